"""Make a drafter for a target: plan, pretrain, let the target write, distil, evaluate, export, verify, bundle.

Every stage owns a folder under --out. Interrupt it at any point and run the same command: what is complete is skipped, what was
under way goes on. `torchrun --nproc_per_node N -m edgespec build-drafter ...` shares the work among N processes.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.building.pipeline import Build
from edgespec.building.pipeline_head import HeadBuild
from edgespec.core.errors import InputError, MissingExtra, NoRoom
from edgespec.core.files import write_text
from edgespec.core.folder_lock import held, refuse_other
from edgespec.core.options import (
    command_line,
    from_mapping,
    knob,
    shell_line,
    to_mapping,
    underscored,
    with_default,
)
from edgespec.core.output import json_knob, next_step, step, write_result
from edgespec.core.table import byte_size
from edgespec.planning.plan import PlanOptions, own_options, recipes_for
from edgespec.planning.preflight import (
    Room,
    check_device,
    check_processes,
    disk_left,
    find_shortages,
    refuse,
    room_here,
)
from edgespec.recipe.precisions import MIXED
from edgespec.recipe.read import RECIPE_FILE, check_learning, dump_recipe, read_recipe
from edgespec.recipe.schema import ExportOptions, Recipe
from edgespec.recipe.shipped import load_recipe
from edgespec.recipe.targets import gguf_of, package_of
from edgespec.shell.environment import API_KEY
from edgespec.stages.stage import STAGE_FILE, Processes


@dataclass(frozen=True)
class Options(Recipe):
    out: str = knob("", "folder for everything that is made (default: build/TARGET)")
    recipe: str = with_default(PlanOptions, "recipe", "")
    force: bool = knob(False, "start although the estimate says that disk or memory will not suffice")
    parallel: str = knob(
        "ddp",
        "how several processes share a training: every one with whole models (ddp) or with a part of them (fsdp)",
        choices=("ddp", "fsdp"),
    )
    json: str = json_knob()


def _read_options(given: dict[str, Any]) -> tuple[Recipe, Options]:
    """The recipe, and the options of this run alone (its target is a placeholder). `run` checks what trains the drafter."""
    options, flags = own_options(Options, given)
    return read_recipe(options.recipe, flags, made=True)[0], options


def check_packages(recipe: Recipe, *, trains: bool = True) -> None:
    """Everything the last stage needs is asked for before the first one starts. Raises MissingExtra."""
    extra, purpose = ("all", "Building a drafter") if trains else ("export", "Exporting a pair")
    wanted = ["torch", "transformers", *(["accelerate"] if trains else [])]
    wanted += ["onnx", "onnxruntime_genai"] if recipe.export.onnx else []
    wanted += ["gguf"] if recipe.export.gguf or gguf_of(recipe.target) else []
    for package in wanted:
        if find_spec(package) is None:
            raise MissingExtra(package, extra, purpose)
    if recipe.drafter.kind == "head" and not recipe.export.onnx and find_spec("llama_cpp") is None:
        raise MissingExtra("llama_cpp", "llamacpp", "Measuring a head that has only GGUF files beside it")


CHEAP_STAGES = ("data", "target", "plan")
"""The first stages. They only look: their folders hold nothing that took long, so they may be removed."""


def claim(out: Path, recipe: Recipe) -> None:
    """Make `out` this recipe's folder, or refuse it where another recipe has made something there.

    One that was refused at its plan has made nothing: its cure is another recipe, which takes the folder over.
    """
    file = out / RECIPE_FILE
    refuse_other(out, RECIPE_FILE)
    if file.exists():
        seen, wanted = _filled(load_recipe(file), recipe), to_mapping(recipe)
        if seen == wanted:
            return
        begun = [folder for folder in out.iterdir() if folder.is_dir()]
        if any(folder.name not in CHEAP_STAGES for folder in begun):
            raise InputError(
                f"{out} holds a build of another recipe ({_difference(seen, wanted)}); give another --out, or remove that folder"
            )
        for folder in begun:
            shutil.rmtree(folder)
    write_text(file, dump_recipe(recipe))


def _filled(seen: dict[str, Any], here: Recipe) -> dict[str, Any]:
    """A build's recipe with the defaults of the knobs that it is older than, and the target's own file where it lies now.

    An environment that was made anew has the file at another place; stages compare its bytes.
    """
    try:
        there = from_mapping(Recipe, seen)
    except InputError:
        return seen
    package = package_of(here.target)
    files = (there.inference.file, here.inference.file)
    if package is not None and all(Path(file).as_posix().endswith(f"/{package.file}") for file in files):
        there = replace(there, inference=replace(there.inference, file=here.inference.file))
    return to_mapping(there)


def _difference(seen: Any, wanted: Any, where: str = "") -> str:
    if isinstance(seen, dict) and isinstance(wanted, dict):
        for key in [*wanted, *seen]:
            if seen.get(key) != wanted.get(key):
                return _difference(seen.get(key), wanted.get(key), f"{where}.{key}" if where else str(key))
    return f"{where} is {seen!r} there and {wanted!r} here"


def _room(out: Path, parallel: str) -> Room:
    """What the build may take: where a GPU trains whole models, its memory and not the machine's.

    It is that of the process with the least, so that all meet the same refusal.
    """
    import torch
    from edgespec_recipes.parallel import processes

    room = room_here(out)
    if torch.cuda.is_available():
        # parts of a model are not estimated
        memory = None if parallel == "fsdp" else torch.cuda.mem_get_info(processes.device())[0]
        sharing = -(-room.sharing // torch.cuda.device_count())
        room = replace(room, memory=memory, on_gpu=True, sharing=sharing)

    def least(free: int | None) -> int:
        known = sys.maxsize if free is None else free
        return int(processes.gathered(torch.tensor([known])).min())

    return replace(room, disk=least(room.disk), memory=least(room.memory))


def _processes(parallel: str) -> Processes:
    """The processes torchrun started; one, without it. Only the first one prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and parallel != "fsdp":
        raise InputError(f"accelerate's config is FSDP and --parallel is {parallel}; add --parallel fsdp")
    os.environ["EDGESPEC_PARALLEL"] = parallel
    from edgespec_recipes.parallel import processes

    if processes.rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the program)
    processes.start()
    return Processes(processes.rank(), processes.wait)


def _check_budget(options: ExportOptions) -> None:
    """Raise InputError where a budget of bits is given and no file that has one is wanted."""
    if MIXED["onnx"] in options.onnx or MIXED["gguf"] in options.gguf:
        return
    for name in ("bits", "size", "quality"):
        if (value := getattr(options, name)) not in (None, ""):
            raise InputError(
                f"export.{name} is {value}, which is for mixed files, and the recipe names none; "
                f"add {MIXED['onnx']} to --export.onnx or {MIXED['gguf']} to --export.gguf, or leave export.{name} out"
            )


def _check_key(recipe: Recipe, given: dict[str, Any]) -> None:
    """Raise InputError where the user's key would go to a server that a recipe's file alone names."""
    own = (underscored(given).get("inference") or {}).get("url")  # Python may give None
    url = recipe.inference.url
    if url and url != own and os.environ.get(API_KEY):
        raise InputError(
            f"the recipe names the server {url!r}, and the key in {API_KEY} would be sent to it; "
            f"add {shell_line('--inference.url', url)} if it is meant for that server, or unset {API_KEY}"
        )


def folder_of(target: str, out: str) -> Path:
    """Where everything that is made lies."""
    return Path(out).expanduser() if out else Path("build") / Path(target).name.removesuffix(".gguf")


def run(given: dict[str, Any]) -> int:
    recipe, options = _read_options(given)
    out = folder_of(recipe.target, options.out)
    if not (out / "distill" / STAGE_FILE).is_file():  # how a drafter that is done was trained is past
        check_learning(recipe)
    check_packages(recipe)
    _check_key(recipe, given)
    if not options.recipe and (made := recipes_for(recipe.target)):
        step(
            f"Note: {recipe.target} has recipes of its own, {', '.join(made)} (--recipe NAME); this build takes the defaults."
        )
    _check_budget(recipe.export)
    processes = _processes(options.parallel)
    processes.wait()  # all meet a refusal at the same time, so that the first one lives to print it
    check_processes(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    check_device(recipe)
    if not options.force:
        refuse(find_shortages(recipe, out, _room(out, options.parallel)))
    command = command_line("build-drafter", Options, given)
    fresh = not out.exists()
    with nullcontext() if processes.rank else held(out, command):
        build = _build(recipe, out, processes, command, fresh)
        if not processes.rank:
            write_result(options.json, build.summary())
            next_step("edgespec", "chat", out / "bundle")
    return 0


def _build(recipe: Recipe, out: Path, processes: Processes, command: str, fresh: bool) -> Build:
    """Make or go on with the build in a folder that no other build is in; `fresh`: the folder was not there before.

    Raises NoRoom with what the rest of the build will take.
    """
    if not processes.rank:
        claim(out, recipe)
        write_text(out / "command.txt", command + "\n")
    try:
        kind = HeadBuild if recipe.drafter.kind == "head" else Build
        build = kind(recipe, out, processes)
        build.run()
        return build
    except NoRoom as error:
        needed = disk_left(recipe, out)
        more = f"; the build still takes about {byte_size(needed)}" if needed else ""
        raise NoRoom(f"{error}{more}") from error
    except Exception:
        if fresh and not processes.rank and not (out / "target" / STAGE_FILE).exists():
            shutil.rmtree(out, ignore_errors=True)  # a target that cannot be had leaves nothing behind
        raise
