"""One step of decoding (propose, verify, accept, keep) for all rows at once, whatever each of them drafts.

Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), D depth of the plan, T context tokens,
F feature width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.drafters.base import Drafter, workers
from draftsmith.drafters.lookup.prediction import PredictionDrafter
from draftsmith.engine.made import Tree
from draftsmith.engine.steps.allowed import constrain
from draftsmith.engine.steps.clock import Clock
from draftsmith.engine.steps.layout import Layout, roots_alone, together
from draftsmith.engine.steps.rows import PREDICTED, Rows, join_contexts, slots_of
from draftsmith.engine.steps.runner import Runner
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.types import ROOT, UNUSED, Context, Draft
from draftsmith.verify import (
    Acceptance,
    accept_block,
    accept_block_natively,
    accept_deterministic,
    accept_drawn_natively,
    accept_greedy,
    accept_natively,
    accept_sampled,
    accept_typical,
    can_accept_natively,
    narrow,
    probabilities,
    shape_logits,
)


@dataclass
class StepResult:
    """What a step committed for a group of rows.

    Args:
        tables: one line for each row, in order, in one or two pieces: the number of committed tokens, the number of
            verified guesses (or `NOT_FINITE`), then the tokens, the target's own last.
        depth: the most guesses that could have been accepted.
        raw_logits_BTV: the target's logits that chose each committed token, if a row wants log-probabilities.
        before: the context that the step began with.
        draft: the guesses.
        paths: the nodes of the accepted paths, in as many pieces as `tables`; the root counts as node 0 here.
    """

    tables: list[Tensor]
    depth: int
    raw_logits_BTV: Tensor | None
    before: Context
    draft: Draft
    paths: list[Tensor]

    def tree(self, row: int, accepted: int) -> Tree:
        """Return a row's guesses, of which the first `accepted` on its path stayed; this waits for the device."""
        parents = self.draft.parents_BN[row].tolist()
        used = [node for node, parent in enumerate(parents) if parent != UNUSED]
        number = {ROOT: ROOT, **{node: new for new, node in enumerate(used)}}
        tokens, path_D = self.draft.tokens_BN[row].tolist(), torch.cat(self.paths)[row]
        return Tree(
            [tokens[node] for node in used], [number[parents[node]] for node in used],
            [number[node - 1] for node in path_D[:accepted].tolist()],
        )

    def parts(self) -> Sequence[int] | None:
        """Return which part of the drafter guessed in every row, see `Draft.parts`; None if it has no parts."""
        parts = self.draft.parts
        return [parts] * self.draft.tokens_BN.shape[0] if isinstance(parts, int) else parts


class Stepper:
    """Runs the target and the drafters over the cache; holds no state of requests.

    Args:
        drafters: by name; the first one drafts unless a choice names another.
    """

    def __init__(self, target: Target, drafters: Mapping[str, Drafter], cache: KVCache, runner: Runner) -> None:
        self.target, self.cache = target, cache
        self.first = next(iter(drafters))
        self.predictions = PredictionDrafter()
        """Drafts for rows that have a prediction, while they keep to it."""
        self.drafters = {**drafters, PREDICTED: self.predictions}
        self.workers = workers(self.drafters.values())
        """The drafters that do the work for all of these, see `workers`."""
        self.taps = union_of_taps(workers(drafters.values()))
        # A drafter that wants no states simply gets those of the others, which saves cutting them off.
        self._columns = {
            drafter: columns_of(drafter.taps, self.taps, target) if drafter.taps else None
            for drafter in (*self.drafters.values(), *self.workers)
        }
        # Those with a memory; and for each drafter, those of them that do not work for it.
        self._followers: dict[str | None, list[Drafter]] = {
            None: [drafter for drafter in self.workers if drafter.reads_prompt]
        }
        for name, drafter in self.drafters.items():
            own = workers([drafter])
            self._followers[name] = [one for one in self._followers[None] if one not in own]
        self._runner = runner
        self._draft = {name: runner.drafting(drafter) for name, drafter in self.drafters.items()}
        self._lone_roots: dict[int, Layout] = {}
        self._choose = target.backend.choose(choose, choose_natively)

    def context_for(self, drafter: Drafter, context: Context) -> Context:
        """Return a context with the tapped states of one drafter."""
        columns_F = self._columns[drafter]
        if columns_F is None:
            return context
        return replace(context, features_BTF=context.features_BTF[:, :, columns_F])

    def follow(self, context: Context, besides: str | None) -> None:
        """Show what was committed to every drafter with a memory, except those that work for `besides`."""
        for drafter in self._followers[besides]:
            drafter.follow(self.context_for(drafter, context))

    def follow_prompts(self, context: Context) -> None:
        """Show pieces of prompts to every drafter with a memory."""
        for drafter in self._followers[None]:
            drafter.follow_prompts(self.context_for(drafter, context))

    def step(self, groups: Sequence[Rows], clock: Clock) -> list[StepResult]:
        """Advance every row by 1 to (its plan's depth + 1) tokens, and leave the groups ready for the next step."""
        clock.start("drafter")
        contexts = [rows.context for rows in groups]
        layouts = [self._constrain(rows, self._lay_out(rows)) for rows in groups]
        clock.start("rest")
        layout = layouts[0] if len(layouts) == 1 else together(layouts)
        nodes = Nodes(
            layout.tokens_BM, concat([context.lengths_B for context in contexts]) - 1,
            concat([slots_of(context) for context in contexts]), layout.depths_BM, layout.visible_BMM, layout.nodes_B,
            self._runner.columns(lambda: self._span(groups, layout)),
        )
        clock.start("target")
        logits_BMV, features_BMF = self._runner.forward(self.cache, nodes, self.taps)
        clock.start("rest")
        results, begin = [], 0
        for rows, own in zip(groups, layouts, strict=True):
            if own is layout:
                wide, scores, states = layout, logits_BMV, features_BMF
            else:
                end = begin + rows.size
                wide, scores, states = layout.part(begin, end), logits_BMV[begin:end], features_BMF[begin:end]
                begin = end
            self._observe(rows, own, scores, clock)
            results.append(self._commit(rows, own, wide, scores, states))
        return results

    def _span(self, groups: Sequence[Rows], layout: Layout) -> int:
        most = max(rows.longest for rows in groups) + layout.tokens_BM.shape[1] - 1
        return min(self.cache.capacity, self._runner.span(most))

    def _lay_out(self, rows: Rows) -> Layout:
        plan, name = rows.choice.plan, rows.choice.drafter or self.first
        context = rows.context
        if not rows.never_drafts:
            self.follow(context, name if rows.depth else None)
        if not rows.depth and context.tokens_BT.shape[1] == 1:
            return self._roots(context)
        if context.drawn is None:
            rows.context = context = replace(context, drawn=rows.drawn)
        seen, span = self.context_for(self.drafters[name], context), self._runner.drafted_span(rows.longest)
        layout = self._draft[name](seen if span is None else replace(seen, span=span), plan)
        draft = layout.draft
        if draft.tokens_BN.shape[1] > rows.max_nodes or draft.depth > rows.depth:
            raise RuntimeError(
                f"the drafter returned {draft.tokens_BN.shape[1]} nodes in {draft.depth} levels for {plan}; "
                "a draft has to fit its plan."
            )
        return layout

    def _constrain(self, rows: Rows, layout: Layout) -> Layout:
        """Find out what the constraints of rows allow in a layout, and remove the guesses that they forbid."""
        if rows.constrained is None:
            return layout
        learns = self.drafters[rows.choice.drafter or self.first].observes
        return constrain(layout, rows.constrained, rows.context, self._runner.lay_out, removes=not learns)

    def _roots(self, context: Context) -> Layout:
        """Lay out rows that draft nothing and committed one token each: all but the tokens is the same every time."""
        size = len(context.rows_B)
        if size not in self._lone_roots:
            self._lone_roots[size] = roots_alone(context)
        known = self._lone_roots[size]
        return Layout(known.draft, context.tokens_BT, known.depths_BM, known.visible_BMM)

    def _observe(self, rows: Rows, layout: Layout, logits_BMV: Tensor, clock: Clock) -> None:
        """Show the target's choices at every guess to a drafter that learns from them."""
        name = rows.choice.drafter or self.first
        drafter = self.drafters[name]
        if drafter.observes and rows.depth:
            clock.start("drafter")
            nodes = layout.tokens_BM.shape[1]
            # On a CPU a maximum is found several times faster than an argmax.
            choice_BM = logits_BMV[:, :nodes].max(dim=-1).indices
            drafter.observe(self.context_for(drafter, rows.context), layout.draft, choice_BM)
            clock.start("rest")

    def _commit(
        self, rows: Rows, own: Layout, wide: Layout, logits_BMV: Tensor, features_BMF: Tensor
    ) -> StepResult:
        """Accept paths and keep them: for simple rows greedily, for the others by their rules.

        Args:
            own: the group's layout as drafted.
            wide: the same, padded to the width at which all groups were read.
        """
        context, depth = rows.context, own.draft.depth
        if wide is not own:
            wide.draft.depth, wide.draft.branching = depth, own.draft.branching
        simple, size = rows.simple_rows, rows.size
        done = []
        if simple == size:
            done.append(self._runner.commit_greedily(self.cache, logits_BMV, features_BMF, wide, context))
        elif simple:
            done.append(self._runner.commit_greedily(
                self.cache, logits_BMV[:simple], features_BMF[:simple], wide.part(0, simple), context.part(0, simple)
            ))
        if not simple:
            done.append(self._commit_by_rules(rows, own, wide, logits_BMV, features_BMF, context))
        elif simple < size:
            done.append(self._commit_by_rules(
                rows, own.part(simple, size), wide.part(simple, size), logits_BMV[simple:], features_BMF[simple:],
                context.part(simple, size),
            ))
        rows.context = done[0][0] if len(done) == 1 else join_contexts([after for after, _, _ in done])
        if self.cache.states_NEF is not None:
            self._runner.keep_states(self.cache, context, rows.context.features_BTF)
        if rows.count < size:
            # Padding rows keep their length, so that they write the same places again; growing, they would overrun the
            # cache.
            lengths_B = torch.where(context.rows_B < 0, context.lengths_B, rows.context.lengths_B)
            rows.context = replace(rows.context, lengths_B=lengths_B)
        raw_BTV = None
        if rows.has_logprobs:
            path_BD = torch.cat([path_BD for _, _, path_BD in done])
            index_BT = torch.cat([torch.zeros_like(context.counts_B).unsqueeze(1), path_BD], dim=1)
            raw_BTV = logits_BMV.gather(1, index_BT.unsqueeze(2).expand(-1, -1, logits_BMV.shape[2]))
        tables, paths = [table_BX for _, table_BX, _ in done], [path_BD for _, _, path_BD in done]
        return StepResult(tables, depth, raw_BTV, context, own.draft, paths)

    def _commit_by_rules(
        self, rows: Rows, own: Layout, wide: Layout, logits_BMV: Tensor, features_BMF: Tensor, context: Context
    ) -> tuple[Context, Tensor, Tensor]:
        """Accept and keep the paths of those rows of a group that are not simple; only these are in what is given."""
        nodes = own.tokens_BM.shape[1]
        scores_BMV = logits_BMV if nodes == logits_BMV.shape[1] else logits_BMV[:, :nodes]
        acceptance = self.choose(rows, context, scores_BMV, own)
        after, table_BX, path_BD = self._runner.commit_path(
            self.cache, acceptance, logits_BMV, features_BMF, wide, context
        )
        if rows.history is not None:
            rows.history.commit(after.tokens_BT, after.counts_B)
        return after, table_BX, path_BD

    def choose(self, rows: Rows, context: Context, logits_BMV: Tensor, layout: Layout) -> Acceptance:
        """Apply the rules of acceptance to the rows of a group that are not simple.

        It is a method so that a proof can replace it by a broken rule.
        """
        if layout.allowed is not None:
            logits_BMV = layout.allowed.apply(logits_BMV)
        return self._choose(rows, context, logits_BMV, layout)


def lists_of(results: Sequence[StepResult]) -> list[list[list[int]]]:
    """Bring the tables of all groups to the host, in one transfer."""
    tables = [table_BX for result in results for table_BX in result.tables]
    if len(tables) == 1:
        return [tables[0].tolist()]
    width = max(table_BX.shape[1] for table_BX in tables)
    lines = torch.cat([pad(table_BX, (0, width - table_BX.shape[1])) for table_BX in tables]).tolist()
    found = []
    for result in results:
        size = sum(len(table_BX) for table_BX in result.tables)
        found.append(lines[:size])
        lines = lines[size:]
    return found


def concat(tensors_B: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors."""
    return tensors_B[0] if len(tensors_B) == 1 else torch.cat(list(tensors_B))


def union_of_taps(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the hidden states that any of the drafters reads, each once; for a single drafter, its own list."""
    if len(drafters) == 1:
        return drafters[0].taps
    return tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))


def columns_of(taps: tuple[int, ...], all_taps: tuple[int, ...], target: Target) -> Tensor | None:
    """Return the columns of some taps among those of all taps; None if both are the same."""
    if taps == all_taps:
        return None
    width = target.hidden_size
    columns = [all_taps.index(tap) * width + f for tap in taps for f in range(width)]
    return torch.tensor(columns, dtype=torch.long, device=target.device)


def choose_natively(rows: Rows, context: Context, logits_BMV: Tensor, layout: Layout) -> Acceptance:
    """Do as `choose`, by a native operator unless the plan's rule has none: the tokens stay the same."""
    draft, rule, sampling = layout.draft, rows.choice.plan.acceptance, rows.sampling
    own_choice = sampling.all_greedy or (draft.q_BMV is None and rule != "typical")
    if (rule == "typical" and not own_choice) or not can_accept_natively(logits_BMV, rows.history):
        return choose(rows, context, logits_BMV, layout)
    accept_drawn = accept_block_natively if rule == "block" else accept_drawn_natively
    accept = accept_natively if own_choice else accept_drawn
    return accept(logits_BMV, sampling, rows.history, draft, layout.visible_BMM, context.seeds_B, context.lengths_B)


def choose(rows: Rows, context: Context, logits_BMV: Tensor, layout: Layout) -> Acceptance:
    """Apply every row's sampling rules at every node and accept a path by the plan's rule."""
    draft, plan, sampling, shaped_BMV = layout.draft, rows.choice.plan, rows.sampling, logits_BMV
    if sampling.needs_shaping:
        shaped_BMV = shape_logits(logits_BMV, sampling, rows.history, draft.tokens_BN, layout.visible_BMM)
    if sampling.all_greedy:
        return accept_greedy(shaped_BMV.argmax(dim=-1), draft)
    narrowed = narrow(shaped_BMV, sampling, draft)
    if narrowed is not None:
        return narrowed.restore(
            accept_by_rule(narrowed.p_BMU, narrowed.draft, context, plan, narrowed.alphabet_BU)
        )
    return accept_by_rule(probabilities(shaped_BMV, sampling), draft, context, plan)


def accept_by_rule(
    p_BMV: Tensor, draft: Draft, context: Context, plan: Plan, alphabet_BU: Tensor | None = None
) -> Acceptance:
    """Accept a path of a draft, with the target's distribution at every node, by the plan's rule."""
    seeds_B, positions_B = context.seeds_B, context.lengths_B
    if plan.acceptance == "typical":
        return accept_typical(p_BMV, draft, seeds_B, positions_B, plan.epsilon, plan.delta, alphabet_BU)
    if draft.q_BMV is None:
        return accept_deterministic(p_BMV, draft, seeds_B, positions_B, alphabet_BU)
    accept = accept_block if plan.acceptance == "block" else accept_sampled
    return accept(p_BMV, draft, seeds_B, positions_B, alphabet_BU)
