"""Mixed files of one model: text, float model and sensitivities once, then a file of either format under a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from edgespec_runtime.engines.vocabulary import Vocabulary
from gguf.constants import GGMLQuantizationType as Kind

from edgespec.core.errors import InputError
from edgespec.core.files import scratch_beside, write_json
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import read_config
from edgespec.recipe.schema import ExportOptions
from edgespec_export.bits.choose import Chooser, Chosen, budget_of
from edgespec_export.bits.probe import Probe
from edgespec_export.bits.roundings import Rounding, gguf_rounding, onnx_rounding
from edgespec_export.bits.texts import Text, split
from edgespec_export.gguf.to_gguf import Bits, Checkpoint, export_gguf
from edgespec_export.onnx.families import table_values
from edgespec_export.onnx.folder import DATA
from edgespec_export.onnx.joined_states import export_for_head
from edgespec_export.onnx.to_mixed import export_mixed
from edgespec_export.onnx.to_onnx import FAST_GRAPH, log_of

CHOICE = "bits.json"
"""What was chosen, inside an ONNX folder; beside a GGUF file with its name in front."""
FLOAT = 4  # bytes


def choice_of(path: Path) -> Path:
    """Where the choice for a mixed file or folder lies."""
    return path / CHOICE if path.is_dir() else path.with_name(f"{path.stem}.{CHOICE}")


class Mixed:
    """The mixed files of one model; `texts` [of the target's tokens] is called when the first is wanted.

    `subset`: the tokens that a drafter knows, None for all.

    A size is the target's file's; the drafter then keeps the usual share of its argmaxes. Raises InputError for a size that is
    none, and where several budgets are given.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        texts: Callable[[], Sequence[Text]],
        options: ExportOptions,
        subset: Vocabulary | None = None,
    ) -> None:
        self.folder, self._texts, self._subset = folder, texts, subset
        self.shape = ModelShape.from_config(read_config(folder))
        size = options.size if role == "target" else ""
        self.budget = budget_of(options.bits, size, options.quality)

    @cached_property
    def probe(self) -> Probe:
        """The float model, with the importance of every input."""
        texts = self._texts()
        if self._subset is not None:
            places = self._subset.places()
            texts = [Text(places.take(text.tokens).tolist(), text.start) for text in texts]
        return Probe(self.folder, split(texts, self.shape.context_length, self.shape.parameters))

    def onnx(self, out_folder: Path, head: Path | None = None) -> dict[str, Any]:
        """Write a mixed folder, whole or not at all; returns {"bytes", "notes", "bits"}.

        `head`: of a drafter that reads what its graphs then give. Raises what `choose`, `export_mixed`, `export_for_head` raise.
        """
        rope = table_values(read_config(self.folder), self.folder)

        def write(chosen: Chosen, place: Path) -> dict[str, Any]:
            export = partial(
                export_mixed,
                self.folder,
                kinds=chosen.kinds,
                importance=self.probe.importance,
                log=log_of(out_folder),
                about={CHOICE: asdict(chosen)},
            )
            return export_for_head(head, place, export)

        def size(place: Path) -> int:
            return sum((place / name).stat().st_size for name in ("model.onnx", DATA, FAST_GRAPH))

        return self._written(out_folder, onnx_rounding(self.shape.vocab_size), rope * FLOAT, write, size)

    def gguf(self, out_file: Path) -> dict[str, Any]:
        """Write a mixed file; as `onnx`."""

        def write(chosen: Chosen, place: Path) -> dict[str, Any]:
            kinds = {name: Kind[kind] for name, kind in chosen.kinds.items()}
            made = export_gguf(self.folder, place, "q_mixed", Bits(kinds, self.probe.importance))
            write_json(choice_of(place), asdict(chosen))
            return made

        return self._written(out_file, gguf_rounding(), 0, write, lambda place: place.stat().st_size)

    def _written(
        self,
        out: Path,
        rounding: Rounding,
        tables: int,
        write: Callable[[Chosen, Path], dict[str, Any]],
        size: Callable[[Path], int],
    ) -> dict[str, Any]:
        shapes = Checkpoint(self.folder).shapes.values()
        tables += FLOAT * sum(shape[0] for shape in shapes if len(shape) == 1)
        chooser = Chooser(self.probe, rounding, weights=self.shape.parameters, tables=tables)
        most, rest = self.budget.bytes, 0
        with scratch_beside(out, "trial") as scratch:
            trial = scratch / out.name
            for _ in range(2):  # graphs and vocabulary are known once they are written
                chosen = chooser.choose(self.budget, rest)
                self.probe.release()  # a writer takes memory of its own
                made = write(chosen, trial)
                rest = size(trial) - chosen.bytes
                if most is None or size(trial) <= most:
                    break
            else:
                raise InputError(
                    f"the {rounding.name} file takes {size(trial):,} bytes, and at most {most:,} were asked for; ask for more"
                )
            for file in sorted(scratch.iterdir(), key=lambda file: file == trial):
                file.replace(out.with_name(file.name))  # the model last: where it is, all is
        print(f"{self.folder.name}, {rounding.name}: {chosen.text()}", flush=True)
        notes = [*made.get("notes", ()), chosen.text()]
        if chosen.fallbacks:
            first, *others = chosen.fallbacks
            notes.append(first + (f" (and {len(others)} others, named in {CHOICE})" if others else ""))
        told = asdict(chosen)
        del told["groups"]  # the manifest goes without the losses of what was not taken
        return {"bytes": made["bytes"], "notes": notes, "bits": told}
