"""A target's weights without the model: tensors read from its files one at a time, for drafters that start from a few of them.

Files are mapped, and a tensor has the type that it is stored in: only what is made of it takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from edgespec.core.errors import InputError
from edgespec.core.families import Family, family_named
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import EMBEDDING
from edgespec.model_folder.weights_files import read_tensors
from edgespec_recipes.models.loading import torch_config

OUTPUT = "lm_head.weight"


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a model folder by name. Raises InputError for files that are missing or not whole."""

    def __init__(self, folder: Path) -> None:
        self._stored = read_tensors(folder)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._stored[name].file, "pt") as opened:
            found: Tensor = opened.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


@dataclass(frozen=True)
class TargetWeights:
    """A target's tensors by Hugging Face's names, of any float type, and what it is."""

    tensors: Mapping[str, Tensor]
    shape: ModelShape
    family: Family

    @classmethod
    def stored(cls, folder: Path) -> TargetWeights:
        """Those of a model folder. Raises InputError where it is none, or not whole."""
        config = torch_config(folder)
        shape = ModelShape.from_config(config.to_dict())
        return cls(StoredTensors(folder), shape, family_named(config.model_type))

    @property
    def embedding(self) -> Tensor:
        """[V, H]. Raises InputError where it is not called as in Llama."""
        return self._table(EMBEDDING)

    @property
    def output(self) -> Tensor:
        """[V, H], the output layer's rows: the embedding where both are one. Raises InputError as that does."""
        return self._table(EMBEDDING if self.shape.tied else OUTPUT)

    def _table(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise InputError(
                f"the target has no {name}; a drafter that starts from it needs a target of Llama's form: give "
                "--drafter.kind model --drafter.init random"
            )
        return self.tensors[name]
