"""What a training shows: TensorBoard's event files hold the rows of the log, a kill in between or not; the picture is drawn."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgespec_recipes.training.curves import DPI, PANEL, Curves, plot_curves
from small_files import files_of_at_most

from edgespec.core.errors import NoRoom


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 8.0 / step,
        "lr": 1e-3 / step,
        "tokens": step * 512,
        "seconds": step * 0.5,
        "tokens_per_second": 1000.0 + step,
        **more,
    }


def event_files(folder: Path) -> list[list[Any]]:
    """The events of every file of `folder`/tensorboard, files in the order TensorBoard reads them (TFRecord framing)."""
    from tensorboardX.proto.event_pb2 import Event

    files = []
    for file in sorted((folder / "tensorboard").iterdir()):
        data, place, events = file.read_bytes(), 0, []
        while place < len(data):
            (length,) = struct.unpack_from(
                "<Q", data, place
            )  # length, its checksum, the record, its checksum
            events.append(Event.FromString(data[place + 12 : place + 12 + length]))
            place += 16 + length
        assert place == len(data)
        files.append(events)
    return files


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: a session that starts at a step hides what was written of that step and later ones."""
    from tensorboardX.proto.event_pb2 import SessionLog

    curves: dict[str, list[tuple[int, float]]] = {}
    for events in event_files(folder):
        assert events[0].file_version == "brain.Event:2"
        for event in events:
            if event.session_log.status == SessionLog.START:
                curves = {
                    name: [point for point in points if point[0] < event.step]
                    for name, points in curves.items()
                }
            for value in event.summary.value:
                curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def expected(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    curves = {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}
    return {
        name: [(step, pytest.approx(value)) for step, value in points]
        for name, points in curves.items()
        if points
    }


NAMES = ["loss", "lr", "tokens", "seconds", "tokens_per_second"]


def test_event_file_holds_every_number_of_the_log(tmp_path: Path) -> None:
    rows = [row(10), row(20, alpha=0.5, kept=0.4, selected=[[7, 1, 2]]), row(30, alpha=0.625)]
    curves = Curves(tmp_path, 0)
    for each in rows:
        curves.add(each)
    assert shown(tmp_path) == expected(rows, [*NAMES, "alpha", "kept"])  # on the disk before it is closed
    curves.close()
    assert shown(tmp_path) == expected(rows, [*NAMES, "alpha", "kept"])


def test_steps_after_a_kill_do_not_show_twice(tmp_path: Path) -> None:
    for start, steps in ((0, (10, 20)), (0, (10, 20, 30, 40)), (25, (30, 35, 40, 50))):
        curves = Curves(
            tmp_path, start
        )  # the first was killed before a checkpoint, the second went on from step 25
        for step in steps:
            curves.add(row(step, loss=float(step + start)))
        curves.close()
    kept = [row(step, loss=float(step)) for step in (10, 20)]
    again = [row(step, loss=float(step + 25)) for step in (30, 35, 40, 50)]
    assert len(event_files(tmp_path)) == 3
    assert shown(tmp_path) == expected(kept + again, NAMES)


def test_a_full_disk_is_named_with_the_whole_path(tmp_path: Path) -> None:
    curves = Curves(tmp_path, 0)
    with files_of_at_most(1), pytest.raises(NoRoom, match=f"cannot write {tmp_path / 'tensorboard'}: "):
        curves.add(row(10))
    curves.close()


def test_training_goes_on_without_the_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboardX.event_file_writer", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    curves = Curves(tmp_path, 0)
    curves.add(row(10))
    curves.close()
    assert not plot_curves(write(tmp_path, [row(10)]), tmp_path / "curves.png", "title")
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


def picture(folder: Path, rows: list[dict[str, Any]]) -> np.ndarray:
    """[height, width, 3] of what is drawn, 0 to 1."""
    from matplotlib.image import imread

    png = folder / "curves.png"
    assert plot_curves(write(folder, rows), png, "distil, seed 0")
    image: np.ndarray = imread(png)[..., :3]
    return image


def count_of(image: np.ndarray, colour: str) -> int:
    """Pixels of a colour."""
    wanted = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return int((np.abs(image - wanted).max(-1) < 0.02).sum())


@pytest.mark.parametrize("length", [1, 10, 10_000])
@pytest.mark.parametrize("watched", [False, True])
def test_picture_of_a_log(tmp_path: Path, length: int, watched: bool) -> None:
    rows = [row(step, **({"alpha": step / 20_000} if watched else {})) for step in range(1, length + 1)]
    image = picture(tmp_path, rows)
    width, height = PANEL
    assert image.shape[:2] == (round(height * (1.6 if watched else 1.0) * DPI), round(width * DPI))
    loss, alpha = count_of(image, "#1f6f8b"), count_of(image, "#c1666b")
    enough = 10 if length == 1 else 500
    assert loss > enough
    assert alpha > enough / 2 if watched else alpha == 0


@pytest.mark.parametrize(("low", "scale"), [(1.0, "linear"), (0.5, "log"), (-0.5, "linear")])
def test_a_wide_positive_range_is_drawn_on_a_logarithmic_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float, scale: str
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    picture(tmp_path, [row(1, loss=7.0), row(2, loss=low)])
    axes = drawn[0].axes[0]
    assert axes.get_yscale() == scale
    assert "distil, seed 0" in axes.get_title()
    assert axes.get_xlabel() == "optimizer step"


def test_empty_log_has_no_picture(tmp_path: Path) -> None:
    assert not plot_curves(write(tmp_path, []), tmp_path / "curves.png", "title")
