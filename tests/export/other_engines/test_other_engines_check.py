"""`edgespec other-engines`: engines chosen, compared and refused. llama.cpp's programs are stood in for: only how they are called
is tested here (docs/other-engines.md says what the real ones did).
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from altered_bundle import change
from edgespec_export.onnx import to_onnx
from edgespec_export.other_engines import llamacpp
from edgespec_export.other_engines.check import (
    BINARY,
    HEADERS,
    TRANSFORMERS,
    Compared,
    Options,
    Ours,
    compare,
    open_other,
    same_text,
    with_room,
)
from edgespec_export.other_engines.engines import Answer, GenAi, until_stop
from edgespec_export.other_engines.llamacpp import (
    LlamaServer,
    LlamaSpeculativeSimple,
    pair_arguments,
    program_of,
)
from edgespec_export.other_engines.other_engines import CHECKPOINT
from edgespec_runtime.decoding.options import DecodingOptions
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.errors import EdgespecError, InputError
from edgespec.core.files import read_json
from edgespec.core.manifest import describe_files, open_manifest, write_manifest
from edgespec.core.metrics import RawCounts

STOPS, HOW = frozenset({2}), DecodingOptions(max_new_tokens=24)


def program(folder: Path, name: str, body: str) -> Path:
    """An executable of that name that runs a Python body."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
    path.chmod(0o755)
    return path


@pytest.mark.llamacpp
def test_three_engines_agree_with_edgespec(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = tmp_path / "counts.json"
    target = both.parent / "target"
    flags = ["--target", str(target), "--max-new-tokens", "12", "--json", str(counts)]
    assert main(["other-engines", str(both), *flags]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:]] == [
        *("onnxruntime-genai", "llama-cpp-python", "transformers"),
    ]
    assert shown.count("1/1") == 3
    found = {one["name"]: one for one in json.loads(counts.read_text())}
    genai, transformers = found["onnxruntime-genai"], found["transformers"]
    blocks = [one["counts"]["blocks"] for one in genai["ours"]]
    assert (
        [one["passes"] for one in genai["answers"]]
        == [one["passes"] for one in transformers["answers"]]
        == blocks
    )
    assert all(one["tokens"] for one in genai["answers"])


def test_another_text_is_exit_code_1(both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_model_folder(tmp_path / "other", seed=9, context=128)
    flags = ["--engines", "transformers", "--target", str(other), "--max-new-tokens", "8"]
    assert main(["other-engines", str(both), *flags]) == 1
    assert "the greedy text is not edgespec's own in transformers (1 of 1)" in capsys.readouterr().err


def test_a_checkpoint_that_lies_is_refused(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would make the layers that a stranger's config.json tells, however many."""
    copy = Path(shutil.copytree(both, tmp_path / "bundle"))
    name = f"{CHECKPOINT}/config.json"
    layers = read_json(copy / name)["num_hidden_layers"] + 1
    change(copy, name, json.dumps(read_json(copy / name) | {"num_hidden_layers": layers}))
    flags = ["--engines", "transformers", "--target", str(both.parent / "target")]
    assert main(["other-engines", str(copy), *flags]) == 2
    assert f"num_hidden_layers is {layers}, and the files have {layers - 1} layers" in capsys.readouterr().err


def test_prompts_that_leave_no_room(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """onnxruntime-genai and llama-cpp-python raise errors of their own at a context's end."""
    flags = ["--engines", "onnxruntime-genai", "--max-new-tokens", "127"]
    assert main(["other-engines", str(both), *flags]) == 2
    assert "room for 127 new tokens in a context of 128; give fewer with" in capsys.readouterr().err
    short, long = ([5] * 8, "short"), ([5] * 9, "long")
    assert with_room([short, long], 8, 16) == [short]
    assert "Note: 1 of 2 prompts left out: no room for 8 new tokens" in capsys.readouterr().err


@pytest.mark.llamacpp
def test_what_cannot_run(both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    still = tmp_path / "llama-server"
    still.touch(0o644)
    for arguments, message in (
        (["--engines", "transformers"], "transformers cannot run here: give --target FOLDER"),
        (["--engines", "llama.cpp"], "llama.cpp cannot run here: give --llama-binary PATH"),
        (["--engines", "mlx"], "mlx"),
        (
            ["--engines", "llama.cpp", "--llama-binary", str(tmp_path / "no")],
            "is not there; give the path of",
        ),
        (["--engines", "llama.cpp", "--llama-binary", sys.executable], "is neither llama-server nor"),
        (["--engines", "llama.cpp", "--llama-binary", str(still)], "make it executable: chmod +x"),
        (["--engines", "transformers", "--target", "llama-2-7b-chat"], "has no config.json"),
    ):
        assert main(["other-engines", str(both), *arguments]) == 2
        assert message in capsys.readouterr().err
    bare = shutil.copytree(both, tmp_path / "bare")
    (bare / "genai_config.json").unlink()
    shutil.rmtree(bare / CHECKPOINT)
    manifest = open_manifest(both)
    files = describe_files(bare)
    write_manifest(bare, type(manifest)(**{**manifest.__dict__, "files": files, "folder": None}))
    assert main(["other-engines", str(bare), "--engines", "onnxruntime-genai"]) == 2
    assert "the bundle has no ONNX pair with a genai_config.json" in capsys.readouterr().err
    assert (
        main(["other-engines", str(bare), "--target", str(both.parent / "target")]) == 2
    )  # runs none before
    assert "no drafter/checkpoint; a device's bundle goes without it" in capsys.readouterr().err


@pytest.mark.llamacpp
def test_edgespec_runs_the_rule_of_the_engine_whatever_the_files(both: Path) -> None:
    """transformers samples by min(1, p/q) too where edgespec has GGUF files alone to stand beside it."""
    manifest = open_manifest(both)
    target, drafter = (
        replace(model, files={"llama.cpp": model.files["llama.cpp"]})
        for model in (manifest.target, manifest.drafter)
    )
    folder = str(both.parent / "target")
    options = Options(bundle=str(both), target=folder, prompts=1, max_new_tokens=4, temperature=1.0)
    found = compare(TRANSFORMERS, both, replace(manifest, target=target, drafter=drafter), options)
    assert (found.files, found.rule) == ("llama.cpp q8_0", "lossless")


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
@pytest.mark.parametrize("use", [to_onnx._builder, lambda: GenAi(Path(), STOPS)])
def test_a_package_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[], object], error: str
) -> None:
    """It is installed, and a shared library that it needs is not."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime_genai"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "onnxruntime_genai" / "__init__.py"
    package.parent.mkdir()
    package.write_text(f"raise {error}('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    to_onnx._builder.cache_clear()
    with pytest.raises(EdgespecError, match=r"genai is installed and cannot .* libcudart\.so\.12"):
        use()


def test_a_program_in_the_home_folder(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    program(tmp_path, "llama-server", "")
    options = Options(bundle=str(both), llama_binary="~/llama-server")
    engine = open_other(BINARY, both, open_manifest(both), options, STOPS, 64)
    assert isinstance(engine, LlamaServer)
    assert engine._command[0] == str(tmp_path / "llama-server")


SIMPLE = """
    import json, pathlib, sys
    here = pathlib.Path(__file__).parent
    runs = here / "runs.json"
    seen = json.loads(runs.read_text()) if runs.exists() else []
    arguments = sys.argv[1:]
    prompt = pathlib.Path(arguments[arguments.index("-bf") + 1]).read_bytes().decode()
    runs.write_text(json.dumps([*seen, {"arguments": arguments, "prompt": prompt}]))
    print(prompt + "a reply")
    if len(seen) % 2:  # every other run loses its log, as the real one does
        for line in ("n_draft   = 3", "n_predict = 9", "n_drafted = 12", "n_accept  = 5", "accept    = 41.7%"):
            print("0.00.183.971 I " + line, file=sys.stderr)
"""


def test_how_llama_speculative_simple_is_called(tmp_path: Path) -> None:
    path = program(tmp_path, "llama-speculative-simple", SIMPLE)
    target, drafter = tmp_path / "t.gguf", tmp_path / "d.gguf"
    assert program_of(path) == "llama-speculative-simple"
    with LlamaSpeculativeSimple(path, target, drafter, 256) as engine:
        answer = engine.answer([1], "<|im_start|>user\\n\nHello\n", HOW)
    assert answer == Answer(None, "a reply\n", 4, 12, 5)
    assert not same_text(Ours((5,), "Hello", RawCounts()), answer)  # that is the prompt's
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert len(runs) == 2  # the first one's counts were lost
    arguments = runs[1]["arguments"]
    assert runs[1]["prompt"] == "<|im_start|>user\\n\nHello\n"  # its last newline too, and no escape read
    assert "--no-escape" in arguments
    for flag, value in (
        *(("-m", str(target)), ("-md", str(drafter)), ("--spec-type", "draft-simple")),
        *(("--spec-draft-n-max", "3"), ("--temp", "0"), ("--top-k", "0"), ("-n", "24"), ("-c", "256")),
    ):
        assert arguments[arguments.index(flag) + 1] == value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "import sys; sys.exit('unknown model architecture')",
            "ended with code 1: unknown model architecture",
        ),
        ("import os; os.kill(os.getpid(), 9)", "was killed, as the system does where no memory is left"),
        ("print('a reply')", "printed no counts in 40 runs"),
    ],
)
def test_a_program_that_fails(tmp_path: Path, body: str, message: str) -> None:
    path = program(tmp_path, "llama-speculative-simple", body)
    with (
        LlamaSpeculativeSimple(path, tmp_path, tmp_path, 64) as engine,
        pytest.raises(EdgespecError, match=message),
    ):
        engine.answer([1], "Hello", HOW)


SERVER = """
    import http.server, json, pathlib, sys
    here = pathlib.Path(__file__).parent
    arguments = sys.argv[1:]
    class Handler(http.server.BaseHTTPRequestHandler):
        def say(self, value, code=200):
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def do_GET(self):
            self.say({"status": "ok"})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            (here / "seen.json").write_text(json.dumps({"path": self.path, "body": body, "arguments": arguments}))
            self.say({"tokens": [7, 8, 2], "timings": {"predicted_n": 3, "draft_n": 6, "draft_n_accepted": 1}})
        def log_message(self, *_):
            pass
    port = int(arguments[arguments.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_how_llama_server_is_called(tmp_path: Path) -> None:
    path = program(tmp_path, "llama-server", SERVER)
    engine = LlamaServer(path, tmp_path / "t.gguf", tmp_path / "d.gguf", 256, STOPS)
    with engine:
        answer = engine.answer([1, 5], "Hello", HOW)
        process = engine._process
        assert process.poll() is None
    assert process.poll() is not None  # stopped with the object
    assert answer == Answer((7, 8), None, 2, 6, 1)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["path"] == "/completion"
    assert seen["body"] == {
        **{"prompt": [1, 5], "n_predict": 24, "cache_prompt": False, "return_tokens": True},
        **{"temperature": 0.0, "seed": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    }
    common = pair_arguments(tmp_path / "t.gguf", tmp_path / "d.gguf", 256)
    assert seen["arguments"][: len(common)] == common
    assert seen["arguments"][seen["arguments"].index("--host") + 1] == "127.0.0.1"


def test_programs_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another processor, too slow, and killed between two prompts."""
    strange = tmp_path / "llama-speculative-simple"
    strange.write_bytes(b"\x7fELF and nothing more")
    strange.chmod(0o755)
    with pytest.raises(EdgespecError, match=r"llama-speculative-simple gave no answer: .*Exec format error"):
        LlamaSpeculativeSimple(strange, tmp_path, tmp_path, 64).answer([1], "Hello", HOW)
    monkeypatch.setattr(llamacpp, "ANSWER_SECONDS", 0.2)
    slow = program(tmp_path, "llama-speculative-simple", "import time; time.sleep(60)")
    with pytest.raises(EdgespecError, match=r"gave no answer: .*timed out after"):
        LlamaSpeculativeSimple(slow, tmp_path, tmp_path, 64).answer([1], "Hello", HOW)
    monkeypatch.undo()
    path = program(tmp_path, "llama-server", SERVER)
    with LlamaServer(path, tmp_path, tmp_path, 64, STOPS) as engine:
        engine._process.kill()
        engine._process.wait()
        with pytest.raises(EdgespecError, match=r"llama-server gave no answer: .*run it by itself"):
            engine.answer([1], "Hello", HOW)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    path = program(tmp_path, "llama-server", "import sys; sys.exit('failed to load the model')")
    engine = LlamaServer(path, tmp_path, tmp_path, 64, STOPS)
    with pytest.raises(EdgespecError, match="llama-server ended with code 1: failed to load the model"):
        engine.__enter__()
    program(tmp_path, "llama-server", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(EdgespecError, match="llama-server was killed, as the system does where no memory"):
        engine.__enter__()


def test_a_server_that_is_interrupted_while_it_loads_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = program(tmp_path, "llama-server", "import time; time.sleep(60)")
    engine = LlamaServer(path, tmp_path, tmp_path, 64, STOPS)
    monkeypatch.setattr(LlamaServer, "_ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.__enter__()
    assert engine._process.poll() is not None


def test_equal_texts() -> None:
    ours = Ours((5, 6), "Hello you", RawCounts())
    assert same_text(ours, Answer((5, 6), None, 2))
    assert not same_text(ours, Answer((5, 6, 7), None, 2))
    assert same_text(ours, Answer(None, "\n<|user|>Hi\nHello you, and more\n", 2))
    assert not same_text(ours, Answer(None, "Hello", 2))
    assert until_stop([5, 6, 2, 7, 2], STOPS) == (5, 6)
    assert until_stop([5], STOPS) == (5,)
    assert len(HEADERS) == 10
    with pytest.raises(InputError, match="neither"):
        program_of(Path(__file__))


@pytest.mark.parametrize(("length", "emitted"), [(7, 8), (8, 8)])  # then the stop token, or none: it was cut
def test_tokens_per_pass_of_a_drawn_reply(length: int, emitted: int) -> None:
    counts = RawCounts(blocks=4, drafted=12, emitted=8, tested=[4], accepted=[2])
    answer = Answer(tuple(range(length)), None, 4)
    found = Compared("other", "onnxruntime fp32", "lossless", True, 8, [answer], [Ours((), "", counts)])
    assert found.row()[4] == f"{emitted / 4:.2f}"
