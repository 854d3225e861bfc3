"""A drafter that is a head: its graph, and the engine that gives it the features of its target."""
