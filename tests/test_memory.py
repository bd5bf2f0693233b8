"""Memory that programs keep: whether pages have to be cleared anew, counted in processes of their own."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.memory import SWITCH, keep_freed_memory

PAGES = 25_000
"""Of 4 KB in a hundred megabytes."""
COUNT = """
import resource, sys, threading, torch
from draftsmith.memory import give_back_freed_memory, keep_freed_memory
kept = keep_freed_memory() if "keep" in sys.argv else None
counts = []
def met():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step(megabytes):
    begun = met()
    torch.ones(megabytes * 2 ** 18)
    counts.append(met() - begun)
def steps():
    for _ in range(20):  # where a piece begins is rounded up, and what is left before it fits nobody: seven times
        step(40 if "thread" in sys.argv else 100)
if "thread" in sys.argv:
    one = threading.Thread(target=steps)
    one.start(), one.join()
else:
    steps()
if "give" in sys.argv:
    give_back_freed_memory()
    step(100)
print(kept, counts[0], *counts[-5:])
"""


def counted(*words: str, **environment: str) -> tuple[str, list[int]]:
    """Return what keeping answered, and how many pages the first step and the last ones met anew."""
    found = subprocess.run(
        [sys.executable, "-c", COUNT, *words], env={"PATH": "", **environment}, capture_output=True, text=True,
        check=True,
    ).stdout.split()
    return found[0], [int(word) for word in found[1:]]


NAME, VERSION = platform.libc_ver()
if NAME != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35):
    pytest.skip("older versions of GNU's C library keep smaller pieces only, and others none", allow_module_level=True)


def test_a_step_finds_the_memory_of_the_step_before():
    """A hundred megabytes are touched anew in every step without it, and once with it."""
    assert min(counted()[1]) > PAGES / 2
    kept, (first, *later) = counted("keep")
    assert kept == "True"
    assert first > PAGES / 2
    assert max(later) < PAGES / 100


def test_other_threads_find_theirs_too():
    kept, (first, *later) = counted("keep", "thread")
    assert kept == "True"
    assert first > 0.2 * PAGES
    assert max(later) < PAGES / 100


def test_what_was_freed_can_be_given_back():
    _, (*_, before, after) = counted("keep", "give")
    assert before < PAGES / 100
    assert after > PAGES / 2


def test_the_switch_leaves_memory_to_the_c_library():
    kept, (_, *later) = counted("keep", **{SWITCH: "0"})
    assert kept == "False"
    assert min(later) > PAGES / 2


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}], ids=str
)
def test_the_users_own_choice_stays(environment):
    assert not keep_freed_memory(environment)


OTHER_LIBRARY = """
#include <stddef.h>
#include <string.h>
static char room[1 << 28];
static size_t taken = 0;
void *memalign(size_t unit, size_t size) {
    unit = unit < 16 ? 16 : unit;
    size_t begin = __atomic_fetch_add(&taken, size + 2 * unit, __ATOMIC_SEQ_CST) + unit;
    char *piece = room + (begin + unit - 1) / unit * unit;
    ((size_t *)piece)[-1] = size;
    return piece;
}
void *malloc(size_t size) { return memalign(16, size); }
void *aligned_alloc(size_t unit, size_t size) { return memalign(unit, size); }
int posix_memalign(void **found, size_t unit, size_t size) { *found = memalign(unit, size); return 0; }
void *calloc(size_t count, size_t size) { return malloc(count * size); }
void *realloc(void *old, size_t size) {
    void *piece = malloc(size);
    size_t before = old ? ((size_t *)old)[-1] : 0;
    if (before) memcpy(piece, old, before < size ? before : size);
    return piece;
}
void free(void *piece) { (void)piece; }
"""
"""Gives out memory that nobody had before, in place of the C library."""


def test_it_says_no_where_memory_comes_from_another_library(tmp_path: Path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "other.c").write_text(OTHER_LIBRARY)
    other = tmp_path / "other.so"
    subprocess.run([compiler, "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", other, tmp_path / "other.c"], check=True)
    asked = [sys.executable, "-c", "from draftsmith.memory import keep_freed_memory; print(keep_freed_memory())"]
    for more, said in (({}, "True"), ({"LD_PRELOAD": str(other)}, "False")):
        run = subprocess.run(asked, env={**os.environ, **more}, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == said


@pytest.mark.parametrize("environment", [{SWITCH: "1"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}], ids=str)
def test_other_choices_leave_it_on(environment):
    assert counted("keep", **environment)[0] == "True"


def test_who_asks_how_much_is_free_gets_what_was_kept_too():
    """Half a gigabyte that was freed stays with the process until then; the system's own count follows later."""
    asked = (
        "import pathlib, torch; from draftsmith.memory import keep_freed_memory; "
        "from draftsmith.system import free_memory; "
        "pages = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1]); "
        "assert keep_freed_memory(); before = pages(); torch.ones(2 ** 27); kept = pages(); free_memory(); "
        "print(kept - before, pages() - before)"
    )
    run = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    kept, left = map(int, run.stdout.split())
    assert kept > 5 * PAGES
    assert left < PAGES / 2
