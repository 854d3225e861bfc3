"""llama.cpp's tokenizer of a GGUF file without weights, its own test vectors, and Llama 2's tokenizer in every form."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec_export.gguf.vocabulary import Vocabulary
from edgespec_runtime.engines.llamacpp import load_library
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, normalizers, processors

from edgespec.core.files import write_json


class Splitter:
    """llama.cpp's tokenizer of a file, loaded without weights."""

    def __init__(self, file: Path) -> None:
        self.lib: Any = load_library()
        params = self.lib.llama_model_default_params()
        params.vocab_only = True
        self.model = self.lib.llama_model_load_from_file(os.fsencode(file), params)
        assert self.model, file
        self.vocab = self.lib.llama_model_get_vocab(self.model)

    def __call__(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        data = text.encode()
        buffer = (ctypes.c_int32 * (len(data) + 16))()
        count = self.lib.llama_tokenize(
            self.vocab, data, len(data), buffer, len(buffer), add_special, parse_special
        )
        assert count >= 0
        return list(buffer[:count])


@contextmanager
def written(vocabulary: Vocabulary, file: Path) -> Iterator[Splitter]:
    writer = GGUFWriter(None, "llama")
    writer.add_name("Phi-3" if vocabulary.strips_right else "test")
    vocabulary.write(writer)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    splitter = Splitter(file)
    yield splitter
    splitter.lib.llama_model_free(splitter.model)


def vectors(shared: Path, name: str) -> list[tuple[str, list[int]]]:
    """(text, ids) of llama.cpp's own tests."""
    stem = shared / "data" / "gguf_vocabs" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text(encoding="utf-8").splitlines()
    pairs = list(zip(texts, ([int(word) for word in line.split()] for line in lines), strict=False))
    assert len(pairs) > 40
    return pairs


def sentencepiece_folder(shared: Path, folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir()
    shutil.copyfile(shared / "data" / "tokenizer_llama2" / "tokenizer.model", folder / "tokenizer.model")
    write_json(folder / "tokenizer_config.json", settings)
    return folder


LLAMA2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def merged(pieces: list[str], scores: list[float]) -> Tokenizer:
    """The tokenizers library's BPE of a SentencePiece model: every split of every piece, best piece first."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    ranked = sorted((index for index in range(3 + 256, len(pieces))), key=lambda index: -scores[index])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (pieces[index] for index in ranked)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
