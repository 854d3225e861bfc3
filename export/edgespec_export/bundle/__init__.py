"""The bundle and its card."""
