"""The config.json that is read out of a GGUF file says what llama.cpp makes of the file's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from changed_gguf import changed
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_runtime.untrusted.gguf_config import llama3_divisors, read_model, rope_of_factors
from family_cases import LLAMA3
from tiny_models import make_model_folder

from edgespec.core.errors import InputError

FACTOR, KIND, SCALE = (f"llama__rope__scaling__{name}" for name in ("factor", "type", "attn_factor"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small llama. Read-only."""
    folder = tmp_path_factory.mktemp("tiny")
    export_gguf(make_model_folder(folder / "source"), folder / "tiny.gguf", "f32")
    return folder / "tiny.gguf"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"rope_type": "default"}),
        ({FACTOR: 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({FACTOR: 0.0}, {"rope_type": "default"}),
        ({FACTOR: 4.0, KIND: "none"}, {"rope_type": "default"}),
        ({FACTOR: 4.0, KIND: "linear", SCALE: 1.0}, {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_a_scaling_without_a_type_is_linear(
    tiny: Path, tmp_path: Path, keys: dict[str, Any], wanted: dict[str, Any]
) -> None:
    _, config = read_model(changed(tiny, tmp_path / "m.gguf", **keys))
    assert config["rope_parameters"] == {**wanted, "rope_theta": 10000.0}
    assert config.get("rope_scaling") == (None if wanted["rope_type"] == "default" else wanted)


@pytest.mark.parametrize("keys", [{SCALE: 0.5}, {SCALE: 0.5, FACTOR: 4.0}])
def test_a_factor_on_cosines_is_yarns_alone(tiny: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    """llama.cpp multiplies by it whatever the scaling is; torch has a place for it in some only."""
    file = changed(tiny, tmp_path / "m.gguf", **keys)
    with pytest.raises(InputError, match=r"a rope\.scaling\.attn_factor of 0\.5 and RoPE scaling"):
        read_model(file)


def test_factors_beside_another_scaling_are_refused(tiny: Path) -> None:
    """llama.cpp multiplies both, and a config.json has a place for one."""
    _, config = read_model(tiny)
    factors = [*llama3_divisors(LLAMA3, config["rope_theta"], config["head_dim"])]
    assert rope_of_factors(config, factors, tiny)["rope_scaling"]["rope_type"] == "llama3"
    linear = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(
        InputError, match=r"\(rope_freqs\.weight\) and RoPE scaling 'linear'; edgespec reads only one"
    ):
        rope_of_factors({**config, "rope_scaling": linear}, factors, tiny)
