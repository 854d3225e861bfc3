"""Every file against torch, and the exported pair measured."""
