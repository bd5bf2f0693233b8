"""How many threads fit: quotas of both versions of control groups, from trees of files, and who has the last word."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftsmith import processor as module
from draftsmith.processor import (
    Processor,
    available_processor,
    check_threads,
    chosen_by_user,
    physical_cores,
    quota,
    quota_in_words,
    usable_cores,
    use_threads,
)
from draftsmith.types import DraftsmithError

V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct"
V2 = "41 31 0:38 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def system(root: Path, groups: str, mounts: str, **files: str) -> Path:
    """Make a tree of files; names of files have __ for a slash, below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups + "\n")
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/vda rw\n" + mounts + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def second(root: Path, groups: str = "0::/", seen_from: str = "/", **limits: str) -> Path:
    """Make a tree of the second version, from what cpu.max says in each group."""
    files = {f"{name}__cpu.max".removeprefix("top__"): text for name, text in limits.items()}
    return system(root, groups, V2.format(root=seen_from), **files)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("400000 200000", 2.0),
        ("max 100000", None),
        ("max", None),
        ("", None),
        ("150000", None),
        ("lots 100000", None),
        ("150000 0", None),
        ("-5 100000", None),
        ("1 2 3", None),
    ],
)
def test_a_quota_of_the_second_version(tmp_path: Path, text: str, expected: float | None):
    assert quota(second(tmp_path, top=text)) == expected


def test_the_tightest_quota_of_all_groups_around_counts(tmp_path: Path):
    inner = {"pods": "300000 100000", "pods__one": "max 100000", "pods__one__main": "800000 100000"}
    assert quota(second(tmp_path / "a", "0::/pods/one/main", **inner)) == 3.0
    inner["pods__one"] = "125000 50000"
    assert quota(second(tmp_path / "b", "0::/pods/one/main", **inner)) == 2.5
    assert quota(second(tmp_path / "c", "0::/pods", **inner)) == 3.0
    assert quota(second(tmp_path / "d", "0::/other", **inner)) is None


def test_a_container_that_sees_its_own_group_alone(tmp_path: Path):
    """Docker of the first kind shows the group at the top of the mount, and names its whole path all the same."""
    own = "0::/docker/abc/inner"
    limits = {"top": "200000 100000", "inner": "150000 100000"}
    assert quota(second(tmp_path / "a", own, "/docker/abc", **limits)) == 1.5
    assert quota(second(tmp_path / "b", "0::/somewhere/else", "/docker/abc", **limits)) == 2.0
    assert quota(second(tmp_path / "c", "0::/../../elsewhere", **limits)) == 2.0


@pytest.mark.parametrize(("granted", "period", "expected"), [
    ("150000", "100000", 1.5), ("-1", "100000", None), ("150000", "", None), ("x", "100000", None), ("1000", "0", None),
])
def test_a_quota_of_the_first_version(tmp_path: Path, granted: str, period: str, expected: float | None):
    names = "cpu,cpuacct__docker__abc__cpu.cfs"
    files = {f"{names}_quota_us": granted, f"{names}_period_us": period}
    lines = "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n0::/"
    assert quota(system(tmp_path, lines, V1.format(root="/"), **files)) == expected


def test_the_first_version_is_read_up_to_the_top_and_cpuset_is_not_cpu(tmp_path: Path):
    files = {
        "cpu,cpuacct__a__cpu.cfs_quota_us": "100000", "cpu,cpuacct__a__cpu.cfs_period_us": "100000",
        "cpu,cpuacct__a__b__cpu.cfs_quota_us": "-1", "cpu,cpuacct__a__b__cpu.cfs_period_us": "100000",
    }
    mounts = "30 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n" + V1.format(root="/")
    assert quota(system(tmp_path / "a", "5:cpuset:/x\n4:cpu,cpuacct:/a/b", mounts, **files)) == 1.0
    assert quota(system(tmp_path / "b", "5:cpuset:/a/b", mounts, **files)) is None


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path):
    assert quota(tmp_path) is None
    assert quota(system(tmp_path / "a", "0::/", "")) is None
    assert quota(system(tmp_path / "b", "no line of this\n::::\n0:", "neither - is\nthis - cgroup2")) is None
    assert quota(system(tmp_path / "c", "0::/", V2.format(root="/"))) is None


@pytest.mark.parametrize(("cores", "granted", "threads"), [
    (8, None, 8), (8, 3.0, 3), (8, 1.5, 1), (8, 2.9, 2), (8, 0.25, 1), (2, 64.0, 2),
])
def test_threads_are_the_whole_cores_of_a_quota(cores: int, granted: float | None, threads: int):
    assert Processor(cores, cores, granted).threads == threads


def test_cores_that_share_their_arithmetic_are_one(tmp_path: Path):
    for core, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(frozenset(range(4)), tmp_path) == 2 and physical_cores(frozenset({0, 1}), tmp_path) == 2
    assert physical_cores(frozenset({0, 2, 9}), tmp_path) == 2


def test_this_machine_can_be_looked_at():
    here = available_processor()
    assert 1 <= here.threads <= here.cores == len(usable_cores()) and 1 <= here.physical <= here.cores
    assert here.quota is None or here.quota > 0


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nobody has chosen threads yet, on a machine of eight cores; afterwards all is as it was."""
    before = torch.get_num_threads()
    monkeypatch.setattr(module, "_settled", False)
    monkeypatch.setattr(module, "usable_cores", lambda: frozenset(range(8)))
    for name in module.CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    torch.set_num_threads(before)


def test_pytorchs_own_choice_is_lowered_to_the_quota_and_once_only(unsettled: pytest.MonkeyPatch, tmp_path: Path):
    limited = second(tmp_path, top="350000 100000")
    torch.set_num_threads(8)
    assert use_threads(root=limited) == "3 threads and not 8, because of a quota of 3.5 cores."
    assert torch.get_num_threads() == 3
    torch.set_num_threads(8)
    assert use_threads(root=limited) is None and torch.get_num_threads() == 8


def test_without_a_quota_nothing_is_changed(unsettled: pytest.MonkeyPatch, tmp_path: Path):
    torch.set_num_threads(8)
    assert use_threads(root=tmp_path) is None and torch.get_num_threads() == 8


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_number_that_is_not_pytorchs_own_was_chosen_by_somebody(
    unsettled: pytest.MonkeyPatch, tmp_path: Path, threads: int
):
    torch.set_num_threads(threads)
    assert use_threads(root=second(tmp_path, top="200000 100000")) is None and torch.get_num_threads() == threads


@pytest.mark.parametrize("name", module.CHOSEN_BY)
def test_an_environment_variable_has_the_last_word(unsettled: pytest.MonkeyPatch, tmp_path: Path, name: str):
    unsettled.setenv(name, "8")
    torch.set_num_threads(8)
    assert chosen_by_user() == name
    assert use_threads(root=second(tmp_path, top="200000 100000")) is None and torch.get_num_threads() == 8
    unsettled.setenv(name, " ")
    assert chosen_by_user() is None


def test_a_number_that_is_given_is_taken_with_a_note_where_it_is_large(unsettled: pytest.MonkeyPatch, tmp_path: Path):
    limited = second(tmp_path, top="200000 100000")
    assert use_threads(2, limited) is None and torch.get_num_threads() == 2
    assert "quota of 2 cores" in (use_threads(3, limited) or "") and torch.get_num_threads() == 3
    assert use_threads(9, limited) == "9 threads on 8 cores: they take turns and wait for each other."
    assert torch.get_num_threads() == 9
    assert use_threads(root=limited) is None and torch.get_num_threads() == 9


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_threads_is_refused(threads: object):
    with pytest.raises(DraftsmithError, match=r"threads is .*; use at least 1, or leave it out\.$"):
        check_threads(threads)  # type: ignore[arg-type]
    with pytest.raises(DraftsmithError, match="--threads is"):
        check_threads(threads, "--threads")  # type: ignore[arg-type]


def test_a_quota_is_said_in_words():
    said = [quota_in_words(value) for value in (None, 1.0, 1.5)]
    assert said == ["no quota", "a quota of 1 core", "a quota of 1.5 cores"]
