"""Random weights of published shapes."""
