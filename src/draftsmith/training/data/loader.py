"""A streaming, shuffled loader of token windows that can be stopped anywhere and continues exactly there.

Pieces of documents are drawn from all sources in one global order that depends on the seed alone; piece k belongs to
rank k mod world. The state holds what was drawn, not the text; to continue, the files are read again up to that place.
A state that was saved by one number of ranks can be loaded by another: no piece is lost or seen twice.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from draftsmith.training.data.reader import Reader, Unusable
from draftsmith.training.data.sources import Piece, Source
from draftsmith.training.data.windows import Batch, Window, collate, cut
from draftsmith.training.sections import DataSection
from draftsmith.types import DraftsmithError

SAMPLE_PIECES = 256
MOST_MISSES = 10_000
"""If more pieces in a row, for each rank, give no window, there is nothing to use in the data."""
LENGTH_CLASSES = 8
"""Windows of a batch have similar lengths; this is the number of length classes."""


def noise(*labels: object) -> int:
    """Return 63 random bits that depend on the labels alone, so that no generator state has to be saved."""
    digest = hashlib.blake2b(repr(labels).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class NothingUsable(DraftsmithError):
    """No piece of the data gives tokens to learn; `reasons` counts the pieces by what is wrong with them."""

    def __init__(self, reasons: str, advice: str) -> None:
        self.reasons = reasons
        super().__init__(f"no document in data.sources can be used ({reasons}); {advice}.")


class ShuffledSource:
    """Endless passes over one source, shuffled within a buffer; each pass yields every piece once."""

    def __init__(self, source: Source, seed: int, label: int, buffer_size: int) -> None:
        self.source, self.seed, self.label, self.buffer_size = source, seed, label, buffer_size
        self._begin(0, 0, [])

    def _begin(self, epoch: int, drawn: int, kept: Sequence[int], read: int = 0) -> None:
        """Start pass `epoch` where `read` pieces were taken from the stream, and those in `kept` are in the buffer."""
        self.epoch, self.drawn, self.read = epoch, drawn, 0
        self._stream: Iterator[Piece] = self.source.pieces()
        self._buffer: list[tuple[int, Piece]] = []
        wanted, found = set(kept), {}
        while self.read < read:
            piece = next(self._stream)
            if self.read in wanted:
                found[self.read] = piece
            self.read += 1
        self._buffer = [(ordinal, found[ordinal]) for ordinal in kept]

    def _fill(self) -> None:
        while len(self._buffer) < self.buffer_size:
            piece = next(self._stream, None)
            if piece is None:
                return
            self._buffer.append((self.read, piece))
            self.read += 1

    def mean_characters(self) -> float:
        """Estimate the length of a piece from the first few."""
        lengths = [piece.characters for piece, _ in zip(self.source.pieces(), range(SAMPLE_PIECES), strict=False)]
        return sum(lengths) / len(lengths)

    def peek(self, chance: int) -> Piece | None:
        """Return one of the pieces in memory without drawing it; None if there are none."""
        return self._buffer[chance % len(self._buffer)][1] if self._buffer else None

    def draw(self) -> Piece:
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
        """Return the position in this source, as plain JSON."""
        return {
            "epoch": self.epoch, "drawn": self.drawn, "read": self.read,
            "buffer": [ordinal for ordinal, _ in self._buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a saved state."""
        try:
            self._begin(state["epoch"], state["drawn"], state["buffer"], state["read"])
        except StopIteration as error:
            raise DraftsmithError(
                f"{self.source.label} is shorter than when the checkpoint was saved; restore it, or start a new run."
            ) from error


@dataclass(frozen=True)
class Windowing:
    """How pieces become windows of at most `length` tokens.

    With `prompts`, each piece gives one prompt: a text of exactly `length` tokens, other documents whole, up to
    `prompts` tokens. Without `prompts`, each piece is cut into windows, all of which are learnt.
    """

    length: int
    prompts: int | None = None


class Loader:
    """Windows for one rank of `world`.

    Raises:
        DraftsmithError: no sources, missing files, or nothing to train on in one of them.
    """

    def __init__(
        self, section: DataSection, reader: Reader, windowing: Windowing, *, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        if not section.sources:
            raise DraftsmithError("data.sources is empty; list at least one file or data set to train on.")
        self.reader, self.windowing = reader, windowing
        self.seed, self.rank, self.world = seed, rank, world
        self.pool_size = section.shuffle_windows
        self.sources = [
            ShuffledSource(
                Source(item, section.held_out_every, section.piece_characters), seed, i, section.shuffle_documents
            )
            for i, item in enumerate(section.sources)
        ]
        # A piece gives windows for all of its tokens, but a single prompt however long it is.
        sizes = [source.mean_characters() for source in self.sources]
        if windowing.prompts is not None:
            sizes = [1.0] * len(sizes)
        odds = [item.weight / size for item, size in zip(section.sources, sizes, strict=True)]
        self.odds = [odd / sum(odds) for odd in odds]
        self.pieces = 0
        self.windows = 0
        self.unusable: Counter[str] = Counter()
        self.past: list[dict[str, Any]] = []
        self._pool: list[Window] = []

    @property
    def epochs(self) -> list[int]:
        """The number of finished passes over each source."""
        return [source.epoch for source in self.sources]

    def account(self) -> dict[str, Any]:
        """Return what was read and what was left out, as plain JSON.

        Documents are those read so far in the current pass over each source; some of them still wait to be shuffled.
        `unusable` counts pieces that were drawn and gave no tokens to learn from.
        """
        sources = [shuffled.source.account() for shuffled in self.sources]
        return {"sources": sources, "pieces": self.pieces, "unusable": dict(self.unusable)}

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
        number = self.pieces
        piece = self._pick(number).draw()
        self.pieces += 1
        if not self._is_mine(number):
            return
        try:
            self._pool += self._windows_of(piece, number)
        except Unusable as error:
            self.unusable[str(error)] += 1

    def _windows_of(self, piece: Piece, number: int) -> list[Window]:
        length, longest = self.windowing.length, self.windowing.prompts
        if longest is None:
            return cut(self.reader.text(piece), self.reader.opening, length)
        return [
            Window(self.reader.prompt(piece, length, longest, lambda purpose: noise(self.seed, purpose, number)), [])
        ]

    def _fill(self) -> None:
        misses = 0
        while len(self._pool) < self.pool_size:
            before = len(self._pool)
            self._read_piece()
            misses = 0 if len(self._pool) > before else misses + 1
            if misses > MOST_MISSES * self.world:
                raise self._nothing_usable()

    def _nothing_usable(self) -> NothingUsable:
        """Say why no piece can be used; each is counted once, though it was drawn in every pass over its source."""
        reasons: Counter[tuple[str, str]] = Counter()  # each with what to do about it
        pieces = (piece for source in self.sources for piece in source.source.pieces())
        for number, piece in enumerate(islice(pieces, MOST_MISSES)):
            try:
                self._windows_of(piece, number)
            except Unusable as error:
                reasons[str(error), error.advice] += 1
        commonest = reasons.most_common(3)
        said = "; ".join(f"{count:,}: {reason}" for (reason, _), count in commonest)
        if next(pieces, None) is not None:
            said = f"of the first {MOST_MISSES:,}: {said}"
        return NothingUsable(said, commonest[0][0][1] if commonest else "add others")

    def first(self, count: int) -> list[Window]:
        """Return some of the next windows without drawing them."""
        self._fill()
        return self._pool[:count]

    def waiting(self) -> Iterator[Piece]:
        """Yield random pieces that wait to be drawn, without drawing them and without end; pieces may repeat."""
        self._fill()
        for number in count(1):
            piece = self._pick(-number).peek(noise(self.seed, "waiting", number))
            if piece is not None:
                yield piece

    def next_window(self, near: int | None = None) -> Window:
        """Return the next window, drawn at random from a pool; with `near`, of about that length if there is one."""
        self._fill()
        places = list(range(len(self._pool)))
        if near is not None:
            wanted = self._class_of(near)
            apart = [abs(self._class_of(len(window.tokens)) - wanted) for window in self._pool]
            nearest = min(apart)
            places = [place for place in places if apart[place] == nearest]
        index = places[noise(self.seed, "window", self.rank, self.windows) % len(places)]
        self.windows += 1
        self._pool[index], self._pool[-1] = self._pool[-1], self._pool[index]
        return self._pool.pop()

    def _class_of(self, length: int) -> int:
        return -(-length * LENGTH_CLASSES // self.windowing.length)

    def next_batch(self, size: int, room: int = 0) -> Batch:
        """Return the next `size` windows, of similar length, side by side; see `collate`."""
        rows = [self.next_window()]
        while len(rows) < size:
            rows.append(self.next_window(len(rows[0].tokens)))
        return collate(rows, self.windowing.length, room)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, as plain JSON."""
        return {
            "rank": self.rank, "world": self.world, "pieces": self.pieces, "windows": self.windows,
            "past": self.past, "sources": [source.state_dict() for source in self.sources],
            "pool": [window.to_json() for window in self._pool], "unusable": dict(self.unusable),
        }

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue from the states of all ranks, saved by the same or another number of ranks.

        Raises:
            DraftsmithError: a rank's state is missing or of an earlier version, or the sources are not those of the
                state.
        """
        if any("unusable" not in state for state in states):
            raise DraftsmithError("the checkpoint was written by an earlier version; start a new run.")
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
        self.unusable = Counter(mine["unusable"])
        if same_world:
            self.windows, self._pool = mine["windows"], [Window.from_json(value) for value in mine["pool"]]
            return
        self.past.append({"world": world, "pieces": [state["pieces"] for state in states]})
        self.windows = max(state["windows"] for state in states)
        everything = [Window.from_json(value) for state in states for value in state["pool"]]
        self._pool = everything[self.rank :: self.world]
