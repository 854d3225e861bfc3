"""Every exported file against torch on held-out prompts: weights, logits, and whether a block changes the answer.

Three questions, each with its own bound, because rounding a weight to 4 bits moves logits further than a wrong RoPE base does:
  weights   the file's weights, read back, against the model's: a skipped permutation or swapped matrix shows here;
  engine    the engine's logits against torch with the file's own weights: a wrong graph or hyperparameter shows here;
  block     logits of four tokens fed at once against four single steps: what "lossless" rests on.
The bounds hold for the exact mode. A file with a fast one (a second ONNX graph; llama.cpp without flash attention) is run in that
too: its block difference is reported and not bounded, its distance from torch only as far as tells a wrong graph.
The distance to the float model (logits, KL, top-1 agreement, perplexity) is reported for all files: it is what the precision
costs. Where that should be next to nothing its KL has a bound too. Without llama.cpp a GGUF file is checked by its weights and
hyperparameters, run in torch; the table says so. Tokenizers and the acceptance of the exported pairs are checked by modules of
their own. A drafter with a vocabulary subset is compared in its own numbers of the prompts' tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.engines.vocabulary import Vocabulary
from edgespec_runtime.text.same_tokens import subset_of

from edgespec.core.errors import CheckFailed
from edgespec.core.files import read_json, write_json
from edgespec.core.free_space import free_memory
from edgespec.core.manifest import ROLES
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.config import corrected_ids
from edgespec.model_folder.head import JOINING, head_weights, is_head, target_layers
from edgespec.planning.export_costs import opened_bytes, whole_bytes
from edgespec.recipe.schema import ExportOptions
from edgespec.stages.own_gguf import own_file
from edgespec_export.answers.in_torch import adopt_from_torch
from edgespec_export.answers.replies import Questions
from edgespec_export.formats.export import ExportedFile, exported_files
from edgespec_export.onnx.by_layers import are_alike
from edgespec_export.verify.exported_pair import Trials
from edgespec_export.verify.file_check import FileCheck
from edgespec_export.verify.files import OwnModel, Standard, as_numbered, verify_files
from edgespec_export.verify.head_check import check_head
from edgespec_export.verify.readback import Weights
from edgespec_export.verify.report import broken_of, broken_words, report_of
from edgespec_export.verify.streamed_check import Streamed

Array = np.ndarray[Any, Any]
ROWS = 1024  # of a tensor that are compared at once


class Reference(OwnModel):
    """One float model, whole in memory. `prompts` in the target's numbers; `subset`: what a drafter knows, None for all."""

    def __init__(
        self,
        folder: Path,
        prompts: list[list[int]],
        questions: Questions | None = None,
        subset: Vocabulary | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # ours covers it
        super().__init__(folder, as_numbered(prompts, subset), questions)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **corrected_ids(folder)
        ).eval()
        self.shapes = {name: tuple(value.shape) for name, value in self.model.named_parameters()}
        self.logits = self.run(iter(()))
        if self.held is not None:
            adopt_from_torch(self.held, self.model)

    def pieces(self, name: str) -> list[Array]:
        return [piece.numpy() for piece in self.model.get_parameter(name).detach().split(ROWS)]

    def run(self, weights: Weights) -> list[Array]:
        """A weight that is not among these is the model's own."""
        state = {
            name: torch.from_numpy(np.require(value, requirements=["C", "W"])) for name, value in weights
        }
        results = []
        with torch.inference_mode():
            for passage in self.passages:
                arguments = (torch.tensor([passage.tokens]),)
                options = {"use_cache": False, "logits_to_keep": len(passage.compared)}
                output = torch.func.functional_call(self.model, state, arguments, options)
                results.append(output.logits[0].float().numpy())
        return results

    def ordered(self, files: Iterable[ExportedFile]) -> list[ExportedFile]:
        return list(files)

    def embedding(self) -> torch.Tensor:
        table: torch.Tensor = self.model.get_input_embeddings().weight
        return table.detach().float()

    def states(self, early: Sequence[int]) -> list[torch.Tensor]:
        """Of every passage [n, F]: what each of the `early` layers reads, behind its norm, and the last states, behind theirs."""
        found = []
        with torch.inference_mode():
            for passage in self.passages:
                tokens = torch.tensor([passage.tokens])
                given = self.model.model(tokens, use_cache=False, output_hidden_states=bool(early))
                states = [
                    self.model.model.layers[layer].input_layernorm(given.hidden_states[layer])
                    for layer in early
                ]
                found.append(torch.cat([*states, given.last_hidden_state], -1)[0].float())
        return found


class Head(Standard):
    """A head that reads the target's hidden states: its one folder, held against its own tensors in torch."""

    def __init__(self, folder: Path, target: Reference | Streamed) -> None:
        super().__init__(target.shape, 0, None, [])
        self.folder, self.target = folder, target

    def ordered(self, files: Iterable[ExportedFile]) -> list[ExportedFile]:
        return [file for file in files if file.is_head][:1]  # the one beside every file of the target

    def check(self, file: ExportedFile) -> FileCheck:
        texts = [passage.tokens for passage in self.target.passages]
        early = target_layers(self.folder)
        features = self.target.states(early)
        if early:  # the head's own matrix joins them with the last states
            matrix = torch.from_numpy(head_weights(self.folder)[JOINING])
            features = [states @ matrix.T for states in features]
        return check_head(file, self.folder, self.target.embedding(), texts, features)


def verify_pair(
    out: Path,
    export_folder: Path,
    target_folder: Path,
    drafter_folder: Path,
    prompts: list[list[int]],
    options: ExportOptions,
    *,
    trials: Trials | None = None,
    questions: Questions | None = None,
    most: float = math.inf,
) -> dict[str, Any]:
    """Check every file of `export_folder`, write `out`/verify.json, return the number of files and positions.

    `prompts` are token ids; `trials`: what the exported pairs decode, None for no measure of acceptance;
    `questions`: what the target replies to, for comparing answers; `most`: as of `target_standard`. Raises CheckFailed with the
    tables when a bound is broken (verify.json is written all the same).
    """
    folders = dict(zip(ROLES, (target_folder, drafter_folder), strict=True))
    head = is_head(drafter_folder)
    files = exported_files(export_folder, options, own_file(target_folder), head=head)
    result = verify_with_models(files, folders, prompts, trials, target_folder, questions, most)
    write_json(out / "verify.json", result)
    broken = broken_of(result)
    if broken:
        raise CheckFailed(
            f"{report_of(result)}\n{broken_words(broken)}. "
            f"Remove {export_folder} and export again; if it stays, the exporter does not know this model"
        )
    checks = result["files"]
    return {"files": len(checks), "positions": sum(int(check["positions"]) for check in checks)}


def verify_with_models(
    files: list[ExportedFile],
    folders: dict[str, Path],
    prompts: list[list[int]],
    trials: Trials | None,
    tokenizer_folder: Path,
    questions: Questions | None = None,
    most: float = math.inf,
) -> dict[str, Any]:
    """`verify_files` with the models in `folders`, by role, as standards."""
    subset = subset_of(folders["target"], folders["drafter"])

    def standards() -> Iterator[tuple[str, Standard]]:
        own = [(file.engine, file.held) for file in files if file.role == "target"]
        target = target_standard(folders["target"], prompts, questions, own, most)
        yield "target", target
        if is_head(folders["drafter"]):
            yield "drafter", Head(folders["drafter"], target)
            return
        del target  # one model at a time is in memory
        yield "drafter", Reference(folders["drafter"], prompts, subset=subset)

    return verify_files(files, standards(), subset, trials, tokenizer_folder)


def target_standard(
    folder: Path,
    prompts: list[list[int]],
    questions: Questions | None,
    files: Iterable[tuple[str, str]],
    most: float = math.inf,
) -> Reference | Streamed:
    """The target in torch: one layer at a time where free memory does not hold it twice as floats and its layers are alike.

    `files`: engine and precision of those that are checked; `most`: bytes it may take, though more be free.
    """
    free, shape = free_memory(), ModelShape.from_config(read_json(folder / "config.json"))
    needed = whole_bytes(shape, len(prompts), opened_bytes(shape, files))
    whole = needed <= min(most, math.inf if free is None else free)
    return (Reference if whole or not are_alike(folder) else Streamed)(folder, prompts, questions)
