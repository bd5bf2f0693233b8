"""Which blocks of a cache belong to which slot: they come as texts grow, serve texts that begin alike, and stay on.

A block holds `BLOCK` tokens. Full blocks of a text can be made findable (`publish`) and then serve other texts that
begin with the same tokens (`share`), because keys and values depend on nothing but the tokens up to theirs. Only full
blocks are shared, and nobody writes into them. A findable block that nobody uses any more stays until its memory is
needed; those that were used longest ago go first.

All of this is bookkeeping of the host. The device sees the tables alone, and those only when a slot gets or loses
blocks.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftsmith.targets.cache.cache import BLOCK, NO_BLOCK, KVCache

Namespace = bytes | int
WARM = 32
"""Blocks whose memory stays when a slot is emptied: to ask the system for it again takes longer than to write it."""


class OutOfBlocks(RuntimeError):
    """More blocks are needed than are free."""


@dataclass(eq=False)
class _Piece:
    """A block of a text that can be found: by the pieces before it and then by its tokens, which are compared whole."""

    block: int
    tokens: tuple[int, ...]
    home: "dict[tuple[int, ...], _Piece]"  # where it is found, by its tokens
    behind: "dict[tuple[int, ...], _Piece]" = field(default_factory=dict)
    findable: bool = True


@dataclass
class _Slot:
    """What one slot holds: its blocks, and of the first of them the findable pieces with the same text."""

    blocks: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    namespace: Namespace = 0


class Blocks:
    """Owner of the tables of one cache.

    Args:
        cache: made with a number of blocks, none of them in use.
    """

    def __init__(self, cache: KVCache) -> None:
        if cache.tables_RJ is None:
            raise ValueError("this cache has no blocks; make it with new_cache(slots, capacity, blocks=…)")
        self.cache = cache
        self._storage = [*cache.tensors, *([] if cache.states_NEF is None else [cache.states_NEF])]
        self._count = len(cache.tensors[0])
        self._slots = [_Slot() for _ in range(cache.slots)]
        self._room = [0] * cache.slots
        self._references = [0] * self._count
        self._free = list(range(self._count))[::-1]
        # Free ones whose memory has not gone back to the system, those that were freed first first.
        self._warm: dict[int, None] = {}
        # Findable blocks that no slot has, least recently used first; a dictionary keeps the order.
        self._idle: dict[int, None] = {}
        self._piece_of: dict[int, _Piece] = {}
        self._roots: dict[Namespace, dict[tuple[int, ...], _Piece]] = {}
        self.block_bytes = sum(tensor[0].nbytes for tensor in self._storage) if self._count else 0
        """Memory of a block, in all layers."""
        self.hits = 0
        """Tokens that `share` found and that nobody had to read again."""

    # ---- how much there is

    @property
    def limit(self) -> int:
        """How many tokens all blocks hold together."""
        return self._count * BLOCK

    @property
    def free_blocks(self) -> int:
        """Blocks that slots can still get, those of texts that nobody uses any more included."""
        return len(self._free) + len(self._idle)

    @property
    def held_tokens(self) -> int:
        """Tokens that fit the blocks of the slots; blocks of several slots count once."""
        return (self._count - self.free_blocks) * BLOCK

    @property
    def held_bytes(self) -> int:
        """Memory of the blocks of the slots."""
        return (self._count - self.free_blocks) * self.block_bytes

    @property
    def cached_bytes(self) -> int:
        """Memory of findable blocks that no slot has."""
        return len(self._idle) * self.block_bytes

    def room(self, slot: int) -> int:
        """Return how many tokens the blocks of a slot hold."""
        return self._room[slot]

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        """Return the blocks of a slot, in the order of its text."""
        return tuple(self._slots[slot].blocks)

    # ---- getting and giving back

    def missing(self, slot: int, tokens: int) -> int:
        """Return how many more blocks a slot needs to hold its first `tokens` tokens."""
        return max(0, -(-tokens // BLOCK) - self._room[slot] // BLOCK)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot blocks for its first `tokens` tokens; it keeps those it has.

        Raises:
            OutOfBlocks: there are not enough, and nothing has changed.
            ValueError: a slot does not hold so many tokens.
        """
        if tokens <= self._room[slot]:
            return
        if tokens > self.cache.capacity:
            raise ValueError(f"a slot holds {self.cache.capacity} tokens, and {tokens} are asked for")
        self._append(slot, self._take(self.missing(slot, tokens)))

    def release(self, slot: int) -> None:
        """Empty a slot. What it alone had and nobody can find goes back to the system where that is possible."""
        held = self._slots[slot]
        if not held.blocks:
            return
        gone = []
        # Backwards, so that of an idle text the end is forgotten first: what it begins with serves more texts.
        for block in reversed(held.blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                if block in self._piece_of:
                    self._idle[block] = None
                else:
                    gone.append(block)
        self._slots[slot], self._room[slot] = _Slot(), 0
        assert self.cache.tables_RJ is not None
        self.cache.tables_RJ[slot, : len(held.blocks)] = NO_BLOCK
        self._set_free(gone, WARM)

    def trim(self, keep_tokens: int = 0) -> int:
        """Forget findable blocks that no slot has until they hold at most so many tokens; return how many went.

        Their memory goes back to the system on Linux with a cache on the CPU, where they read as zeros from then on.
        On other devices memory stays PyTorch's.
        """
        before, gone = len(self._idle), []
        while len(self._idle) * BLOCK > max(0, keep_tokens):
            gone += self._forget(next(iter(self._idle)))
        self._set_free(gone)
        return (before - len(self._idle)) * BLOCK

    # ---- sharing

    def share(self, slot: int, tokens: Sequence[int], namespace: Namespace = 0) -> int:
        """Let an empty slot begin with the blocks of the longest findable text that `tokens` begin with.

        Args:
            tokens: the text that is to be read into the slot. At least its last token is left to be read.
            namespace: texts of different namespaces are not found for each other.

        Returns:
            how many tokens the slot holds now, a multiple of `BLOCK`.
        """
        held = self._slots[slot]
        if held.blocks:
            raise ValueError(f"slot {slot} is not empty; release it first")
        held.namespace = namespace
        pieces = self._find(tokens, namespace)
        self._refer(slot, [piece.block for piece in pieces])
        held.pieces = pieces
        self.hits += len(pieces) * BLOCK
        return len(pieces) * BLOCK

    def findable(self, tokens: Sequence[int], namespace: Namespace = 0) -> int:
        """Return how many tokens `share` would find now."""
        return len(self._find(tokens, namespace)) * BLOCK

    def publish(self, slot: int, tokens: Sequence[int]) -> None:
        """Make the full blocks of a slot findable, which holds exactly these tokens so far.

        What was published before is not looked at again, so that this costs next to nothing until a block is full.
        """
        held = self._slots[slot]
        full = len(tokens) // BLOCK
        if held.pieces and not held.pieces[-1].findable:
            held.pieces = []  # forgotten in the meantime: found again, or published anew
        if full <= len(held.pieces):
            return
        assert full <= len(held.blocks), "a slot holds the tokens that it is said to hold"
        for index in range(len(held.pieces), full):
            own = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            home = held.pieces[-1].behind if held.pieces else self._roots.setdefault(held.namespace, {})
            piece = home.get(own)
            if piece is None:
                # Several slots may have read the same text; the first one's blocks are those that are found.
                piece = home[own] = _Piece(held.blocks[index], own, home)
                self._piece_of[piece.block] = piece
            held.pieces.append(piece)

    # ---- inside

    def _find(self, tokens: Sequence[int], namespace: Namespace) -> list[_Piece]:
        """Follow a text through the findable pieces, as far as they go and its last token is left."""
        pieces: list[_Piece] = []
        behind = self._roots.get(namespace, {})
        for begin in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
            piece = behind.get(tuple(tokens[begin : begin + BLOCK]))
            if piece is None:
                break
            pieces.append(piece)
            behind = piece.behind
        return pieces

    def _refer(self, slot: int, blocks: list[int]) -> None:
        """Give a slot blocks that exist already."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)
        self._note(slot, blocks)

    def _append(self, slot: int, blocks: list[int]) -> None:
        """Give a slot fresh blocks."""
        for block in blocks:
            assert self._references[block] == 0
            self._references[block] = 1
        self._note(slot, blocks)

    def _note(self, slot: int, blocks: list[int]) -> None:
        if not blocks:
            return
        held, tables_RJ = self._slots[slot].blocks, self.cache.tables_RJ
        assert tables_RJ is not None
        begin = len(held)
        held += blocks
        tables_RJ[slot, begin : len(held)] = tables_RJ.new_tensor(blocks)
        self._room[slot] = len(held) * BLOCK

    def _take(self, count: int) -> list[int]:
        """Return blocks that nobody has any more, free ones first."""
        if count > self.free_blocks:
            raise OutOfBlocks(
                f"{count} blocks of {BLOCK} tokens are needed, and {self.free_blocks} of {self._count} are free."
            )
        while len(self._free) < count:
            # Their memory is written at once, so it is not given back in between.
            self._free += self._forget(next(iter(self._idle)))[::-1]
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._warm.pop(block, None)
        return taken

    def _forget(self, block: int) -> list[int]:
        """Make a block unfindable with all pieces behind it; return those of their blocks that no slot has."""
        first = self._piece_of[block]
        del first.home[first.tokens]
        gone, pieces = [], [first]
        while pieces:
            piece = pieces.pop()
            pieces += piece.behind.values()
            piece.behind, piece.findable = {}, False
            del self._piece_of[piece.block]
            if piece.block in self._idle:
                del self._idle[piece.block]
                gone.append(piece.block)
        return gone

    def _set_free(self, blocks: list[int], keep: int = 0) -> None:
        """Take blocks back, and give the memory of all but some to the system; those are taken first next time."""
        self._free += sorted(blocks, reverse=True)
        self._warm |= dict.fromkeys(blocks)
        cold = list(self._warm)[: max(0, len(self._warm) - keep)]
        for block in cold:
            del self._warm[block]
        for first, behind in _runs(cold):
            for tensor in self._storage:
                _give_back(tensor, first, behind)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return what follows each other among these numbers: the first of each run, and the number behind its last."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _system() -> ctypes.CDLL | None:
    # Elsewhere the call of this name leaves what is there, or does nothing.
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


_LIBRARY = _system()


def _give_back(storage: Tensor, first: int, behind: int) -> None:
    """Let the system have the whole pages of some blocks; they read as zeros when they are touched again."""
    if _LIBRARY is None or storage.device.type != "cpu":
        return
    size = storage[0].nbytes
    begin = -(-(storage.data_ptr() + first * size) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + behind * size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _LIBRARY.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))
