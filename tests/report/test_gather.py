"""Which column of the report a file of measurements belongs to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from edgespec.report.gather import BUILD, BUNDLE, VERIFY, gather


def test_a_verification_that_is_given_takes_the_place_of_the_bundles_own(
    small_build: Path, tmp_path: Path
) -> None:
    """Of the last run alone; the next one begins a run, and a build of before its verification gets none."""
    bundle, begun = small_build / "out" / "bundle", tmp_path / "begun"
    shutil.copytree(small_build / "out" / "target", begun / "target")
    verified = json.loads((small_build / "out" / "verify" / "verify.json").read_text())
    first, second = files = [tmp_path / f"{name}.json" for name in "ab"]
    for file in files:
        file.write_text(json.dumps(verified))

    def columns(*paths: Path) -> list[tuple[set[str], Path | None]]:
        return [
            ({BUILD, BUNDLE} & {*run.sources}, run.sources[VERIFY].path if VERIFY in run.sources else None)
            for run in gather([str(path) for path in paths])
        ]

    assert columns(bundle) == [({BUNDLE}, bundle.resolve() / "verify.json")]
    assert columns(bundle, first, second) == [({BUNDLE}, first), ({BUNDLE}, second)]
    assert columns(begun, bundle, first) == [({BUILD}, None), ({BUNDLE}, first)]
    assert columns(begun, bundle, first, second) == [({BUILD}, second), ({BUNDLE}, first)]
