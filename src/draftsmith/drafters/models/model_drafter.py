"""Drafting with a whole language model: it reads the text with its own cache, then its own guesses.

"Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192), section 2.

Shapes: B rows, R = B × frontier nodes, D tokens of a path below the root, T context tokens, V the target's vocabulary,
W that of the drafting model.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.drafters.base import StagewiseDrafter, best
from draftsmith.drafters.grow import grow
from draftsmith.drafters.models.depth import MAX_DEPTH
from draftsmith.drafters.models.path_reader import ROOM, SCRATCH, PathReader
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Target
from draftsmith.targets.copies import bytes_by_place
from draftsmith.types import UNUSED, Context, Draft, empty_draft


class ModelDrafter(StagewiseDrafter):
    """What whole models have in common: a chain grows by one token per level, wider trees are read path by path.

    The state of a node is its path of tokens below the root. If a frontier has several nodes, every path is read again
    at every level, all in one forward.

    Args:
        model: the model that drafts.
        vocab_size: of the target.
        guesses: depth of the chain that is drafted if no plan was chosen.
    """

    taps = ()

    def __init__(self, model: Target, vocab_size: int, guesses: int) -> None:
        self.model, self.vocab_size, self.guesses = model, vocab_size, guesses
        self._reader: PathReader | None = None
        self._held: list[int] = []
        self._fresh: list[list[int]] = []
        self._slots_B: Tensor | None = None
        # The guesses that the cache holds as if they were text; see `PathReader.read_paths`.
        self._ahead_BD: Tensor | None = None
        self._is_chain = True

    def parameter_count(self) -> int:
        """Count the model's weights."""
        return self.model.weights

    def memory_bytes(self) -> int:
        """Return the memory of the model's weights, without its cache."""
        return sum(bytes_by_place(self.model.model).values())

    @abstractmethod
    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        """Return for every row how many tokens the cache holds, and the tokens to read behind them, the root last."""

    def to_own(self, tokens: Tensor) -> Tensor:
        """Translate ids of the target into the model's; a token that the model lacks becomes any other token."""
        return tokens.clamp(max=self.model.vocab_size - 1)

    def to_target(self, logits_RW: Tensor) -> Tensor:
        """Translate logits over the model's vocabulary into logits over the target's (R, V)."""
        return pad(logits_RW[:, : self.vocab_size], (0, max(0, self.vocab_size - logits_RW.shape[1])), value=-torch.inf)

    def begin(self, context: Context) -> tuple[Tensor, Tensor]:
        """Note the committed tokens; the first step reads them."""
        self._held, self._fresh = self.take_in(context)
        self._slots_B = context.slots_B
        self._ahead_BD, self._is_chain = None, True
        root_B = context.root()[0]
        return root_B, root_B.new_empty((root_B.shape[0], 0))

    def step(self, depth: int, state: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q (R, V) in fp32 and the paths of the nodes (R, depth)."""
        logits_RV, paths_RD = self._read(depth, state, tokens_R)
        return logits_RV.float().log_softmax(-1), paths_RD

    def top_k(
        self, depth: int, state: Tensor, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Find the best k by their logits, without a softmax unless scores are wanted."""
        logits_RV, paths_RD = self._read(depth, state, tokens_R)
        logits_Rk, tokens_Rk = best(logits_RV, k)
        log_q_Rk = logits_Rk.float() - logits_RV.float().logsumexp(-1, keepdim=True) if scores else None
        return log_q_Rk, tokens_Rk, paths_RD

    def _read(self, depth: int, state: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        assert self._reader is not None, "a drafter is attached to a cache before it drafts"
        if depth == 0:
            return self.to_target(self._reader.read(self._held, self._fresh, self._slots_B)), state
        paths_RD = torch.cat([state, self.to_own(tokens_R).unsqueeze(1)], dim=1)
        batch = len(self._held)
        paths_BFD = paths_RD.view(batch, -1, depth)
        ends = [held + len(fresh) for held, fresh in zip(self._held, self._fresh, strict=True)]
        # A frontier may also narrow to one node, but then the cache does not hold that node's path.
        self._is_chain = self._is_chain and paths_BFD.shape[1] == 1
        if self._is_chain:
            newest = [end + depth - 1 for end in ends]
            logits_RW, kept = self._reader.read_paths(newest, paths_BFD[:, :, -1:], self._slots_B)
        else:
            logits_RW, kept = self._reader.read_paths(ends, paths_BFD, self._slots_B)
        self._ahead_BD = paths_BFD[:, kept]
        return self.to_target(logits_RW), paths_RD

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a tree of any shape."""
        return grow(self, context, plan)

    def default_plan(self) -> Plan:
        """Return a chain."""
        return Plan((1,) * self.guesses)

    @property
    def max_depth(self) -> int:
        """The limit for whole models; they have no depth of their own."""
        return MAX_DEPTH


class RowText:
    """The committed text of one row in the tokens of the drafting model."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> int:
        """Append committed tokens, given as ids of the target; return how many earlier own tokens surely stay."""
        before = len(self.tokens)
        self.tokens += tokens
        return before


class DraftModel(ModelDrafter):
    """A separate model with the target's tokenizer, and its own cache with the engine's slots.

    What it read of its own guesses stays in the cache as far as the guesses were accepted. Texts longer than the
    model's context get no more guesses.
    """

    reads_prompt = True

    def __init__(self, model: Target, vocab_size: int, guesses: int) -> None:
        super().__init__(model, vocab_size, guesses)
        self._cache: KVCache | None = None
        self._limit = 0
        self._texts: dict[int, RowText] = {}
        # For each row, the guesses that the cache holds behind its text.
        self._guesses: dict[int, list[int]] = {}
        self._too_long: set[int] = set()
        self._order: list[int] = []

    def new_text(self) -> RowText:
        """Return the text of a new row."""
        return RowText()

    def longest_text(self, cache: KVCache) -> int:
        """Return how many of its own tokens the model may have to store for a row of the target's cache."""
        return cache.capacity

    def attach(self, cache: KVCache, plan: Plan) -> None:
        """Allocate a cache for as many rows, and forget all rows."""
        self._limit = min(self.model.max_length, self.longest_text(cache))
        sizes = (cache.slots, self._limit + ROOM)
        if self._cache is None or (self._cache.slots, self._cache.capacity) != sizes:
            self._cache = self.model.new_cache(*sizes)
        if self._reader is None or self._reader.cache is not self._cache:
            self._reader = PathReader(self.model, self._cache)
        self._texts, self._guesses, self._too_long, self._order, self._ahead_BD = {}, {}, set(), [], None

    def reset_rows(self, rows: list[int]) -> None:
        """Forget rows that ended."""
        for row in rows:
            self._texts.pop(row, None)
            self._guesses.pop(row, None)
            self._too_long.discard(row)

    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        """Find for every row the longest prefix of its text that the cache holds; return the rest as tokens to read."""
        first_B = context.first_B
        head_BX = [context.rows_B, context.counts_B, *([] if first_B is None else [first_B])]
        table = torch.cat([torch.stack(head_BX, dim=1), context.tokens_BT], dim=1).tolist()  # one transfer
        self._note_guesses()
        self._order = [entry[0] for entry in table]
        held, fresh = [], []
        for row, count, *tokens in table:
            firsts = tokens[: len(head_BX) - 2]
            new = tokens[len(firsts) : len(firsts) + count]
            stay = 0
            if row != SCRATCH and row not in self._too_long:
                if row not in self._texts:
                    self._texts[row] = self.new_text()
                    new = firsts + new
                there = self._texts[row].tokens + self._guesses.pop(row, [])
                stay = self._texts[row].extend(new)
                if len(self._texts[row].tokens) > self._limit:
                    self._too_long.add(row)
            if row == SCRATCH or row in self._too_long:
                held.append(0)
                fresh.append([0])
                continue
            text = self._texts[row].tokens
            # The root is always read, even if it is in the cache, because its logits are needed.
            stay = min(stay, len(there), len(text) - 1)
            same = stay + shared_prefix(there[stay:], text[stay:-1])
            held.append(same)
            fresh.append(self._readable(text[same:]))
        return held, fresh

    def _readable(self, tokens: list[int]) -> list[int]:
        return [min(token, self.model.vocab_size - 1) for token in tokens]

    def _note_guesses(self) -> None:
        """Note which guesses of the last draft are in the cache behind the texts of its rows."""
        if self._ahead_BD is not None:
            for row, guesses in zip(self._order, self._ahead_BD.tolist(), strict=True):
                if row in self._texts and row not in self._too_long:
                    self._guesses[row] = guesses
            self._ahead_BD = None

    def follow(self, context: Context) -> None:
        """Read committed tokens, without guessing."""
        assert self._reader is not None, "a drafter is attached to a cache before it drafts"
        held, fresh = self.take_in(context)
        self._reader.read(held, fresh, context.slots_B)

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a tree of any shape; rows longer than the model's context get only unused nodes."""
        rows = context.rows_B.tolist()
        if plan.depth and self._too_long and all(row == SCRATCH or row in self._too_long for row in rows):
            return self._nothing(context, plan)
        draft = grow(self, context, plan)
        mute = [b for b, row in enumerate(rows) if row in self._too_long]
        if mute:
            draft.parents_BN = draft.parents_BN.clone()
            draft.parents_BN[mute] = UNUSED
        return draft

    def _nothing(self, context: Context, plan: Plan) -> Draft:
        """Return a draft without nodes, so that the target need not read unused ones."""
        draft = empty_draft(context)
        if plan.sampled:
            batch, device = context.tokens_BT.shape[0], context.tokens_BT.device
            draft.q_BMV = torch.zeros((batch, 1, self.vocab_size), dtype=torch.float64, device=device)
        return draft


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two texts have in common from the start."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
