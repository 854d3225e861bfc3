"""edgespec from Python: load a bundle, plan and build a drafter, export a pair, verify a bundle. The verbs call the same.

    import edgespec

    with edgespec.load("build/tiny-chat/bundle") as pair:
        for piece in pair.generate("What does os.path.join do?"):
            print(piece.text, end="")
        print(pair.stats["tokens_per_second"])

Functions raise subclasses of `edgespec.core.errors.EdgespecError`. Keyword options are those of the verb of the same name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.core.errors import naming_extras
from edgespec.core.manifest import open_manifest
from edgespec.core.options import from_mapping
from edgespec.core.output import write_result
from edgespec.loaded_pair import Chat as Chat
from edgespec.loaded_pair import Pair
from edgespec.verbs.ready import bundle_of

BUNDLE = "bundle"  # the folder of a build or an export that `load` takes


@naming_extras("edgespec.load")
def load(bundle: str | Path, *, engine: str = "", precision: str = "", **options: Any) -> Pair:
    """Open a bundle: the size of every file and the sha256 of each that it opens are checked, then both models are loaded.

    Args:
        bundle: the folder, as `build` and `export` return it, or the name of a ready pair (smollm2-135m-instruct).
        engine, precision: one of those in the bundle; the bundle's default where ''.
        options: `context` (tokens; where absent that of the device the bundle was made for, else the model's up to 8192),
            `threads`, `mode` (exact or fast), `flash_attention`.

    Raises BundleError where the bundle is incomplete, altered or harmful, InputError for an unknown option, engine or
    precision, MissingExtra where the engine's package is not installed.
    """
    from edgespec_runtime.pair.bundle import LoadOptions, open_pair

    folder = Path(bundle_of(str(bundle)))
    manifest = open_manifest(folder, hashes=False)
    given: dict[str, Any] = {"engine": engine, "precision": precision, **options}
    if given.get("context") is None:  # absent, or passed on by a caller who has none
        given["context"] = manifest.device.get("context")
    return Pair(open_pair(folder, from_mapping(LoadOptions, given), manifest=manifest))


@naming_extras("edgespec.plan")
def plan(target: str, recipe: str = "", **options: Any) -> dict[str, Any]:
    """Whether a drafter fits and pays, and how long its build takes, with nothing made: the figures of `edgespec plan --json`.
    `options`: those of `build`, and `gpus`, `alphas`, `mfu`, `bandwidth_share`. Raises InputError.
    """
    from edgespec.planning.plan import make, read_options
    from edgespec.planning.plan_report import as_json

    how, chosen = read_options({"target": target, "recipe": recipe, **options})
    found = as_json(make(chosen, how))
    write_result(how.json, found)
    return found


@naming_extras("edgespec.build")
def build(target: str, recipe: str = "", *, out: str | Path = "", **options: Any) -> Path:
    """Make a drafter for a target with every stage of `edgespec build-drafter`; returns the bundle's folder.

    A build that was interrupted goes on; one that is complete returns at once. `target`: an alias (`edgespec targets
    list`), a hub id or a model folder. `recipe`: a YAML file or a shipped recipe; the target's own where ''. `out`:
    folder for everything that is made; build/TARGET where ''. `options`: sections and knobs of a recipe, as in YAML:
    `distill={"steps": 400}`, `seed=1`. Raises InputError for what a recipe or the machine does not allow, MissingExtra
    where torch is not installed.
    """
    from edgespec.verbs.build import folder_of, run

    given = {"target": target, **({"recipe": recipe} if recipe else {}), **options}
    given |= {"out": str(out)} if out else {}
    run(given)
    return folder_of(target, str(out)) / BUNDLE


@naming_extras("edgespec.export")
def export(target: str | Path, drafter: str | Path, *, out: str | Path, **options: Any) -> Path:
    """Write both model folders as ONNX and GGUF files, hold them against torch, pack them; returns the bundle's folder.

    `options`: `device`, `formats`, `precisions` ... of `edgespec export`. Raises InputError, CheckFailed, MissingExtra.
    """
    from edgespec.verbs.export import run

    run({"target": str(target), "drafter": str(drafter), "out": str(out), **options})
    return Path(out).expanduser() / BUNDLE


@naming_extras("edgespec.verify")
def verify(bundle: str | Path, **options: Any) -> dict[str, Any]:
    """Hold a bundle's files against its models; everything that was measured. `broken` lists the bounds that do not hold.

    `options`: `models` (two folders), `prompts`, `temperatures` ... of `edgespec verify`. Raises BundleError, InputError,
    MissingExtra.
    """
    from edgespec_export.verify.bundle import Options, verify_bundle

    how = from_mapping(Options, {"bundle": bundle_of(str(bundle)), **options})
    found = verify_bundle(how)
    write_result(how.json, found)
    return found
