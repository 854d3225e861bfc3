"""What the machine has to give, and what a container's limits leave of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.core import free_space
from edgespec.core.errors import InputError
from edgespec.core.free_space import (
    available_in,
    bytes_in,
    folder_at,
    free_disk,
    free_memory,
    processor_limit,
)


def write_groups(
    folder: Path, own: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Path]:
    """Control groups below `folder`, and a process that is in those that `own` names; the path of each file."""
    (folder / "own").write_text(own)
    monkeypatch.setattr(free_space, "OWN_CGROUPS", folder / "own")
    monkeypatch.setattr(free_space, "CGROUPS", folder / "groups")
    for name, text in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(text)
    return {name: folder / "groups" / name for name in files}


def test_what_the_system_says() -> None:
    memory = free_memory()
    assert memory is not None
    assert 2**20 < memory < 2**50
    assert free_disk(Path("/not/there/yet")) == pytest.approx(shutil.disk_usage("/").free, rel=0.1)


def test_what_a_mac_says_of_its_memory() -> None:
    said = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                                3000.\n"
        "Pages active:                            400000.\n"
        "Pages inactive:                          200000.\n"
        "Pages speculative:                         1000.\n"
        "Pages throttled:                              0.\n"
        "Pages wired down:                        120000.\n"
        '"Translation faults":                 987654321.\n'
    )
    assert available_in(said) == 204_000 * 16_384
    assert available_in("") is None


def test_a_drive_that_is_not_there() -> None:
    class Place:
        def __init__(self, name: str, parent: Any = None) -> None:
            self.name, self.parent = name, parent or self

        def __fspath__(self) -> str:
            return self.name

        __str__ = __fspath__

    place: Any = Place("Q:\\pairs\\mine", Place("Q:\\pairs", Place("Q:\\")))
    with pytest.raises(InputError, match=r"Q:\\pairs\\mine lies on Q:\\, which is not there"):
        folder_at(place)


def test_files_that_go_while_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a build that ends its files in the same folder."""
    real, files = os.stat, [tmp_path / "below" / "one", tmp_path / "below" / "another"]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(bytes(7))
    assert (bytes_in(tmp_path), bytes_in(tmp_path / "absent")) == (14, 0)

    def stat(path: Any, **how: Any) -> os.stat_result:
        found = real(path, **how)
        if Path(path) in files:
            for file in files:
                file.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "stat", stat)
    assert bytes_in(tmp_path) == 7


@pytest.mark.parametrize(
    ("own", "limit", "used", "stat"),
    [
        ("", "memory.max", "memory.current", "inactive_file 300000"),  # a container's own group is the root
        ("0::/\n", "memory.max", "memory.current", "anon 5\ninactive_file 300000"),
        ("0::/\n", "memory.max", "memory.current", "inactive_file 100000\nactive_file 200000"),  # read often
        ("1:pids:/x\n0::/a/job\n", "a/job/memory.max", "a/job/memory.current", "inactive_file 300000"),
        ("0::/a/job/step\n", "a/memory.max", "a/memory.current", "inactive_file 300000"),  # a group above
        ("0::/../elsewhere\n", "memory.max", "memory.current", "inactive_file 300000"),
        (
            "4:hugetlb,memory:/docker/1\n0::/\n",  # mounted as the container's root
            *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
            "inactive_file 1\ntotal_inactive_file 300000",
        ),
        (
            "4:memory:/slurm/job\n",
            *("memory/slurm/memory.limit_in_bytes", "memory/slurm/memory.usage_in_bytes"),
            "inactive_file 1\nactive_file 1\ntotal_inactive_file 200000\ntotal_active_file 100000",
        ),
    ],
)
def test_a_containers_memory_counts(
    own: str, limit: str, used: str, stat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is least of the limits of a process's groups and of those above them."""
    beside = str(Path(limit).with_name("memory.stat"))
    made = write_groups(tmp_path, own, {limit: "1000000", used: "900000", beside: stat}, monkeypatch)
    assert free_memory() == 400_000
    for none in ("max\n", "9223372036854771712\n"):
        made[limit].write_text(none)
        assert (free_memory() or 0) > 2**20


@pytest.mark.parametrize(
    ("own", "files", "processors"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "150000 100000\n"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000"}, 0.5),
        ("3:cpuset:/\n1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "5"}, None),
        ("", {}, None),
    ],
)
def test_a_containers_processors_count(
    own: str,
    files: dict[str, str],
    processors: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_groups(tmp_path, own, files, monkeypatch)
    assert processor_limit() == processors
