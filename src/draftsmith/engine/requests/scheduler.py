"""Whose turn it is: which requests get a slot, and which pieces of prompts are read beside the next decoding step.

First come, first served, within a priority. A request that does not fit waits, and no request of the same priority
overtakes it. So a request starves only under a steady flow of requests of higher priority. A request gets a slot when
the most it may ever hold fits beside the most that the others may hold, so none has to be thrown out in the middle.
"""

import heapq
import time
from bisect import insort
from dataclasses import dataclass, field

from draftsmith.engine.limits import SCORED_PIECE
from draftsmith.engine.policy import Load
from draftsmith.engine.requests.request import NO_SLOT, Request
from draftsmith.targets import BLOCK, Blocks


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` - 1 of a request's prompt: to be read next or, if `stored`, to be shown to drafters."""

    request: Request
    begin: int
    end: int
    stored: bool = False

    @property
    def ends_prompt(self) -> bool:
        """Whether the first token of the text follows."""
        return self.end == len(self.request.prompt)


@dataclass
class Scheduler:
    """Knows who waits, who reads and who decodes.

    Args:
        blocks: hands out the cache's memory, and shares common beginnings of prompts.
        max_batch: most requests that hold a slot.
        max_tokens: most tokens that the texts of these requests may have together at their ends.
        piece: most prompt tokens that are read in a step while rows decode.
        largest_piece: the same while no row decodes.
        room: cache places for what drafters write after a row's text and draft, at least 1.
        share: whether common beginnings of prompts are read and stored only once.
        tells: whether a drafter with a memory wants to see prompts.
    """

    blocks: Blocks
    max_batch: int
    max_tokens: int
    piece: int
    largest_piece: int
    room: int
    share: bool
    tells: bool
    waiting: list[tuple[int, int, Request]] = field(default_factory=list)
    reading: list[Request] = field(default_factory=list)
    decoding: dict[int, Request] = field(default_factory=dict)
    """By id."""
    tokens: int = 0
    """The most tokens that the texts of the requests with a slot may have together."""
    _free: list[int] = field(init=False)
    _deadlines: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.max_batch))

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        heapq.heappush(self.waiting, (*_turn(request), request))
        self._deadlines += request.deadline is not None

    @property
    def has_work(self) -> bool:
        """Whether any request waits, reads or decodes."""
        return bool(self.waiting or self.reading or self.decoding)

    def load(self) -> Load:
        """Return how busy the core is, for a policy."""
        return Load(len(self.decoding), len(self.reading), len(self.waiting), self.max_batch)

    def overdue(self) -> list[Request]:
        """Return the requests whose deadline has passed."""
        if not self._deadlines:
            return []
        now = time.monotonic()
        everybody = [*(request for *_, request in self.waiting), *self.reading, *self.decoding.values()]
        return [request for request in everybody if request.deadline is not None and request.deadline <= now]

    def pieces(self) -> list[Piece]:
        """Give slots to the requests whose turn it is; return what to read next, in the order of their turns."""
        while self.waiting and self._free:
            request = self.waiting[0][2]
            if self.tokens + whole(request) > self.max_tokens:
                break
            heapq.heappop(self.waiting)
            # The lowest slot, because rows in adjacent slots are read without being gathered.
            request.slot = heapq.heappop(self._free)
            self.tokens += whole(request)
            request.began_at = time.monotonic()
            insort(self.reading, request, key=_turn)
        budget = self.piece if self.decoding else self.largest_piece
        pieces: list[Piece] = []
        for request in self.reading:
            if budget <= 0:
                break
            scored = request.params.prompt_logprobs is not None
            if self.share and request.read == 0:
                if not scored and self._comes_later(request):
                    continue
                # All tokens of a prompt that is scored have to be read.
                known = request.prompt[:1] if scored else request.prompt
                request.read = request.shared = self.blocks.share(request.slot, known, request.namespace)
            if self.tells and request.told < request.shared and not request.never_drafts:
                told = min(request.shared, request.told + budget)
                budget -= told - request.told
                pieces.append(Piece(request, request.told, told, stored=True))
                if budget <= 0:
                    break
            end = min(len(request.prompt), request.read + (min(budget, SCORED_PIECE) if scored else budget))
            budget -= end - request.read
            # Room for drafts is reserved when the request decodes.
            self.blocks.reserve(request.slot, min(end + 1, self.blocks.cache.capacity))
            pieces.append(Piece(request, request.read, end))
        return pieces

    def _comes_later(self, request: Request) -> bool:
        """Whether an earlier request is about to read more of the same beginning than is stored now."""
        more = self.blocks.findable(request.prompt, request.namespace) + BLOCK
        if more >= len(request.prompt):
            return False  # all that can be shared is stored already
        begin, block = request.prompt[:more], request.prompt[more - BLOCK : more]
        for other in self.reading:
            if other is request:
                return False
            # The block that would be new first, since most prompts differ there.
            alike = other.namespace == request.namespace and other.prompt[more - BLOCK : more] == block
            if alike and other.prompt[:more] == begin:
                return True
        return False

    def done_reading(self, request: Request) -> None:
        """Let a request decode after its prompt was read."""
        self.reading.remove(request)
        self.decoding[request.id] = request

    def remove(self, request: Request, stored: list[int] | None) -> None:
        """Forget a request, whether it waits, reads or decodes; its slot is free at once.

        Args:
            stored: the tokens whose keys and values its slot holds, for others to share; None throws them away.
        """
        self._deadlines -= request.deadline is not None
        if request.slot == NO_SLOT:
            self.waiting = [entry for entry in self.waiting if entry[2] is not request]
            heapq.heapify(self.waiting)
            return
        if self.decoding.pop(request.id, None) is None:
            self.reading.remove(request)
        if self.share and stored is not None:
            self.blocks.publish(request.slot, stored)
        self.blocks.release(request.slot)
        self.tokens -= whole(request)
        heapq.heappush(self._free, request.slot)
        request.slot = NO_SLOT


def _turn(request: Request) -> tuple[int, int]:
    """Return what requests are ordered by: the larger priority goes first, among equals the one that came first."""
    return -request.priority, request.id


def whole(request: Request) -> int:
    """Return the most tokens that a request's text may have."""
    return len(request.prompt) + request.params.max_tokens
