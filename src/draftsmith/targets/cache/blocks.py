"""Says which blocks of a cache belong to which slot: slots get blocks as texts grow, and texts share common beginnings.

A block holds `BLOCK` tokens. The full blocks of a text can be made findable (`publish`) and then serve other texts that
begin with the same tokens (`share`), because keys and values depend only on the tokens up to theirs. Only full blocks
are shared, and nothing is written into them. A findable block that no slot uses any more stays until its memory is
needed; those that were unused longest go first.

All of this is bookkeeping on the host. The device only sees the tables, which are sent when a slot gets or loses
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
"""Blocks whose memory is kept when a slot is emptied: getting it from the system again takes longer than writing it."""


class OutOfBlocks(RuntimeError):
    """More blocks are needed than are free."""


@dataclass(eq=False)
class _Piece:
    """A block of a findable text. It is found through the pieces before it and then by its tokens, compared exactly."""

    block: int
    tokens: tuple[int, ...]
    home: "dict[tuple[int, ...], _Piece]"  # the dictionary that holds it, by its tokens
    namespace: Namespace
    behind: "dict[tuple[int, ...], _Piece]" = field(default_factory=dict)
    findable: bool = True


@dataclass
class _Slot:
    """What one slot holds: its blocks, and for the first of them the findable pieces with the same text."""

    blocks: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    namespace: Namespace = 0


class Blocks:
    """Owns the tables of one cache.

    Args:
        cache: made with a number of blocks, none of which is in use.
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
        # Free blocks whose memory has not gone back to the system, in the order in which they were freed.
        self._warm: dict[int, None] = {}
        # Findable blocks that no slot uses, least recently used first; a dictionary keeps the order.
        self._idle: dict[int, None] = {}
        self._piece_of: dict[int, _Piece] = {}
        self._roots: dict[Namespace, dict[tuple[int, ...], _Piece]] = {}
        self.block_bytes = sum(tensor[0].nbytes for tensor in self._storage) if self._count else 0
        """Memory of one block, in all layers."""
        self.hits = 0
        """Tokens that `share` found, so that they did not have to be read again."""

    # ---- amounts

    @property
    def limit(self) -> int:
        """How many tokens all blocks together can hold."""
        return self._count * BLOCK

    @property
    def free_blocks(self) -> int:
        """Blocks that slots can still get, including those of texts that no slot uses any more."""
        return len(self._free) + len(self._idle)

    @property
    def held_tokens(self) -> int:
        """Tokens that fit into the blocks of the slots; a block of several slots counts once."""
        return (self._count - self.free_blocks) * BLOCK

    @property
    def held_bytes(self) -> int:
        """Memory of the blocks of the slots."""
        return (self._count - self.free_blocks) * self.block_bytes

    @property
    def cached_bytes(self) -> int:
        """Memory of the findable blocks that no slot uses."""
        return len(self._idle) * self.block_bytes

    def room(self, slot: int) -> int:
        """Return how many tokens fit into the blocks of a slot."""
        return self._room[slot]

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        """Return the blocks of a slot, in the order of its text."""
        return tuple(self._slots[slot].blocks)

    # ---- taking and giving back

    def missing(self, slot: int, tokens: int) -> int:
        """Return how many more blocks a slot needs to hold its first `tokens` tokens."""
        return max(0, -(-tokens // BLOCK) - self._room[slot] // BLOCK)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot enough blocks for its first `tokens` tokens; it keeps the blocks it has.

        Raises:
            OutOfBlocks: there are not enough free blocks; nothing has changed.
            ValueError: a slot cannot hold that many tokens.
        """
        if tokens <= self._room[slot]:
            return
        if tokens > self.cache.capacity:
            raise ValueError(f"a slot holds {self.cache.capacity} tokens, and {tokens} are asked for")
        self._append(slot, self._take(self.missing(slot, tokens)))

    def release(self, slot: int) -> None:
        """Empty a slot. The memory of blocks that only it used, and that are not findable, goes back to the system."""
        held = self._slots[slot]
        if not held.blocks:
            return
        gone = []
        # Backwards, so that the end of an unused text is forgotten first: its beginning may serve more texts.
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
        """Forget unused findable blocks until they hold at most `keep_tokens` tokens; return how many were forgotten.

        On Linux with a cache on the CPU, their memory goes back to the system and reads as zeros from then on. On other
        devices PyTorch keeps the memory.
        """
        before, gone = len(self._idle), []
        while len(self._idle) * BLOCK > max(0, keep_tokens):
            gone += self._forget(next(iter(self._idle)))
        self._set_free(gone)
        return (before - len(self._idle)) * BLOCK

    # ---- sharing

    def share(self, slot: int, tokens: Sequence[int], namespace: Namespace = 0) -> int:
        """Let an empty slot begin with the blocks of the longest findable text that is a beginning of `tokens`.

        Args:
            tokens: the text that is to be read into the slot. At least its last token is left to be read.
            namespace: a text is found only within its own namespace.

        Returns:
            the number of tokens that the slot now holds, a multiple of `BLOCK`.
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
        """Make the full blocks of a slot findable; the slot has to hold exactly these tokens.

        Blocks published before are not looked at again, so this costs almost nothing until a block is full.
        """
        held = self._slots[slot]
        full = len(tokens) // BLOCK
        if held.pieces and not held.pieces[-1].findable:
            held.pieces = []  # forgotten in the meantime: they are found again below, or published anew
        if full <= len(held.pieces):
            return
        assert full <= len(held.blocks), "a slot holds the tokens that it is said to hold"
        for index in range(len(held.pieces), full):
            own = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            home = held.pieces[-1].behind if held.pieces else self._roots.setdefault(held.namespace, {})
            piece = home.get(own)
            if piece is None:
                # Several slots may have read the same text; the blocks of the first one are those that are found.
                piece = home[own] = _Piece(held.blocks[index], own, home, held.namespace)
                self._piece_of[piece.block] = piece
            held.pieces.append(piece)

    # ---- internal

    def _find(self, tokens: Sequence[int], namespace: Namespace) -> list[_Piece]:
        """Follow a text through the findable pieces; at least its last token is left to be read."""
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
        """Add existing blocks to a slot."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)
        self._note(slot, blocks)

    def _append(self, slot: int, blocks: list[int]) -> None:
        """Add fresh blocks to a slot."""
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
        """Return `count` blocks that no slot uses, free ones first."""
        if count > self.free_blocks:
            raise OutOfBlocks(
                f"{count} blocks of {BLOCK} tokens are needed, and {self.free_blocks} of {self._count} are free."
            )
        while len(self._free) < count:
            # Their memory is written right away, so it is not given back to the system in between.
            self._free += self._forget(next(iter(self._idle)))[::-1]
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._warm.pop(block, None)
        return taken

    def _forget(self, block: int) -> list[int]:
        """Make a block unfindable, with all pieces behind it; return those of their blocks that no slot uses."""
        first = self._piece_of[block]
        del first.home[first.tokens]
        if not self._roots[first.namespace]:
            del self._roots[first.namespace]
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
        """Free blocks; give the memory of all but `keep` of them to the system. The kept ones are reused first."""
        self._free += sorted(blocks, reverse=True)
        self._warm |= dict.fromkeys(blocks)
        cold = list(self._warm)[: max(0, len(self._warm) - keep)]
        for block in cold:
            del self._warm[block]
        for first, behind in _runs(cold):
            for tensor in self._storage:
                _give_back(tensor, first, behind)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, each as its first number and the number behind its last."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _system() -> ctypes.CDLL | None:
    # On other systems the call of this name keeps the memory, or does nothing.
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


_LIBRARY = _system()


def _give_back(storage: Tensor, first: int, behind: int) -> None:
    """Give the whole pages of some blocks to the system; they read as zeros when they are touched again."""
    if _LIBRARY is None or storage.device.type != "cpu":
        return
    size = storage[0].nbytes
    begin = -(-(storage.data_ptr() + first * size) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + behind * size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _LIBRARY.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))
