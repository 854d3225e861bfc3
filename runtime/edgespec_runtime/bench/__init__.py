"""Plain against speculative decoding, side by side."""
