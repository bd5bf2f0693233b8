"""What the system says about this process: the control groups it is in, and the memory that it can still get.

Only files below `root` are read, which is `/` except in tests.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from draftsmith.memory import give_back_freed_memory

ROOT = Path("/")


def free_memory(root: Path | None = None) -> int | None:
    """Return the bytes that this process can still get, by the machine's memory and the limits of its control groups.

    The system's cache of files counts as free, because the system gives it up, and so does what this process freed,
    which is given back. None where the system does not say.
    """
    if root is None:
        root = ROOT
        give_back_freed_memory()
    found = [*_free_of_machine(root)]
    for folder in control_groups(root, None):
        found += _free_of_group(folder, "memory.max", "memory.current", "")
    for folder in control_groups(root, "memory"):
        found += _free_of_group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(found, default=None)


def bytes_in_words(count: int) -> str:
    """Return "290 MB" or "44 kB", in decimal units."""
    return f"{count / 1e6:,.0f} MB" if count >= 10**7 else f"{count / 1e3:,.0f} kB"


def _free_of_machine(root: Path) -> Iterator[int]:
    for line in (read(root / "proc/meminfo") or "").splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "MemAvailable:" and words[1].isdecimal():
            yield 1024 * int(words[1])


def _free_of_group(folder: Path, limit: str, used: str, prefix: str) -> Iterator[int]:
    """Yield the bytes that a limit leaves; nothing without a limit, which version 2 of control groups calls "max"."""
    most, taken = (read(folder / name) or "" for name in (limit, used))
    if not most.isdecimal() or not taken.isdecimal():
        return
    told = dict(line.split()[:2] for line in (read(folder / "memory.stat") or "").splitlines() if " " in line)
    files = (told.get(f"{prefix}{kind}_file", "") for kind in ("active", "inactive"))
    yield max(0, int(most) - int(taken) + sum(int(size) for size in files if size.isdecimal()))


def read(path: Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def control_groups(root: Path, controller: str | None) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups around it, as far as they are visible.

    Args:
        controller: a controller of version 1 of control groups; None for version 2, which has one tree for all.
    """
    own = _group(read(root / "proc/self/cgroup") or "", controller)
    mount = _mount(read(root / "proc/self/mountinfo") or "", controller)
    if own is None or mount is None:
        return
    seen_from, top = mount
    # A container may see only its own group, mounted as if it were the outermost, although /proc gives the whole path.
    inside = own.relative_to(seen_from) if own.is_relative_to(seen_from) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        folder = root / top.relative_to("/") / part
        if folder.is_dir():
            yield folder


def _group(text: str, controller: str | None) -> PurePosixPath | None:
    """Find the path of a group in /proc/self/cgroup."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        if colon and path.startswith("/") and _fits(names.split(","), controller, number == "0" and not names):
            return PurePosixPath(path)
    return None


def _mount(text: str, controller: str | None) -> tuple[PurePosixPath, PurePosixPath] | None:
    """Find in /proc/self/mountinfo which group is mounted where."""
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not dash or len(fields) < 5 or len(kind) < 3 or not fields[4].startswith("/"):
            continue
        if kind[0] in ("cgroup", "cgroup2") and _fits(kind[2].split(","), controller, kind[0] == "cgroup2"):
            return PurePosixPath(_plain(fields[3])), PurePosixPath(_plain(fields[4]))
    return None


def _fits(names: list[str], controller: str | None, second: bool) -> bool:
    return second if controller is None else not second and controller in names


def _plain(path: str) -> str:
    """Undo what mountinfo writes for a space."""
    return path.replace("\\040", " ")
