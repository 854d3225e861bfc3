"""Mixed files of one model: text, float model and sensitivities once, then a file of either format under a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.vocabulary import vocabulary_of
from gguf.constants import GGMLQuantizationType as Kind

from edgespec.core.errors import InputError
from edgespec.core.files import write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import ExportOptions
from edgespec_export.bits.choose import Chooser, Chosen, budget_of
from edgespec_export.bits.probe import Probe
from edgespec_export.bits.roundings import GgufRounding, OnnxRounding, Rounding
from edgespec_export.bits.texts import Text, split
from edgespec_export.gguf.to_gguf import Bits, Checkpoint, export_gguf
from edgespec_export.onnx.folder import DATA
from edgespec_export.onnx.to_mixed import export_mixed
from edgespec_export.onnx.to_onnx import FAST_GRAPH

CHOICE = "bits.json"
"""What was chosen, inside an ONNX folder; beside a GGUF file with its name in front."""
FLOAT = 4  # bytes


class Mixed:
    """The mixed files of one model; `texts` [of the target's tokens] is called when the first is wanted.

    A size is the target's file's; the drafter then keeps the usual share of its argmaxes. Raises InputError for a size that is
    none, and where several budgets are given.
    """

    def __init__(
        self, folder: Path, role: str, texts: Callable[[], Sequence[Text]], options: ExportOptions
    ) -> None:
        self.folder, self._texts = folder, texts
        size = options.size if role == "target" else ""
        self.budget = budget_of(options.bits, size, options.quality)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(read_config(self.folder))

    @cached_property
    def probe(self) -> Probe:
        """The float model, with the importance of every input."""
        subset, texts = vocabulary_of(self.folder), self._texts()
        if subset is not None:
            places = subset.places()
            texts = [Text(places.take(text.tokens).tolist(), text.start) for text in texts]
        probe = Probe(self.folder, split(texts, self.shape.context_length, self.shape.parameters))
        probe.measure_importance()
        return probe

    @cached_property
    def sensitivities(self) -> dict[str, float]:
        return self.probe.sensitivities()

    def onnx(self, out_folder: Path, *, hidden_states: bool = False) -> dict[str, Any]:
        """Write a mixed folder; returns {"bytes", "notes", "bits"}. Raises what `choose` and `export_mixed` raise."""
        rope = 2 * self.shape.context_length * self.shape.head_dim // 2

        def write(chosen: Chosen) -> dict[str, Any]:
            export_mixed(
                self.folder,
                out_folder,
                chosen.kinds,
                self.probe.importance,
                hidden_states=hidden_states,
                about={CHOICE: asdict(chosen)},
            )
            return {"bytes": sum(file.stat().st_size for file in out_folder.iterdir())}

        def size() -> int:
            return sum((out_folder / name).stat().st_size for name in ("model.onnx", DATA, FAST_GRAPH))

        return self._written(OnnxRounding(self.shape.vocab_size), rope * FLOAT, write, size)

    def gguf(self, out_file: Path) -> dict[str, Any]:
        """Write a mixed file; as `onnx`."""

        def write(chosen: Chosen) -> dict[str, Any]:
            kinds = {name: Kind[kind] for name, kind in chosen.kinds.items()}
            made = export_gguf(self.folder, out_file, "q_mixed", Bits(kinds, self.probe.importance))
            write_json(out_file.with_name(f"{out_file.stem}.{CHOICE}"), asdict(chosen))
            return made

        return self._written(GgufRounding(), 0, write, lambda: out_file.stat().st_size)

    def _written(
        self,
        rounding: Rounding,
        tables: int,
        write: Callable[[Chosen], dict[str, Any]],
        size: Callable[[], int],
    ) -> dict[str, Any]:
        checkpoint = Checkpoint(self.folder)
        shapes = map(checkpoint.shape, checkpoint)
        vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
        chooser = Chooser(
            self.probe,
            self.sensitivities,
            rounding,
            weights=self.shape.parameters,
            tables=tables + FLOAT * vectors,
        )
        chosen = chooser.choose(self.budget)
        self.probe.release()  # a writer takes memory of its own
        made = write(chosen)
        most = self.budget.bytes
        if most is not None and size() > most:  # graphs and vocabulary are known once they are written
            chosen = chooser.choose(self.budget, rest=size() - chosen.bytes)
            made = write(chosen)
        if most is not None and size() > most:
            raise InputError(
                f"the {rounding.name} file takes {size():,} bytes, and at most {most:,} were asked for; ask for more"
            )
        print(f"{self.folder.name}, {rounding.name}: {chosen.text()}", flush=True)
        notes = [*made.get("notes", ()), chosen.text(), *_shortened(chosen.fallbacks)]
        told = asdict(chosen)
        del told["groups"]  # the manifest goes without the losses of what was not taken
        return {"bytes": made["bytes"], "notes": notes, "bits": told}


def _shortened(fallbacks: Sequence[str]) -> list[str]:
    if not fallbacks:
        return []
    more = f" (and {len(fallbacks) - 1} others, named in {CHOICE})" if len(fallbacks) > 1 else ""
    return [fallbacks[0] + more]
