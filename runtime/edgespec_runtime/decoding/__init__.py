"""The decoding loop, and the drafters."""
