"""Acceptance: exact tokens where the rule is deterministic, the joint distribution of three tokens where it is not."""

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from draftsmith.plan import Plan
from draftsmith.types import UNUSED, Draft, SamplingParams
from draftsmith.verify import (
    SamplingBatch,
    Stream,
    accept_deterministic,
    accept_greedy,
    accept_sampled,
    probabilities,
    race,
    tree_tables,
)
from tests.helpers.toy import ALPHABET, LENGTH, chi_square_p_value, decode, p_value_of_texts, prefix_code, world
from tests.verify.test_tree import random_parents, walk_up

ALPHA = 1e-6
DRAWS = 1_000_000
PLAIN = Plan()
RANKED = [Plan((1, 1)), Plan((3, 2), paths=4), Plan((2, 2, 2)), Plan((4, 3), beam=2, nodes=5), Plan((8,))]
SAMPLED = [Plan((1, 1), sampled=True), Plan((3, 2), sampled=True)]


def names(plan: Plan) -> str:
    return f"{'sampled' if plan.sampled else 'ranked'}-{'x'.join(map(str, plan.branching))}"


def random_trees(rows: int, nodes: int, depth: int, vocab: int, distinct: bool) -> tuple[list[list[int]], Draft]:
    generator = random.Random(rows + nodes)
    trees = [random_parents(generator, nodes, depth) for _ in range(rows)]
    tokens = []
    for parents in trees:
        guesses: list[int] = []
        for node in range(nodes):
            taken = [guesses[n] for n in range(node) if parents[n] == parents[node]] if distinct else []
            guesses.append(generator.choice([t for t in range(vocab) if t not in taken]))
        tokens.append(guesses)
    return trees, Draft(torch.tensor(tokens), torch.tensor(trees), depth)


@pytest.mark.parametrize("distinct", [True, False])
def test_greedy_takes_the_longest_path_of_right_guesses(distinct: bool) -> None:
    """Siblings may repeat a token when a drafter is careless; then the longer of the right paths counts."""
    trees, draft = random_trees(rows=200, nodes=14, depth=5, vocab=15 if distinct else 3, distinct=distinct)
    generator = torch.Generator().manual_seed(0)
    choice_BM = torch.randint(0, 4 if distinct else 3, (200, 15), generator=generator)
    accepted = accept_greedy(choice_BM, draft)
    lengths = set()
    for row, parents in enumerate(trees):
        right = [[]]
        for node in range(14):
            path = walk_up(parents, node)[::-1]
            pairs = list(itertools.pairwise(path))
            if parents[node] != UNUSED and all(draft.tokens_BN[row, b - 1] == choice_BM[row, a] for a, b in pairs):
                right.append(path[1:])
        longest = max(len(path) for path in right)
        count = int(accepted.counts_B[row])
        path = accepted.path_BD[row].tolist()
        assert count == longest
        assert path[:count] in right
        assert all(0 <= index < 15 for index in path)
        assert accepted.next_B[row] == choice_BM[row, path[count - 1] if count else 0]
        lengths.add(count)
    assert {0, 1, 2} <= lengths


def test_padding_is_never_accepted() -> None:
    draft = Draft(torch.zeros((1, 3), dtype=torch.int64), torch.tensor([[UNUSED] * 3]), 2)
    accepted = accept_greedy(torch.zeros((1, 4), dtype=torch.int64), draft)
    assert accepted.counts_B.tolist() == [0]


@pytest.mark.parametrize("accept", [accept_deterministic, accept_sampled])
def test_an_empty_draft_is_plain_sampling(accept) -> None:  # type: ignore[no-untyped-def]
    none_BN = torch.zeros((5, 0), dtype=torch.int64)
    p_BMV = torch.rand((5, 1, 9), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    seeds_B, positions_B = torch.arange(5), torch.arange(5) * 3
    accepted = accept(p_BMV, Draft(none_BN, none_BN, 0), seeds_B, positions_B)
    assert accepted.path_BD.shape == (5, 0)
    assert accepted.counts_B.tolist() == [0] * 5
    assert torch.equal(accepted.next_B, race(p_BMV[:, 0], seeds_B, positions_B, Stream.TARGET))


@pytest.mark.parametrize("plan", RANKED, ids=names)
def test_a_deterministic_draft_never_changes_the_text_of_a_seed(plan: Plan) -> None:
    seeds_B = torch.arange(20_000)
    plain_BT = decode(world(0), PLAIN, accept_deterministic, seeds_B)
    assert plain_BT.unique(dim=0).shape[0] > 50
    assert torch.equal(plain_BT, decode(world(0), plan, accept_deterministic, seeds_B))


@pytest.mark.parametrize("plan", [PLAIN, Plan((2, 2), paths=3)], ids=names)
def test_the_distribution_with_deterministic_trees(plan: Plan) -> None:
    assert p_value_of_texts(world(0), plan, accept_deterministic, DRAWS) > ALPHA


@pytest.mark.parametrize("plan", SAMPLED, ids=names)
def test_the_distribution_with_sampled_drafts(plan: Plan) -> None:
    assert p_value_of_texts(world(0), plan, accept_sampled, DRAWS) > ALPHA


def test_independent_seeds_give_independent_texts() -> None:
    """Texts of neighbouring seeds are uncorrelated: the pair of their first tokens has the product distribution."""
    toy, plan = world(0), Plan((2, 2), sampled=True)
    first_B = decode(toy, plan, accept_sampled, torch.arange(100_000))[:, 0].view(-1, 2)
    counts = torch.bincount(prefix_code(first_B), minlength=ALPHABET**2)
    exact = (toy.p[0].unsqueeze(1) * toy.p[0]).reshape(-1)
    assert chi_square_p_value(counts, exact * len(first_B)) > ALPHA


def test_p_values_over_independent_seeds_are_uniform() -> None:
    toy, plan = world(1), Plan((2,), sampled=True)
    p_values = [p_value_of_texts(toy, plan, accept_sampled, 1_000, first_seed=1_000 * run) for run in range(100)]
    counts = torch.bincount((torch.tensor(p_values) * 5).long().clamp(max=4), minlength=5)
    assert chi_square_p_value(counts, torch.full((5,), 20.0)) > ALPHA


def sampled_draft(rows: int, branching: tuple[int, ...], vocab: int, uniform_q: bool = False) -> Draft:
    """Draw siblings without replacement with torch's own sampler; level by level."""
    generator = torch.Generator().manual_seed(rows)
    tokens, parents, q, frontier, start = [], [], [], 1, 0
    for depth, children in enumerate(branching):
        q_BFV = torch.rand((rows, frontier, vocab), generator=generator, dtype=torch.float64)
        q_BFV = torch.full_like(q_BFV, 1 / vocab) if uniform_q else q_BFV / q_BFV.sum(-1, keepdim=True)
        q.append(q_BFV)
        tokens.append(torch.multinomial(q_BFV.view(-1, vocab), children, generator=generator).view(rows, -1))
        above = torch.arange(start - frontier, start) if depth else torch.tensor([-1])
        parents.append(above.repeat_interleave(children))
        start, frontier = start + frontier * children, frontier * children
    q.append(torch.zeros((rows, frontier, vocab), dtype=torch.float64))
    return Draft(torch.cat(tokens, 1), torch.cat(parents).expand(rows, -1), len(branching), torch.cat(q, 1), branching)


def test_greedy_rows_of_a_sampled_batch_come_out_greedy() -> None:
    draft = sampled_draft(rows=500, branching=(3, 2), vocab=6)
    logits_BMV = torch.randn((500, 10, 6), generator=torch.Generator().manual_seed(1))
    rules = [SamplingParams(temperature=0.0 if row % 2 else 1.0) for row in range(500)]
    p_BMV = probabilities(logits_BMV, SamplingBatch.build(rules, 6, "cpu"))
    seeds_B = torch.arange(500)
    sampled, greedy = accept_sampled(p_BMV, draft, seeds_B, seeds_B), accept_greedy(logits_BMV.argmax(-1), draft)
    assert torch.equal(sampled.counts_B[1::2], greedy.counts_B[1::2])
    assert torch.equal(sampled.next_B[1::2], greedy.next_B[1::2])
    for row in range(1, 500, 2):
        count = int(greedy.counts_B[row])
        assert sampled.path_BD[row, :count].tolist() == greedy.path_BD[row, :count].tolist()
    assert not torch.equal(sampled.next_B, greedy.next_B)


def test_tokens_of_probability_zero_never_come_out() -> None:
    draft = sampled_draft(rows=2_000, branching=(3, 2), vocab=6)
    rule = SamplingParams(temperature=1.0, top_k=2)
    logits_BMV = torch.randn((2_000, 10, 6), generator=torch.Generator().manual_seed(1))
    p_BMV = probabilities(logits_BMV, SamplingBatch.build([rule] * 2_000, 6, "cpu"))
    seeds_B = torch.arange(2_000)
    accepted = accept_sampled(p_BMV, draft, seeds_B, seeds_B)
    rows, node_B = torch.arange(2_000), torch.zeros(2_000, dtype=torch.int64)
    for d in range(2):
        taken_B = accepted.counts_B > d
        token_B = draft.tokens_BN[rows, (accepted.path_BD[:, d] - 1).clamp(min=0)]
        assert (p_BMV[rows, node_B, token_B][taken_B] > 0).all()
        node_B = torch.where(taken_B, accepted.path_BD[:, d], node_B)
    assert (p_BMV[rows, node_B, accepted.next_B] > 0).all()
    assert accepted.counts_B.unique().tolist() == [0, 1, 2]


def test_a_fully_accepted_path_ends_with_the_targets_own_choice() -> None:
    """Also where an elder sibling was refused on the way; a refusal at the end has noise of its own."""
    draft = sampled_draft(rows=2_000, branching=(3, 2), vocab=6)
    p_BMV = torch.rand((2_000, 10, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    seeds_B = torch.arange(2_000)
    accepted = accept_sampled(p_BMV, draft, seeds_B, seeds_B)
    full_B = accepted.counts_B == 2
    assert (accepted.path_BD[full_B, 0] != 1).any()
    own_B = race(p_BMV[seeds_B, accepted.path_BD[:, 1]], seeds_B, seeds_B + 2, Stream.TARGET)
    assert torch.equal(accepted.next_B[full_B], own_B[full_B])


def test_a_draft_from_the_target_itself_is_always_accepted() -> None:
    draft = sampled_draft(rows=300, branching=(1, 1, 1), vocab=7)
    assert draft.q_BMV is not None
    p_BMV = draft.q_BMV.clone()
    p_BMV[:, -1] = 1 / 7
    seeds_B = torch.arange(300)
    assert accept_sampled(p_BMV, draft, seeds_B, seeds_B).counts_B.tolist() == [3] * 300


def test_when_the_children_exhaust_the_alphabet_one_of_them_stays() -> None:
    """All of V drawn without replacement: the last one left has q = 1 and p = 1."""
    draft = sampled_draft(rows=300, branching=(5,), vocab=5, uniform_q=True)
    p_BMV = torch.rand((300, 6, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    seeds_B = torch.arange(300)
    assert accept_sampled(p_BMV, draft, seeds_B, seeds_B).counts_B.tolist() == [1] * 300


@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2)])
def test_the_branching_is_only_a_bound(branching: tuple[int, ...]) -> None:
    draft = sampled_draft(rows=100, branching=branching, vocab=6)
    nodes = draft.tokens_BN.shape[1]
    p_BMV = torch.rand((100, nodes + 1, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    seeds_B = torch.arange(100)
    known = accept_sampled(p_BMV, draft, seeds_B, seeds_B)
    draft.branching = None
    unknown = accept_sampled(p_BMV, draft, seeds_B, seeds_B)
    assert torch.equal(known.next_B, unknown.next_B)
    assert torch.equal(known.path_BD, unknown.path_BD)
    assert known.counts_B.unique().numel() > 1


def test_a_row_does_not_notice_its_neighbours() -> None:
    draft = sampled_draft(rows=40, branching=(3, 2), vocab=6)
    assert draft.q_BMV is not None
    p_BMV = torch.rand((40, 10, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    seeds_B = torch.arange(40)
    together = accept_sampled(p_BMV, draft, seeds_B, seeds_B)
    for row in range(40):
        one = slice(row, row + 1)
        alone = Draft(draft.tokens_BN[one], draft.parents_BN[one], 2, draft.q_BMV[one], draft.branching)
        accepted = accept_sampled(p_BMV[one], alone, seeds_B[one], seeds_B[one])
        assert accepted.next_B == together.next_B[row]
        assert torch.equal(accepted.path_BD[0], together.path_BD[row])


def test_acceptance_compiles_once_without_breaks() -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=False, backend=counter)
    def step(choice_BM: Tensor, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[Tensor, ...]:
        visible_BMM, depths_BM = tree_tables(parents_BN, 5)
        accepted = accept_greedy(choice_BM, Draft(tokens_BN, parents_BN, 5))
        return visible_BMM, depths_BM, accepted.path_BD, accepted.counts_B, accepted.next_B

    for seed in range(3):
        _, draft = random_trees(rows=4, nodes=14, depth=5, vocab=15, distinct=True)
        choice_BM = torch.randint(0, 15, (4, 15), generator=torch.Generator().manual_seed(seed))
        accepted = accept_greedy(choice_BM, draft)
        compiled = step(choice_BM, draft.tokens_BN, draft.parents_BN)
        for ours, theirs in zip((accepted.path_BD, accepted.counts_B, accepted.next_B), compiled[2:], strict=True):
            assert torch.equal(ours, theirs)
    assert counter.frame_count == 1


def test_sampled_acceptance_compiles_without_breaks() -> None:
    counter = CompileCounter()
    compiled = torch.compile(accept_sampled, fullgraph=True, dynamic=False, backend=counter)
    p_BMV = torch.rand((4, 10, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    for first in (0, 4):
        seeds_B = torch.arange(first, first + 4)
        draft = sampled_draft(rows=4, branching=(3, 2), vocab=6)
        assert torch.equal(compiled(p_BMV, draft, seeds_B, seeds_B).next_B,
                           accept_sampled(p_BMV, draft, seeds_B, seeds_B).next_B)
    assert counter.frame_count == 1


def test_the_texts_are_as_long_as_they_should_be() -> None:
    assert decode(world(0), SAMPLED[0], accept_sampled, torch.arange(10)).shape == (10, LENGTH)
