"""Drafting in two levels: a copy of the target in fewer bits drafts for it, and a cheap drafter guesses for the copy.

After "ML-SpecQD: Multi-Level Speculative Decoding with Quantized Drafts" (arXiv:2503.13565). The copy chooses nearly
the tokens of the target, but each token costs it the reading of all its weights. So it reads several guesses of the
inner drafter in one pass, keeps those that it would have chosen itself, adds its own choice, and goes on until the
chain is long enough. The tokens are the same as if the copy had drafted alone, in fewer passes. The target then
verifies the chain. A few guesses that the copy has not read follow its end: each costs the verification a row, but no
pass of the copy.

Shapes: B rows, R of them that go on, M tokens of a pass, F feature width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.draws import any_drawn, draw_like_target, shares_noise
from draftsmith.drafters.lookup.python_drafter import DraftTree, to_draft
from draftsmith.drafters.models.cascade_config import NAME, CascadeConfig
from draftsmith.drafters.models.inner import Inner, all_inside
from draftsmith.drafters.models.path_reader import SCRATCH
from draftsmith.drafters.models.quantised_self import QuantisedSelf, make_quantised
from draftsmith.drafters.registry import load_drafter
from draftsmith.plan import Plan
from draftsmith.targets import Nodes
from draftsmith.types import ROOT, Context, Draft, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target

SHORT = 4
"""At most one in this many tokens of a chain belongs to the tail: short chains should hold only good guesses."""


class Cascade(Drafter):
    """Drafts chains in two levels, and any other shape by the copy alone.

    Args:
        copy: a copy of the target, over the target's cache.
        inner: the drafter that guesses for the copy.
        guesses: tokens of the chain that is drafted if no plan was chosen.
        tail: tokens at the end of a chain that may be guesses which the copy has not read.
    """

    borrows_layers = True
    can_sample = True

    def __init__(self, copy: QuantisedSelf, inner: Inner, guesses: int, tail: int) -> None:
        self.copy, self.inner = copy, inner
        self.guesses, self.tail = guesses, tail
        self.taps = tuple(tap for drafter in inner.drafters for tap in drafter.taps)
        remembering = [drafter for drafter in inner.drafters if drafter.reads_prompt]
        self.reads_prompt = bool(remembering)
        self.follows_cheaply = all(drafter.follows_cheaply for drafter in remembering)
        self.passes = self.tokens_read = 0
        """How many passes of the copy drafted chains so far, and how many tokens of rows they read."""
        self._cache: KVCache | None = None

    def parameter_count(self) -> int:
        """Count the weights of both."""
        return sum(one.parameter_count() for one in (self.copy, *self.inner.drafters))

    def memory_bytes(self) -> int:
        """Return the memory of the parts that are not the target's."""
        return sum(one.memory_bytes() for one in (self.copy, *self.inner.drafters))

    def default_plan(self) -> Plan:
        """Return a chain."""
        return Plan((1,) * self.guesses)

    def note_for_user(self, texts: Sequence[str]) -> str | None:
        """Return the note of the first inner drafter that has one."""
        return next(filter(None, (drafter.note_for_user(texts) for drafter in self.inner.drafters)), None)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Attach all drafters."""
        self._cache = cache
        for drafter in (self.copy, *self.inner.drafters):
            drafter.attach(cache, plan)

    def follow(self, context: Context) -> None:
        """Pass it on to the inner drafters; the copy finds all text in the target's cache."""
        for drafter in self.inner.drafters:
            if drafter.reads_prompt:
                drafter.follow(context)

    def follow_prompts(self, context: Context) -> None:
        """Do the same with pieces of prompts."""
        for drafter in self.inner.drafters:
            if drafter.reads_prompt:
                drafter.follow_prompts(context)

    @property
    def max_depth(self) -> int:
        """The depth of the copy."""
        return self.copy.max_depth

    def reset_rows(self, rows: list[int]) -> None:
        """Forget rows that ended."""
        for drafter in (self.copy, *self.inner.drafters):
            drafter.reset_rows(rows)

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain in two levels; for sampled plans, trees, and plans with a confidence, the copy drafts alone."""
        if not plan.is_chain or plan.sampled or plan.confidence is not None:
            if self.reads_prompt:
                self.inner.begin(context)
            return self.copy.propose(context, plan)
        if plan.depth > self.max_depth:
            raise DraftsmithError(
                f"the plan drafts {plan.depth} tokens ahead, but a {NAME} reaches {self.max_depth}; shorten it."
            )
        if not shares_noise(plan, context):
            context = replace(context, temperature_B=torch.zeros_like(context.temperature_B), drawn="none")
        if context.slots_B is None:
            context = replace(context, slots_B=torch.arange(len(context.rows_B), device=context.rows_B.device))
        trees = []
        for chosen in self._chains(context, plan.depth):
            tree = DraftTree(plan.branching, plan.depth)
            tree.add_path(ROOT, chosen)
            trees.append(tree)
        return to_draft(trees, context, plan)

    def _chains(self, context: Context, length: int) -> list[list[int]]:
        """Return the chain of every row, of up to `length` tokens; all tokens but the tail are the copy's own."""
        enough = length - min(self.tail, length // SHORT)
        root_B, states_RF = context.root()
        newest, held = root_B.tolist(), (context.lengths_B - 1).tolist()
        chains: list[list[int]] = [[] for _ in newest]
        going = [b for b, row in enumerate(context.rows_B.tolist()) if row != SCRATCH]
        if len(going) < len(newest):
            states_RF = states_RF[torch.tensor(going, device=states_RF.device)]
        self.inner.begin(context)
        while going:
            rooms = [length - len(chains[b]) for b in going]
            wants = [min(self.inner.most, room - 1) if length - room < enough else room for room in rooms]
            guesses: Sequence[Sequence[int]] = [()] * len(going)
            if any(wants):
                guesses = self.inner.guess(going, [chains[b] for b in going], states_RF, max(wants))
            reading, pieces = [], []
            for b, ahead, want in zip(going, guesses, wants, strict=True):
                if len(chains[b]) < enough:
                    reading.append(b)
                    pieces.append([newest[b], *ahead[:want]])
                else:
                    chains[b] += ahead[:want]
            if not reading:
                break
            own = context
            if len(reading) < len(chains):
                own = context.some(torch.tensor(reading, device=states_RF.device))
            choices, states_RMF = self._read(own, pieces, [held[b] + len(chains[b]) for b in reading])
            going, lines, columns = [], [], []
            for line, (b, piece, chosen) in enumerate(zip(reading, pieces, choices, strict=True)):
                stay = agreed(piece, chosen)
                chains[b] += chosen[: stay + 1]
                newest[b] = chosen[stay]
                if len(chains[b]) < length:
                    going.append(b)
                    lines.append(line)
                    columns.append(stay)
            if going:
                states_RF = states_RMF[lines, columns]
        return chains

    def _read(
        self, context: Context, pieces: Sequence[Sequence[int]], held: Sequence[int]
    ) -> tuple[list[list[int]], Tensor]:
        """Let the copy read a piece behind the first `held` tokens of every row; return choices, states (R, M, F)."""
        assert self._cache is not None, "a drafter is attached to a cache before it drafts"
        self.passes, self.tokens_read = self.passes + 1, self.tokens_read + sum(map(len, pieces))
        model, device, widest = self.copy.model, context.tokens_BT.device, max(map(len, pieces))
        counts_R = None
        if any(len(piece) < widest for piece in pieces):
            counts_R = torch.tensor([len(piece) for piece in pieces], device=device)
        tokens_RM = torch.tensor([[*piece, *[piece[0]] * (widest - len(piece))] for piece in pieces], device=device)
        held_R = torch.tensor(held, device=device)
        nodes = Nodes(
            tokens_RM, held_R, context.slots_B, counts_B=counts_R,
            columns_S=model.backend.columns(lambda: max(held) + widest),
        )
        logits_RMV, states_RMF = model.forward(self._cache, nodes, self.taps)
        return self._choices(context, logits_RMV, held_R).tolist(), states_RMF

    def _choices(self, context: Context, logits_RMV: Tensor, held_R: Tensor) -> Tensor:
        """Return the tokens (R, M) that the copy chooses behind every token it read, as if it drafted them."""
        if not any_drawn(context):
            # On a CPU a maximum is found several times faster than an argmax.
            return logits_RMV.max(dim=-1).indices
        rows, nodes, _ = logits_RMV.shape
        positions_RM = held_R.unsqueeze(1) + torch.arange(1, nodes + 1, device=held_R.device)
        return draw_like_target(
            logits_RMV.float().flatten(0, 1), context.temperature_B.repeat_interleave(nodes),
            context.seeds_B.repeat_interleave(nodes), positions_RM.flatten(),
        ).view(rows, nodes)


def agreed(piece: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many guesses behind the first token of a piece agree with the choices in their places."""
    for stay, guess in enumerate(piece[1:]):
        if guess != chosen[stay]:
            return stay
    return len(piece) - 1


def make_cascade(config: CascadeConfig, target: "Target", draft_tokens: Tensor | None) -> Cascade:
    """Load the inner drafter and copy the target; DraftsmithError if the two cannot share its cache."""
    if target.dtype != torch.bfloat16:
        raise DraftsmithError(
            f"{NAME} drafts over the cache of a bf16 target, but {target.name} is in {target.dtype}; give --dtype bf16."
        )
    inner = all_inside({name: load_drafter(name, target) for name in config.inner}, config.ahead)
    copy = make_quantised(NAME, config.quantize, config.guesses, target, config.calibrate)
    assert isinstance(copy, QuantisedSelf)
    return Cascade(copy, inner, config.guesses, config.tail)
