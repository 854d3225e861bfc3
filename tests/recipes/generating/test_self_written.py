"""The target writes instructions and text: the user's turn of a template, the filters, seeds, resuming, mixing with files."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import self_written_program
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_recipes.data.documents import read_documents
from edgespec_recipes.data.prompts import encode_prompt, read_prompts
from edgespec_recipes.generating import self_written
from edgespec_recipes.generating.response_shards import Answers, Request, Written, read_responses
from edgespec_recipes.generating.self_written import (
    INSTRUCTIONS,
    TEXT,
    Verdict,
    judge_document,
    judge_instruction,
    user_turn,
    write_instructions,
)
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.parallel.precision import Precision
from small_build import command, write_data
from study_values import changed
from tiny_models import SPECIALS, make_model_folder
from tiny_sentencepiece import LLAMA_2, sentencepiece_like
from torchrun import one_thread, two_processes
from transformers import PreTrainedTokenizerFast

from edgespec.building.pipeline import Build
from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.files import read_json, read_jsonl, write_jsonl
from edgespec.core.progress import Bar
from edgespec.planning.estimate import estimate
from edgespec.recipe.schema import (
    SELF,
    SELF_INSTRUCTIONS,
    SELF_PROMPTS,
    EvaluateOptions,
    GenerateOptions,
    InferenceOptions,
    PretrainOptions,
    Recipe,
)
from edgespec.recipe.study_options import read_study
from edgespec.recipe.targets import shape_of_target

pytestmark = pytest.mark.training

END = SPECIALS[2]
WORDS = ["red", "green", "blue", "one", "two", "three", "tree", "house", "river", "stone", "bread", "cloud"]
OPTIONS = GenerateOptions(shard_size=6, batch_size=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("target") / "target")


class Typist:
    """A writer whose answers are words drawn by shard and seed; every third is of a kind that is left out."""

    stops = (2,)
    context_length = 256
    precision = Precision("typed", "a test")

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.shards: list[int] = []
        self.beginnings: list[list[int]] = []

    def answers(self, number: int, requests: list[Request]) -> Answers:
        self.shards.append(number)
        self.beginnings += [list(request.prompt_ids) for request in requests]
        drawn = random.Random(f"{self.seed} {number}")
        before = ""
        for place, request in enumerate(requests):
            text = " ".join(drawn.choice(WORDS) for _ in range(6)) + ("?" if place % 3 else "")
            text = "hm" if place % 3 == 0 else text
            text, before = (f"  {before.upper()} " if place == 5 else text), text  # said before, in capitals
            yield Written(request.id, self.tokenizer.encode(f"{text}{END}", add_special_tokens=False), {})


@pytest.fixture
def typists(monkeypatch: pytest.MonkeyPatch) -> list[Typist]:
    """The writers that were made, in order, instead of real ones."""
    made: list[Typist] = []

    def make(folder: Path, tokenizer: Any, options: GenerateOptions, seed: int, how: Any) -> Typist:
        assert (options.top_p, options.temperatures) == (0.95, (1.0,))
        made.append(Typist(tokenizer, seed))
        return made[-1]

    monkeypatch.setattr(self_written, "writer_of", make)
    return made


def asked(folder: Path) -> list[str]:
    return [row["messages"][0]["content"] for row in read_jsonl(folder / INSTRUCTIONS)]


def test_openings_are_used_in_turn_and_kept(target: Path, typists: list[Typist], tmp_path: Path) -> None:
    """Every sample goes on from the turn and its opening; the text holds the opening once, and shards go on with the turn."""
    openings = ("red:", "blue stone", "")
    options = replace(OPTIONS, self_openings=openings, shard_size=4)
    write_instructions(tmp_path / "a", target, 20, options, 3)
    tokenizer = load_tokenizer(target)
    turn = user_turn(tokenizer)
    expected = [turn.before + tokenizer.encode(opening, add_special_tokens=False) for opening in openings]
    asked_of = typists[0].beginnings
    assert asked_of == [expected[place % 3] for place in range(len(asked_of))]
    texts = asked(tmp_path / "a")
    begun = [
        sum(text.replace(" ", "").startswith(o.replace(" ", "")) for text in texts) for o in openings[:2]
    ]
    assert all(count >= 4 for count in begun)
    assert not any(text.count("red:") > 1 for text in texts)


def test_the_bar_goes_on_within_a_shard(
    target: Path, typists: list[Typist], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the samples before gave; after each shard it stands at what is kept, and it ends at all of it."""
    seen: list[tuple[float, str]] = []

    class Seen(Bar):
        def refresh(self) -> None:
            seen.append((self.n, str(self)))

    @contextmanager
    def watched(label: str, total: float, unit: str) -> Iterator[Bar]:
        yield Seen(label, total, unit, 0)

    monkeypatch.setattr(self_written, "progress", watched)
    write_instructions(tmp_path / "a", target, 20, OPTIONS, 3)
    shards = len(typists[0].shards)
    assert shards >= 4
    values = [value for value, _ in seen]
    assert len(set(values)) > 2 * shards
    assert max(values) == values[-1] == 20
    assert "6 samples" in seen[5][1]


def test_the_users_turn_of_a_template(target: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(target)
    turn = user_turn(tokenizer)
    assert (tokenizer.decode(turn.before), turn.closing) == ("<|im_start|>user\n", END)
    whole = encode_prompt(tokenizer, [{"role": "user", "content": "Hello"}])
    assert whole[: len(turn.before)] == turn.before
    llama = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_like("normalizer"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    llama.chat_template = LLAMA_2
    assert user_turn(llama).closing == "[/INST]"
    for template in (
        "{{ 'no place for a user' }}",
        "{{ messages[0]['content'] }}",
        "{{ raise_exception('x') }}",
    ):
        llama.chat_template = template
        with pytest.raises(InputError, match=r"the chat template (writes nothing|cannot write)"):
            user_turn(llama)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"What is a river?{END}", ""),
        (f"What is a river?{END}<|im_start|>assistant\nWater", ""),
        ("What is a river?<|endoftext|>", "unfinished"),
        ("What is a river", "unfinished"),
        (f"  {END}", "short"),
        (f"a{END}", "short"),
        (f"<|im_start|>What is a river?{END}", "garbled"),
        (f"red green blue {'and again and again ' * 12}{END}", "repeated"),
    ],
)
def test_what_an_instruction_is(target: Path, text: str, reason: str) -> None:
    tokenizer = load_tokenizer(target)
    found = judge_instruction(
        tokenizer, user_turn(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    )
    assert found.reason == reason
    if not reason:
        assert found == Verdict("What is a river?")


def test_what_a_document_is(target: Path) -> None:
    tokenizer = load_tokenizer(target)

    def judged(text: str) -> Verdict:
        return judge_document(tokenizer, tokenizer.encode(text, add_special_tokens=False))

    assert judged("A river runs to the sea") == Verdict("A river runs to the sea")  # cut, and no worse for it
    assert judged(f"<|endoftext|>A river runs to{END} and on") == Verdict("A river runs to")
    assert judged("la " * 40).reason == "repeated"
    assert judged(END).reason == "short"
    half = tokenizer.encode("A river runs in Zürich", add_special_tokens=False)
    place = next(at for at in range(len(half)) if tokenizer.decode(half[:at]).endswith("\ufffd"))
    assert judge_document(tokenizer, half[:place]) == Verdict("A river runs in Z")
    assert judge_document(tokenizer, [*half[:place], *half[:9]]).reason == "garbled"


def test_the_same_seed_writes_the_same(target: Path, tmp_path: Path, typists: list[Typist]) -> None:
    counts = [
        write_instructions(tmp_path / name, target, 9, OPTIONS, seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, second, third = (asked(tmp_path / name) for name in "abc")
    assert first == second
    assert not set(first) & set(third)
    assert len(set(first)) == len(first) == counts[0]["kept"] == 9
    assert counts[0]["left_out"] == {"short": 6, "twice": 3}
    assert (counts[0]["samples"], counts[0]["shards"], counts[0]["precision"]) == (18, 3, "typed")
    assert counts[0] == counts[1] | {"tokens_per_second": counts[0]["tokens_per_second"]}


def test_what_is_held_out_is_not_written(target: Path, tmp_path: Path, typists: list[Typist]) -> None:
    write_instructions(tmp_path / "held-out", target, 3, OPTIONS, 0)
    held_out = tmp_path / "held-out" / INSTRUCTIONS
    counts = write_instructions(tmp_path / "learnt", target, 9, OPTIONS, 0, held_out=held_out)
    assert typists[-1].seed == typists[0].seed  # it says the same at first
    assert counts["left_out"] == {"short": 8, "twice": 7}
    assert counts["kept"] == 9
    assert not set(asked(tmp_path / "held-out")) & set(asked(tmp_path / "learnt"))


def test_a_killed_writing_goes_on(
    target: Path, tmp_path: Path, typists: list[Typist], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_instructions(tmp_path / "whole", target, 9, OPTIONS, 0)

    def killed(self: Typist, number: int, requests: list[Request]) -> Answers:
        if number == 2:
            raise KeyboardInterrupt
        return write(self, number, requests)

    write = Typist.answers
    with monkeypatch.context() as patch:
        patch.setattr(Typist, "answers", killed)
        with pytest.raises(KeyboardInterrupt):
            write_instructions(tmp_path / "cut", target, 9, OPTIONS, 0)
    assert not (tmp_path / "cut" / INSTRUCTIONS).exists()
    (tmp_path / "cut" / "shard-00000.jsonl").write_text("damaged")
    write_instructions(tmp_path / "cut", target, 9, OPTIONS, 0)
    assert typists[-1].shards == [0, 2]  # the whole one stays, the damaged one is made again
    assert asked(tmp_path / "cut") == asked(tmp_path / "whole")


def test_a_target_that_cannot_write_says_so(
    target: Path, tmp_path: Path, typists: list[Typist], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "Random", lambda seed: FirstOf())
    with pytest.raises(InputError, match=r"of 12 samples of the target 0 are usable \(8 repeated, 4 short\)"):
        write_instructions(tmp_path / "out", target, 12, OPTIONS, 0)


class FirstOf:
    """Draws the same always."""

    def choice(self, words: Sequence[Any]) -> Any:
        return words[0]


@pytest.mark.parametrize("source", ["torch", "file"])
def test_running_text_of_a_real_target(target: Path, tmp_path: Path, source: str) -> None:
    how = InferenceOptions()
    if source == "file":
        export_gguf(target, tmp_path / "t.gguf", "f32")
        how = InferenceOptions(source="file", file=str(tmp_path / "t.gguf"), threads=1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        self_written_program.write(target, tmp_path / name, seed, how)
    texts = [(tmp_path / name / TEXT).read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    beginnings = {json.dumps(row["ids"][:1]) for row in read_rows(tmp_path / "a")}
    assert len(beginnings) > 3  # documents begin with tokens of their own


def test_two_processes_write_what_one_writes(target: Path, tmp_path: Path) -> None:
    with one_thread():
        self_written_program.write(target, tmp_path / "one")
    program = shutil.copy(self_written_program.__file__, tmp_path)
    two_processes(Path(program), str(target), str(tmp_path / "two"))
    assert (tmp_path / "two" / TEXT).read_bytes() == (tmp_path / "one" / TEXT).read_bytes()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for shard in sorted(folder.glob("shard-*.jsonl")) for row in read_jsonl(shard)]


def test_sources_are_mixed_in_turn(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 1)):
        for file, key in ((f"{name}.jsonl", "text"), (f"{name}-asked.jsonl", "instruction")):
            write_jsonl(tmp_path / file, [{key: f"{name}{n}"} for n in range(count)])
    both = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert list(read_documents(both)) == ["a0", "b0", "a1", "a2"]
    prompts = read_prompts([name.replace(".jsonl", "-asked.jsonl") for name in both], "seed")
    assert [messages[0]["content"] for messages in prompts] == ["a0", "b0", "a1", "a2"]


def test_a_whole_build_without_data(
    tmp_path: Path, typists: list[Typist], capsys: pytest.CaptureFixture[str]
) -> None:
    """Instructions and text of the target's own, mixed with files; every stage is counted, and done once."""
    write_data(tmp_path)
    make_model_folder(tmp_path / "target")
    words = command(tmp_path)
    words[words.index("--pretrain.text") + 1] = f"self,{tmp_path / 'text.jsonl'}"
    words[words.index("--generate.instructions") + 1] = f"{tmp_path / 'asked.jsonl'},self"
    words += ["--pretrain.self-tokens", "200", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    out = tmp_path / "out"
    instructions = read_json(out / "self-instructions" / "stage.json")
    assert (instructions["options"], instructions["counts"]["kept"]) == ({"instructions": 4}, 4)
    assert read_json(out / "self-text" / "stage.json")["counts"]["kept"] >= 4
    answered = [row["messages"][-1]["content"] for row in read_responses(out / "generate")]
    own = asked(out / "self-instructions")
    assert answered[:4] == ["Say 0?", own[0], "Say 1?", own[1]]
    # the same command does nothing; a change of the files makes what reads them again, and not what the target wrote
    capsys.readouterr()
    assert main(words) == 0
    assert "self-text: the target writes 200 tokens of running text (done before)" in capsys.readouterr().out
    with open(tmp_path / "text.jsonl", "a") as stream:
        stream.write('{"text": "One more text about a river."}\n')
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "! pretrain: text.jsonl changed" in told
    assert "self-text: the target writes 200 tokens of running text (done before)" in told


@pytest.mark.parametrize("alike", [False, True])
def test_held_out_prompts_are_not_what_it_trains_on(
    target: Path, tmp_path: Path, typists: list[Typist], monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """Both are the target's own, of one seed of the recipe: each draws from a seed of its purpose.

    What it says all the same is left out.
    """
    if alike:
        monkeypatch.setattr(self_written, "_seed", lambda seed, purpose: seed)
    generate = GenerateOptions(instructions=(SELF,), prompts=50, shard_size=60)
    build = Build(
        Recipe(target=str(target), generate=generate, evaluate=EvaluateOptions(prompts_file=SELF)), tmp_path
    )
    build._write_own_prompts(target)
    filled = build._write_own_data(target)
    folders = [tmp_path / SELF_PROMPTS, tmp_path / SELF_INSTRUCTIONS]
    assert filled.evaluate.prompts_file == str(folders[0] / INSTRUCTIONS)
    assert filled.generate.instructions == (str(folders[1] / INSTRUCTIONS),)
    held_out, learnt = map(asked, folders)
    assert (len(held_out), len(learnt)) == (build.recipe.export.bundle_prompts, 50)
    assert not set(held_out) & set(learnt)


def test_plans_count_it_and_studies_refuse_it(target: Path) -> None:
    shape = shape_of_target("smollm2-135m-instruct")
    recipe = Recipe(
        target="x",
        pretrain=PretrainOptions(text=("self",), self_tokens=1000),
        generate=GenerateOptions(instructions=("self", "more.jsonl"), prompts=100),
    )
    stages = {stage.stage: stage.tokens for stage in estimate(recipe, shape, shape)}
    assert stages["self-text"] == 4 * (128 + 256)
    assert stages["self-instructions"] == 50 * (128 + 128)
    with pytest.raises(InputError, match="names the source 'self', which is build-drafter's"):
        read_study("mine", changed("recipe/pretrain/text", ["text.jsonl", "self"]))
