"""Growing a tree against a search written out in plain Python."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.draws import COMPARED
from draftsmith.drafters.grow import grow
from draftsmith.native import LIBRARY
from draftsmith.plan import Plan
from draftsmith.types import ROOT, UNUSED, Context, Draft, DraftsmithError
from draftsmith.verify import tree_tables
from draftsmith.verify.noise import Stream, arrivals
from tests.helpers.toy import chi_square_p_value

V = 11
CONTEXTS = 997
ALPHA = 1e-6


class RandomDrafter(StagewiseDrafter):
    """log q depends on the depth and on every token since the root; the state also holds a dictionary and a tuple."""

    def __init__(self, depth: int = 4, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(depth)
        self.log_q = (spread * torch.randn((depth, CONTEXTS, V), generator=generator)).log_softmax(-1)

    @property
    def max_depth(self) -> int:
        return len(self.log_q)

    def begin(self, context: Context) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        root_B = context.root()[0]
        return root_B, (torch.zeros_like(root_B), {"row": context.rows_B})

    def step(
        self, depth: int, state: tuple[Tensor, dict[str, Tensor]], tokens_R: Tensor
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        code_R = (state[0] * 31 + tokens_R * 7 + state[1]["row"] + 1) % CONTEXTS
        return self.log_q[depth][code_R], (code_R, state[1])

    def propose(self, context: Context, plan: Plan) -> Draft:
        return grow(self, context, plan)

    def default_plan(self) -> Plan:
        return Plan((1,))

    def after(self, row: int, path: list[int]) -> list[float]:
        """log q of the token after this path, root first, in plain Python."""
        code = 0
        for token in path:
            code = (code * 31 + token * 7 + row + 1) % CONTEXTS
        values: list[float] = self.log_q[len(path) - 1, code].tolist()
        return values


def context_of(rows: int, temperature: float = 0.0, first: int = 0) -> Context:
    ids = torch.arange(first, first + rows)
    return Context(
        tokens_BT=torch.stack([ids % V, (ids * 3 + 1) % V], dim=1),
        features_BTF=torch.zeros((rows, 2, 1)),
        counts_B=1 + ids % 2,
        lengths_B=5 + ids,
        rows_B=ids,
        temperature_B=torch.full((rows,), temperature),
        seeds_B=ids * 17,
    )


def by_noise(log_q: list[float], temperature: float, seed: int, position: int) -> list[float]:
    """How likely somebody else draws a token with the noise of this place, among the first to arrive."""
    times = arrivals(torch.arange(V), torch.tensor(seed), torch.tensor(position), Stream.TARGET).tolist()
    total = sum(math.exp(one / temperature) for one in log_q)
    each = [math.exp(one / temperature) / total / time for one, time in zip(log_q, times, strict=True)]
    first = sum(sorted(each)[-COMPARED:])
    return [math.log(one / first) for one in each]


def search(
    drafter: RandomDrafter, row: int, root: int, plan: Plan, temperature: float = 0.0, seed: int = 0, length: int = 0
) -> tuple[list[int], list[int]]:
    """The ranked tree of one row: tokens and parents, padded."""
    score: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    short: list[list[tuple[int, ...]]] = []
    for depth, children in enumerate(plan.branching):
        level = []
        for path in frontier:
            log_q = drafter.after(row, [root, *path])
            if temperature:
                log_q = by_noise(log_q, temperature, seed, length + depth)
            for token in sorted(range(V), key=lambda t: -log_q[t])[:children]:
                score[(*path, token)] = score[path] + log_q[token]
                level.append((*path, token))
        frontier = level
        if plan.beam is not None and depth + 1 < plan.depth:
            ranked = sorted(level, key=lambda path: -score[path])
            frontier = ranked[: plan.beam]
            short.append(ranked[plan.beam :])
    leaves = sorted(frontier, key=lambda path: -score[path])[: plan.paths]
    if plan.paths is None:
        leaves += [path for level in reversed(short) for path in level]
    nodes: list[tuple[int, ...]] = []
    for leaf in leaves:
        nodes += [leaf[: d + 1] for d in range(len(leaf)) if leaf[: d + 1] not in nodes]
    kept = sorted(nodes, key=lambda path: -score[path])[: plan.nodes]
    nodes = [node for node in nodes if node in kept]
    padding = plan.max_nodes - len(nodes)
    parents = [nodes.index(node[:-1]) if len(node) > 1 else ROOT for node in nodes]
    return [node[-1] for node in nodes] + [0] * padding, parents + [UNUSED] * padding


PLANS = [
    Plan(branching, paths=paths, nodes=nodes, beam=beam)
    for branching, paths, nodes, beam in itertools.product(
        [(1, 1, 1), (6, 3, 2), (3,), (2, 2, 2, 2), (1, 4, 1)],
        [None, 1, 2, 4, 8, 16, 32],
        [None, 1, 5, 12],
        [None, 1, 3],
    )
]


def test_the_ranked_tree_is_that_of_the_written_out_search() -> None:
    drafter, context = RandomDrafter(), context_of(3)
    roots = context.root()[0].tolist()
    for plan in PLANS:
        draft = drafter.propose(context, plan)
        assert draft.tokens_BN.shape == draft.parents_BN.shape == (3, plan.max_nodes), plan
        assert draft.q_BMV is None
        for row in range(3):
            expected = search(drafter, row, roots[row], plan)
            assert (draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist()) == expected, plan


def test_trees_of_sampled_rows_hold_what_the_noise_lets_arrive_first() -> None:
    """Greedy rows beside them have the trees that they have by themselves."""
    drafter, context = RandomDrafter(), context_of(4, temperature=0.8)
    context.temperature_B[1] = 0
    roots, seeds, lengths = context.root()[0].tolist(), context.seeds_B.tolist(), context.lengths_B.tolist()
    for plan in PLANS:
        if plan.is_chain:
            continue
        draft = drafter.propose(context, plan)
        assert draft.q_BMV is None
        for row in range(4):
            heat = float(context.temperature_B[row])
            expected = search(drafter, row, roots[row], plan, heat, seeds[row], lengths[row])
            assert (draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist()) == expected, plan


def test_static_trees_of_sampled_rows_have_ranks_by_the_noise() -> None:
    plan = Plan(choices=((0,), (1,), (3,), (0, 1), (1, 0), (0, 1, 2)))
    drafter, context = RandomDrafter(), context_of(3, temperature=1.3)
    draft = drafter.propose(context, plan)
    for row in range(3):
        root, seed, length = (int(x[row]) for x in (context.root()[0], context.seeds_B, context.lengths_B))
        for choice, node in zip(plan.choices, range(plan.max_nodes), strict=True):
            path: list[int] = []
            for depth, rank in enumerate(choice):
                scores = by_noise(drafter.after(row, [root, *path]), 1.3, seed, length + depth)
                path.append(sorted(range(V), key=lambda t: -scores[t])[rank])
            assert int(draft.tokens_BN[row, node]) == path[-1]


@pytest.mark.parametrize("plan", [Plan((6, 3, 2), paths=8), Plan((6, 3, 2), nodes=9), Plan((4, 4, 4), beam=3)], ids=str)
def test_parents_come_first_and_the_best_path_lies_in_front(plan: Plan) -> None:
    draft = RandomDrafter().propose(context_of(20), plan)
    nodes = torch.arange(plan.max_nodes)
    assert (draft.parents_BN < nodes).all()
    _, depths_BM = tree_tables(draft.parents_BN, draft.depth)
    used_BN = draft.parents_BN != UNUSED
    # From the front, nodes form a chain until the first path ends.
    best = Plan(plan.branching, paths=1, beam=plan.beam)
    first = RandomDrafter().propose(context_of(20), best)
    for row in range(20):
        ends = [n for n in range(plan.max_nodes) if draft.parents_BN[row, n] != n - 1]
        length = min(ends, default=plan.max_nodes)
        assert 1 <= length <= plan.depth
        if plan.nodes is None:
            assert draft.tokens_BN[row, : plan.depth].tolist() == first.tokens_BN[row].tolist()
        # Padding comes last.
        assert used_BN[row].tolist() == sorted(used_BN[row].tolist(), reverse=True)
    assert depths_BM.max() <= draft.depth


def test_a_single_path_of_a_wide_search_beats_the_greedy_chain() -> None:
    """Ranking looks ahead: in some rows the best summed path does not begin with the best first token."""
    drafter, context = RandomDrafter(), context_of(50)
    ranked = drafter.propose(context, Plan((6, 3, 2), paths=1)).tokens_BN
    greedy = drafter.propose(context, Plan((1, 1, 1))).tokens_BN
    assert (ranked[:, 0] != greedy[:, 0]).any() and (ranked[:, 0] == greedy[:, 0]).any()


def test_no_draft_has_no_nodes() -> None:
    draft = RandomDrafter().propose(context_of(4), Plan())
    assert draft.tokens_BN.shape == draft.parents_BN.shape == (4, 0)
    assert draft.tokens_BN.dtype == torch.int64 and draft.depth == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_a_plan_beyond_the_drafter_is_refused(sampled: bool) -> None:
    with pytest.raises(DraftsmithError, match="drafts 3 tokens ahead, but this drafter reaches 2"):
        RandomDrafter(depth=2).propose(context_of(1), Plan((1, 1, 1), sampled=sampled))


@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2), (2, 2, 2), (V,)])
def test_a_sampled_draft_hands_over_the_distributions_it_drew_from(branching: tuple[int, ...]) -> None:
    drafter, context, plan = RandomDrafter(), context_of(30, temperature=0.7), Plan(branching, sampled=True)
    draft = drafter.propose(context, plan)
    assert draft.q_BMV is not None and draft.q_BMV.dtype == (torch.float32 if LIBRARY else torch.float64)
    assert draft.tokens_BN.shape == (30, plan.max_nodes)
    leaves = int(torch.tensor(branching).prod())
    assert draft.q_BMV.shape == (30, plan.max_nodes + 1 - leaves, V), "a row for the root and every node with children"
    _, depths_BM = tree_tables(draft.parents_BN, plan.depth)
    for row, root in enumerate(context.root()[0].tolist()):
        parents, tokens = draft.parents_BN[row].tolist(), draft.tokens_BN[row].tolist()
        for node in range(-1, plan.max_nodes):
            children = [n for n in range(plan.max_nodes) if parents[n] == node]
            depth = int(depths_BM[row, node + 1])
            if depth == plan.depth:
                assert not children
                continue
            assert len(children) == branching[depth]
            assert len({tokens[n] for n in children}) == len(children)
            path, up = [], node
            while up >= 0:
                path.append(tokens[up])
                up = parents[up]
            expected = (torch.tensor(drafter.after(row, [root, *path[::-1]])) / 0.7).double().softmax(-1)
            torch.testing.assert_close(draft.q_BMV[row, node + 1].double(), expected, rtol=1e-5, atol=0)


def test_siblings_are_drawn_without_replacement_from_q() -> None:
    """The joint distribution of two siblings is q(x) q(y) / (1 - q(x))."""
    rows = 200_000
    context = replace(
        context_of(rows, temperature=1.0), rows_B=torch.zeros(rows, dtype=torch.int64),
        tokens_BT=torch.zeros((rows, 1), dtype=torch.int64), features_BTF=torch.zeros((rows, 1, 1)),
        counts_B=torch.ones(rows, dtype=torch.int64), lengths_B=torch.full((rows,), 9), seeds_B=torch.arange(rows),
    )
    draft = RandomDrafter(spread=1.0).propose(context, Plan((2, 1), sampled=True))
    assert draft.q_BMV is not None
    q = draft.q_BMV[0, 0]
    exact = q.unsqueeze(1) * q / (1 - q).unsqueeze(1)
    exact.fill_diagonal_(0)
    siblings = draft.tokens_BN[:, 0] * V + draft.tokens_BN[:, 1]
    counts = torch.bincount(siblings, minlength=V * V)
    assert counts.view(V, V).diagonal().sum() == 0
    assert chi_square_p_value(counts, exact.reshape(-1) * rows) > ALPHA
    # Children of the two siblings are drawn with noise of their own, and given their parents they are independent.
    same = (draft.tokens_BN[:, 2] == draft.tokens_BN[:, 3]).double()
    expected = (draft.q_BMV[:, 1] * draft.q_BMV[:, 2]).sum(1)
    deviation = (expected * (1 - expected)).sum().sqrt()
    assert (same.sum() - expected.sum()).abs() < 5 * deviation


def test_a_sampled_row_depends_on_its_seed_and_position_alone() -> None:
    drafter, plan = RandomDrafter(), Plan((3, 2), sampled=True)
    together = drafter.propose(context_of(6, temperature=1.0), plan)
    alone = drafter.propose(context_of(1, temperature=1.0, first=4), plan)
    assert torch.equal(together.tokens_BN[4:5], alone.tokens_BN)
    moved = replace(context_of(6, temperature=1.0), lengths_B=torch.arange(6) + 100)
    assert not torch.equal(together.tokens_BN, drafter.propose(moved, plan).tokens_BN)
    reseeded = replace(context_of(6, temperature=1.0), seeds_B=torch.arange(6) + 100)
    assert not torch.equal(together.tokens_BN, drafter.propose(reseeded, plan).tokens_BN)


def test_greedy_rows_of_a_sampled_batch_mostly_guess_the_best() -> None:
    drafter, context = RandomDrafter(), context_of(200)
    sampled = drafter.propose(context, Plan((1,), sampled=True)).tokens_BN
    best = drafter.propose(context, Plan((1,))).tokens_BN
    assert (sampled == best).double().mean() > 0.9


def test_a_chain_that_is_cut_short_shares_noise_too() -> None:
    """As many guesses as the plan has nodes, the first ones of the whole chain."""
    context = context_of(3, temperature=1.0)
    whole, cut = (RandomDrafter().propose(context, Plan((1, 1, 1), nodes=nodes)) for nodes in (None, 2))
    assert cut.tokens_BN.shape == (3, 2) and torch.equal(cut.tokens_BN, whole.tokens_BN[:, :2])
    greedy = RandomDrafter().propose(context_of(3, temperature=0.0), Plan((1, 1, 1)))
    assert cut.q_BMV is None and not torch.equal(whole.tokens_BN, greedy.tokens_BN)


@pytest.mark.parametrize(
    "plan",
    [Plan((1, 1, 1)), Plan((6, 3, 2), paths=4), Plan((6, 3, 2)), Plan((4, 4, 4), beam=3, nodes=7),
     Plan((3, 2), sampled=True), Plan((1, 1, 1), confidence=0.1), Plan((4, 2), nodes=5, confidence=0.1)],
    ids=str,
)
def test_growing_compiles_once_without_breaks(plan: Plan) -> None:
    drafter, counter = RandomDrafter(), CompileCounter()

    @torch.compile(fullgraph=True, dynamic=False, backend=counter)
    def propose(context: Context) -> Draft:
        return grow(drafter, context, plan)

    # Nothing asks a compiled drafter whether rows are sampled, so their chains are the likeliest tokens there.
    temperature = 1.0 if plan.sampled else 0.0
    for first in (0, 3):
        context = context_of(3, temperature=temperature, first=first)
        compiled, eager = propose(context), drafter.propose(context, plan)
        assert torch.equal(compiled.tokens_BN, eager.tokens_BN)
        assert torch.equal(compiled.parents_BN, eager.parents_BN)
    assert counter.frame_count == 1
