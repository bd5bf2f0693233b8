"""Memory that was freed stays with this process, so that the next step finds it already there.

The C library hands large pieces back to the system as soon as they are freed. The system clears every page anew when it
is touched again, which takes a training step on a CPU a fifth longer (docs/training.md, "Memory that stays"), and a
decoding step of many rows that draw from large vocabularies as well.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

# Of GNU's malloc.h: what the top of a heap may have free, how much more than asked for is taken from the system, and
# from how many bytes on a piece is mapped by itself.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
_LARGE, _OLD_LARGE = 1 << 30, 32 << 20  # the most that older versions take
# A heap of a thread other than the first one has at most this, and is given back when the heap before it has more free
# than this pad.
_THREADS_HEAP = 64 << 20
OWN_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables by which a user chooses this; `GLIBC_TUNABLES` is another."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees, from here on; return whether it does.

    It holds for the whole process, so programs call it and libraries do not. Pieces of a gigabyte or more are given
    back all the same, and in other threads than the first those of 64 MB. Nothing happens where the user has chosen
    otherwise by the environment, or where the C library is not GNU's.
    """
    library = _library()
    chosen = any(name in environment for name in OWN_CHOICE) or "malloc" in environment.get("GLIBC_TUNABLES", "")
    if library is None or chosen:
        return False
    # First, because older versions refuse so much, and the other settings alone would freeze this one where it is low.
    if not any(library.mallopt(_MMAP_THRESHOLD, size) for size in (_LARGE, _OLD_LARGE)):
        return False
    done = [library.mallopt(_TRIM_THRESHOLD, _NEVER), library.mallopt(_TOP_PAD, _THREADS_HEAP)]
    return min(done) == 1


def give_back_freed_memory() -> None:
    """Give what was freed so far to the system: after loading, which frees what will not be needed again."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


def _library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        library.gnu_get_libc_version  # noqa: B018 - others have no such function, and other settings
    except AttributeError:
        return None
    return library
