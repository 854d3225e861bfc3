"""A GGUF file whose bytes are no finite numbers somewhere is refused by tensor, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.gguf_target.model_folder import MODEL, folder_of
from edgespec_runtime.untrusted.gguf_file import read_header
from tiny_models import make_model_folder

from edgespec.core.errors import InputError
from edgespec.shell.environment import cache_folder

TENSOR = "blk.1.ffn_up.weight"
# little-endian: NaN and infinities; of q8_0 the scale of the first block
DAMAGE = {
    "f32": (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"),
    "f16": (b"\x00\x7e", b"\x00\xfc"),
    "bf16": (b"\xc0\x7f", b"\x80\xff"),
    "q8_0": (b"\x00\x7e", b"\x00\x7c"),
}


@pytest.mark.parametrize(
    ("precision", "damage"), [(name, one) for name, both in DAMAGE.items() for one in both]
)
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, damage: bytes
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    export_gguf(make_model_folder(tmp_path / "source"), file, precision)
    assert folder_of(file).is_dir()  # its own largest values are read
    start = read_header(file).tensors[TENSOR].start
    whole = file.read_bytes()
    file.write_bytes(whole[:start] + damage + whole[start + len(damage) :])
    with pytest.raises(
        InputError,
        match=rf"m.gguf has values in '{TENSOR}' that are no finite numbers: .*fetch the file again",
    ):
        folder_of(file)
    assert len(list(cache_folder().glob(f"targets/*/{MODEL}"))) == 1
