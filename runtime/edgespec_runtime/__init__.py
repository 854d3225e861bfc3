"""Run a bundle: numpy and one engine, never torch."""
