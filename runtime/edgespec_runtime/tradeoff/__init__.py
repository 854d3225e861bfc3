"""Quality against latency for the acceptance rules."""
