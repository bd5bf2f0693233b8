"""Training has fewer threads beside other programs, and says so once; a number that the user chose stays."""

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from draftsmith.processor import CHOSEN_BY, Watch
from draftsmith.training import neighbours
from draftsmith.training.neighbours import Neighbours, threads_for, yielding


def test_there_are_as_many_threads_as_free_cores():
    assert [threads_for(free, 4, 4) for free in (4.0, 3.6, 3.4, 2.4, 0.1)] == [4, 4, 3, 2, 1]
    assert [threads_for(free, 2, 4) for free in (2.0, 2.7, 2.8, 3.3, 4.0)] == [2, 2, 3, 3, 4]
    for cores in range(1, 9):  # what is free while nobody else computes brings all of them back, one or more a time
        now = 1
        for _ in range(cores):
            now = threads_for(float(cores), now, cores)
        assert now == cores


def test_they_follow_what_others_take(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neighbours, "LOOKS_EVERY_S", 0.0)
    threads(2)
    taken = iter([0.0, 1.1, 1.0, None, 0.1, 1.2])
    out = io.StringIO()
    beside = Neighbours(Console(file=out, width=200), 2, 2, lambda: next(taken))
    seen = []
    for _ in range(6):
        beside.look()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 1, 2, 1]
    assert out.getvalue().count("while other programs want the processor") == 1
    assert "1 thread and not 2 while other programs want the processor (now they take 1.1 of 2 cores" in out.getvalue()


def test_it_looks_only_now_and_then(threads: Callable[[int], None]):
    threads(2)
    asked = []
    beside = Neighbours(Console(quiet=True), 2, 2, lambda: asked.append(1) or 2.0)
    for _ in range(100):
        beside.look()
    assert asked == [1] and torch.get_num_threads() == 1


def test_in_the_end_there_are_as_many_as_before(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch):
    for name in CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(neighbours, "LOOKS_EVERY_S", 0.0)
    monkeypatch.setattr(neighbours.Watch, "others", lambda self: 64.0)
    threads(2)
    with yielding(Console(quiet=True), None, Watch()) as look:
        look()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with yielding(Console(quiet=True), 2, Watch()) as look:
        look()
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with yielding(Console(quiet=True), None, Watch()) as look:
        look()
        assert torch.get_num_threads() == 2
