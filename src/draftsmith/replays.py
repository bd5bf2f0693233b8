"""On a GPU: records what a function launches there, and launches the recording as a whole from then on.

A forward of few tokens launches a thousand kernels or more, and Python takes several times as long to launch them one
by one as the GPU takes to run them (docs/gpu.md). A recording (a CUDA graph) runs the same kernels on the same shapes,
so its results are the same bits.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

log = logging.getLogger(__name__)

R = TypeVar("R")

SWITCH = "DRAFTSMITH_CUDA_GRAPHS"
"""The environment variable that leaves all launches to Python if it is 0."""
MOST_SHAPES, MOST_BYTES = 64, 2**30
"""Recordings that a function keeps, those used last, and the bytes that their arguments and results may take."""
MOST_MET = 1024
"""Shapes that a function remembers to have met once."""
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
        # A pool whose graphs are all gone cannot be used again.
        self._newest: torch.cuda.CUDAGraph | None = None

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """See `Recorder`."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Products keep scratch memory for each stream. It must not come from a pool that may go before this one.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.stream(self._stream):
            # Other threads may start work on the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = function()
            except BaseException:
                with suppress(RuntimeError):  # the first error says what happened
                    graph.capture_end()
                raise
            graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
        current.wait_stream(self._stream)
        self._newest = graph
        return made, graph.replay


Version = int | None


@dataclass
class _Recording:
    """A recording, and where its arguments and results lie.

    Args:
        held: the tensors that it reads.
        given: what was copied there last, each with its version, see `version_of`; but not those that a replay makes.
        replay: computes `made`.
        made: what the function returned.
    """

    held: list[Tensor]
    given: list[tuple[Tensor, Version]]
    replay: Callable[[], None]
    made: Any

    @property
    def bytes(self) -> int:
        """Memory of arguments and results."""
        return sum(tensor.nbytes for tensor in (*self.held, *tensors_in(self.made)))


class Replays:
    """A function that is recorded when the shapes of its arguments come a second time; the first time it just runs.

    Args:
        function: its work is all on the device and follows from the shapes of its tensors and the values of its other
            arguments, which are hashable.
        copies: whether results are copied, so that they stay as they are when another recording runs.
        to_record: what is recorded in the function's place: it does the same, and raises where the function may return
            something else.
    """

    def __init__(
        self, function: Callable[..., Any], recorder: Recorder, copies: bool,
        to_record: Callable[..., Any] | None = None,
    ) -> None:
        self._function, self._recorder, self._copies = function, recorder, copies
        self._to_record = function if to_record is None else to_record
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        self._can_record = True

    def __call__(self, *arguments: Any, beside: tuple[Hashable, ...] = ()) -> Any:
        """Run the function, or its recording.

        Args:
            beside: further arguments, which hold no tensors.
        """
        shapes = outline(arguments), beside
        recording = self._recordings.get(shapes)
        if recording is not None:
            self._recordings.move_to_end(shapes)
        elif shapes in self._met and self._can_record:
            recording = self._record(arguments, beside)
            if recording is not None:
                self._keep(shapes, recording)
        else:
            self._met[shapes] = None
            if len(self._met) > MOST_MET:
                self._met.popitem(last=False)
        return self._function(*arguments, *beside) if recording is None else self._run(recording, arguments)

    def forget(self) -> None:
        """Drop all recordings."""
        self._recordings.clear()
        self._met.clear()

    def _keep(self, shapes: Hashable, recording: _Recording) -> None:
        self._recordings[shapes] = recording
        size = sum(one.bytes for one in self._recordings.values())
        while len(self._recordings) > 1 and (len(self._recordings) > MOST_SHAPES or size > MOST_BYTES):
            _, oldest = self._recordings.popitem(last=False)
            size -= oldest.bytes

    def _record(self, arguments: tuple[Any, ...], beside: tuple[Hashable, ...]) -> _Recording | None:
        given = list(tensors_in(arguments))
        try:
            with torch.inference_mode(False):  # what is made in that mode could not be written outside it
                held = [tensor.clone() for tensor in given]
            copies = iter(held)
            own = with_tensors(arguments, lambda _: next(copies))
            made, replay = self._recorder.record(lambda: self._to_record(*own, *beside))
        except torch.OutOfMemoryError:
            self.forget()
            return None
        except Exception as error:  # what is wrong with the function itself shows when it runs as it is
            self._can_record = False
            reason = str(error).strip().partition("\n")[0]
            log.warning("a piece of the step cannot be recorded on this GPU, so it runs slower: %s", reason)
            return None
        return _Recording(held, [(tensor, version_of(tensor)) for tensor in given], replay, made)

    def _run(self, recording: _Recording, arguments: tuple[Any, ...]) -> Any:
        given = list(tensors_in(arguments))
        for index, tensor in enumerate(given):
            last, version = recording.given[index]
            now = version_of(tensor)
            if tensor is not last or now is None or now != version:
                recording.held[index].copy_(tensor)
                recording.given[index] = tensor, now
        recording.replay()
        if not self._copies:
            # Other tensors of the same memory: a tensor seen again would count as unchanged, see `given`.
            return with_tensors(recording.made, Tensor.detach)
        # What is handed through is the caller's own.
        through = {id(held): tensor for held, tensor in zip(recording.held, given, strict=True)}
        return with_tensors(recording.made, lambda made: through[id(made)] if id(made) in through else made.clone())


def version_of(tensor: Tensor) -> Version:
    """Return a count of a tensor's changes in place; None if nobody counts them."""
    return None if tensor.is_inference() else tensor._version


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
