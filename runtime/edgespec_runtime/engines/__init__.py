"""Tokens in, logits out: engines, KV cache, exactness, the machine."""
