"""Divergences, token selection, means: pure functions of logits."""
