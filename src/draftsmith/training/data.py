"""A streaming, shuffled loader of token windows that can be stopped anywhere and goes on exactly there.

Pieces of documents are drawn from all sources in one global order that depends on the seed alone; piece k belongs to
rank k mod world. The state names what was drawn, not the text: going on reads the files again up to that place. A state
saved by one number of ranks is taken up by another: no piece is lost or seen twice.
Shapes: B windows, T tokens a window.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.training.recipe import DataSection
from draftsmith.training.sources import Source
from draftsmith.types import DraftsmithError

SAMPLE_PIECES = 256
ENOUGH_CHARACTERS = 8


def noise(*labels: object) -> int:
    """Return 63 random bits that are a function of the labels alone, so that no generator state has to be kept."""
    digest = hashlib.blake2b(repr(labels).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class ShuffledSource:
    """Endless passes over one source, shuffled within a buffer; each pass yields every piece once."""

    def __init__(self, source: Source, seed: int, label: int, buffer_size: int) -> None:
        self.source, self.seed, self.label, self.buffer_size = source, seed, label, buffer_size
        self._begin(0, 0, [])

    def _begin(self, epoch: int, drawn: int, kept: Sequence[int], read: int = 0) -> None:
        """Open pass `epoch` where `read` pieces were taken from the stream and those in `kept` are in the buffer."""
        self.epoch, self.drawn, self.read = epoch, drawn, 0
        self._stream: Iterator[str] = self.source.pieces()
        self._buffer: list[tuple[int, str]] = []
        wanted, found = set(kept), {}
        while self.read < read:
            text = next(self._stream)
            if self.read in wanted:
                found[self.read] = text
            self.read += 1
        self._buffer = [(ordinal, found[ordinal]) for ordinal in kept]

    def _fill(self) -> None:
        while len(self._buffer) < self.buffer_size:
            text = next(self._stream, None)
            if text is None:
                return
            self._buffer.append((self.read, text))
            self.read += 1

    def mean_characters(self) -> float:
        """Estimate the length of a piece from the first few."""
        lengths = [len(text) for text, _ in zip(self.source.pieces(), range(SAMPLE_PIECES), strict=False)]
        return sum(lengths) / len(lengths)

    def draw(self) -> str:
        """Return the next piece."""
        self._fill()
        if not self._buffer:
            self._begin(self.epoch + 1, 0, [])
            self._fill()
        index = noise(self.seed, "piece", self.label, self.epoch, self.drawn) % len(self._buffer)
        self.drawn += 1
        self._buffer[index], self._buffer[-1] = self._buffer[-1], self._buffer[index]
        return self._buffer.pop()[1]

    def state_dict(self) -> dict[str, Any]:
        """Return where this source stands, as plain JSON."""
        return {
            "epoch": self.epoch, "drawn": self.drawn, "read": self.read,
            "buffer": [ordinal for ordinal, _ in self._buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where a state was taken."""
        try:
            self._begin(state["epoch"], state["drawn"], state["buffer"], state["read"])
        except StopIteration as error:
            raise DraftsmithError(
                f"{self.source.label} is shorter than when the checkpoint was saved; restore it, or start a new run."
            ) from error


@dataclass(frozen=True)
class Packing:
    """How pieces become windows of `length` tokens.

    With `one_a_piece`, each piece gives one window from a random place in it; else pieces are packed end to end, an end
    token between them.
    """

    length: int
    one_a_piece: bool = False


class Loader:
    """Windows for one rank of `world`.

    Args:
        tokenize: text to token ids, without special tokens.
        end_token: put after every piece.
    Raises:
        DraftsmithError: no sources, missing files, or nothing to train on in one of them.
    """

    def __init__(
        self, section: DataSection, tokenize: Callable[[str], list[int]], end_token: int, packing: Packing, *,
        seed: int, rank: int = 0, world: int = 1,
    ) -> None:
        if not section.sources:
            raise DraftsmithError("data.sources is empty; list at least one file or data set to train on.")
        self.tokenize, self.end_token, self.packing = tokenize, end_token, packing
        self.seed, self.rank, self.world = seed, rank, world
        self.pool_size = section.shuffle_windows
        self.sources = [
            ShuffledSource(
                Source(item, section.held_out_every, section.piece_characters), seed, i, section.shuffle_documents
            )
            for i, item in enumerate(section.sources)
        ]
        odds = [item.weight / s.mean_characters() for item, s in zip(section.sources, self.sources, strict=True)]
        self.odds = [odd / sum(odds) for odd in odds]
        self.pieces = 0
        self.windows = 0
        self.past: list[dict[str, Any]] = []
        self._rest: list[int] = []
        self._pool: list[list[int]] = []

    @property
    def epochs(self) -> list[int]:
        """Finished passes over each source."""
        return [source.epoch for source in self.sources]

    @property
    def empty(self) -> int:
        """Empty documents met in the current pass over each source, summed."""
        return sum(source.source.empty for source in self.sources)

    def _pick(self, piece: int) -> ShuffledSource:
        point = noise(self.seed, "source", piece) / 2**63
        for source, odd in zip(self.sources, self.odds, strict=True):
            point -= odd
            if point < 0:
                return source
        return self.sources[-1]

    def _is_mine(self, piece: int) -> bool:
        if any(piece < era["pieces"][piece % era["world"]] for era in self.past):
            return False
        return piece % self.world == self.rank

    def _read_piece(self) -> None:
        piece = self.pieces
        text = self._pick(piece).draw()
        self.pieces += 1
        if not self._is_mine(piece):
            return
        length = self.packing.length
        if self.packing.one_a_piece:
            # A slice that surely holds enough; its first token may be the end of a word, so it is left out.
            spare = max(1, len(text) - ENOUGH_CHARACTERS * length)
            start = noise(self.seed, "start", piece) % spare
            tokens = self.tokenize(text[start : start + 2 * ENOUGH_CHARACTERS * length])[1:]
            if len(tokens) >= length:
                self._pool.append(tokens[:length])
            return
        tokens = [*self.tokenize(text), self.end_token]
        self._rest += tokens
        while len(self._rest) >= length:
            self._pool.append(self._rest[:length])
            del self._rest[:length]

    def next_window(self) -> list[int]:
        """Return the next window, drawn at random from a pool."""
        misses = 0
        while len(self._pool) < self.pool_size:
            before = len(self._pool)
            self._read_piece()
            misses = 0 if len(self._pool) > before else misses + 1
            if misses > 10_000 * self.world:
                raise DraftsmithError(f"no text in data.sources is longer than {self.packing.length} tokens; add some.")
        index = noise(self.seed, "window", self.rank, self.windows) % len(self._pool)
        self.windows += 1
        self._pool[index], self._pool[-1] = self._pool[-1], self._pool[index]
        return self._pool.pop()

    def next_batch(self, size: int) -> Tensor:
        """Return the next `size` windows as tokens_BT."""
        return torch.tensor([self.next_window() for _ in range(size)], dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands, as plain JSON."""
        return {
            "rank": self.rank, "world": self.world, "pieces": self.pieces, "windows": self.windows,
            "past": self.past, "sources": [source.state_dict() for source in self.sources],
            "rest": list(self._rest), "pool": [list(window) for window in self._pool],
        }

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Go on from the states of all ranks, saved by as many ranks as now or by another number of them.

        Raises:
            DraftsmithError: a rank's state is missing, or the sources are not those of the state.
        """
        states = tuple(sorted(states, key=lambda state: int(state["rank"])))
        world = states[0]["world"]
        same_world = world == self.world
        if same_world and len(states) == 1:
            mine = states[0]
        elif len(states) == world:
            mine = states[self.rank] if same_world else min(states, key=lambda state: int(state["pieces"]))
        else:
            raise DraftsmithError(f"{len(states)} loader states were given, but {world} ranks had saved one; give all.")
        if len(mine["sources"]) != len(self.sources):
            raise DraftsmithError("data.sources differs from that of the checkpoint; use the same, or start a new run.")
        for source, state in zip(self.sources, mine["sources"], strict=True):
            source.load_state_dict(state)
        self.pieces, self.past = mine["pieces"], list(mine["past"])
        if same_world:
            self.windows, self._rest, self._pool = mine["windows"], list(mine["rest"]), [list(w) for w in mine["pool"]]
            return
        self.past.append({"world": world, "pieces": [state["pieces"] for state in states]})
        self.windows = max(state["windows"] for state in states)
        everything = [window for state in states for window in state["pool"]]
        self._pool = [list(window) for window in everything[self.rank :: self.world]]
        self._rest = [token for state in states[self.rank :: self.world] for token in state["rest"]]
