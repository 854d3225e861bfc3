"""Which files are written for a device, and how large they are."""
