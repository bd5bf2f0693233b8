"""Streams that are read by their own tasks: several merged into one, or one that can say whether more is there."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class Followed(Generic[T]):
    """The pieces of some streams, in the order in which they come.

    Use as `async with Followed(streams) as pieces: async for piece in pieces`. All streams are closed however the block
    ends. If a stream raises, the loop raises too, after all pieces that came before.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[T, None]]) -> None:
        self._streams = streams
        self._came: asyncio.Queue[T | _End] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(streams)

    async def __aenter__(self) -> "Followed[T]":
        self._tasks = [asyncio.create_task(self._follow(stream)) for stream in self._streams]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __aiter__(self) -> "Followed[T]":
        return self

    async def __anext__(self) -> T:
        while self._left:
            found = await self._came.get()
            if not isinstance(found, _End):
                return found
            if found.error is not None:
                raise found.error
            self._left -= 1
        raise StopAsyncIteration

    @property
    def has_more(self) -> bool:
        """Whether the next piece, or the end, is there already."""
        return not self._came.empty()

    async def _follow(self, stream: AsyncGenerator[T, None]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(stream) as own:
                async for piece in own:
                    self._came.put_nowait(piece)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # so that the reader does not wait for ever
            self._came.put_nowait(_End(raised))
            raise
        self._came.put_nowait(_End(error))


class _End:
    """Marks the end of a stream, with the error that it failed on, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the pieces of all these streams as they come; if one raises, or the reader stops, all are closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield piece
        return
    async with Followed(streams) as pieces:
        async for piece in pieces:
            yield piece
