"""On a GPU: records what a function launches there, and launches the recording as a whole from then on.

A forward of few tokens launches a thousand kernels or more, and Python takes several times as long to launch them one
by one as the GPU takes to run them (docs/gpu.md). A recording (a CUDA graph) runs the same kernels on the same shapes,
so its results are the same bits.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

log = logging.getLogger(__name__)

R = TypeVar("R")

SWITCH = "DRAFTSMITH_CUDA_GRAPHS"
"""The environment variable that leaves all launches to Python if it is 0."""
MOST_SHAPES = 64
"""Recordings that a function keeps, those used last. Each holds memory on the device for its arguments and results."""
LEAST_SPAN = 256


def few_spans(most: int) -> int:
    """Return how many cached entries to look at where `most` are needed: a power of two, or one and a half of it.

    So there are few recordings, and few entries are looked at in vain.
    """
    power = max(LEAST_SPAN, 1 << (most - 1).bit_length())
    between = power * 3 // 4
    return between if most <= between and power > LEAST_SPAN else power


def can_replay(device: torch.device, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether steps are recorded on a device."""
    return device.type == "cuda" and environment.get(SWITCH) != "0"


class Recorder(Protocol):
    """Turns a function's work on a device into a recording."""

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """Return what the function returns, not yet computed, and what computes it, each time in the same memory.

        RuntimeError if the function waits for the device, or copies from the host.
        """


class CudaGraphs:
    """Records CUDA graphs, which share their working memory: only one of them may run at a time.

    Results of one graph may lie where another one works, so they have to be used, or copied, before that one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """See `Recorder`."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads of the process may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = function()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return made, graph.replay


@dataclass
class _Recording:
    """A recording, and where its arguments and results lie.

    Args:
        held: the tensors that it reads.
        given: what was copied there last, each with its version, which counts changes in place; but not those that a
            replay makes.
        replay: computes `made`.
        made: what the function returned.
    """

    held: list[Tensor]
    given: list[tuple[Tensor, int]]
    replay: Callable[[], None]
    made: Any


class Replays:
    """A function that is recorded when the shapes of its arguments come a second time; the first time it just runs.

    Args:
        function: its work is all on the device and follows from the shapes of its tensors and the values of its other
            arguments, which are hashable.
        copies: whether results are copied, so that they stay as they are when another recording runs.
    """

    def __init__(self, function: Callable[..., Any], recorder: Recorder, copies: bool) -> None:
        self._function, self._recorder, self._copies = function, recorder, copies
        # None: it was called once, or cannot be recorded.
        self._recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()
        self._can_record = True

    def __call__(self, *arguments: Any) -> Any:
        """Run the function, or its recording."""
        shapes = outline(arguments)
        if shapes not in self._recordings:
            self._recordings[shapes] = None
            if len(self._recordings) > MOST_SHAPES:
                self._recordings.popitem(last=False)
            return self._function(*arguments)
        self._recordings.move_to_end(shapes)
        recording = self._recordings[shapes]
        if recording is None:
            recording = self._record(arguments) if self._can_record else None
            if recording is None:
                return self._function(*arguments)
            self._recordings[shapes] = recording
        return self._run(recording, arguments)

    def _record(self, arguments: tuple[Any, ...]) -> _Recording | None:
        given = list(tensors_in(arguments))
        held = [tensor.clone() for tensor in given]
        copies = iter(held)
        own = with_tensors(arguments, lambda _: next(copies))
        try:
            made, replay = self._recorder.record(lambda: self._function(*own))
        except RuntimeError as error:
            self._can_record = False
            reason = str(error).strip().partition("\n")[0]
            log.warning("a piece of the step cannot be recorded on this GPU, so it runs slower: %s", reason)
            return None
        return _Recording(held, [(tensor, tensor._version) for tensor in given], replay, made)

    def _run(self, recording: _Recording, arguments: tuple[Any, ...]) -> Any:
        given = list(tensors_in(arguments))
        for index, tensor in enumerate(given):
            last, version = recording.given[index]
            if tensor is not last or tensor._version != version:
                recording.held[index].copy_(tensor)
                recording.given[index] = tensor, tensor._version
        recording.replay()
        if not self._copies:
            # Other tensors of the same memory: a tensor seen again would count as unchanged, see `given`.
            return with_tensors(recording.made, Tensor.detach)
        # What is handed through is the caller's own.
        through = {id(held): tensor for held, tensor in zip(recording.held, given, strict=True)}
        return with_tensors(recording.made, lambda made: through[id(made)] if id(made) in through else made.clone())


def outline(value: Any) -> Hashable:
    """Return what decides whether a recording fits: the shapes and types of tensors, and all other values."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return tuple(outline(part) for part in value)
    if _is_record(value):
        return type(value), tuple(outline(getattr(value, field.name)) for field in fields(value))
    return cast(Hashable, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Go through the tensors of a value: of tuples, lists, and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif _is_record(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a value with other tensors, asked for in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(with_tensors(part, change) for part in value)
    if _is_record(value) and any(True for _ in tensors_in(value)):
        changed = {field.name: with_tensors(getattr(value, field.name), change) for field in fields(value)}
        return replace(value, **changed)
    return value


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
