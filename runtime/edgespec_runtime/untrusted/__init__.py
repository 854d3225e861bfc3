"""Files of strangers, checked before anything opens them."""
