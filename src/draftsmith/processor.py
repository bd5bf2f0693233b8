"""How many threads to compute with: the cores that this process may use, and the time that a container grants.

A container with a quota sees all cores of its machine, and PyTorch starts a thread for each. Together they use up in a
part of every period, usually 0.1 seconds, what they may use in all of it, and then all of them stand still until the
next one. So the number of threads follows the quota here. Nothing is read but files below `root`, which is `/` but in
tests.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftsmith.system import ROOT, control_groups, read
from draftsmith.types import DraftsmithError

CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What a user sets to choose the number of threads before PyTorch starts."""

BUSY = 0.1
"""Of all cores' time; less is a system at rest."""

_settled = False


@dataclass(frozen=True)
class Processor:
    """What this process may use.

    Args:
        cores: logical ones that it may run on (its affinity).
        physical: of these, those that do not share their arithmetic with another of them.
        quota: cores' worth of time that it may use by the quotas of its control groups; None without one.
    """

    cores: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """How many threads fit: whole cores of the quota, at least one."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))


def available_processor(root: Path = ROOT) -> Processor:
    """Look what this process may use now."""
    cores = usable_cores()
    return Processor(len(cores), physical_cores(cores, root), quota(root))


def usable_cores() -> frozenset[int]:
    """Return the numbers of the logical cores that this process may run on."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cores: frozenset[int], root: Path = ROOT) -> int:
    """Count the cores, taking those for one that share their arithmetic; each for itself where nothing tells."""
    folder = root / "sys/devices/system/cpu"
    return len({read(folder / f"cpu{core}/topology/thread_siblings_list") or str(core) for core in cores})


def quota(root: Path = ROOT) -> float | None:
    """Return the cores' worth of time that control groups grant this process; None where none of them limits it.

    Both versions are read, of the group of the process and of all around it, because the tightest quota counts. What
    cannot be read or understood is no quota.
    """
    found = [share for share in map(_share_v2, control_groups(root, None)) if share is not None]
    found += [share for share in map(_share_v1, control_groups(root, "cpu")) if share is not None]
    return min(found, default=None)


def chosen_by_user() -> str | None:
    """Name the environment variable by which the user has chosen the number of threads; None for none."""
    return next((name for name in CHOSEN_BY if os.environ.get(name, "").strip()), None)


def check_threads(threads: int | None, name: str = "threads") -> None:
    """Raise DraftsmithError for a number of threads that nobody can compute with; `name` is what the user calls it."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise DraftsmithError(f"{name} is {threads!r}; use at least 1, or leave it out.")


def use_threads(threads: int | None = None, root: Path = ROOT) -> str | None:
    """Set the number of threads of PyTorch and the native kernels, which is one for the whole process.

    Given none, it is settled once in a process, and only ever lowered: to what fits into the quota of a container,
    where the number is PyTorch's own choice. It is left alone where the user chose it, by OMP_NUM_THREADS or by
    `torch.set_num_threads` before.

    Returns:
        What the user should know of it, in a sentence; None where there is nothing to be said.
    """
    global _settled
    check_threads(threads)
    import torch

    here = available_processor(root)
    if threads is not None:
        _settled = True
        torch.set_num_threads(threads)
        if threads > here.cores:
            return f"{threads} threads on {_cores(here.cores)}: they take turns and wait for each other."
        if here.quota is not None and threads > here.quota:
            return f"{threads} threads under {quota_in_words(here.quota)}: they stand still when it is used up."
        return None
    if _settled:
        return None
    _settled = True
    now = torch.get_num_threads()
    # PyTorch begins with one of these two, by how it was built; another number is somebody's choice.
    if chosen_by_user() is not None or now not in (here.cores, here.physical) or now <= here.threads:
        return None
    torch.set_num_threads(here.threads)
    return f"{_threads(here.threads)} and not {now}, because of {quota_in_words(here.quota)}."


class Watch:
    """Watches from its making on what other programs take."""

    def __init__(self) -> None:
        self._begun, self._busy, self._own = time.perf_counter(), busy_seconds(), time.process_time()

    def others(self) -> float | None:
        """Return the cores' worth of time that others took, or the host of a virtual machine; None where untold."""
        now, wall = busy_seconds(), time.perf_counter() - self._begun
        if self._busy is None or now is None:
            return None
        return max(0.0, now - self._busy - (time.process_time() - self._own)) / max(1e-9, wall)

    @property
    def is_disturbed(self) -> bool:
        """Whether they took a noticeable share."""
        others = self.others()
        return others is not None and others > BUSY * len(usable_cores())


def busy_seconds(root: Path = ROOT) -> float | None:
    """Return how long the cores that this process may use were busy since the system began, all together.

    Time that the host of a virtual machine gave to others counts; None where the system does not tell.
    """
    lines = (read(root / "proc/stat") or "").splitlines()
    cores = {f"cpu{core}" for core in usable_cores()}
    ticks = 0
    for line in lines:
        name, *rest = line.split()
        if name in cores and len(rest) >= 8:
            user, nice, system, _idle, _waiting, hard, soft, stolen = map(int, rest[:8])
            ticks += user + nice + system + hard + soft + stolen
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def quota_in_words(value: float | None) -> str:
    """Say what a quota grants."""
    return "no quota" if value is None else f"a quota of {value:.4g} core{'' if value == 1 else 's'}"


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _share_v2(folder: Path) -> float | None:
    words = (read(folder / "cpu.max") or "").split()
    return _share(words[0], words[1]) if len(words) == 2 else None


def _share_v1(folder: Path) -> float | None:
    return _share(read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))


def _share(granted: str | None, period: str | None) -> float | None:
    """Divide; None for "max", for -1, which is none in the first version, and for what is no number."""
    try:
        time, every = int(granted or ""), int(period or "")
    except ValueError:
        return None
    return time / every if time > 0 and every > 0 else None
