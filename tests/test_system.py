"""The memory that a process can still have, from trees of files as Linux and containers show them."""

from pathlib import Path

import pytest

from draftsmith.system import free_memory
from tests.test_processor import V2, system

MEMINFO = "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/memory rw,relatime shared:5 - cgroup cgroup rw,memory"


def machine(root: Path) -> Path:
    (root / "proc/meminfo").write_text(MEMINFO)
    return root


def second(root: Path, **files: str) -> Path:
    return machine(system(root, "0::/app", V2.format(root="/"), **files))


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path):
    assert free_memory(second(tmp_path, app__memory__x="")) == 4000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        ("1000000", "400000", "active_file 1000\ninactive_file 2000\nanon 5", 603_000),
        ("1000000", "1200000", "", 0),
        ("max", "400000", "", 4000 * 1024),
        ("much", "400000", "", 4000 * 1024),
        ("9000000000", "400000", "", 4000 * 1024),
    ],
)
def test_the_tightest_limit_counts_and_what_is_kept_of_files_is_free(
    tmp_path: Path, limit: str, used: str, stat: str, expected: int
):
    root = second(tmp_path, **{"app__memory.max": limit, "app__memory.current": used, "app__memory.stat": stat})
    assert free_memory(root) == expected


def test_the_first_version_of_groups_is_read_too(tmp_path: Path):
    stat = "total_active_file 7\ntotal_inactive_file 3"
    names = {"limit_in_bytes": "900000", "usage_in_bytes": "500000", "stat": stat}
    files = {f"memory__app__memory.{name}": text for name, text in names.items()}
    assert free_memory(machine(system(tmp_path, "7:memory:/app", V1.format(root="/"), **files))) == 400_010


def test_where_nothing_tells_there_is_no_answer(tmp_path: Path):
    assert free_memory(tmp_path) is None
