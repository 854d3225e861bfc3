"""Inputs of matrices without outliers, before they are rounded: norms divide large channels, the matrices multiply them back.

Fast int8 graphs round the inputs of a matrix in blocks, each by its largest value. In a few channels of a model's layers values
are tens of times as large as in the others, which then keep few steps. Where a norm gives the inputs, its weights can be divided
by any factors s and the columns of the matrices behind it multiplied by them: the model stays the same. SmoothQuant (Xiao et al.
2023, eq. 4 with α = 1/2) takes

    s = √(a / w)     a: how large a channel is, w: how large its column of weights is

so that inputs and weights are about equally hard to round. Here both sizes are root mean squares, which kept SmolLM2's answers
better than the largest values that the paper takes. Which channels are large hardly depends on the text, so a is measured on
random tokens, and no text is needed. A file beside the graph holds the factors, so that verify/readback.py can undo them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import EdgespecError
from edgespec.core.families import Family

FACTORS = "smoothing.safetensors"
"""In an ONNX folder: by the name of a norm, what its weights were divided by, float32 [K]."""
# Of random text. With three times as many tokens of chats SmolLM2's answers were kept no better.
ROWS = 8
TOKENS = 64
LEAST = 1e-3  # of the mean: no channel counts as smaller, even where these tokens leave it at zero

Array = np.ndarray[Any, Any]


@contextmanager
def smoothed(family: Family, kept: dict[str, Array]) -> Iterator[None]:
    """Smooth the model that the model builder loads meanwhile, and keep the factors in `kept`.

    Raises EdgespecError where it loaded none with transformers.
    """
    from transformers import AutoModelForCausalLM

    load, name = AutoModelForCausalLM.from_pretrained, "from_pretrained"
    own = vars(AutoModelForCausalLM).get(name)  # None where the class inherits it

    def loaded(*place: Any, **options: Any) -> Any:
        model = load(*place, **options)
        kept.update(smooth(model, family))
        return model

    setattr(AutoModelForCausalLM, name, loaded)
    try:
        yield
    finally:
        delattr(AutoModelForCausalLM, name)
        if own is not None:
            setattr(AutoModelForCausalLM, name, own)
    if not kept:
        raise EdgespecError("this onnxruntime-genai does not load models with transformers")


def smooth(model: Any, family: Family) -> dict[str, Array]:
    """Change a model of transformers in place, to float32 and without outliers behind norms. Its logits stay.

    Returns what each norm was divided by: {its name: float32 [K]}.
    """
    import torch

    model.float()
    modules = dict(model.named_modules())
    layers = range(model.config.num_hidden_layers)
    readers = {
        f"model.layers.{layer}.{norm}": [modules[f"model.layers.{layer}.{name}"] for name in names]
        for layer in layers
        for norm, names in family.behind_norms().items()
    }
    squares = _mean_squares(model, {name: modules[name] for name in readers})
    found = {}
    with torch.no_grad():
        for name, matrices in readers.items():
            columns = torch.cat([matrix.weight for matrix in matrices]).square().mean(0)
            factors = (_at_least(squares[name]) / _at_least(columns)) ** 0.25  # of squares
            norm = modules[name].weight
            norm.copy_((norm + family.norm_offset) / factors - family.norm_offset)
            for matrix in matrices:
                matrix.weight.mul_(factors)
            found[name] = factors.numpy()
    return found


def _mean_squares(model: Any, norms: dict[str, Any]) -> dict[str, Any]:
    """E[x²] [K] of what each norm gives, over random tokens. The first of a text is left out: many models give it huge values."""
    import torch

    found: dict[str, Any] = {}

    def add(name: str, module: Any, inputs: Any, output: Any) -> None:
        found[name] = output[:, 1:].square().mean((0, 1))

    hooks = [norm.register_forward_hook(partial(add, name)) for name, norm in norms.items()]
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (ROWS, TOKENS))
    with torch.inference_mode():
        model.base_model(torch.from_numpy(ids), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _at_least(squares: Any) -> Any:
    """Mean squares [K], none smaller than LEAST² of their mean; ones where all are zero."""
    mean = squares.mean()
    return squares.clamp(min=float(LEAST**2 * mean)) if mean > 0 else squares + 1


def read_factors(folder: Path, width: int) -> dict[str, Array]:
    """By a norm's name, what its `width` weights were divided by; nothing where a folder was not smoothed.

    Raises EdgespecError for a file that no exporter wrote.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = folder / FACTORS
    if not file.is_file():
        return {}
    try:
        found: dict[str, Array] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise EdgespecError(f"{file} cannot be read: {error}; export it again") from error
    for name, factors in found.items():
        if factors.shape != (width,) or not (factors > 0).all():
            raise EdgespecError(
                f"{file} has factors {list(factors.shape)} of {name}; {width} numbers above 0 are wanted: export again"
            )
    return found
