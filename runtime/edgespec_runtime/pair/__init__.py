"""A bundle, opened once."""
