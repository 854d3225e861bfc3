"""More than 10,000 damaged bundles: nothing but EdgespecError comes out, and nothing is written anywhere.

Fixed examples (derandomize): a run that passes here passes everywhere. Hypothesis draws what is put in and a seed; the seed
picks SPREAD places for it, which is SPREAD cases for the price of one. Every test also asserts that some cases got through and
some did not, so that neither a loader that refuses all nor one that checks nothing would pass.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edgespec_runtime.engines.vocabulary import read_vocabulary
from edgespec_runtime.text.prompts import read_chats
from edgespec_runtime.text.tokenizer import ChatTokenizer
from edgespec_runtime.untrusted.genai_settings import read_settings
from edgespec_runtime.untrusted.gguf_file import read_header
from edgespec_runtime.untrusted.onnx_graph import check_onnx
from edgespec_runtime.untrusted.template import SafeTemplate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from edgespec.core.errors import EdgespecError
from edgespec.core.manifest import open_manifest

CASES = {"values": 2000, "bytes": 2000, "small": 2000, "gguf": 1300, "onnx": 1800, "template": 1500}
SPREAD = 5
ONNX = "target/onnx-fp32"
SEEDS = st.integers(0, 2**32 - 1)


def fuzzed(cases: int) -> Any:
    return settings(
        max_examples=cases // SPREAD,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def root(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A folder with a bundle to damage and a sentinel beside it, which nobody may touch."""
    place = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(bundle, place / "bundle")
    (place / "sentinel" / "inner").mkdir(parents=True)
    (place / "sentinel" / "secret").write_text("secret")
    (place / "sentinel" / "inner" / "file").write_text("file")
    (place / "cwd").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place / "cwd")
        yield place


def seen(place: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder with size and time of change."""
    stats = {str(path.relative_to(place)): path.lstat() for path in sorted(place.rglob("*"))}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def tried(counts: Counter[str], run: Callable[[], Any]) -> None:
    """Run one case. Whatever is not an EdgespecError fails the test."""
    try:
        run()
    except EdgespecError as error:
        counts["refused"] += 1
        counts["no or endless words"] += not 0 < len(str(error)) < 5000
    else:
        counts["accepted"] += 1


def checked(
    root: Path, before: dict[str, tuple[int, int]], counts: Counter[str], altered: str, cases: int
) -> None:
    after = seen(root)
    assert {name: after[name] for name in after if name != altered} == {
        name: before[name] for name in before if name != altered
    }
    assert min(counts["refused"], counts["accepted"]) >= 4, counts
    assert counts["refused"] + counts["accepted"] >= 0.9 * cases, counts
    assert counts["no or endless words"] == 0


TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["../sentinel/secret", "/etc/passwd", "..", ".", "a\nb", "\ud800", "NUL", "C:/x", "a\\b", "x" * 3000, "tokenizer", ONNX]
    ),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


BYTES = st.one_of(st.binary(max_size=9), st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little")))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON tree, the root left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [(*path, key), *places(inner, (*path, key))]
    return found


def mutated(text: str, value: Any, key: str, chance: random.Random) -> str:
    """A JSON text with `value` or `key` in one to three places, or with places removed."""
    tree = json.loads(text)
    for _ in range(chance.randint(1, 3)):
        paths = places(tree)
        if not paths:
            break
        path = chance.choice(paths)
        holder = tree
        for step in path[:-1]:
            holder = holder[step]
        action = chance.choice(("replace", "replace", "remove", "rename", "add"))
        new = copy.deepcopy(value)  # a list that was put in twice could be put into itself
        if action == "replace" or isinstance(holder, list):
            holder[path[-1]] = new
        elif action == "remove":
            del holder[path[-1]]
        elif action == "rename":
            holder[key] = holder.pop(path[-1])
        else:
            holder[key] = new
    return json.dumps(tree)


def damaged(data: bytes, new: bytes, chance: random.Random, within: int) -> bytes:
    """`new` written, inserted or its length cut out in up to three of the first `within` bytes, or all cut off from there."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(max(1, min(within, len(result))))
        action = chance.choice(("write", "write", "write", "insert", "cut", "end"))
        if action == "write":
            result[at : at + len(new)] = new
        elif action == "insert":
            result[at:at] = new
        elif action == "cut":
            del result[at : at + 1 + len(new)]
        else:
            del result[at:]
    return bytes(result)


def use(folder: Path) -> None:
    """What a loader asks of a manifest."""
    manifest = open_manifest(folder, hashes=False)
    for engine, precision in manifest.pairs():
        manifest.cost_ratios(engine, precision)
        for role in ("target", "drafter"):
            assert manifest.model_path(role, engine, precision).resolve().is_relative_to(folder.resolve())
            manifest.check_folder(getattr(manifest, role).files[engine][precision])


def test_manifests_with_other_values(root: Path) -> None:
    file = root / "bundle" / "manifest.json"
    whole, before, counts = file.read_bytes(), seen(root), Counter[str]()
    text = whole.decode()

    @fuzzed(CASES["values"])
    @given(VALUES, TEXTS, SEEDS)
    def run(value: Any, key: str, seed: int) -> None:
        for chance in map(random.Random, range(seed, seed + SPREAD)):
            file.write_text(mutated(text, value, key, chance))
            tried(counts, lambda: use(root / "bundle"))

    run()
    file.write_bytes(whole)
    checked(root, before, counts, "bundle/manifest.json", CASES["values"])


def test_manifests_with_other_bytes(root: Path) -> None:
    file = root / "bundle" / "manifest.json"
    whole, before, counts = file.read_bytes(), seen(root), Counter[str]()

    @fuzzed(CASES["bytes"])
    @given(BYTES, SEEDS)
    def run(new: bytes, seed: int) -> None:
        for chance in map(random.Random, range(seed, seed + SPREAD)):
            file.write_bytes(damaged(whole, new, chance, len(whole)))
            tried(counts, lambda: use(root / "bundle"))

    run()
    file.write_bytes(whole)
    checked(root, before, counts, "bundle/manifest.json", CASES["bytes"])


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer/tokenizer_config.json",
        "tokenizer/generation_config.json",
        "tokenizer/chat_template.jinja",
        "tokenizer/tokenizer.json",
        f"{ONNX}/genai_config.json",
        "prompts.jsonl",
        "vocabulary.json",
    ],
)
def test_small_files(root: Path, name: str) -> None:
    folder = root / "bundle"
    file = folder / name
    added = not file.exists()
    if added:
        first = (
            {"target_vocab_size": 9, "ids": [0, 2, 5], "fillers": 2}
            if name == "vocabulary.json"
            else {"eos_token_id": [2]}
        )
        file.write_text(json.dumps(first))
    whole, before, counts = file.read_bytes(), seen(root), Counter[str]()
    cases = CASES["small"] // (25 if name.endswith("tokenizer.json") else 6)

    def load() -> None:
        if name.startswith("tokenizer/"):
            tokenizer = ChatTokenizer(folder / "tokenizer")
            tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "Hello 🙂"}]))
        elif name == "prompts.jsonl":
            read_chats(file)
        elif name == "vocabulary.json":
            read_vocabulary(file)
        else:
            read_settings(folder / ONNX)

    @fuzzed(cases)
    @given(VALUES, TEXTS, BYTES, SEEDS)
    def run(value: Any, key: str, new: bytes, seed: int) -> None:
        for chance in map(random.Random, range(seed, seed + SPREAD)):
            if name.endswith(".json") and chance.random() < 0.6:
                file.write_text(mutated(whole.decode(), value, key, chance))
            else:
                file.write_bytes(damaged(whole, new, chance, len(whole)))
            tried(counts, load)

    run()
    file.write_bytes(whole)
    checked(root, before, counts, f"bundle/{name}", cases)
    if added:
        file.unlink()


def test_gguf_headers(root: Path, both: Path) -> None:
    whole = next((both / "target").rglob("*.gguf")).read_bytes()
    tensors = whole.index(b"token_embd.weight")
    # the vocabulary in the middle of the header is long and dull: what comes before it and the tensors are damaged
    file = root / "bundle" / "fuzz.gguf"
    file.write_bytes(whole)
    before, counts = seen(root), Counter[str]()

    @fuzzed(CASES["gguf"])
    @given(BYTES, SEEDS)
    def run(new: bytes, seed: int) -> None:
        for chance in map(random.Random, range(seed, seed + SPREAD)):
            if chance.random() < 0.5:
                file.write_bytes(damaged(whole, new, chance, 1500))
            else:
                file.write_bytes(whole[: tensors - 8] + damaged(whole[tensors - 8 :], new, chance, 900))
            tried(counts, lambda: read_header(file))

    run()
    checked(root, before, counts, "bundle/fuzz.gguf", CASES["gguf"])
    file.unlink()


def test_onnx_graphs(root: Path) -> None:
    file = root / "bundle" / ONNX / "model.onnx"
    whole, before, counts = file.read_bytes(), seen(root), Counter[str]()

    @fuzzed(CASES["onnx"])
    @given(BYTES, SEEDS)
    def run(new: bytes, seed: int) -> None:
        for chance in map(random.Random, range(seed, seed + SPREAD)):
            file.write_bytes(damaged(whole, new, chance, len(whole)))
            tried(counts, lambda: check_onnx(file))

    run()
    file.write_bytes(whole)
    checked(root, before, counts, f"bundle/{ONNX}/model.onnx", CASES["onnx"])


WORDS = (
    "{{ }} {% %} {# #} ( ) [ ] { } | ~ + - * ** // % . , : = == in is not and or if else 'x' '%s' 9 99999 1.5 none true m "
    "messages m.content loop loop.index range(9) namespace(a=1) for endfor set endset macro endmacro call endcall block endblock "
    "filter endfilter include extends tojson join replace center sort map list string upper format length .format .join .replace "
    "__class__ raise_exception strftime_now self caller dict cycler joiner"
)
FORMS = (
    "{% for m in messages %}{{ @ }}{% endfor %}",
    "{% set x = @ %}{{ x }}",
    "{{ @ }}",
    "{% if @ %}{{ @ }}{% endif %}",
    "@",
    "{% macro f(m) %}{{ @ }}{% endmacro %}{{ f(@) }}",
)


def test_chat_templates(root: Path) -> None:
    before, counts = seen(root), Counter[str]()
    values: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "tools": None}

    def load(text: str) -> None:
        try:
            assert len(SafeTemplate(text).render(values)) < 5_000_000
        except TemplateError as error:  # what the tokenizer turns into an InputError
            raise EdgespecError(str(error) or "refused") from error

    @fuzzed(CASES["template"])
    @given(SEEDS)
    def run(seed: int) -> None:
        for chance in map(random.Random, range(seed, seed + SPREAD)):
            text = chance.choice(FORMS)
            while "@" in text:
                text = text.replace("@", " ".join(chance.choices(WORDS.split(), k=chance.randint(1, 5))), 1)
            tried(counts, lambda text=text: load(text))  # type: ignore[misc]

    run()
    checked(root, before, counts, "", CASES["template"])
