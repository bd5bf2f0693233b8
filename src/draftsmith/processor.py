"""How many threads to compute with: the cores that this process may use, and the time that a container grants.

A container with a quota sees all cores of its machine, and PyTorch starts a thread for each. Early in every period,
usually 0.1 seconds, these threads use up the quota of the whole period; then all of them stand still until the next
one. So here the number of threads follows the quota. Only files below `root` are read, which is `/` except in tests.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftsmith.system import ROOT, control_groups, read
from draftsmith.types import DraftsmithError

CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which a user chooses the number of threads before PyTorch starts."""

MOST_A_CORE = 4
"""The most threads on a core that may be asked for."""
BUSY = 0.1
"""The share of all cores' time that other programs must take to count as a disturbance."""

_settled = False


@dataclass(frozen=True)
class Processor:
    """What this process may use.

    Args:
        cores: logical cores that it may run on (its affinity).
        physical: how many of these are physical cores, counting hardware threads of the same core once.
        quota: time that the quotas of its control groups grant, in cores; None without a quota.
    """

    cores: int
    physical: int
    quota: float | None

    @property
    def threads(self) -> int:
        """How many threads fit: whole cores of the quota, at least one."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))


def available_processor(root: Path = ROOT) -> Processor:
    """Return what this process may use now."""
    cores = usable_cores()
    return Processor(len(cores), physical_cores(cores, root), quota(root))


def usable_cores() -> frozenset[int]:
    """Return the numbers of the logical cores that this process may run on."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cores: frozenset[int], root: Path = ROOT) -> int:
    """Count physical cores: logical ones that share a core count once; where that is unknown, each counts."""
    folder = root / "sys/devices/system/cpu"
    return len({read(folder / f"cpu{core}/topology/thread_siblings_list") or str(core) for core in cores})


def quota(root: Path = ROOT) -> float | None:
    """Return the time that control groups grant this process, in cores; None if no group limits it.

    Both versions of control groups are read, for the group of the process and all groups around it, because the
    tightest quota counts. What cannot be read or parsed counts as no quota.
    """
    found = [share for share in map(_share_v2, control_groups(root, None)) if share is not None]
    found += [share for share in map(_share_v1, control_groups(root, "cpu")) if share is not None]
    return min(found, default=None)


def chosen_by_user() -> str | None:
    """Return the name of the environment variable by which the user chose the number of threads; None if none did."""
    return next((name for name in CHOSEN_BY if os.environ.get(name, "").strip()), None)


def check_threads(threads: int | None, name: str = "threads") -> None:
    """Raise DraftsmithError for an invalid number of threads; `name` is what the option is called for the user."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise DraftsmithError(f"{name} is {threads!r}; use at least 1, or leave it out.")
    cores = len(usable_cores())
    if threads is not None and threads > MOST_A_CORE * cores:
        raise DraftsmithError(
            f"{name} is {threads}, on {_cores(cores)}: threads wait for each other at every layer, and these would "
            f"hardly ever meet; use {cores}, or leave it out."
        )


def use_threads(threads: int | None = None, root: Path = ROOT) -> str | None:
    """Set the number of threads of PyTorch and the native kernels, for the whole process.

    Without `threads`, it acts at most once in a process, and only lowers the number: to what fits into the quota of a
    container, if PyTorch chose the number. It does not change a number that the user chose, by an environment variable
    (`CHOSEN_BY`) or by `torch.set_num_threads`.

    Returns:
        What the user should know about it, in a sentence; None if there is nothing to say.
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
    # PyTorch starts with one of these two numbers, depending on its build; any other number was chosen by someone.
    if chosen_by_user() is not None or now not in (here.cores, here.physical) or now <= here.threads:
        return None
    torch.set_num_threads(here.threads)
    return f"{_threads(here.threads)} and not {now}, because of {quota_in_words(here.quota)}."


class Watch:
    """Measures how much processor time other programs take, from its creation on."""

    def __init__(self) -> None:
        self._begun, self._busy, self._own = time.perf_counter(), busy_seconds(), time.process_time()

    def others(self) -> float | None:
        """Return the time, in cores, that other programs or a virtual machine's host took; None if unknown."""
        now, wall = busy_seconds(), time.perf_counter() - self._begun
        if self._busy is None or now is None:
            return None
        return max(0.0, now - self._busy - (time.process_time() - self._own)) / max(1e-9, wall)

    @property
    def is_disturbed(self) -> bool:
        """Whether others took a noticeable share (`BUSY`) of the time."""
        others = self.others()
        return others is not None and others > BUSY * len(usable_cores())


def busy_seconds(root: Path = ROOT) -> float | None:
    """Return the seconds that the cores of this process were busy since the system started, all cores together.

    Time that a virtual machine's host gave to others counts as busy; None where the system does not report it.
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
    """Return a quota in words."""
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
    """Return the quota in cores; None for "max" and -1, which mean no quota, and for what is not a number."""
    try:
        time, every = int(granted or ""), int(period or "")
    except ValueError:
        return None
    return time / every if time > 0 and every > 0 else None
