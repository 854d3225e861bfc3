"""The llama.cpp engine: cache arithmetic, exact blocks, and clear errors. Real files, real llama.cpp."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from edgespec_export.gguf.to_gguf import export_gguf
from edgespec_runtime.engines.cached_engine import CachedEngine
from edgespec_runtime.engines.llamacpp import LlamaCppEngine, written_name

from edgespec.core.errors import BundleError, InputError

TOKENS = np.random.default_rng(1).integers(4, 512, 64).tolist()


@pytest.fixture(scope="module")
def files(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    for family in ("llama", "mistral"):
        for precision in ("f16", "q8_0"):
            export_gguf(families[family], folder / f"{family}-{precision}.gguf", precision)
    return {file.stem: file for file in folder.glob("*.gguf")}


@pytest.fixture
def engine(files: dict[str, Path]) -> Iterator[LlamaCppEngine]:
    opened = LlamaCppEngine(files["llama-q8_0"], context_length=64, threads=1)
    yield opened
    opened.close()


def fed(engine: LlamaCppEngine, step: int) -> np.ndarray:
    engine.rewind(0)
    return np.concatenate(
        [np.array(engine.forward(TOKENS[i : i + step])) for i in range(0, len(TOKENS), step)]
    )


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.llamacpp
def test_blocks_are_exact_with_quantised_weights(files: dict[str, Path], family: str) -> None:
    """Flash attention makes a Q8_0 block equal to single steps, and is the default there."""
    engine = LlamaCppEngine(files[f"{family}-q8_0"], threads=1)
    assert engine.flash_attention
    single = fed(engine, 1)
    for step in (2, 3, 4, 5, 6, 8):
        assert np.array_equal(fed(engine, step), single), step
    engine.close()


@pytest.mark.llamacpp
def test_a_long_piece_of_a_prompt_goes_to_no_gpu(engine: LlamaCppEngine) -> None:
    """llama.cpp's default lets a GPU multiply 32 rows and more, though all weights lie with the processor."""
    assert engine._lib.llama_context_default_params().op_offload
    assert not engine._settings.op_offload


@pytest.mark.llamacpp
def test_blocks_of_float_weights_stay_close(files: dict[str, Path]) -> None:
    engine = LlamaCppEngine(files["llama-f16"], threads=1)
    assert not engine.flash_attention
    single = fed(engine, 1)
    block = fed(engine, 4)
    engine.close()
    assert 0 < np.abs(single - block).max() < 0.02
    assert (single.argmax(1) == block.argmax(1)).all()


@pytest.mark.llamacpp
def test_rewind_forgets(engine: LlamaCppEngine) -> None:
    straight = np.array(engine.forward(TOKENS[:20]))
    engine.rewind(7)
    assert engine.n_past == 7
    engine.forward([9, 8, 7, 6, 5])  # a wrong guess
    engine.rewind(7)
    again = np.array(engine.forward(TOKENS[7:20]))
    assert np.array_equal(again, straight[7:])
    assert engine.n_past == 20
    with pytest.raises(ValueError, match=r"cannot rewind to 21"):
        engine.rewind(21)


@pytest.mark.llamacpp
def test_logits_are_a_view(engine: LlamaCppEngine) -> None:
    first = engine.forward(TOKENS[:3])
    assert first.dtype == np.float32
    assert first.shape == (3, engine.vocab_size) == (3, 512)
    assert not first.flags.owndata


@pytest.mark.llamacpp
def test_the_context_has_an_end(engine: LlamaCppEngine) -> None:
    engine.forward(TOKENS[:60])
    with pytest.raises(InputError, match=r"60 tokens \+ 5 more exceed the context of 64"):
        engine.forward(TOKENS[:5])
    assert engine.n_past == 60
    assert engine.forward(TOKENS[:4]).shape == (4, 512)  # the last four fit


@pytest.mark.llamacpp
def test_a_token_outside_the_vocabulary(engine: LlamaCppEngine) -> None:
    before = np.array(engine.forward(TOKENS[:5]))
    with pytest.raises(InputError, match=r"token id 512 is outside the vocabulary of 512"):
        engine.forward([1, 512])
    assert engine.n_past == 5
    engine.rewind(4)
    assert np.array_equal(engine.forward(TOKENS[4:5])[0], before[4])


@pytest.mark.llamacpp
def test_ctrl_c_in_a_pass_leaves_nothing_of_it_in_the_cache(engine: LlamaCppEngine) -> None:
    """It is raised when llama.cpp returns: the cells are written then, and nobody has counted them."""
    model, library = CachedEngine(engine), engine._lib
    wanted = np.array(model.forward(TOKENS[:5]))

    class Pressed:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def llama_decode(self, *given: object) -> None:
            library.llama_decode(*given)
            raise KeyboardInterrupt

    for held in (3, 0):
        model.rewind(held)
        engine._lib = Pressed()
        with pytest.raises(KeyboardInterrupt):
            model.forward(TOKENS[held:5])
        engine._lib = library
        assert (engine.n_past, model.tokens) == (held, TOKENS[:held])
        assert np.array_equal(model.forward(TOKENS[held:5]), wanted[held:])


@pytest.mark.llamacpp
def test_context_is_capped_by_the_model(files: dict[str, Path]) -> None:
    engine = LlamaCppEngine(files["llama-f16"], context_length=10_000)
    assert engine.context_length == 256
    engine.close()
    engine.close()  # a second close is harmless


@pytest.mark.llamacpp
def test_bad_files(files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"is missing"):
        LlamaCppEngine(tmp_path / "none.gguf")
    (tmp_path / "cut.gguf").write_bytes(files["llama-f16"].read_bytes()[:20_000])
    with pytest.raises(BundleError, match=r"cut\.gguf has .* is wanted"):
        LlamaCppEngine(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(BundleError, match=r"text\.gguf"):
        LlamaCppEngine(tmp_path / "text.gguf")
    LlamaCppEngine(files["llama-f16"]).close()
    assert capfd.readouterr() == ("", "")  # llama.cpp's own log is silent


def test_libraries_that_cannot_be_loaded_are_one_sentence(tmp_path: Path) -> None:
    """Whoever can do without llama.cpp goes on."""
    program = (
        "from edgespec.core.errors import EdgespecError\n"
        "from edgespec_runtime.engines.llamacpp import is_available, load_library\n"
        "assert not is_available()\n"
        "try:\n    load_library()\n"
        "except EdgespecError as error:\n    print(error)\n"
    )
    for made, said in ((False, "not found"), (True, "Failed to load shared library")):
        if made:
            for name in ("libllama.so", "libllama.dylib", "llama.dll"):
                (tmp_path / name).write_text("no library")
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)},
        )
        assert done.stdout.startswith("llama-cpp-python is installed and cannot be loaded: ")
        assert said in done.stdout
        assert done.stdout.endswith("; install it again\n")


def test_the_name_of_a_file_that_is_written() -> None:
    """llama.cpp opens it as C++ streams do, which do not read UTF-8 on Windows."""
    file = Path("/home/Jörg/target-q4_k_m.gguf")
    assert written_name(file) == os.fsencode(file)
    assert written_name(file, "cp1252") == b"/home/J\xf6rg/target-q4_k_m.gguf"
    assert written_name(Path("/home/王/a.gguf"), "cp1252") == b"/home/?/a.gguf"


def test_missing_extra_is_one_sentence(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from pathlib import Path\n"
        "from edgespec.core.errors import MissingExtra\n"
        "from edgespec_runtime.engines.llamacpp import LlamaCppEngine, is_available\n"
        "assert not is_available()\n"
        "try:\n    LlamaCppEngine(Path('x.gguf'))\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith('pip install "edgespec[llamacpp]"')
    assert done.stderr == ""
