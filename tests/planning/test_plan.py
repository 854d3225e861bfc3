"""`edgespec plan`: what it prints, its JSON, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paper_plan import DRAFTER, PAPER, TARGET, planned
from repository import PYTHONPATH, REPOSITORY

from edgespec.cli import main
from edgespec.core.errors import InputError
from edgespec.core.metrics import acceptance_rate_of
from edgespec.planning import costs, plan
from edgespec.planning.devices_fit import fit
from edgespec.planning.estimate import PROMPT_TOKENS
from edgespec.planning.hardware import GIB, THIS_MACHINE, Hardware
from edgespec.planning.plan_device import budget, rates_of_profile
from edgespec.planning.plan_report import _rates, span
from edgespec.recipe.devices import profiles
from edgespec.recipe.schema import Recipe
from edgespec.recipe.shipped import in_recipes
from edgespec.recipe.targets import TARGETS, shape_of_target


def as_json(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main([*words, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_whole_report_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *PAPER, "--device", "laptop-cpu-x86")
    for words in (
        *("6,738,415,616", "c by bytes streamed", "8 x A100-80GB", "600B", "break-even α", "MBSU"),
        *("α = 0.8", "at γ =", "GPU hours", "Speculation looks "),
        "edgespec bench --synthetic llama-2-7b-chat",
    ):
        assert words in out, words
    assert max(map(len, out.splitlines())) < 240


def test_json_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(tmp_path, *PAPER, "--device", "raspberry-pi", "--mfu", "0.4", "--alphas", "0.55")
    pretrain = found["stages"][0]
    assert pretrain["cost"]["tokens"] == 590_663 * 496 * 2048
    assert pretrain["seconds"] == pytest.approx(pretrain["cost"]["flops"] / (8 * 312e12 * 0.4))
    [way] = found["device"]["ways"]
    assert way["name"] == "llama.cpp q4_0"
    assert list(way["lengths"][2]["speedup"]) == ["0.55"]
    assert found["device"]["fits"] is (found["device"]["needed_bytes"] <= 5 * GIB)
    flops = sum(stage["cost"]["flops"] for stage in found["stages"])
    assert found["cost_ratios"]["parameters"] == pytest.approx(116_925_440 / 6_738_415_616)
    out = capsys.readouterr().out
    assert "\n".join(found["verdict"]) in out
    total = next(line.split() for line in out.splitlines() if line.startswith("in all"))
    assert total[2] == f"{flops:.2e}"


def test_a_targets_own_file_is_what_the_device_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Q8_0 file of Llama-2-7B is nearly twice what the profile's Q4_0 would be."""
    own, one = costs.file_bytes(TARGET, "llama.cpp", "q8_0"), profiles()["raspberry-pi"]
    monkeypatch.setattr(plan, "own_bytes", lambda recipe: own)
    found = as_json(tmp_path, *PAPER, "--device", "raspberry-pi")["device"]
    [way] = found["ways"]
    wanted = budget(TARGET, DRAFTER, one.engine, "q8_0", rates_of_profile(one, 0.6))
    assert way["name"] == "llama.cpp with the target's own file"
    assert way["plain_tokens_per_second"] == pytest.approx(wanted.at.plain_rate, rel=1e-2)
    assert (found["fits"], found["needed_bytes"]) == (False, fit(one, TARGET, DRAFTER, own).needed)


def test_verdicts_follow_the_figures(tmp_path: Path) -> None:
    pi = as_json(tmp_path, *PAPER, "--device", "raspberry-pi")
    gains = pi["device"]["ways"][0]["best"]
    rate = acceptance_rate_of(2.3, 3)
    assert rate == pytest.approx(0.636, abs=0.001)
    one = profiles()["raspberry-pi"]
    way = budget(TARGET, DRAFTER, one.engine, one.target, rates_of_profile(one, 0.6), one.max_draft_length)
    word = "looks worth it" if way.at.best(rate)[1] >= 1.3 else "looks hardly worth it"
    if way.at.best(rate)[1] < 1.05:
        word = "looks not worth it"
    assert word in pi["verdict"][0]
    assert gains["0.8"]["speedup"] >= gains["0.5"]["speedup"]
    assert not any("expect a lower α" in line for line in pi["verdict"])  # the paper's own recipe
    trial = as_json(tmp_path, "plan", "--target", "llama-2-7b-chat", "--gpus", "1xH100")
    read = re.search(r"had read 600B tokens, and this recipe's reads ([\d.]+)M", "\n".join(trial["verdict"]))
    assert read
    tokens = {stage["cost"]["stage"]: stage["cost"]["tokens"] for stage in trial["stages"]}
    assert float(read[1]) == pytest.approx((tokens["pretrain"] + tokens["distill"]) / 1e6, rel=0.01)
    tight = as_json(tmp_path, *PAPER[:-1], "1xT4", "--device", "laptop-cpu-x86")
    assert any("Memory does not suffice for pretrain, generate" in line for line in tight["verdict"])


def test_a_budget_says_how_to_measure_what_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """`bench --synthetic` has a drafter of the usual shape, and a plan with a device uses no measurement of this machine."""
    tiny = ("plan", "--target", "tinyllama-1.1b-chat", "--gpus", "1xH100")
    bench = "no measurement: run `edgespec bench --synthetic tinyllama-1.1b-chat`"
    there = planned(capsys, *tiny, "--device", "raspberry-pi")
    assert f"{bench} on the device before" in there
    assert "this plan again there, without --device, which uses" in there
    here = planned(capsys, *tiny)
    assert "GPU hours" not in here  # it takes minutes
    assert f"{bench} before" in here
    assert "this plan again, which uses" in here
    other = planned(capsys, *tiny, "--drafter.layers", "1")
    assert "That is a budget and no measurement.\n" in other
    assert "--synthetic" not in other


def test_devices_that_cannot_share_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *PAPER[:-1], "12xH100", "--device", "laptop-cpu-x86")
    assert "12 were given and 8 can share the work" in out


@pytest.mark.parametrize("alias", [alias for alias in TARGETS if alias != "llama-2-7b-chat"])
def test_every_target_can_be_planned(alias: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Speculation " in planned(
        capsys, "plan", "--target", alias, "--gpus", "1xH100", "--device", "apple-silicon"
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--gpus", "8xA100-80G"), "did you mean 'A100-80GB'"),
        (("--device", "laptop-x86"), "did you mean 'laptop-cpu-x86'"),
        (("--recipe", "paper-llama"), "neither a file nor a shipped recipe"),
        (("--mfu", "1.5"), "mfu is 1.5; it must be at most 1.0"),
        (("--alphas", "0.5,2"), "alphas is 2.0"),
        (
            ("--drafter.init", "checkpoint", "--drafter.checkpoint", "gone"),
            "drafter.checkpoint gone has no config.json",
        ),
        (("--target", "nobody/nothing-7b"), "hf download nobody/nothing-7b config.json"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = ("--gpus", "1xH100", "--device", "apple-silicon")
    assert main(["plan", "--target", "llama-2-7b-chat", *device, *words]) == 2
    seen = capsys.readouterr().err
    assert error in seen
    assert seen.count("\n") == 1


def test_needs_no_torch_no_network_and_makes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, socket\nfor name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "def no(*_): raise OSError('no network here')\nsocket.socket.connect = no\n"
        "from edgespec.cli import main\n"
        "assert main(['plan', '--target', 'tiny-chat']) == 0\n"
        "sys.exit(main(['plan', '--target', 'llama-2-7b-chat', '--recipe', 'paper-llama-2-7b-chat']))"
    )
    environment = {"PYTHONPATH": PYTHONPATH, "EDGESPEC_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("; measured with numpy") == 2
    assert list(tmp_path.rglob("*")) == []


def test_a_plan_of_a_checkpoint_and_a_teacher(
    families: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ("--tune.steps", "5", "--tune.conversations", "a.jsonl", "--tune.teacher", str(families["qwen3"]))
    drafter = ("--drafter.init", "checkpoint", "--drafter.checkpoint", str(families["llama"]))
    out = planned(capsys, "plan", "--target", str(families["qwen2"]), "--gpus", "1xH100", *tune, *drafter)
    assert "tune" in out
    assert f"{shape_of_target(str(families['llama'])).parameters:,}" in out
    assert f"prompts of {PROMPT_TOKENS} tokens" in out


def test_a_head_that_goes_on_is_planned_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = in_recipes("ready", "smollm2-135m-instruct")
    head = ("--drafter.kind", "head", "--drafter.init", "checkpoint", "--drafter.checkpoint", str(ready))
    kept = ("--generate.features", "--distill.target-side", "stored", "--distill.text-fraction", "0")
    found = as_json(tmp_path, "plan", "--target", "smollm2-135m-instruct", "--gpus", "1xH100", *head, *kept)
    assert found["drafter"]["parameters"] == 8_923_968
    assert "evaluate is timed as on one GPU, and takes longer." in capsys.readouterr().out


def test_the_other_answers_take_their_own_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        ((), "target is missing"),
        (("--target", "tiny-chat", "--rehearsal.minutes", "1"), "--rehearsal.minutes belongs to --rehearse"),
        (
            ("--target", "tiny-chat", "--rehearse", "--alphas", "0.5"),
            "--alphas has no effect with --rehearse",
        ),
        (("--target", "tiny-chat", "--rehearse", "--devices"), "--rehearse has no effect with --devices"),
        (("--devices", "--gpus", "H100"), "--gpus has no effect with --devices"),
        (("--devices", "--export.npu-length", "64"), "--export.npu-length has no effect with --devices"),
    ):
        assert main(["plan", *words]) == 2
        assert error in capsys.readouterr().err


def test_spans() -> None:
    assert [span(30.0), span(7200.0), span(86400.0 * 10), span(86400.0 * 365.25 * 40)] == [
        "30.0s",
        "2h 00m",
        "10.0 days",
        "40 years",
    ]


def test_plan_and_build_read_the_same_recipe() -> None:
    from edgespec.planning.plan import read_options
    from edgespec.verbs import build

    given = {"target": "tiny-chat", "seed": 3, "pretrain": {"steps": 7}}
    assert read_options(dict(given))[1] == build._read_options(dict(given))[0]
    assert isinstance(read_options({**given, "device": "this machine"})[1], Recipe)
    with pytest.raises(InputError, match="device is empty; it must be a string"):  # from Python
        read_options({**given, "device": None})


PAGE = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_docs_show_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *PAPER, "--device", "laptop-cpu-x86")
    shown = [line[4:] for line in PAGE.splitlines() if line.startswith("    ")]
    start = shown.index(next(line for line in shown if line.startswith("On 8 x A100")))
    table = shown[start : shown.index(next(line for line in shown if line.startswith("Storage")))]
    printed = out[out.index("On 8 x") :]
    assert [line for line in printed.splitlines() if line][: len(table)] == table
    for words, figures in {
        ("--gpus", "8xH100"): ("39h 15m",),
        ("--gpus", "1xH100"): ("13.1 days",),
        ("--gpus", "1xA100-80GB", "--pretrain.steps", "5906", "--inference.dtype", "bfloat16"): (
            "52h 47m",
            "44.1 GiB",
        ),
    }.items():
        out = planned(capsys, *PAPER[:-2], *words, "--device", "laptop-cpu-x86")
        for figure in figures:
            assert figure in out
            assert figure in PAGE


def test_the_plans_of_the_docs_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    commands = PAGE.replace("\\\n", " ").splitlines()
    plans = [line.split() for line in commands if line.startswith("    edgespec plan --target")]
    assert len(plans) == 3
    for words in plans:
        assert planned(capsys, *words[1:], *(() if "--device" in words else ("--device", "apple-silicon")))
    (one_card,) = (words for words in plans if "1xRTX4090" in words)
    small = planned(capsys, *one_card[1:], "--device", "apple-silicon")
    assert "6.2 days" in small
    assert "47% of it generate" in small
    assert "(!)" not in small


def test_static_graphs_are_planned_at_their_own_length(tmp_path: Path) -> None:
    """A build counts their memory at npu_length, and the plan does too; export.context is another name for it there."""
    npu = ("plan", "--target", "tinyllama-1.1b-chat", "--gpus", "1xL4", "--device", "intel-npu")
    usual, context, length = (
        as_json(tmp_path, *npu, *words)["device"]["needed_bytes"]
        for words in ((), ("--export.context", "2048"), ("--export.npu-length", "2048"))
    )
    assert usual < context == length


def test_memory_that_the_system_does_not_tell_is_no_number() -> None:
    """As on Windows."""
    known = Hardware(THIS_MACHINE, 1, 1e12, 1e11, 8 * GIB, measured=True)
    unknown = Hardware(THIS_MACHINE, 1, 1e12, 1e11, 0, measured=True)
    before, here = (_rates(SimpleNamespace(hardware=one)) for one in (known, unknown))
    assert "100 GB/s, 8 GiB each; measured with numpy in float32, memory that is free now" in before
    assert "100 GB/s; measured with numpy in float32, free memory not known" in here
