"""Distributions, and which draft tokens stay: pure functions, one table."""
