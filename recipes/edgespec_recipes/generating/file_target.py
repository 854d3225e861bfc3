"""The target as an exported file on a CPU: it writes responses and gives distributions through the runtime's engine.

A Q4_0 or int4 file of a 7B target takes 4 GB where float32 weights take 27. Rows go through one after the other, since the
engines have one sequence. What comes out is the words and distributions of the rounded target, which is the one that
will run on the device. Knows no shards and no losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec_runtime.decoding.loop import decode
from edgespec_runtime.decoding.options import DecodingOptions, plain
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.engine import context_for
from edgespec_runtime.pair.bundle import load_engine
from edgespec_runtime.rules.table import LOSSLESS
from edgespec_runtime.untrusted.genai_settings import SETTINGS
from edgespec_runtime.untrusted.gguf_config import TOKENS
from edgespec_runtime.untrusted.gguf_file import metadata, read_header

from edgespec.core.errors import InputError
from edgespec.core.files import read_json
from edgespec.core.manifest import MANIFEST, open_manifest
from edgespec.core.metrics import RawCounts
from edgespec.recipe.devices import LLAMACPP, ONNXRUNTIME
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec.recipe.targets import is_gguf
from edgespec_recipes.data.token_rows import documents_of
from edgespec_recipes.generating.response_shards import Answers, Request, Writer, Written
from edgespec_recipes.models.loading import load_tokenizer, stop_ids_of
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.top_k import record_type, records_of

SAME = 0.95  # share of the tokens whose text must be the same; special tokens may be written otherwise


def locate(how: InferenceOptions) -> tuple[str, Path]:
    """(engine, path) of the target in a bundle, an ONNX folder or a GGUF file; a bundle's files are held against its manifest.

    Raises InputError where it is none of these or the bundle has no such precision, BundleError for an altered bundle.
    """
    path = Path(how.file).expanduser()
    if path.is_file() and is_gguf(path):
        return LLAMACPP, path
    if not (path / MANIFEST).is_file():
        if (path / SETTINGS).is_file():
            return ONNXRUNTIME, path
        raise InputError(
            f"inference.file {how.file!r} is no bundle, no folder with a {SETTINGS} and no .gguf file; give one of these"
        )
    manifest = open_manifest(path)
    engine, precision = manifest.default["engine"], how.precision or manifest.default["precision"]
    offered = {name: which for which, names in manifest.target.files.items() for name in names}
    if precision not in offered:
        raise InputError(
            f"the bundle {how.file} has no target in {precision!r}; it has {', '.join(sorted(offered))}"
        )
    engine = engine if precision in manifest.target.files.get(engine, {}) else offered[precision]
    return engine, manifest.model_path("target", engine, precision)


def check_vocabulary(engine: Any, path: Path, target_folder: Path) -> None:
    """Hold a loaded file's tokens against the target's. Raises InputError.

    A GGUF file carries its tokens; ONNX folders and files without a vocabulary have only its size.
    """
    wanted, seen = int(read_json(target_folder / "config.json")["vocab_size"]), engine.vocab_size
    if seen != wanted:
        raise InputError(
            f"{path} has a vocabulary of {seen} tokens and the target in {target_folder} of {wanted}; give a file that was "
            "exported from this target"
        )
    tokens = None if path.is_dir() else metadata(path, read_header(path), TOKENS)
    if tokens is None:
        return
    known = load_tokenizer(target_folder).get_vocab()
    same = sum(tokens[number : number + 1] == [token] for token, number in known.items())
    if same < SAME * len(known):
        raise InputError(
            f"of the target's {len(known)} tokens {same} are the same in {path}; give a file exported from this target"
        )


class FileTarget:
    """The target's file on its engine, held against the target's folder (config.json and tokenizer; no weights are read).

    `longest`: tokens of the longest text, None where that is not known; the context has room for it unless `how` names one.
    Raises InputError: no such file, another vocabulary than the target's; BundleError for a file the engine refuses.
    """

    def __init__(self, how: InferenceOptions, target_folder: Path, longest: int | None = None) -> None:
        engine, path = locate(how)
        context = how.context or (None if longest is None else context_for(longest))
        self.engine = CachedEngine(load_engine(engine, path, context, how.threads))
        self.context_length = self.engine.engine.context_length
        self.vocab_size = self.engine.engine.vocab_size
        self.precision = Precision(path.name, f"the target is {path} on {engine}")
        check_vocabulary(self.engine.engine, path, target_folder)

    def close(self) -> None:
        self.engine.engine.close()

    def records(self, rows: Any, part: Sequence[int], top_k: int) -> Iterator[np.ndarray]:
        """See target_store.Distributions: one row of conversations at a time, each conversation by itself."""
        size = self.engine.engine.block_length
        for number in part:
            row = rows[number]
            found = [np.empty(0, record_type(top_k, self.vocab_size))]
            for places in documents_of(row):
                wanted = row["compared"][places]
                tokens = row["input_ids"][places][: wanted.nonzero()[0].max(initial=-1) + 1]
                self.engine.rewind(0)
                for start in range(0, len(tokens), size):
                    piece = tokens[start : start + size]
                    logits = self.engine.forward(piece.tolist())[wanted[start : start + len(piece)]]
                    found.append(records_of(torch.from_numpy(logits), top_k))
            yield np.concatenate(found)


class FileWriter(FileTarget, Writer):
    """An answer is a function of the file, the request and the seed, in whatever shard it stands."""

    def __init__(
        self, how: InferenceOptions, target_folder: Path, tokenizer: Any, options: GenerateOptions, seed: int
    ) -> None:
        super().__init__(how, target_folder)
        self.options, self.seed, self.stops = options, seed, stop_ids_of(target_folder, tokenizer)

    def answers(self, number: int, requests: list[Request]) -> Answers:
        for request in requests:
            how = DecodingOptions(
                temperature=request.temperature,
                top_p=self.options.top_p,
                min_p=self.options.min_p,
                max_new_tokens=self.options.max_new_tokens,
                seed=self.seed * 1_000_003 + request.id,
                rule=LOSSLESS,
            )
            blocks = decode(self.engine, None, request.prompt_ids, plain(how), self.stops, RawCounts())
            yield Written(request.id, [token for block in blocks for token in block.tokens], {})
