"""Rejection sampling of drawn guesses by the native operator, against the PyTorch that defines it: the same tokens.

B rows, N guesses, M = N + 1 nodes (root first), V vocabulary.
"""

import itertools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.native import LIBRARY, why_missing
from draftsmith.types import ROOT, UNUSED, Draft, SamplingParams
from draftsmith.verify import (
    Acceptance,
    History,
    SamplingBatch,
    Stream,
    accept_drawn_as_defined,
    accept_drawn_natively,
    categorical,
    tree_tables,
    uniform,
)
from draftsmith.verify.choices import UNDECIDED
from draftsmith.verify.noise import arrivals
from tests.native.test_sampling import DTYPES, KINDS, assert_same, logits_of, past_of, rules_of

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith
Given = tuple[Tensor, SamplingBatch, History | None, Draft, Tensor, Tensor, Tensor]


def native(*given: object) -> Acceptance:
    """What the operator says by itself, without PyTorch's help where it is undecided."""
    logits_BMV, batch, past, draft, visible_BMM, seeds_B, positions_B = given
    assert isinstance(batch, SamplingBatch) and isinstance(draft, Draft)
    bias = [] if batch.bias is None else [batch.bias.rows_K, batch.bias.tokens_K, batch.bias.values_K]
    return Acceptance(*ops.accept_drawn(
        logits_BMV, draft.tokens_BN, draft.parents_BN, visible_BMM, draft.depth, batch.rules_BX, batch.top_k_B, seeds_B,
        positions_B, bias, past.tensors if isinstance(past, History) else [], draft.q_BMV, draft.branching or (),
    ))


def drawn(scores_BMV: Tensor, branching: Sequence[int], seeds_B: Tensor, dtype: torch.dtype) -> Draft:
    """Draw a draft of this shape from the softmax of scores, whatever the drafter: siblings without replacement."""
    batch, vocabulary = scores_BMV.shape[0], scores_BMV.shape[2]
    parents, level = [], [ROOT]
    for children in branching:
        first = len(parents)
        parents += [parent for parent in level for _ in range(children)]
        level = list(range(first, len(parents)))
    q_BMV = scores_BMV[:, : len(parents) + 1].double().softmax(-1).to(dtype)
    tokens, left_BMV = [], q_BMV.double().clone()
    for node, parent in enumerate(parents):
        token_B = categorical(left_BMV[:, parent + 1], uniform(seeds_B, seeds_B, Stream.DRAFT, node))
        left_BMV[torch.arange(batch), parent + 1, token_B] = 0
        tokens.append(token_B)
    inner = len(parents) + 1 - len(level)
    parents_BN = torch.tensor(parents, dtype=torch.long).expand(batch, -1)
    tokens_BN = torch.stack(tokens, 1) if tokens else torch.empty((batch, 0), dtype=torch.long)
    assert q_BMV.shape[2] == vocabulary
    return Draft(tokens_BN, parents_BN, len(branching), q_BMV[:, :inner], tuple(branching))


def given_of(
    kind: str, params: Sequence[SamplingParams], vocabulary: int, branching: Sequence[int], seed: int,
    dtype: torch.dtype = torch.bfloat16, q_dtype: torch.dtype = torch.float32, error: float = 1.0,
) -> Given:
    """Draw logits, and a draft from a q near them."""
    numbers, batch = torch.Generator().manual_seed(seed), len(params)
    nodes = 1 + sum(itertools.accumulate(branching, operator.mul))
    logits_BMV = logits_of(kind, batch, nodes, vocabulary, numbers)
    hot_B11 = torch.tensor([p.temperature if p.temperature > 0 else 0.1 for p in params])[:, None, None]
    finite_BMV = logits_BMV.nan_to_num(nan=0.0, posinf=5.0, neginf=-5.0)
    scores_BMV = (finite_BMV + error * torch.randn(finite_BMV.shape, generator=numbers)) / hot_B11
    seeds_B = torch.randint(2**40, (batch,), generator=numbers)
    draft = drawn(scores_BMV, branching, seeds_B, q_dtype)
    visible_BMM, _ = tree_tables(draft.parents_BN, draft.depth)
    rules = SamplingBatch.build(params, vocabulary, "cpu")
    past = past_of(random.Random(seed), batch, vocabulary) if rules.needs_history else None
    return logits_BMV.to(dtype), rules, past, draft, visible_BMM, seeds_B, torch.arange(batch)


@pytest.mark.parametrize(("seed", "late"), [(4_400_933, 1_188), (7_352_519, 36_177)])
def test_where_a_guess_cannot_have_been_drawn_a_late_token_hides_no_sooner_one(seed: int, late: int) -> None:
    """`late`, found by searching, arrives later than 25 times the mean, and others of little weight just before it."""
    vocabulary, seeds_B, positions_B = 40_000, torch.tensor([seed]), torch.zeros(1, dtype=torch.long)
    times_V = arrivals(torch.arange(vocabulary), seeds_B[0], positions_B[0], Stream.TARGET)
    rules = SamplingBatch.build([SamplingParams(temperature=1.0)], vocabulary, "cpu")
    impossible = 5
    q_BMV = torch.zeros((1, 1, vocabulary))
    q_BMV[..., impossible + 1] = 1.0
    draft = Draft(torch.tensor([[impossible]]), torch.tensor([[ROOT]]), 1, q_BMV, (1,))
    visible_BMM, _ = tree_tables(draft.parents_BN, draft.depth)
    for sooner in times_V.argsort()[:40].tolist():
        logits_BMV = torch.full((1, 2, vocabulary), -torch.inf)
        logits_BMV[..., late] = 0.0
        logits_BMV[..., sooner] = (times_V[sooner] / (times_V[late] - 0.01)).log().float()
        given = (logits_BMV, rules, None, draft, visible_BMM, seeds_B, positions_B)
        found = native(*given)
        assert found.next_B.tolist() == [sooner]
        assert_same(found, accept_drawn_as_defined(*given))


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branching", [(), (1,), (1, 1, 1), (3,), (2, 2), (4, 1, 2)], ids=str)
def test_tokens_are_those_of_the_definition(
    kind: str, dtype: torch.dtype, q_dtype: torch.dtype, branching: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    generator, accepted, rows, left = random.Random(request.node.name), 0, 0, 0
    for seed in range(6):
        vocabulary, batch = (7, 40, 512)[seed % 3], (1, 16)[seed % 2]
        params = [rules_of(generator, vocabulary, row % 4 == 3, (row + seed) % 2 == 0) for row in range(batch)]
        given = given_of(kind, params, vocabulary, branching, seed, dtype, q_dtype)
        found = native(*given)
        decided = (found.next_B != UNDECIDED).tolist()
        # Where a share and its remainder are told apart by rounding alone; so few that a rule which gave up would show.
        left += batch - sum(decided)
        assert_same(accept_drawn_natively(*given), accept_drawn_as_defined(*given))
        accepted, rows = accepted + int(found.counts_B[found.next_B != UNDECIDED].sum()), rows + batch
    assert left <= 3
    assert accepted > rows // 10 or not branching or kind in ("nan", "infinity", "nothing")


@pytest.mark.parametrize(
    ("vocabulary", "batch", "kind", "branching"),
    [(8_192, 16, "plain", (1, 1, 1)), (8_192, 16, "plain", (2, 2)), (8_192, 1, "narrow", (2, 2)),
     (32_000, 16, "plain", (1, 1)), (32_000, 1, "flat", (2, 1)), (128_256, 2, "plain", (1, 1)),
     (128_256, 1, "narrow", (2,))],
)
def test_tokens_of_large_vocabularies(vocabulary: int, batch: int, kind: str, branching: tuple[int, ...]) -> None:
    rules = [
        SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.3, top_k=40, frequency_penalty=0.4), SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(),
    ]
    params = [rules[row % len(rules)] for row in range(batch)]
    for seed, dtype in enumerate(DTYPES if vocabulary < 20_000 else DTYPES[:1]):
        given = given_of(kind, params, vocabulary, branching, seed, dtype)
        assert_same(accept_drawn_natively(*given), accept_drawn_as_defined(*given))


def test_every_instruction_set_and_number_of_threads_takes_the_same_tokens(
    instructions: str, threads: Callable[[int], None]
) -> None:
    generator = random.Random(3)
    for kind in ("plain", "narrow", "ties", "minus infinity", "nan"):
        for vocabulary, batch in ((300, 8), (66_000, 1)) if kind == "narrow" else ((300, 8),):
            params = [rules_of(generator, vocabulary, row % 4 == 3, True) for row in range(batch)]
            given = given_of(kind, params, vocabulary, (2, 1, 1), 5)
            # Two threads share the one row.
            threads(1 + (batch == 1))
            found = accept_drawn_natively(*given)
            threads(1)
            assert_same(found, accept_drawn_as_defined(*given))


def test_draws_near_every_boundary_are_those_of_the_definition() -> None:
    """Few tokens, many draws: the shares of all tokens, and what q leaves of them, are met at both ends."""
    batch, vocabulary = 3_000, 12
    for kind in ("plain", "narrow", "ties", "flat"):
        for branching in ((1,), (3,)):
            given = given_of(kind, [SamplingParams(temperature=1.0)] * batch, vocabulary, branching, 1)
            # The same distributions for all rows, which differ by their seeds alone.
            logits_BMV, rules, _, draft, visible_BMM, seeds_B, positions_B = given
            assert draft.q_BMV is not None
            draft = drawn(draft.q_BMV[:1].log().expand(batch, -1, -1), branching, seeds_B, torch.float32)
            same_BMV = logits_BMV[:1].expand(batch, -1, -1)
            given = (same_BMV, rules, None, draft, visible_BMM, seeds_B, positions_B)
            found = native(*given)
            assert (found.next_B == UNDECIDED).sum() <= batch // 100 or kind == "flat"
            assert_same(accept_drawn_natively(*given), accept_drawn_as_defined(*given))


def test_what_is_no_part_of_a_tensor_of_its_own_is_read_where_it_lies() -> None:
    generator = random.Random(9)
    params = [rules_of(generator, 50, row == 2, row % 2 == 0) for row in range(6)]
    logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B = given_of("plain", params, 50, (2, 2), 3)
    assert draft.q_BMV is not None
    expected = accept_drawn_as_defined(logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B)
    wider_BMV = torch.cat([logits_BMV, logits_BMV], dim=1)[:, : logits_BMV.shape[1]]
    deeper = torch.cat([draft.q_BMV, torch.zeros_like(draft.q_BMV)], dim=1)
    for q_BMV in (deeper, deeper[:, : draft.q_BMV.shape[1]]):
        own = replace(draft, q_BMV=q_BMV)
        found = accept_drawn_natively(wider_BMV, rules, past, own, visible_BMM, seeds_B, positions_B)
        assert_same(found, expected)


def test_guesses_that_were_taken_out_are_passed_over() -> None:
    """Unused nodes, more children than the draft says, and a guess that q cannot have drawn."""
    for seed in range(20):
        params = [SamplingParams(temperature=1.0)] * 8
        logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B = given_of("plain", params, 9, (3, 1), seed)
        assert draft.q_BMV is not None
        parents_BN, q_BMV = draft.parents_BN.clone(), draft.q_BMV.clone()
        parents_BN[::2, 1], parents_BN[1::2, 4] = UNUSED, UNUSED
        q_BMV[3, 0, draft.tokens_BN[3, 0]] = 0
        q_BMV[3, 0] /= q_BMV[3, 0].sum()
        cut = replace(draft, parents_BN=parents_BN, q_BMV=q_BMV, branching=((3, 1), (2, 1), None)[seed % 3])
        given = (logits_BMV, rules, past, cut, visible_BMM, seeds_B, positions_B)
        assert_same(accept_drawn_natively(*given), accept_drawn_as_defined(*given))


def test_rows_that_are_left_to_the_definition_go_alone() -> None:
    """Two rules that fp32 hardly tells apart, among rows that it does."""
    fine = [SamplingParams(temperature=1.0, top_p=1 - 1e-7), SamplingParams(temperature=1.0, min_p=1e-35)]
    plain = SamplingParams(temperature=1.0, repetition_penalty=1.3, logit_bias={3: 1.0})
    given = given_of("plain", [plain, fine[0], plain, fine[1], SamplingParams()], 60, (2, 1), 4)
    undecided = (native(*given).next_B == UNDECIDED).nonzero().flatten().tolist()
    assert undecided == [1, 3]
    assert_same(accept_drawn_natively(*given), accept_drawn_as_defined(*given))


def refuses_what_does_not_belong_together(operator_alone: Callable[..., Acceptance], **more: object) -> None:
    """Hold that an operator refuses guesses that cannot have been drawn from such a q, and `more` as too deep."""
    given = given_of("plain", [SamplingParams(temperature=1.0)] * 2, 30, (1, 1), 0)
    logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B = given
    assert draft.q_BMV is not None

    def refused(error: type[Exception], message: str, **changes: object) -> None:
        other = replace(draft, **changes)  # type: ignore[arg-type]
        with pytest.raises(error, match=f"^draftsmith: {message}"):
            operator_alone(logits_BMV, rules, past, other, visible_BMM, seeds_B, positions_B)

    for q_BMV in (draft.q_BMV.half(), draft.q_BMV[:1], draft.q_BMV[:, :, 1:], draft.q_BMV.mT.contiguous().mT):
        refused(RuntimeError, r"what the guesses were drawn from has to be fp32 or float64 \(2, M, 30\)", q_BMV=q_BMV)
    refused(IndexError, "node -1 has children, but no distribution", q_BMV=draft.q_BMV[:, :0])
    refused(IndexError, r"there is no token \d+", tokens_BN=draft.tokens_BN + 30)
    if more:
        refused(IndexError, "the draft is deeper than its plan", **more)


def test_what_does_not_belong_together_is_refused() -> None:
    refuses_what_does_not_belong_together(native)


def test_noise_is_the_same_number_for_number() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds_B = torch.randint(-(2**63), 2**63 - 1, (2_000,), generator=generator)
    positions_B = torch.randint(0, 2**40, (2_000,), generator=generator)
    indices_B = torch.randint(0, 4_000, (2_000,), generator=generator)
    for stream in Stream:
        found = ops.noise(seeds_B, positions_B, stream, indices_B)
        assert torch.equal(found, uniform(seeds_B, positions_B, stream, indices_B))
