"""A GGUF file as a target: its weights, config and tokenizer as a model folder."""
