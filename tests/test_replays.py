"""Functions that are recorded and replayed; a recorder that works on a CPU stands for CUDA's."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from draftsmith import replays
from draftsmith.replays import Replays, can_replay, few_spans
from tests.helpers.recorder import OnCPU

R = TypeVar("R")

def test_a_shape_is_recorded_when_it_comes_again_and_the_oldest_are_forgotten():
    recorder = OnCPU()
    double = Replays(lambda x: x * 2, recorder, copies=True)
    for _ in range(3):
        for size in range(1, 65):
            assert double(torch.ones(size)).tolist() == [2.0] * size
    assert len(recorder.computed) == 64
    for size in range(65, 129):  # others, once each: now none of the first is left
        double(torch.ones(size))
    double(torch.ones(1))
    assert len(recorder.computed) == 64


def test_arguments_changed_in_place_are_read_again():
    add = Replays(lambda x, y: (x + y, y), OnCPU(), copies=True)
    x, y = torch.ones(3), torch.ones(3)
    for _ in range(2):
        total, _ = add(x, y)
    assert total.tolist() == [2.0] * 3
    x += 4
    total, same = add(x, y)
    assert total.tolist() == [6.0] * 3
    assert same is y


def test_the_variable_leaves_launches_to_python():
    assert can_replay(torch.device("cuda"), {})
    assert not can_replay(torch.device("cuda"), {"DRAFTSMITH_CUDA_GRAPHS": "0"})
    assert not can_replay(torch.device("cpu"), {})


@pytest.mark.parametrize(("needed", "looked_at"), [(256, 256), (257, 384), (385, 512), (700, 768), (769, 1024)])
def test_spans_are_few(needed: int, looked_at: int):
    assert few_spans(needed) == few_spans(looked_at) == looked_at


class FullOnce(OnCPU):
    """A device whose memory is full when the first recording is made."""

    is_full = True

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        if self.is_full:
            self.is_full = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(function)


def test_a_full_device_is_not_the_end_of_recording():
    recorder = FullOnce()
    double = Replays(lambda x: x * 2, recorder, copies=True)
    for value in range(6):
        assert double(torch.full((3,), float(value))).tolist() == [2.0 * value] * 3
    assert recorder.replays == 3


def test_recordings_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replays, "MOST_BYTES", 4000)
    recorder = OnCPU()
    double = Replays(lambda x: x * 2, recorder, copies=True)
    for _ in range(2):
        for size in (100, 200, 300):  # floats, twice: arguments and results
            double(torch.ones(size))
    made = len(recorder.computed)
    double(torch.ones(300))
    assert len(recorder.computed) == made, "the last one is kept"
    double(torch.ones(100))
    assert len(recorder.computed) == made + 1, "the first one had to go"
