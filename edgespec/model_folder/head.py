"""The folder of a drafter that is a head, and what it takes from its target.

    head.json           its shape, checksums of what wrote its text and of its target's token embeddings
    model.safetensors   float32, or in bytes: of a matrix [N, K] NAME.bytes [N, K / 32, 32] around 128 and NAME.scales [N, K / 32]
    vocabulary.json     the target's tokens that it drafts over

The graph has the same bytes, so a head that is kept in bytes loses nothing more when it is exported. A head that reads three
layers has one matrix more, which joins their states into one feature; it goes into the target's graph.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.files import copy_file, read_object, whole_folder
from edgespec.core.shapes import ModelShape, impossible
from edgespec.model_folder.check import shape_in
from edgespec.model_folder.weights_files import weight_files

HEAD_FILE = "head.json"
WEIGHTS = "model.safetensors"
VOCABULARY_FILE = "vocabulary.json"
EMBEDDING = "model.embed_tokens.weight"
TABLE = "target_table"  # in head.json: `table_checksum` of its target
BLOCK = 32  # columns that share a scale
LAST, THREE = "last", "three"  # what a head reads of its target
JOINING = "reduce.weight"  # [H, 3 H]
_NUMBERS = {
    **{"hidden_size": "hidden", "intermediate_size": "intermediate", "draft_vocab_size": "vocab_size"},
    **{name: name for name in ("heads", "kv_heads", "head_dim", "layers", "context_length")},
    **{name: name for name in ("rope_theta", "rms_norm_eps")},
}
"""Names in head.json -> fields of ModelShape."""


def is_head(folder: Path) -> bool:
    """Whether a drafter's folder holds a head; else it holds a model."""
    return (folder / HEAD_FILE).is_file()


def head_shape(folder: Path) -> dict[str, Any]:
    """The numbers of a head, as `head_numbers` gives them. Raises InputError."""
    shape = read_object(folder / HEAD_FILE).get("shape")
    if not isinstance(shape, dict):
        raise InputError(f"{folder / HEAD_FILE} has no 'shape'; train the head again")
    return shape


def head_numbers(shape: ModelShape, early: tuple[int, ...]) -> dict[str, Any]:
    """What head.json says of a head's shape; `early`: the layers of the target that it reads beside the last hidden state."""
    numbers = {name: getattr(shape, field) for name, field in _NUMBERS.items()}
    return {**numbers, "feature_size": shape.hidden, "target_layers": early}


def early_layers(layers: int) -> tuple[int, int]:
    """The two layers, from 0, whose inputs a head reads beside the last hidden state, of a target with so many.

    A low, a middle and a high one (Li et al. 2025, EAGLE-3, section 3.1). Here the high one is behind the last layer, and the
    others are a third and two thirds of the way up.
    """
    return layers // 3, 2 * layers // 3


def target_layers(folder: Path) -> tuple[int, ...]:
    """The layers whose inputs a head reads beside the last hidden state; none for most heads. Raises InputError."""
    found = head_shape(folder).get("target_layers", [])
    if not isinstance(found, list) or any(type(layer) is not int or layer < 0 for layer in found):
        raise InputError(
            f"{folder / HEAD_FILE}: target_layers is {str(found)[:60]}; a list of layer numbers is wanted: train the head again"
        )
    return tuple(found)


def in_bytes(matrix: Any) -> tuple[Any, Any]:
    """[N, K] float32 -> bytes [N, K / 32, 32] around 128 and scales [N, K / 32]: symmetric blocks, round to nearest."""
    import numpy as np

    rows, columns = matrix.shape
    blocks = matrix.reshape(rows, columns // BLOCK, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127.0
    steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
    return (np.rint(steps) + 128.0).astype(np.uint8), scales[..., 0].astype(np.float32)


def head_weights(folder: Path) -> dict[str, Any]:
    """A head's tensors by name, float32 arrays, whichever way they are kept. Raises InputError where the file is damaged."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        kept = load_file(folder / WEIGHTS)
        found = {}
        for name, value in kept.items():
            plain, _, form = name.rpartition(".")
            if form == "bytes":
                steps = (value.astype(np.float32) - 128.0) * kept[f"{plain}.scales"][..., None]
                found[f"{plain}.weight"] = steps.reshape(len(steps), -1)
            elif form != "scales":
                found[name] = value.astype(np.float32)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{folder / WEIGHTS} cannot be read: {error}; train the head again") from error
    return found


def keep_in_bytes(folder: Path, out: Path) -> None:
    """Copy a head's folder, a quarter of its size: matrices in bytes, norms as they are. Whole or not at all."""
    from safetensors.numpy import save_file

    kept: dict[str, Any] = {}
    for name, value in head_weights(folder).items():
        plain = name.removesuffix(".weight")
        if value.ndim == 2:
            kept[f"{plain}.bytes"], kept[f"{plain}.scales"] = in_bytes(value)
        else:
            kept[name] = value
    with whole_folder(out) as place:
        save_file(kept, place / WEIGHTS, metadata={"format": "np"})
        for name in (HEAD_FILE, VOCABULARY_FILE):
            copy_file(folder / name, place / name)


def check_layers(target: ModelShape, features: str) -> None:
    """Raise InputError where a target has not the layers that a head is to read."""
    if features == THREE and target.layers < 2:
        raise InputError(
            f"drafter.features is {features!r} and the target has {target.layers} layer; two or more are needed: give "
            f"--drafter.features {LAST}"
        )


def check_start(head: Path, target: ModelShape, features: str) -> None:
    """Raise InputError where training cannot go on from a head: it is none, of another target, or reads other states."""
    if not is_head(head):
        raise InputError(f"drafter.checkpoint {head} has no {HEAD_FILE}; give the folder of a trained head")
    shape = shape_of_drafter(head)
    for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim"):
        seen, wanted = getattr(shape, name), getattr(target, name)
        if seen != wanted:
            raise InputError(
                f"the head in {head} has {name} {seen} and the target {wanted}; give a head of this target"
            )
    reads = THREE if target_layers(head) else LAST
    if reads != features:
        raise InputError(
            f"the head in {head} reads {reads!r} and drafter.features is {features!r}; give --drafter.features {reads}"
        )


def shape_of_drafter(folder: Path) -> ModelShape:
    """The shape of a model or of a head. Raises InputError."""
    if not is_head(folder):
        return shape_in(folder / "config.json")
    shape = head_shape(folder)
    try:
        numbers = {field: shape[name] for name, field in _NUMBERS.items()}
    except KeyError as error:
        raise InputError(f"{folder / HEAD_FILE} has no {error}; train the head again") from error
    if wrong := impossible(numbers):
        raise InputError(f"{folder / HEAD_FILE} gives {wrong}; train the head again")
    if (size := shape.get("feature_size", numbers["hidden"])) != numbers["hidden"]:
        raise InputError(
            f"{folder} is not a head: its feature_size is {str(size)[:80]} and its hidden_size {numbers['hidden']}, which must "
            "be one number; build the drafter again"
        )
    return ModelShape(**numbers, tied=True, joins=True)


def table_checksum(table: Any) -> str:
    """Of token embeddings [V, H], float32: another target has others, and so has the same one after another training."""
    return sha256(table.numpy().tobytes()).hexdigest()


def check_target(head: Path, target: Path) -> None:
    """Raise InputError where a head was trained for another target than the one in the folder `target`."""
    trained_for = read_object(head / HEAD_FILE).get(TABLE)
    if trained_for is not None and (seen := table_checksum(target_embedding(target))) != trained_for:
        raise InputError(
            f"the head in {head} was trained for another target: its token embeddings have the checksum {trained_for!s:.12}, and "
            f"those of {target} have {seen:.12}; train a head for this target (build-drafter)"
        )


def target_embedding(folder: Path) -> Any:
    """The target's token embeddings, a float32 tensor [V, H], without the rest of its weights.

    Raises InputError where it has none of Llama's form, or its files are not whole.
    """
    from safetensors import safe_open

    for name in weight_files(folder):
        with safe_open(folder / name, "pt") as opened:
            if EMBEDDING in opened.keys():  # noqa: SIM118 (it is no dictionary)
                return opened.get_tensor(EMBEDDING).float()
    raise InputError(
        f"{folder} has no {EMBEDDING}; a head needs a target of Llama's form: give drafter.kind model"
    )
