"""What several benchmarks repeat: their command line, results that are kept, a process of its own, sums, random models."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgespec_runtime.bench.suite import Question
from edgespec_runtime.text.tokenizer import Message

from edgespec.core.files import read_json, write_json
from edgespec.core.shapes import ModelShape
from edgespec.stages.stage import CHECKPOINTS


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the script's docstring as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def given_paths(doc: str | None, arguments: list[str] | None, *names: str) -> argparse.Namespace:
    """The arguments of a program that takes these paths and nothing else."""
    parser = command_line(doc)
    for name in names:
        parser.add_argument(name, type=Path)
    return parser.parse_args(arguments)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[float]:
    return [float(word) for word in words(text)]


def whole_numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def kept(file: Path, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What was measured into `file`; measured now, unless it was before. The checkpoints in its folder go then."""
    if not file.is_file():
        write_json(file, measure())
    for folder in [*file.parent.glob(f"**/{CHECKPOINTS}")]:
        shutil.rmtree(folder)
    return dict(read_json(file))


def begun(out: Path, result: str) -> Iterator[Path]:
    """What runs in folders of `out` have left: results of that name, and checkpoints that an unfinished run goes on from."""
    yield from out.glob(f"*/{result}")
    yield from out.glob(f"*/**/{CHECKPOINTS}/*")


def same_options(file: Path, given: argparse.Namespace, made: Iterable[Path], *free: str) -> None:
    """Keep in `file` what the results beside it are made with; end the program where an earlier run was asked for another thing.

    `made`: those results. Where there are none, the earlier run made nothing, and what it was asked for counts no more.
    `free`: options that no kept result depends on. An option that the file does not name counts as the same.
    """
    named = {name: value for name, value in vars(given).items() if name not in free}
    asked = json.loads(json.dumps(named, default=str))
    if not file.is_file() or not any(made):
        write_json(file, asked)
    before = read_json(file)
    changed = [
        f"{name} was {before[name]!r} and is {value!r}"
        for name, value in asked.items()
        if before.get(name, value) != value
    ]
    if changed:
        raise SystemExit(
            f"{file}: what lies beside it was made with other options ({'; '.join(changed)}): name another folder or file"
        )


def in_own_process(*command: object, **environment: str) -> Any:
    """The JSON in the last line that Python prints with this command. Ends the program where it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    if done.returncode:
        raise SystemExit(f"{command[-1]}: status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def chat_of(question: Question) -> list[Message]:
    """The question's first turn and what precedes it."""
    return [*question.before, {"role": "user", "content": question.turns[0]}]


def sizes_of(shapes: Mapping[str, ModelShape]) -> str:
    """`target 134.5M, drafter 1.2M`."""
    return ", ".join(f"{role} {shape.parameters / 1e6:.1f}M" for role, shape in shapes.items())


def random_llama(
    seed: int, vocab_size: int, hidden: int, intermediate: int, layers: int, heads: int, **more: Any
) -> Any:
    """A Llama with random weights; `more` is what LlamaConfig names so."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **more,
    )
    return LlamaForCausalLM(config)
