"""A random Llama of two layers in torch, and what it writes greedily without a cache."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(seed: int, vocab_size: int = 60) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def greedy(model: LlamaForCausalLM, prompt: list[int], length: int, stops: list[int]) -> list[int]:
    """Argmax decoding of one row, the whole text read again for every token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in stops:
                break
    return ids[len(prompt) :]


PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [15, 16, 17, 18], [7, 7], [21, 22, 23, 24, 25, 26]]
