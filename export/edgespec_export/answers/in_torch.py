"""Replies of a model in torch, many at once, and its logits on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from edgespec_export.answers.held_out import HeldOut
from edgespec_export.answers.replies import TEMPERATURES, Questions, Reply, temperature_of

BATCH = 8  # prompts that are written together: a step then reads the weights once for all of them

Array = np.ndarray[Any, Any]


def adopt_from_torch(held: HeldOut, model: Any) -> None:
    """The model writes replies, unless there are some, and reads them."""
    written = held.questions.written or written_in_torch(model, held.questions, held.context)

    def read(reply: Reply) -> Array:
        text = torch.tensor([[*reply.prompt, *reply.tokens[:-1]]])
        with torch.inference_mode():
            output = model(text, use_cache=False, logits_to_keep=len(reply.tokens))
        rows: Array = output.logits[0].float().numpy()
        return rows

    held.adopt(written, read)


def written_in_torch(model: Any, questions: Questions, context: int) -> list[Reply]:
    """One reply to every prompt that leaves room for it, in the prompts' order; a batch is greedy or sampled.

    After `questions.seconds` no further batch is begun: fewer replies, never shorter ones.
    """
    end = time.monotonic() + questions.seconds
    found: dict[int, Reply] = {}
    for numbers in _batches(questions, context):
        if found and time.monotonic() > end:
            break
        prompts = [list(questions.prompts[number]) for number in numbers]
        room = min(questions.room(prompt, context) for prompt in prompts)
        temperature = temperature_of(numbers[0])
        replies = _batch(model, prompts, room, temperature, questions, questions.seed + numbers[0])
        for number, prompt, tokens in zip(numbers, prompts, replies, strict=True):
            found[number] = Reply(tuple(prompt), tuple(tokens), temperature)
    return [found[number] for number in sorted(found)]


def _batches(questions: Questions, context: int) -> Iterator[list[int]]:
    """Numbers of prompts: a batch of each temperature in turn."""
    usable = [
        n for n, prompt in enumerate(questions.prompts) if prompt and questions.room(prompt, context) > 0
    ]
    step = BATCH * len(TEMPERATURES)
    for start in range(0, len(questions.prompts), step):
        for temperature in TEMPERATURES:
            numbers = [n for n in usable if start <= n < start + step and temperature_of(n) == temperature]
            if numbers:
                yield numbers


def _batch(
    model: Any, prompts: list[list[int]], room: int, temperature: float, questions: Questions, seed: int
) -> list[list[int]]:
    """Prompts filled up to the left, so that all replies begin at one place."""
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampled: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    stop = sorted(questions.stop_ids) or None
    how = GenerationConfig(max_new_tokens=room, eos_token_id=stop, pad_token_id=0, **sampled)
    # the folder's own (a penalty, a top-p) would fill what `how` leaves open
    model.generation_config = GenerationConfig()
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        whole = model.generate(ids, attention_mask=mask, generation_config=how)
    replies = []
    for row in whole[:, longest:].tolist():
        end = next((place for place, token in enumerate(row) if token in questions.stop_ids), len(row) - 1)
        replies.append(row[: end + 1])  # with the token that ends it
    return replies
