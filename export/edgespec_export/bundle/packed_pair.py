"""The pair that a bundle holds: the files that the runtime runs, and what the manifest tells of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.vocabulary import VOCABULARY, Vocabulary

from edgespec.core.manifest import HEAD, MODEL, BundleModel
from edgespec.core.shapes import ModelShape
from edgespec_export.formats.export import ExportedFile, streamed_bytes

DRAFTERS_VOCABULARY = f"drafter/{VOCABULARY}"


@dataclass(frozen=True)
class PackedPair:
    """Both models, and for each engine and precision the file of either.

    `root`: the folder of the export, from which paths count. `subset`: the tokens that the drafter knows; None: all of them.
    """

    root: Path
    files: Sequence[ExportedFile]
    shapes: Mapping[str, ModelShape]
    subset: Vocabulary | None
    head: bool

    @property
    def parameters(self) -> dict[str, int]:
        return {role: shape.parameters for role, shape in self.shapes.items()}

    @property
    def context_length(self) -> int:
        """What both models know."""
        return min(shape.context_length for shape in self.shapes.values())

    def model(self, role: str, name: str, source: str) -> BundleModel:
        drafts = role == "drafter"
        return BundleModel(
            name,
            source,
            asdict(self.shapes[role]),
            self.shapes[role].parameters,
            self._paths(role),
            DRAFTERS_VOCABULARY if drafts and self.subset is not None else None,
            self._paths(role, fast=True),
            HEAD if drafts and self.head else MODEL,
        )

    def precisions(self) -> dict[str, list[str]]:
        """{engine: those in which it has both models}."""
        target, drafter = self._paths("target"), self._paths("drafter")
        return {
            engine: [name for name in table if name in drafter.get(engine, {})]
            for engine, table in target.items()
        }

    def cost_ratio(self) -> dict[str, Any]:
        """c by parameters, and by the bytes that a token streams for each file of the target and its fast graph."""
        ratios = {
            "/".join((*key, "fast") if fast else key): self.streamed["drafter", key, False] / size
            for (role, key, fast), size in self.streamed.items()
            if role == "target"
        }
        return {"parameters": self.parameters["drafter"] / self.parameters["target"], "bytes": ratios}

    @cached_property
    def streamed(self) -> dict[tuple[str, tuple[str, str], bool], int]:
        """{(role, (engine, precision), whether in the fast mode): bytes that a token streams}."""
        return {
            (file.role, file.key, fast): streamed_bytes(file, fast=fast)
            for file in self.files
            for fast in ((False,) if file.fast_graph is None else (False, True))
        }

    def _paths(self, role: str, *, fast: bool = False) -> dict[str, dict[str, str]]:
        """{engine: {precision: path}}; `fast`: of the graphs for the fast mode, where the export wrote them."""
        engines: dict[str, dict[str, str]] = {}
        for file in self.files:
            path = file.fast_graph if fast else file.path
            if file.role == role and path is not None:
                engines.setdefault(file.engine, {})[file.precision] = path.relative_to(self.root).as_posix()
        return engines
