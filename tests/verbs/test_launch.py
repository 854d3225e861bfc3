"""The launch configs and sbatch scripts that come with edgespec: loaded by accelerate itself, run where they can be run here.

There is no SLURM here: its two commands are replaced by scripts that do what those do on one machine, the rest is the real thing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from repository import REPOSITORY
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.options import add_flags, given
from edgespec.recipe.shipped import launch_files
from edgespec.verbs.build import Options as BuildOptions

FILES = launch_files()
CONFIGS = [name for name, file in FILES.items() if file.suffix == ".yaml"]
SCRIPTS = [name for name, file in FILES.items() if file.suffix == ".sbatch"]
SBATCH = {  # of sbatch's manual: the options used here and what they take
    "job-name": r"\S+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"\S+",
}


def test_what_is_promised_is_there() -> None:
    names = {"one-gpu", "node-ddp", "node-fsdp", "cpu-2", "slurm-node", "slurm-nodes"}
    assert set(FILES) == {f"launch/{name}" for name in names}


def launched(words: list[str]) -> Any:
    """What accelerate makes of the words after `accelerate`."""
    assert words[0] == "launch"
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[1:]))
    return arguments


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_loads_every_config(name: str) -> None:
    text = FILES[name].read_text(encoding="utf-8")
    config = load_config_from_file(str(FILES[name]))
    assert isinstance(config, ClusterConfig)
    # nothing that accelerate does not know
    assert set(yaml.safe_load(text)) <= {*vars(config), "compute_environment"}
    assert config.mixed_precision == "no"  # edgespec has its own autocast
    arguments = launched(["launch", "--config_file", str(FILES[name]), "-m", "edgespec"])
    assert (arguments.module, arguments.training_script) == (True, "edgespec")
    expected = {"launch/one-gpu": 1, "launch/cpu-2": 2}.get(name, 8)
    assert arguments.num_processes == config.num_processes == expected
    assert bool(arguments.use_fsdp) is (name == "launch/node-fsdp")
    assert bool(arguments.multi_gpu) is (name in ("launch/node-ddp", "launch/cpu-2"))


def command_in(name: str) -> list[str]:
    """The words of the command at the head of a file."""
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("#   ")).removeprefix("#   ").split()


@pytest.mark.parametrize("name", FILES)
def test_the_command_at_the_head_is_right(name: str) -> None:
    words = command_in(name)
    file = next(word for word in words if word.endswith((".yaml", ".sbatch")))
    assert file == FILES[name].name
    if words[0] == "accelerate":
        words[words.index("--config_file") + 1] = str(FILES[name])
        arguments = launched(words[1:])
        assert (arguments.training_script, arguments.training_script_args[0]) == ("edgespec", "build-drafter")
        words = arguments.training_script_args[1:]
    else:
        words = words[words.index(file) + 1 :]
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, BuildOptions)
    flags = given(parser.parse_args(words))
    assert {"target", "recipe"} <= set(flags)
    assert ("parallel" in flags) is (name == "launch/node-fsdp")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_and_their_directives_slurms(name: str) -> None:
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/bin/bash"
    subprocess.run(["bash", "-n", str(FILES[name])], check=True)
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first for line in directives)  # sbatch stops reading at the first command
    seen = []
    for line in directives:
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        assert match, line
        seen.append(match[1])
        form = SBATCH[match[1]]
        assert (match[2] is None) if form is None else re.fullmatch(form, match[2]), line
    assert len(seen) == len(set(seen))
    assert {"nodes", "gpus-per-node", "time", "requeue"} <= set(seen)


def on_a_cluster(tmp_path: Path, name: str, node: int, *words: str) -> tuple[list[str], dict[str, str]]:
    """Run a script as one node of a job of two would; the words that accelerate gets there, and its environment."""
    tools = tmp_path / f"tools-{node}"
    tools.mkdir()
    programs = {
        # srun runs the command on a node, after its own options
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
        # a list that comes slowly: whoever reads no further than its first line breaks the pipe
        "scontrol": 'printf "node-a\\n"; sleep 0.2; printf "node-b\\n"',
        "accelerate": f'printf "%s\\0" "$@" > "{tools}/words"; env -0 > "{tools}/environment"',
    }
    for program, text in programs.items():
        (tools / program).write_text(f"#!/bin/bash\n{text}\n")
        (tools / program).chmod(0o755)
    environment = {
        **{"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[a-b]"},
        **{"SLURM_NNODES": "2", "SLURM_NODEID": str(node)},
        **{"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32"},
    }
    program, folder = ["bash", str(FILES[name]), *words], FILES[name].parent
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = (tools / "words").read_bytes().decode().split("\0")[:-1]
    found = [word if word != "node-ddp.yaml" else str(FILES["launch/node-ddp"]) for word in found]
    pairs = (pair.partition("=") for pair in (tools / "environment").read_bytes().decode().split("\0")[:-1])
    return found, {key: value for key, _, value in pairs}


ARGUMENTS = ("--target", "llama-2-7b-chat", "--generate.system-prompts", "Answer briefly., and well")


def test_one_node_of_a_cluster(tmp_path: Path) -> None:
    words, environment = on_a_cluster(tmp_path, "launch/slurm-node", 0, *ARGUMENTS)
    arguments = launched(words)
    assert (arguments.num_processes, arguments.num_machines) == (4, 1)
    assert arguments.training_script_args == ["build-drafter", *ARGUMENTS]  # quoting survives
    assert environment["OMP_NUM_THREADS"] == "8"


def test_several_nodes_of_a_cluster(tmp_path: Path) -> None:
    for node in (0, 1):
        words, _ = on_a_cluster(tmp_path, "launch/slurm-nodes", node, *ARGUMENTS)
        arguments = launched(words)
        assert (arguments.num_machines, arguments.num_processes, arguments.machine_rank) == (2, 8, node)
        assert arguments.main_process_ip == "node-a"
        assert int(arguments.main_process_port) == 20000 + 123456 % 20000
        assert arguments.training_script_args == ["build-drafter", *ARGUMENTS]


def test_show_copy_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, file in FILES.items():
        assert main(["recipes", "show", name]) == 0
        assert capsys.readouterr().out == file.read_text(encoding="utf-8")
        assert main(["recipes", "copy", name, f"{tmp_path}/"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / file.name}\n"
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    capsys.readouterr()
    assert main(["recipes", "list"]) == 0
    assert "launch/slurm-nodes" in capsys.readouterr().out
    assert main(["recipes", "show", "launch/node-dd"]) == 2
    assert "did you mean 'launch/node-ddp'" in capsys.readouterr().err
    assert main(["recipes", "show", "launch/../quick"]) == 2


def test_fsdp_from_accelerate_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate would shard and edgespec would not know: the saved model would be a part of one."""
    target = make_model_folder(tmp_path / "target")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["build-drafter", "--target", str(target), "--out", str(tmp_path / "out")]) == 2
    assert "add --parallel fsdp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "extra"), [("launch/cpu-2", ()), ("launch/node-fsdp", ("--parallel", "fsdp"))]
)
@pytest.mark.training
def test_a_build_under_accelerate_launch(name: str, extra: tuple[str, ...], tmp_path: Path) -> None:
    """Both processes train, on CPUs: the FSDP config of a node of GPUs too, with two processes instead of eight."""
    target = make_model_folder(tmp_path / "target")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("Hello", "What is 1 + 1?")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "text.txt").write_text("The cat sat on the mat and looked at the rain. " * 400)
    small = ("--steps", "3"), ("--batch-size", "4"), ("--context", "64"), ("--warmup-steps", "1")
    trainings = [
        word
        for part in ("pretrain", "distill")
        for key, value in small
        for word in (f"--{part}.{key[2:]}", value)
    ]
    words = [
        *("build-drafter", "--target", str(target), "--out", str(tmp_path / "out"), *extra, *trainings),
        *("--pretrain.text", str(tmp_path / "text.txt"), "--drafter.size-fraction", "0.5"),
        *("--drafter.layers", "1"),
        *("--generate.instructions", str(tmp_path / "chats.jsonl"), "--generate.prompts", "16"),
        *("--generate.shard-size", "8"),
        *("--generate.max-new-tokens", "16", "--evaluate.prompts-file", str(tmp_path / "chats.jsonl")),
        *("--evaluate.prompts", "2", "--evaluate.max-new-tokens", "8", "--evaluate.draft-lengths", "2"),
        *("--distill.watch-steps", "0", "--export.onnx", "fp32", "--export.gguf", ""),
        *("--export.verify-prompts", "1"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
    }
    launch = [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"),
        *("--config_file", str(FILES[name]), "--num_processes", "2", "-m", "edgespec"),
    ]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for part in ("pretrain", "distill"):
        stage = json.loads((tmp_path / "out" / part / "stage.json").read_text())
        assert stage["counts"]["processes"] == 2
    assert (tmp_path / "out" / "bundle" / "manifest.json").is_file()
