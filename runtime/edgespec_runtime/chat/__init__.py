"""Talking to a pair: terminal and one answer."""
