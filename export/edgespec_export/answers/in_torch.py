"""Replies of a model in torch, many at once, and its logits on them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from edgespec.core.errors import NoNumbers
from edgespec_export.answers.held_out import HeldOut
from edgespec_export.answers.replies import Questions, Reply, temperature_of

BATCH = 8  # prompts that are written together: a step then reads the weights once for all of them

Array = np.ndarray[Any, Any]


def adopt_from_torch(held: HeldOut, model: Any) -> None:
    """The model writes replies, unless there are some, and reads them."""
    written = held.questions.written or written_in_torch(model, held.questions, held.context)

    def rows_of(reply: Reply) -> Array:
        text = torch.tensor([[*reply.prompt, *reply.tokens[:-1]]])
        with torch.inference_mode():
            output = model(text, use_cache=False, logits_to_keep=len(reply.tokens))
        rows: Array = output.logits[0].float().numpy()
        return rows

    held.adopt(written, lambda replies: map(rows_of, replies))


def written_in_torch(model: Any, questions: Questions, context: int) -> list[Reply]:
    """One reply to every prompt that leaves room for it, in the prompts' order.

    After `questions.seconds` no further batch is begun: fewer replies, never shorter ones. Raises NoNumbers where
    the model's logits are NaN.
    """
    end = time.monotonic() + questions.seconds
    usable = [
        number
        for number, prompt in enumerate(questions.prompts)
        if prompt and questions.room(prompt, context) > 0
    ]
    found: list[Reply] = []
    for start in range(0, len(usable), BATCH):
        if found and time.monotonic() > end:
            break
        numbers = usable[start : start + BATCH]
        prompts = [list(questions.prompts[number]) for number in numbers]
        room = min(questions.room(prompt, context) for prompt in prompts)
        temperatures = [temperature_of(number) for number in numbers]
        replies = _batch(model, prompts, room, temperatures, questions.stop_ids, questions.seed + numbers[0])
        found += map(Reply, map(tuple, prompts), map(tuple, replies), temperatures)
    return found


def _batch(
    model: Any,
    prompts: list[list[int]],
    room: int,
    temperatures: list[float],
    stop_ids: frozenset[int],
    seed: int,
) -> list[list[int]]:
    """Prompts filled up to the left, so that all replies begin at one place; each has its own temperature."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    heat = torch.tensor(temperatures)[:, None]
    replies: list[list[int]] = [[] for _ in prompts]
    cache = None
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        for _ in range(room):
            output = model(
                ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            if logits.amax().isnan():
                raise NoNumbers(f"the model {model.name_or_path or 'in torch'}")
            drawn = torch.multinomial(torch.softmax(logits / heat.where(heat > 0, 1.0), 1), 1)
            ids = drawn.where(heat > 0, logits.argmax(1, keepdim=True))
            for reply, [token] in zip(replies, ids.tolist(), strict=True):
                if not (reply and reply[-1] in stop_ids):  # with the token that ends it
                    reply.append(token)
            if all(reply[-1] in stop_ids for reply in replies):
                break
            mask, places = torch.nn.functional.pad(mask, (0, 1), value=1), places[:, -1:] + 1
    return replies
