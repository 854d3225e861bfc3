"""What speculation costs on this device, and whether it pays."""
