"""What the tests of several commands share."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.canned_server import Asked, CannedServer, Reply


@pytest.fixture
def serving() -> Iterator[Callable[[Callable[[Asked], Reply]], CannedServer]]:
    """Start servers that answer otherwise."""
    started: list[CannedServer] = []

    def start(of: Callable[[Asked], Reply]) -> CannedServer:
        started.append(CannedServer(of).__enter__())
        return started[-1]

    yield start
    for each in started:
        each.__exit__(None, None, None)
