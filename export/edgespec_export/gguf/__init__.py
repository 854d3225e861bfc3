"""GGUF files: families, RoPE, tokenizers, types."""
