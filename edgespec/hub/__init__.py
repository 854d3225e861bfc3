"""Bundles to and from a hub repository."""
