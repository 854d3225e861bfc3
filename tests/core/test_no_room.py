"""A full disk is one line that says where and how to go on, whichever library met it. The failures here are real ones: writes
beyond a limit on the size of files."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from edgespec_export.gguf.quantize import PRECISIONS, quantize_file
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_export.npu.to_npu import export_npu
from edgespec_recipes.generating.http_json import JsonServer
from edgespec_runtime.batched.sequences import float_copy
from repository import REPOSITORY
from small_build import command
from small_files import files_of_at_most
from tiny_models import make_model_folder

from edgespec.cli import main
from edgespec.core.errors import InputError, NoRoom, OneProcessError
from edgespec.core.files import writing
from edgespec.core.free_space import folder_at
from edgespec.core.no_room import _full, write_error
from edgespec.recipe.schema import ExportOptions

LIMIT = (
    "import resource, signal, sys\n"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "limit = int(sys.argv[1])\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
)
LIBRARIES = LIMIT + (
    "from pathlib import Path\n"
    "import gguf, numpy as np, onnx, torch\n"
    "from onnx import helper, numpy_helper\n"
    "from safetensors.torch import save_file\n"
    "from tokenizers import Tokenizer, models\n"
    "from edgespec.core.errors import NoRoom\n"
    "from edgespec.core.no_room import write_error\n"
    "big, file = torch.zeros(2**18), Path(sys.argv[2]) / 'file'\n"
    "words = Tokenizer(models.WordLevel({str(n) * 9: n for n in range(20000)}, unk_token='0' * 9))\n"
    "graph = helper.make_graph([], 'g', [], [], [numpy_helper.from_array(big.numpy(), 'w')])\n"
    "def gguf_file():\n"
    "    writer = gguf.GGUFWriter(file, 'llama')\n"
    "    writer.add_tensor('a', big.numpy())\n"
    "    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()\n"
    "for name, write in {\n"
    "    'torch': lambda: torch.save(big, file),\n"
    "    'safetensors': lambda: save_file({'a': big}, file),\n"
    "    'numpy': lambda: big.numpy().tofile(file),\n"
    "    'npz': lambda: np.savez(str(file), a=big.numpy()),\n"
    "    'onnx': lambda: onnx.save(helper.make_model(graph), file),\n"
    "    'gguf': gguf_file,\n"
    "    'tokenizers': lambda: words.save(str(file)),\n"
    "    'python': lambda: file.write_bytes(bytes(2**20)),\n"
    "}.items():\n"
    "    try:\n"
    "        write()\n"
    "    except Exception as error:\n"
    "        message = write_error(file, error)\n"
    "        print(name, isinstance(message, NoRoom), message)\n"
)
BUILD = LIMIT + "from edgespec.cli import main\nsys.exit(main(sys.argv[2:]))\n"


def run(program: str, limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, str(limit), *words], capture_output=True, text=True, cwd=REPOSITORY
    )


def test_every_librarys_words_are_understood(tmp_path: Path) -> None:
    done = run(LIBRARIES, 100_000, str(tmp_path))
    lines = done.stdout.splitlines()
    names = ["torch", "safetensors", "numpy", "npz", "onnx", "gguf", "tokenizers", "python"]
    assert [line.split()[0] for line in lines] == names, done.stderr
    for line in lines:
        assert line.split()[1] == "True", line
        assert f"cannot write {tmp_path}" in line
        assert "MiB free in" in line
        assert "run the same command again" in line


def test_a_full_disk_and_what_is_none() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("something else")
    wrapped.__cause__ = full
    counted = OSError("Not enough free space to write 3145728 bytes after offset 0")
    assert "no space left on the disk" in str(write_error("/tmp/x", full))
    assert isinstance(write_error("/tmp/x", wrapped), NoRoom)
    assert "3 MiB needed for this write alone" in str(write_error("/tmp/x", counted))
    for number, words in (
        (errno.EEXIST, "a file has that name"),
        (errno.ENOTDIR, "where a folder is wanted"),
        (errno.EACCES, "cannot use /tmp/x: permission denied; allow it"),  # a library may have read it
    ):
        assert words in str(write_error("/tmp/x", OSError(number, "no")))
    for other in (
        ValueError("12 requested"),
        OSError(errno.ENOENT, "no such file"),
        RuntimeError("(os error 2)"),
        KeyboardInterrupt(),
        InputError("said already"),
    ):
        assert write_error("/tmp/x", other) is None


def test_no_place_for_temporary_files_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose file system is read-only."""
    place = str(tmp_path / "gone")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [place])
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    message = write_error("/tmp/x", caught.value)
    assert isinstance(message, OneProcessError)
    assert str(message).startswith(f"no folder takes temporary files, of [{place!r}]; make room in one of")


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    assert folder_at(long) == tmp_path
    with pytest.raises(OneProcessError, match=f"cannot write {long}: the name is too long"), writing(long):
        long.write_text("")


def test_windows_says_it_by_numbers_of_its_own(tmp_path: Path) -> None:
    for own, number, words in (
        (32, errno.EACCES, f"cannot write {tmp_path}: a program has it open"),
        (1224, errno.EINVAL, "a program has it open"),
        (123, errno.EINVAL, "Windows takes no such name"),
        (206, errno.ENOENT, "the name is too long"),
        (5, errno.EACCES, f"cannot use {tmp_path}: permission denied, or a program has it open"),
    ):
        error = OSError(number, "in the words of that system's language")
        error.winerror = own
        assert words in str(write_error(tmp_path, error))
    absent = OSError(errno.ENOENT, "a path that is not there")
    absent.winerror = 3
    assert write_error(tmp_path, absent) is None  # a library has read it
    full = RuntimeError("Es steht nicht genug Speicherplatz zur Verfügung. (os error 112)")
    assert _full(full, windows=True) == ("no space left on the disk", 0)
    assert _full(full, windows=False) is None  # on Linux: a host is down


@pytest.mark.llamacpp
def test_llama_cpp_says_it_in_words_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    export_gguf(make_model_folder(tmp_path / "model"), source, "f16")
    for place, write in (
        (tmp_path / "out.gguf", lambda out: quantize_file(source, out, PRECISIONS["q4_k_m"])),
        (tmp_path / "copies", lambda folder: float_copy(source, folder, 1)),
    ):
        with files_of_at_most(10_000), pytest.raises(NoRoom, match=f"cannot write {place}.*MiB free in"):
            write(place)


def test_the_last_bytes_of_a_file_count_too(tmp_path: Path) -> None:
    """NumPy writes them when the file is closed, and says nothing where that fails."""
    model, short = make_model_folder(tmp_path / "model"), ExportOptions(npu_length=40, npu_prefill=16)
    whole, static = tmp_path / "model.gguf", tmp_path / "static"
    for write, out, largest in (
        (lambda out: export_gguf(model, out, "f32"), whole, whole),
        (lambda out: export_npu(model, out, short), static, static / "weights.data"),
    ):
        write(out)
        room = largest.stat().st_size - 1
        out.rename(tmp_path / f"kept-{out.name}")
        with files_of_at_most(room), pytest.raises(NoRoom, match=f"cannot write {out}.*MiB free in"):
            write(out)
        assert not out.exists()


def test_the_message_is_any_processes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all processes meet only the first one says; a disk may be full, or a server gone, for one of them."""
    from edgespec.verbs import targets as targets_verb

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(
        "EDGESPEC_TARGETS_JSON", "out.json"
    )  # where an option was set is said behind a message that names it
    with pytest.raises(OneProcessError, match="did not answer in 1 tries") as gone:
        JsonServer("http://127.0.0.1:9", 1.0, 0).ask("/v1/models")
    for error, lines in (
        (InputError("met by all"), 0),
        (NoRoom("full"), 1),
        (NoRoom("json: full"), 1),
        (gone.value, 1),
    ):

        def fail(_: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(targets_verb, "run", fail)
        assert main(["targets"]) == 2
        assert len(capfd.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize(
    ("stage", "place"),
    [("pretrain", "pretrain"), ("distill", "distill"), ("export", "export"), ("pack", "bundle")],
)
def test_a_build_that_meets_it_is_one_line_and_goes_on(
    small_build: Path, tmp_path: Path, stage: str, place: str
) -> None:
    out = shutil.copytree(small_build / "out", tmp_path / "out")
    shutil.rmtree(out / stage)
    words = [*command(small_build), "--out", str(out)]
    done = run(BUILD, 60_000, *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("edgespec:")]
    assert len(said) == 1
    assert f"cannot write {out / place}" in said[0]
    assert "MiB free in" in said[0]
    assert "run the same command again" in said[0]
    assert "the build still takes about" in said[0]
    assert not (out / stage / "stage.json").exists()
    if stage == "pack":
        assert main(words) == 0
        assert (out / "bundle" / "manifest.json").exists()
