"""Faults to plant in a healthy pair, each through a public seam: a drafter, a target, or a step with one mistake.

Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), F feature width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.engine.steps.layout import Layout
from draftsmith.engine.steps.rows import Rows
from draftsmith.engine.steps.step import Stepper
from draftsmith.evaluation.proof.draws import MakeStepper
from draftsmith.evaluation.proof.shared_rows import WrappedTarget
from draftsmith.evaluation.proof.small_target import TableDrafter
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.types import Context, Draft
from draftsmith.verify import Acceptance, Stream, probabilities
from tests.helpers.mutants import (
    CHAIN,
    best_as_sample,
    chain_rule,
    drawn_in_bf16,
    one_noise_for_all_depths,
    one_token_too_many,
)
from tests.helpers.toy import Accept


class BrokenRule(Stepper):
    """Verifies chains by another rule: sampled ones, or those whose guesses are given."""

    def __init__(self, *parts: object, rule: Accept, of_sampled: bool = True) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.rule, self.of_sampled = rule, of_sampled

    def choose(self, rows: Rows, context: Context, logits_BMV: Tensor, layout: Layout) -> Acceptance:
        draft = layout.draft
        others = (draft.q_BMV is not None) != self.of_sampled
        if others or not draft.depth or not draft.is_chain or rows.sampling.needs_shaping:
            return super().choose(rows, context, logits_BMV, layout)
        p_BMV = probabilities(logits_BMV, rows.sampling)
        return self.rule(p_BMV, draft, context.seeds_B, context.lengths_B)


class ForgetsPenalties(Stepper):
    """Lets the penalties of a node count no drafted token."""

    def choose(self, rows: Rows, context: Context, logits_BMV: Tensor, layout: Layout) -> Acceptance:
        root_alone_BMM = layout.visible_BMM.clone()
        root_alone_BMM[:, :, 1:] = False
        return super().choose(rows, context, logits_BMV, replace(layout, visible_BMM=root_alone_BMM))


class BrokenDraft(TableDrafter):
    """Draws sampled drafts in another way."""

    def __init__(
        self, target: Target, propose: Callable[[StagewiseDrafter, Context, Plan], Draft], chains_only: bool
    ) -> None:
        super().__init__(target)
        self.other, self.chains_only = propose, chains_only

    def propose(self, context: Context, plan: Plan) -> Draft:
        if plan.sampled and plan.is_chain == self.chains_only:
            return self.other(self, context, plan)
        return super().propose(context, plan)


class BrokenForward(WrappedTarget):
    """Reads drafts (a root and guesses behind cached tokens) with something wrong."""

    def is_draft(self, nodes: Nodes) -> bool:
        return nodes.depths_BM is not None and nodes.tokens_BM.shape[1] > 1 and bool((nodes.cached_B > 0).all())


class LeakyMask(BrokenForward):
    """Lets a node see all nodes before it, siblings too."""

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.is_draft(nodes):
            nodes = replace(nodes, visible_BMM=torch.ones_like(nodes.visible_BMM).tril())
        return super().forward(cache, nodes, taps, keep_logits)


class WrongPosition(BrokenForward):
    """Takes guesses for one position further on."""

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.is_draft(nodes):
            nodes = replace(nodes, depths_BM=nodes.depths_BM + (nodes.depths_BM > 0))
        return super().forward(cache, nodes, taps, keep_logits)


class StaleEntry(BrokenForward):
    """Does not store the keys of the root when there is a draft: what lay there stays."""

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        root_B = cache.entries(nodes.slots_B, nodes.cached_B.unsqueeze(1)).flatten()
        before = [keys_NEHD.flatten(0, 1)[root_B] for keys_NEHD in cache.keys_NEHD]
        out = super().forward(cache, nodes, taps, keep_logits)
        if self.is_draft(nodes):
            for keys_NEHD, old_BHD in zip(cache.keys_NEHD, before, strict=True):
                keys_NEHD.flatten(0, 1)[root_B] = old_BHD
        return out


class FlatOverCache(WrappedTarget):
    """Reads a single token over a cache as if it were twice as warm; drafts are read as they should be."""

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits_BMV, features_BMF = super().forward(cache, nodes, taps, keep_logits)
        is_plain = nodes.tokens_BM.shape[1] == 1 and bool((nodes.cached_B > 0).all())
        return logits_BMV / 2 if is_plain else logits_BMV, features_BMF


@dataclass(frozen=True)
class Planted:
    """A fault: what to put in the place of a healthy part, where it has to be found, and what the draws need for it."""

    found_in: str
    wrap: Callable[[Target], Target] = lambda target: target
    make_drafter: Callable[[Target], Drafter] = TableDrafter
    make_stepper: MakeStepper = Stepper
    plan: Plan = CHAIN
    alphabet: int = 8
    tokens: int = 3
    draws: int = 2_000


PLANTED = {
    "shared noise": Planted(
        "sampling", make_stepper=partial(BrokenRule, rule=partial(chain_rule, accept_stream=Stream.DRAFT))
    ),
    "residual not clamped": Planted(
        "sampling", make_stepper=partial(BrokenRule, rule=partial(chain_rule, residual=lambda p, q: p - q))
    ),
    # Eight bits of the sums and of the noise matter the more, the less probable the tokens.
    "drawn in bf16, scored in fp32": Planted(
        "sampling", make_drafter=partial(BrokenDraft, propose=drawn_in_bf16, chains_only=True),
        alphabet=64, tokens=2, draws=48_000,
    ),
    "argmax scored as if sampled": Planted(
        "sampling", make_drafter=partial(BrokenDraft, propose=best_as_sample, chains_only=True)
    ),
    "top-k candidates scored as if sampled": Planted(
        "sampling", make_drafter=partial(BrokenDraft, propose=best_as_sample, chains_only=False),
        plan=Plan((2, 1), sampled=True),
    ),
    "off-by-one acceptance": Planted("sampling", make_stepper=partial(BrokenRule, rule=one_token_too_many)),
    "one noise for all depths": Planted(
        "sampling", make_stepper=partial(BrokenRule, rule=one_noise_for_all_depths, of_sampled=False),
        plan=Plan((1, 1)),
    ),
    "forgotten penalty": Planted("sampling", make_stepper=ForgetsPenalties),
    "stale cache entry": Planted("greedy", wrap=StaleEntry),
    "wrong position": Planted("greedy", wrap=WrongPosition),
    "mask that leaks a sibling": Planted("greedy", wrap=LeakyMask),
}
