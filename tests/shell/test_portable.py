"""Windows and macOS: nothing of ours needs a module or a call that only Linux has. Run here, with these hidden."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

ONLY_POSIX = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "posix"}
CALLS = (
    *("fork", "symlink", "link", "wait4", "sched_getaffinity", "getloadavg", "getuid", "sysconf", "mkfifo"),
    "killpg",
)
PACKAGES = ("edgespec", "runtime/edgespec_runtime", "recipes/edgespec_recipes", "export/edgespec_export")
PROGRAM = """
import asyncio, errno, importlib, io, os, pathlib, pkgutil, subprocess, sys, tempfile
import huggingface_hub, jinja2, numpy, onnxruntime, prompt_toolkit, rich.progress, tokenizers, yaml
import huggingface_hub.utils, prompt_toolkit.input, prompt_toolkit.output
for name in ("starlette.applications", "uvicorn", "sse_starlette", "prometheus_client", "llama_cpp"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in MODULES:
    sys.modules[name] = None
for name in CALLS:
    if hasattr(os, name):
        delattr(os, name)
import edgespec_runtime, edgespec
for package in (edgespec, edgespec_runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name not in MODULES, (module.name, error)
sys.platform = "win32"

class msvcrt:
    LK_NBLCK = 2
    locking = staticmethod(lambda file, mode, count: None)

sys.modules["msvcrt"] = msvcrt
from edgespec.building.measured import run_measured
from edgespec.cli import main
from edgespec.core.files import copy_file, shares_blocks, write_text
from edgespec.core.folder_lock import held
from edgespec.core.options import shell_line
from edgespec.core.free_space import free_memory
folder = pathlib.Path(sys.argv[1])
with held(folder / "out", "a command"):
    write_text(folder / "out" / "a.txt", "a")
assert [path.name for path in (folder / "out").iterdir()] == ["a.txt"]
with held(folder / "emptied", "a command"):
    pass
assert not (folder / "emptied").exists()
copy_file(folder / "out" / "a.txt", folder / "b.txt")
assert (folder / "b.txt").read_text() == "a"
assert shares_blocks(folder) is False
free_memory()
used = run_measured([sys.executable, "-c", "print(1)"], folder / "log.txt")
assert used.seconds > 0
os.environ["EDGESPEC_HOME"] = str(folder / "home")
for words in (["targets"], ["recipes", "check", "quick"], ["config", "show"], ["completion", "powershell"]):
    assert main([*words, "--quiet"]) == 0, words
assert shell_line("edgespec", "chat", pathlib.PureWindowsPath("build/a b")) == r'edgespec chat "build\\a b"'

class Pipe(io.RawIOBase):
    written, gone = b"", False
    def writable(self):
        return True
    def fileno(self):
        return 1
    def write(self, data):
        if self.gone:  # as Windows says it
            raise OSError(errno.EINVAL, "Invalid argument")
        self.written += data
        return len(data)

os.environ.pop("PYTHONIOENCODING", None)
pipe = Pipe()
sys.stdout = io.TextIOWrapper(io.BufferedWriter(pipe), encoding="cp1252")
assert main(["recipes", "show", "adaspec"]) == 0
assert "α" in pipe.written.decode("utf-8")
pipe.gone = True
sys.stderr = io.StringIO()
done = main(["recipes", "show", "quick"]), sys.stderr.getvalue()
os.write(2, repr(done).encode())
os._exit(done != (0, ""))
"""


def test_light_rooms_load_and_work_without_what_only_linux_has(tmp_path: Path) -> None:
    program = PROGRAM.replace("MODULES", repr(sorted(ONLY_POSIX - {"posix"}))).replace("CALLS", repr(CALLS))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_posix_are_imported_in_functions_alone(package: str) -> None:
    for file in (REPOSITORY / package).rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {str(node.module)}
            assert not names & ONLY_POSIX, f"{file} imports {names & ONLY_POSIX}"


@pytest.mark.parametrize("package", PACKAGES)
def test_text_files_are_utf_8_on_every_system(package: str) -> None:
    """Windows reads and writes another encoding where none is given."""
    for file in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                given = {one.arg for one in node.keywords}
                if name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute):
                    assert "encoding" in given, f"{file}:{node.lineno}"
                if name == "open" and isinstance(node.func, ast.Name) and "encoding" not in given:
                    mode = node.args[1] if len(node.args) > 1 else None
                    binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
                    assert binary or isinstance(mode, ast.Name), f"{file}:{node.lineno}"


@pytest.mark.parametrize("package", PACKAGES)
def test_finished_files_are_synced_in_one_place(package: str) -> None:
    """Windows refuses to sync what is open for reading: who syncs takes `sync_file`, or a file that is being written."""
    users = [
        file.relative_to(REPOSITORY).as_posix()
        for file in (REPOSITORY / package).rglob("*.py")
        if "os.fsync(" in file.read_text(encoding="utf-8")
    ]
    assert sorted(users) == (
        ["edgespec/core/files.py", "edgespec/hub/pull.py"] if package == "edgespec" else []
    )
