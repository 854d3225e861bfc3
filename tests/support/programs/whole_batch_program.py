"""The gradient of one optimiser step, whole or split, of every loss: what test_whole_batch.py compares.

torchrun --nproc_per_node 2 whole_batch_program.py OUT: each process has half of the rows, in micro-batches of 4. Process 0 writes
OUT/gradients.safetensors.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from edgespec_recipes.data.mixing import STUDENT, TARGET, prompt_rows, response_rows
from edgespec_recipes.parallel import processes
from edgespec_recipes.training.objective import Objective
from edgespec_recipes.training.trainer import collate
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.recipe.schema import DIVERGENCES, DistillOptions

ROWS, CONTEXT, VOCABULARY = 16, 24, 60
LOSSES: dict[str, dict[str, Any]] = {name: {"divergence": name} for name in DIVERGENCES if name != "tvd++"}
LOSSES |= {
    f"tvd++-{estimator}-{scope}": {
        "divergence": "tvd++",
        "tvdpp_estimator": estimator,
        "tvdpp_scope": scope,
    }
    for estimator, scope in product(("exact", "sampled", "uniform"), ("batch", "sequence", "token"))
}
CASES = {
    f"{name}-{mean}-{fraction}": DistillOptions(**options, mean=mean, select_fraction=fraction)
    for (name, options), mean, fraction in product(LOSSES.items(), ("tokens", "sequences"), (1.0, 0.4))
    if name in ("fkl", "tvd++-exact-batch") or (mean == "sequences") == (fraction < 1)
}
CASES |= {f"hard-{mean}": DistillOptions(labels="hard", mean=mean) for mean in ("tokens", "sequences")}
CASES["student"] = DistillOptions(divergence="jsd", mean="sequences", student_fraction=1.0)
"""Of the drafter's own responses: it has to write the same ones."""


def rows(student: bool) -> list[dict[str, Any]]:
    """16 rows of CONTEXT tokens: one response in the first, up to 20 tokens of two responses in the others, in uneven numbers."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        found: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        return found

    lengths = [1, 20, 2, 3, 18, 1, 1, 20, 7, 1, 2, 19, 1, 4, 20, 1]
    packed: list[dict[str, Any]] = []
    for slot, length in enumerate(lengths):
        short = [(text(2), text(1))] if slot % 3 == 1 and length < 19 else []
        conversations = [(text(2), text(length)), *short]
        if student:
            found, kind = (
                prompt_rows([prompt for prompt, _ in conversations], 1 + length // 2, CONTEXT),
                STUDENT,
            )
        else:
            found, kind = response_rows(conversations, CONTEXT), TARGET
        packed.append({**found[0], "kind": kind, "slot": 100 + slot})
    return packed


@cache
def models() -> list[Any]:
    """A target, a drafter and a reference in float64, so that rounding does not stand beside what is compared."""
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
        )
        made.append(LlamaForCausalLM(config).double().eval())
    return made


def gradient(options: DistillOptions, micro: int, *, autocast: bool = False) -> Tensor:
    """[parameters] of a drafter in float64, of this process's rows in micro-batches, averaged over the processes."""
    target, draft, reference = (copy.deepcopy(model) for model in models())
    selects = options.select_fraction < 1
    objective = Objective(
        target.requires_grad_(False),
        options,
        stops=[2],
        seed=5,
        reference=reference.requires_grad_(False) if selects else None,
    )
    own = rows(options.student_fraction > 0)[processes.rank() :: processes.world()]
    batches = [collate(own[at : at + micro]) for at in range(0, len(own), micro)]
    if autocast:
        for model in (target, draft, reference):
            model.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for loss in objective(draft, batches):
            loss.backward()
    found = torch.cat([parameter.grad.flatten() for parameter in draft.parameters()])
    return processes.total(found) / processes.world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    gradients = {name: gradient(options, 4) for name, options in CASES.items()}
    if not processes.rank():
        save_file(gradients, Path(sys.argv[1]) / "gradients.safetensors")
    processes.wait()
