"""Memory that was freed stays with this process, so that the next step finds it already there.

The C library hands large pieces back to the system as soon as they are freed. The system clears every page anew when it
is touched again, which makes a training step on a CPU a fifth to a third longer (docs/training.md, "Memory that
stays"), and a decoding step of many rows that draw from large vocabularies as well.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

# Of GNU's malloc.h: what the top of a heap may have free, how much more than asked for is taken from the system, and
# from how many bytes on a piece is mapped by itself.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
_LARGE, _OLD_LARGE = 1 << 30, 32 << 20  # versions before 2.35 take no more than the second
# A heap of a thread other than the first one has at most this, and is given back when the heap before it has more free
# than this pad.
_THREADS_HEAP = 64 << 20
# A piece that is too large for the caches which count as in use, and how often it is asked for: another thread may free
# as much at the same moment.
_PIECE, _TRIES = 1 << 16, 5
SWITCH = "DRAFTSMITH_KEEP_MEMORY"
"""The environment variable that leaves freed memory to the C library if it is 0."""
OWN_CHOICE = ("trim_threshold", "top_pad", "mmap_threshold", "mmap_max")
"""What a user may have chosen in the C library's own variables: `GLIBC_TUNABLES`, or `MALLOC_TRIM_THRESHOLD_` and so
on."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees, from here on; return whether the C library took the settings and serves it.

    It holds for the whole process, so programs call it and libraries do not. Pieces of a gigabyte or more (of 32 MB
    before glibc 2.35) are given back all the same, and in other threads than the first those of 64 MB. Nothing happens
    where the environment says otherwise (`SWITCH`, `OWN_CHOICE`), where the C library is not GNU's, or where memory
    comes from another library that was loaded before it, such as jemalloc, which goes by settings of its own (not
    noticed before glibc 2.33).
    """
    library = _library()
    if library is None or environment.get(SWITCH) == "0" or _has_chosen(environment) or not _serves(library):
        return False
    # First, because the other settings alone would freeze this one where it is low.
    if not any(library.mallopt(_MMAP_THRESHOLD, size) for size in (_LARGE, _OLD_LARGE)):
        return False
    return all(library.mallopt(*setting) for setting in ((_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _THREADS_HEAP)))


def give_back_freed_memory() -> None:
    """Give what was freed so far to the system, so that others may have it.

    No setting changes, and nothing that is in use moves: what is needed later is taken from the system again.
    """
    library = _library()
    if library is not None:
        library.malloc_trim(0)


def _has_chosen(environment: Mapping[str, str]) -> bool:
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(f"malloc.{name}=" in tunables or f"MALLOC_{name.upper()}_" in environment for name in OWN_CHOICE)


def _serves(library: ctypes.CDLL) -> bool:
    """Whether a piece of memory that is asked for is counted by the C library, so that it comes from there."""
    try:
        library.mallinfo2.restype = _Counts
    except AttributeError:  # before 2.33
        return True
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    for _ in range(_TRIES):
        before = library.mallinfo2().in_use
        piece = library.malloc(_PIECE)
        grown = library.mallinfo2().in_use - before
        library.free(piece)
        if grown >= _PIECE:
            return True
    return False


class _Counts(ctypes.Structure):
    """What `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )

    @property
    def in_use(self) -> int:
        """Bytes that are in use, in heaps and mapped by themselves."""
        return int(self.uordblks) + int(self.hblkhd)


def _library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        library.gnu_get_libc_version  # noqa: B018 - others have no such function, and other settings
    except AttributeError:
        return None
    return library
