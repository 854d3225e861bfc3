"""The evaluation stage: metrics derived from raw counts, resumption, the table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edgespec_recipes.evaluation import evaluation
from edgespec_recipes.evaluation.evaluation import evaluate, held_out_prompts, teacher_forced
from edgespec_recipes.evaluation.report import evaluation_table
from edgespec_recipes.losses.distributions import warp
from small_llama import PROMPTS, greedy, small_llama
from tiny_models import TEMPLATE, make_model_folder

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts
from edgespec.recipe.sampling import Sampling
from edgespec.recipe.schema import EvaluateOptions

RATIO = 0.25


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and two drafters: one is another random model, one is the target itself."""
    place = tmp_path_factory.mktemp("pair")
    return {
        "target": make_model_folder(place / "target"),
        "stranger": make_model_folder(place / "stranger", seed=1, layers=1),
    }


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EvaluateOptions:
    file = tmp_path_factory.mktemp("prompts") / "held.jsonl"
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"What is {number} + {number}?"}]} for number in range(6)
    ]
    rows.append({"messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Why?"}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluateOptions(
        prompts_file=str(file), prompts=7, max_new_tokens=10, draft_lengths=(1, 3), batch_size=4
    )


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path], options: EvaluateOptions
) -> Path:
    out = tmp_path_factory.mktemp("evaluate")
    drafters = {"pretrained": folders["stranger"], "distilled": folders["target"]}
    counts = evaluate(out, folders["target"], drafters, options, seed=0, cost_ratio=RATIO)
    assert counts["prompts"] == 7
    assert counts["settings"] == 8
    assert counts["distilled_beats_pretrained_t0-p1-g3"] is True
    return out


def test_every_metric_follows_from_the_raw_counts(finished: Path) -> None:
    result = json.loads((finished / "evaluation.json").read_text())
    seen = {(s["drafter"], s["temperature"], s["draft_length"]) for s in result["settings"]}
    assert seen == {(d, t, g) for d in ("pretrained", "distilled") for t in (0.0, 0.6) for g in (1, 3)}
    for setting in result["settings"]:
        counts, derived = [RawCounts(**raw) for raw in setting["counts"]], setting["metrics"]
        blocks, emitted = sum(c.blocks for c in counts), sum(c.emitted for c in counts)
        assert derived["tau"][0] == pytest.approx(emitted / blocks)
        assert derived["tau"][1] <= derived["tau"][0] <= derived["tau"][2]
        assert derived["mbsu"][0] == pytest.approx(emitted / blocks / (RATIO * setting["draft_length"] + 1))
        accepted, tested = sum(sum(c.accepted) for c in counts), sum(sum(c.tested) for c in counts)
        assert derived["alpha_empirical"][0] == pytest.approx(accepted / tested)
        overlap, positions, greedy, sampled = (
            sum(column) for column in zip(*setting["teacher_forced"], strict=True)
        )
        assert derived["alpha_teacher_forced"][0] == pytest.approx(overlap / positions)
        assert derived["alpha_match_greedy"][0] == pytest.approx(greedy / positions)
        assert derived["alpha_match_sampled"][0] == pytest.approx(sampled / positions)
        if setting["temperature"] == 0:  # every rule is the agreement of two argmaxes
            assert overlap == greedy == sampled
        else:
            assert sampled < overlap
        if setting["drafter"] == "distilled":  # the target itself
            assert derived["alpha_empirical"][0] == 1
            assert derived["alpha_teacher_forced"][0] == pytest.approx(1, abs=1e-4)


def test_paired_difference(finished: Path) -> None:
    result = json.loads((finished / "evaluation.json").read_text())
    tau = {
        (s["drafter"], s["temperature"], s["draft_length"]): s["metrics"]["tau"][0]
        for s in result["settings"]
    }
    assert len(result["comparisons"]) == 4
    for comparison in result["comparisons"]:
        key = comparison["temperature"], comparison["draft_length"]
        value, low, high = comparison["tau_difference"]
        assert comparison["claim"] == "distilled_beats_pretrained"
        assert value == pytest.approx(tau["distilled", *key] - tau["pretrained", *key])
        assert low <= value <= high
        assert comparison["holds"] is (low > 0)


def test_a_second_run_decodes_nothing_and_a_broken_setting_is_made_again(
    finished: Path,
    folders: dict[str, Path],
    options: EvaluateOptions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = (finished / "evaluation.json").read_bytes()
    runs: list[int] = []
    plain: Callable[..., Any] = evaluation.speculate

    def counted(*given: Any, **how: Any) -> Any:
        runs.append(how["draft_length"])
        return plain(*given, **how)

    monkeypatch.setattr(evaluation, "speculate", counted)
    drafters = {"pretrained": folders["stranger"], "distilled": folders["target"]}
    broken = finished / "settings" / "pretrained-t0.6-p0.9-g3.json"
    broken.write_text(broken.read_text()[:50])
    evaluate(finished, folders["target"], drafters, options, seed=0, cost_ratio=RATIO)
    assert runs == [3, 3]  # two batches of one setting
    assert broken.name in caplog.text
    assert (finished / "evaluation.json").read_bytes() == before


def test_an_evaluation_that_goes_on_another_day_has_its_first_prompts(
    folders: dict[str, Path], options: EvaluateOptions, tmp_path: Path
) -> None:
    """A template that writes microseconds stands for one that writes the date."""
    target, out = shutil.copytree(folders["target"], tmp_path / "dated"), tmp_path / "out"
    (target / "chat_template.jinja").write_text("{{ strftime_now('%f') }}" + TEMPLATE)
    options = replace(options, prompts=2, max_new_tokens=4, draft_lengths=(1,))
    evaluate(out, target, {"distilled": folders["stranger"]}, options, 0, RATIO)
    before = (out / "evaluation.json").read_bytes()
    (out / "settings" / "distilled-t0.6-p0.9-agreement.json").unlink()
    evaluate(out, target, {"distilled": folders["stranger"]}, options, 0, RATIO)
    assert (out / "evaluation.json").read_bytes() == before


def test_table(finished: Path) -> None:
    text = evaluation_table(finished / "evaluation.json")
    assert text.count("\n") == 9
    assert "T=0.6 top-p 0.9, γ=3, distilled" in text


@pytest.mark.parametrize("sampling", [Sampling(0.0, 1.0), Sampling(0.7, 0.9)])
def test_teacher_forced_acceptance_by_hand(sampling: Sampling) -> None:
    target, draft = small_llama(0), small_llama(5)
    responses = [greedy(target, prompt, 3 + row, []) for row, prompt in enumerate(PROMPTS)]
    found = teacher_forced(target, draft, PROMPTS, responses, sampling)
    for prompt, response, (total, positions, greedy_sum, sampled_sum) in zip(
        PROMPTS, responses, found, strict=True
    ):
        text = torch.tensor([prompt + response])
        with torch.inference_mode():
            p, q = (warp(m(text).logits[0], sampling.temperature, sampling.top_p) for m in (target, draft))
        places = range(len(prompt) - 1, len(prompt + response) - 1)
        assert positions == len(response)
        assert total == pytest.approx(sum(float(torch.minimum(p[i], q[i]).sum()) for i in places), abs=1e-3)
        assert greedy_sum == pytest.approx(sum(float(p[i][q[i].argmax()]) for i in places), abs=1e-3)
        assert sampled_sum == pytest.approx(sum(float(p[i] @ q[i]) for i in places), abs=1e-3)


def test_prompts_that_cannot_be_used(
    options: EvaluateOptions, folders: dict[str, Path], tmp_path: Path
) -> None:
    from edgespec_recipes.models.loading import load_tokenizer

    tokenizer = load_tokenizer(folders["target"])
    with pytest.raises(InputError, match=r"0 prompts of at most 7 tokens.*max_new_tokens 10"):
        held_out_prompts(tokenizer, options, context_length=20)
    with pytest.raises(InputError, match=r"'nowhere\.jsonl' does not exist"):
        held_out_prompts(tokenizer, replace(options, prompts_file="nowhere.jsonl"), 256)
    bad = tmp_path / "bad.jsonl"
    for row, message in (
        ({"text": "x"}, r"bad\.jsonl:1 has the keys text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "asks nothing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "it needs 'role'"),
    ):
        bad.write_text(json.dumps(row))
        with pytest.raises(InputError, match=message):
            held_out_prompts(tokenizer, replace(options, prompts_file=str(bad)), 256)


def test_vocabularies_that_differ(folders: dict[str, Path], options: EvaluateOptions, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", vocab_size=400)
    with pytest.raises(InputError, match="vocabulary of 400 tokens and the target of 512"):
        evaluate(tmp_path / "out", folders["target"], {"pretrained": other}, options, 0, RATIO)
