"""One step of decoding: propose, verify, accept, keep. Prefill is the same verification with the prompt as a chain.

Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), D depth of the plan, T context tokens,
F feature width, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.engine.clock import Clock
from draftsmith.engine.compiled import Compiler
from draftsmith.engine.request import Request
from draftsmith.engine.rows import Rows
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.target import KVCache, Nodes, Target, keep_path
from draftsmith.types import UNUSED, Context, Draft, SamplingParams
from draftsmith.verify import (
    Acceptance,
    History,
    SamplingBatch,
    accept_block,
    accept_deterministic,
    accept_greedy,
    accept_sampled,
    accept_typical,
    narrow,
    probabilities,
    shape_logits,
    tree_tables,
)

PREFILL_TOKENS = 2048
"""Tokens of prompts, of all rows together, that are read in one forward."""
# Stands in the table for a row's number of guesses when the logits that chose its first token are NaN or infinite.
NOT_FINITE = -1


@dataclass
class StepResult:
    """What a round committed, packed so that one transfer brings it to the host.

    Args:
        table_BX: a row's number of committed tokens, of verified guesses (or `NOT_FINITE`), then the tokens, the
            target's own last.
        depth: the most guesses that could have been accepted.
        raw_logits_BTV: the target's logits behind every committed token, if a row wants log-probabilities.
    """

    table_BX: Tensor
    depth: int
    raw_logits_BTV: Tensor | None


@dataclass
class Layout:
    """A draft with its root, laid out for the target: tokens and depths (B, M), and who sees whom (B, M, M)."""

    draft: Draft
    tokens_BM: Tensor
    depths_BM: Tensor
    visible_BMM: Tensor


@dataclass(frozen=True)
class Drafting:
    """A drafter with what comes behind it, as one piece to compile.

    Args:
        drafter: guesses.
        native: lay out by the native operator.
        static: give every draft the plan's full size, because what reads it is compiled for fixed shapes; drafts
            that are compiled themselves have it anyway.
    """

    drafter: Drafter
    native: bool
    static: bool

    def lay_out(self, context: Context, plan: Plan) -> Layout:
        """Let the drafter guess, and put its tree behind the root in the form the target reads."""
        draft = self.drafter.propose(context, plan) if plan.depth else empty_draft(context)
        if self.static:
            draft = filled(draft, plan)
        if self.native:
            tokens_BM, depths_BM, visible_BMM = torch.ops.draftsmith.lay_out(
                context.tokens_BT, context.counts_B, draft.tokens_BN, draft.parents_BN
            )
        else:
            visible_BMM, depths_BM = tree_tables(draft.parents_BN, draft.depth)
            tokens_BM = torch.cat([context.root()[0].unsqueeze(1), draft.tokens_BN], dim=1)
        return Layout(draft, tokens_BM, depths_BM, visible_BMM)


class Stepper:
    """Owns nothing but references: runs the target and the drafter over the cache."""

    def __init__(self, target: Target, drafter: Drafter, cache: KVCache, compiler: Compiler) -> None:
        self.target, self.drafter, self.cache = target, drafter, cache
        self._compiler = compiler
        # Native operators have nothing in them to compile.
        self._forward = target.forward if target.is_native else compiler.wrap(target.forward)
        if drafter.is_native or not drafter.can_compile or not compiler.enabled:
            self._draft = Drafting(drafter, native=target.native, static=compiler.enabled).lay_out
        else:
            self._draft = compiler.wrap(Drafting(drafter, native=False, static=False).lay_out)
        self._commit_greedy = commit_greedy_natively if target.native else compiler.wrap(commit_greedy)

    def step(self, rows: Rows, plan: Plan, clock: Clock) -> StepResult:
        """Advance every row by one to `plan.depth` + 1 tokens and leave `rows` ready for the next step."""
        context = rows.context
        self.target.packed = self._compiler.packs
        clock.start("drafter")
        layout = self._draft(context, plan)
        clock.start("rest")
        draft = layout.draft
        if draft.tokens_BN.shape[1] > plan.max_nodes or draft.depth > plan.depth:
            raise RuntimeError(
                f"the drafter returned {draft.tokens_BN.shape[1]} nodes in {draft.depth} levels for {plan}; "
                "a draft has to fit its plan."
            )
        columns_S = None
        if not self.target.is_native:
            columns_S = self._compiler.span(rows.longest + plan.max_nodes, self.cache.capacity, self.target.device)
        clock.start("target")
        nodes = Nodes(
            layout.tokens_BM, context.lengths_B - 1, context.slots_B, layout.depths_BM, layout.visible_BMM,
            columns_S=columns_S,
        )
        logits_BMV, features_BMF = self._forward(self.cache, nodes, self.drafter.taps)
        if self.drafter.observes and plan.depth:
            clock.start("drafter")
            # On a CPU a maximum is found several times faster than an argmax.
            self.drafter.observe(context, draft, logits_BMV.max(dim=-1).indices)
        clock.start("rest")
        if rows.sampling.all_greedy and not rows.sampling.needs_shaping:
            rows.context, table_BX, path_BD = self._commit_greedy(self.cache, logits_BMV, features_BMF, layout, context)
        else:
            acceptance = self.choose(rows, logits_BMV, draft, layout.visible_BMM, plan)
            rows.context, table_BX, path_BD = commit(
                self.cache, acceptance, logits_BMV, features_BMF, layout, context
            )
        if rows.count < len(context.rows_B):
            # Padding writes the same few places again and again; left to grow, it would outgrow the cache.
            lengths_B = torch.where(context.rows_B < 0, context.lengths_B, rows.context.lengths_B)
            rows.context = replace(rows.context, lengths_B=lengths_B)
        if rows.history is not None:
            rows.history.commit(rows.context.tokens_BT, rows.context.counts_B)
        raw_BTV = None
        if rows.logprobs_wanted() is not None:
            index_BT = torch.cat([torch.zeros_like(context.counts_B).unsqueeze(1), path_BD], dim=1)
            raw_BTV = logits_BMV.gather(1, index_BT.unsqueeze(2).expand(-1, -1, logits_BMV.shape[2]))
        return StepResult(table_BX, draft.depth, raw_BTV)

    def choose(
        self, rows: Rows, logits_BMV: Tensor, draft: Draft, visible_BMM: Tensor, plan: Plan
    ) -> Acceptance:
        """Apply the rules of acceptance; a method, so that a proof can put a broken rule in their place."""
        return choose(rows, logits_BMV, draft, visible_BMM, plan)

    def prefill(self, requests: list[Request], width: int, slots: list[int]) -> tuple[Rows, StepResult]:
        """Read the prompts of new requests into these slots; choose their first token each.

        Args:
            width: context tokens (T) that the running rows have, so that compiled code keeps its shapes.
        """
        device = self.target.device
        slots_B = torch.tensor(slots, device=device)
        lengths = [len(r.prompt) for r in requests]
        longest = max(lengths)
        # Padded with the row's own token: one that the row does not have may have no finite state, and attention
        # multiplies what its mask hides.
        padded = [r.prompt + r.prompt[-1:] * (longest - len(r.prompt)) for r in requests]
        tokens_BM = torch.tensor(padded, device=device)
        lengths_B = torch.tensor(lengths, device=device)
        last_logits_BV, features_BMF = self._read_prompts(tokens_BM, lengths, slots_B)

        params = [r.params for r in requests]
        seeds_B = torch.tensor([r.seed for r in requests], device=device)
        context = Context(
            tokens_BT=tokens_BM,
            features_BTF=features_BMF,
            counts_B=lengths_B,
            lengths_B=lengths_B,
            rows_B=torch.tensor([r.index for r in requests], device=device),
            temperature_B=torch.tensor([p.temperature for p in params], device=device),
            seeds_B=seeds_B,
            first_B=tokens_BM[:, 0].clone(),
            slots_B=slots_B,
        )
        rows = first_rows(requests, context, params, self.target.vocab_size)
        no_draft = empty_draft(context)
        visible_BMM, _ = tree_tables(no_draft.parents_BN, 0)
        logits_B1V = last_logits_BV.unsqueeze(1)
        first_B = self.choose(rows, logits_B1V, no_draft, visible_BMM, NO_DRAFT).next_B
        if self.drafter.reads_prompt:
            # Entry t of the context is the token that state t predicted: the prompt from its second on, then ours.
            shifted_BM = torch.cat([tokens_BM[:, 1:], tokens_BM.new_zeros((len(requests), 1))], dim=1)
            shifted_BM.scatter_(1, (lengths_B - 1).unsqueeze(1), first_B.unsqueeze(1))
            context = replace(context, tokens_BT=shifted_BM)
        else:
            last_B11 = (lengths_B - 1).view(-1, 1, 1).expand(-1, 1, features_BMF.shape[2])
            tokens_BT = torch.zeros((len(requests), width), dtype=torch.long, device=device)
            features_BTF = features_BMF.new_zeros((len(requests), width, features_BMF.shape[2]))
            tokens_BT[:, 0] = first_B
            features_BTF[:, :1] = features_BMF.gather(1, last_B11)
            context = replace(
                context, tokens_BT=tokens_BT, features_BTF=features_BTF, counts_B=torch.ones_like(lengths_B)
            )
        rows.context = replace(context, lengths_B=lengths_B + 1)
        none_B = torch.zeros_like(first_B)
        flag_B = guesses_or_flag(no_draft, count_sound(logits_B1V, none_B.unsqueeze(1), none_B))
        table_BX = torch.stack([torch.ones_like(first_B), flag_B, first_B], dim=1)
        raw = logits_B1V if rows.logprobs_wanted() is not None else None
        return rows, StepResult(table_BX, 0, raw)

    def _read_prompts(self, tokens_BM: Tensor, lengths: list[int], slots_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits after every row's last prompt token (B, V) and all states (B, M, F)."""
        device = tokens_BM.device
        batch, longest = tokens_BM.shape
        last_BV: Tensor | None = None
        features = []
        piece = max(1, PREFILL_TOKENS // batch)
        for start in range(0, longest, piece):
            stop = min(start + piece, longest)
            ending = {b: length - 1 - start for b, length in enumerate(lengths) if start < length <= stop}
            # Logits only where a prompt ends. A model's own code cannot be asked for none.
            columns = sorted(set(ending.values())) or ([] if self.target.is_native else [0])
            logits_BUV, features_BMF = self.target.read_chain(
                self.cache,
                tokens_BM[:, start:stop],
                torch.full((batch,), start, device=device),
                self.drafter.taps,
                slots_B,
                torch.tensor(columns, dtype=torch.long, device=device),
                start,
            )
            features.append(features_BMF)
            if last_BV is None:
                last_BV = logits_BUV.new_zeros((batch, logits_BUV.shape[2]))
            rows = list(ending)
            last_BV[rows] = logits_BUV[rows, [columns.index(ending[b]) for b in rows]]
        assert last_BV is not None
        return last_BV, torch.cat(features, dim=1)


def empty_draft(context: Context) -> Draft:
    """Return the draft without guesses: plain decoding."""
    none_BN = context.tokens_BT.new_empty((context.tokens_BT.shape[0], 0))
    return Draft(tokens_BN=none_BN, parents_BN=none_BN, depth=0)


def filled(draft: Draft, plan: Plan) -> Draft:
    """Pad a draft to the nodes and the depth of its plan; one without guesses stays empty, which is a shape too."""
    missing = plan.max_nodes - draft.tokens_BN.shape[1]
    if draft.depth == 0 or draft.q_BMV is not None or missing < 0:
        return draft
    return replace(
        draft,
        tokens_BN=torch.nn.functional.pad(draft.tokens_BN, (0, missing)),
        parents_BN=torch.nn.functional.pad(draft.parents_BN, (0, missing), value=UNUSED),
        depth=plan.depth,
    )


def count_sound(logits_BMV: Tensor, states_BT: Tensor, accepted_B: Tensor) -> Tensor:
    """Count the tokens of every row that finite logits chose, from the first on until one that others chose (B).

    Args:
        states_BT: the root and the accepted path, as nodes; entries behind `accepted_B` + 1 are not looked at.
    """
    # Both ends are NaN where anything is, and nothing as wide as the vocabulary is made to find them.
    least_BM, most_BM = logits_BMV.aminmax(dim=-1)
    sound_BT = (least_BM.isfinite() & most_BM.isfinite()).gather(1, states_BT)
    used_BT = torch.arange(states_BT.shape[1], device=states_BT.device) <= accepted_B.unsqueeze(1)
    return (sound_BT & used_BT).cumprod(dim=1).sum(dim=1)


def guesses_or_flag(draft: Draft, sound_B: Tensor) -> Tensor:
    """Count the guesses of every row, or flag it when no token of it is sound."""
    return torch.where(sound_B > 0, (draft.parents_BN != UNUSED).sum(dim=1), NOT_FINITE)


def first_rows(requests: list[Request], context: Context, params: list[SamplingParams], vocab_size: int) -> Rows:
    """Make the rows of freshly read prompts; the context is not ready for a drafter yet."""
    device = context.tokens_BT.device
    sampling = SamplingBatch.build(params, vocab_size, device)
    history = None
    if sampling.needs_history:
        history = History.of([r.prompt for r in requests], [r.tokens for r in requests], vocab_size, device)
    return Rows(requests, context, sampling, history)


def choose(rows: Rows, logits_BMV: Tensor, draft: Draft, visible_BMM: Tensor, plan: Plan) -> Acceptance:
    """Apply every row's sampling rules at every node and accept a path by the plan's rule."""
    shaped_BMV = logits_BMV
    if rows.sampling.needs_shaping:
        shaped_BMV = shape_logits(logits_BMV, rows.sampling, rows.history, draft.tokens_BN, visible_BMM)
    if rows.sampling.all_greedy:
        return accept_greedy(shaped_BMV.argmax(dim=-1), draft)
    narrowed = narrow(shaped_BMV, rows.sampling, draft)
    if narrowed is not None:
        return narrowed.restore(judge(narrowed.p_BMU, narrowed.draft, rows, plan))
    return judge(probabilities(shaped_BMV, rows.sampling), draft, rows, plan)


def judge(p_BMV: Tensor, draft: Draft, rows: Rows, plan: Plan) -> Acceptance:
    """Accept a path of a draft, with the target's distribution at every node, by the plan's rule."""
    seeds_B, positions_B = rows.context.seeds_B, rows.context.lengths_B
    if plan.acceptance == "typical":
        return accept_typical(p_BMV, draft, seeds_B, positions_B, plan.epsilon, plan.delta)
    if draft.q_BMV is None:
        return accept_deterministic(p_BMV, draft, seeds_B, positions_B)
    accept = accept_block if plan.acceptance == "block" else accept_sampled
    return accept(p_BMV, draft, seeds_B, positions_B)


def commit_greedy(
    cache: KVCache, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
) -> tuple[Context, Tensor, Tensor]:
    """Accept the path of argmaxes and commit it; see `commit`."""
    acceptance = accept_greedy(logits_BMV.argmax(dim=-1), layout.draft)
    return commit(cache, acceptance, logits_BMV, features_BMF, layout, context)


def commit_greedy_natively(
    cache: KVCache, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
) -> tuple[Context, Tensor, Tensor]:
    """Do as `commit_greedy`, in one native operator where logits and states are bf16."""
    if logits_BMV.dtype != torch.bfloat16 or features_BMF.dtype != torch.bfloat16:
        return commit_greedy(cache, logits_BMV, features_BMF, layout, context)
    draft = layout.draft
    tokens_BT, features_BTF, counts_B, lengths_B, table_BX, path_BD = torch.ops.draftsmith.commit_greedy(
        [] if draft.is_chain else cache.tensors, logits_BMV, features_BMF, layout.tokens_BM, draft.parents_BN,
        context.lengths_B, draft.depth, context.slots_B, None, cache.tables_RJ,
    )
    return context.after(tokens_BT, features_BTF, counts_B, lengths_B), table_BX, path_BD


def commit(
    cache: KVCache,
    acceptance: Acceptance,
    logits_BMV: Tensor,
    features_BMF: Tensor,
    layout: Layout,
    context: Context,
) -> tuple[Context, Tensor, Tensor]:
    """Keep the accepted path in the cache and line up the next context.

    Returns:
        the context of the next step (T = depth + 1), the table of `StepResult`, and path_BD.
    """
    path_BD, accepted_B, next_B = acceptance.path_BD, acceptance.counts_B, acceptance.next_B
    draft = layout.draft
    # The nodes of a chain lie where they will stay.
    if draft.depth and not draft.is_chain:
        keep_path(cache, context.lengths_B - 1, path_BD, context.slots_B)
    tokens_BT = torch.cat([layout.tokens_BM.gather(1, path_BD), next_B.unsqueeze(1)], dim=1)
    tokens_BT = tokens_BT.scatter(1, accepted_B.unsqueeze(1), next_B.unsqueeze(1))
    states_BT = torch.cat([torch.zeros_like(accepted_B).unsqueeze(1), path_BD], dim=1)
    features_BTF = features_BMF.gather(1, states_BT.unsqueeze(2).expand(-1, -1, features_BMF.shape[2]))
    # A row ends before what no finite logits chose; its last guess, unreadable, is then the root of the next step.
    sound_B = count_sound(logits_BMV, states_BT, accepted_B)
    counts_B = torch.where(sound_B > 0, sound_B, accepted_B + 1)
    drafted_B = guesses_or_flag(draft, sound_B)
    table_BX = torch.cat([counts_B.unsqueeze(1), drafted_B.unsqueeze(1), tokens_BT], dim=1)
    following = context.after(tokens_BT, features_BTF, counts_B, context.lengths_B + counts_B)
    return following, table_BX, path_BD
