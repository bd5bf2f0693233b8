"""Block verification of drawn chains by the native operator, against the PyTorch that defines it: the same tokens.

B rows, N guesses, M = N + 1 nodes (root first), V vocabulary.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftsmith.native import LIBRARY, why_missing
from draftsmith.types import UNUSED, Draft, SamplingParams
from draftsmith.verify import (
    Acceptance,
    History,
    SamplingBatch,
    accept_block_as_defined,
    accept_block_natively,
    accept_drawn_natively,
)
from draftsmith.verify.choices import UNDECIDED
from tests.native.test_refusals import drawn, given_of, refuses_what_does_not_belong_together
from tests.native.test_sampling import DTYPES, KINDS, assert_same, rules_of

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)


def native(*given: object) -> Acceptance:
    """What the operator says by itself, without PyTorch's help where it is undecided."""
    logits_BMV, batch, past, draft, visible_BMM, seeds_B, positions_B = given
    assert isinstance(batch, SamplingBatch) and isinstance(draft, Draft)
    bias = [] if batch.bias is None else [batch.bias.rows_K, batch.bias.tokens_K, batch.bias.values_K]
    return Acceptance(*torch.ops.draftsmith.accept_block(
        logits_BMV, draft.tokens_BN, draft.parents_BN, visible_BMM, draft.depth, batch.rules_BX, batch.top_k_B, seeds_B,
        positions_B, bias, past.tensors if isinstance(past, History) else [], draft.q_BMV,
    ))


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 3, 6])
def test_tokens_are_those_of_the_definition(
    kind: str, dtype: torch.dtype, q_dtype: torch.dtype, length: int, request: pytest.FixtureRequest
) -> None:
    generator, accepted, rows, left = random.Random(request.node.name), 0, 0, 0
    for seed in range(6):
        vocabulary, batch = (7, 40, 512)[seed % 3], (1, 16)[seed % 2]
        params = [rules_of(generator, vocabulary, row % 4 == 3, (row + seed) % 2 == 0) for row in range(batch)]
        given = given_of(kind, params, vocabulary, (1,) * length, seed, dtype, q_dtype)
        found = native(*given)
        decided = found.next_B != UNDECIDED
        left += int((~decided).sum())
        assert_same(accept_block_natively(*given), accept_block_as_defined(*given))
        accepted, rows = accepted + int(found.counts_B[decided].sum()), rows + batch
    # What has no finite scores is left to the definition, and so is what is so sharp that rounding alone decides.
    unreadable = kind in ("nan", "infinity", "nothing")
    assert left <= (8 if kind == "wide" else 3) or unreadable
    assert accepted > rows // 10 or not length or unreadable


@pytest.mark.parametrize(
    ("vocabulary", "batch", "kind", "length"),
    [(8_192, 16, "plain", 3), (8_192, 1, "narrow", 5), (32_000, 4, "flat", 2), (128_256, 1, "plain", 2)],
)
def test_tokens_of_large_vocabularies(vocabulary: int, batch: int, kind: str, length: int) -> None:
    rules = [
        SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.3, top_k=40, frequency_penalty=0.4), SamplingParams(),
    ]
    given = given_of(kind, [rules[row % len(rules)] for row in range(batch)], vocabulary, (1,) * length, 0)
    assert (native(*given).next_B != UNDECIDED).all()
    assert_same(accept_block_natively(*given), accept_block_as_defined(*given))


def test_every_instruction_set_and_number_of_threads_takes_the_same_tokens(
    instructions: str, threads: Callable[[int], None]
) -> None:
    generator = random.Random(3)
    for kind in ("plain", "narrow", "ties", "minus infinity"):
        for vocabulary, batch in ((300, 8), (66_000, 1)) if kind == "narrow" else ((300, 8),):
            params = [rules_of(generator, vocabulary, row % 4 == 3, True) for row in range(batch)]
            given = given_of(kind, params, vocabulary, (1, 1, 1), 5)
            threads(1 + (batch == 1))  # two threads share the one row
            found = accept_block_natively(*given)
            threads(1)
            assert_same(found, accept_block_as_defined(*given))


def test_draws_near_every_boundary_are_those_of_the_definition_and_more_stay_than_guess_by_guess() -> None:
    """Few tokens, many draws: the shares of all tokens, and what q leaves of them, are met at both ends."""
    batch, vocabulary = 3_000, 12
    for kind in ("plain", "narrow", "ties", "flat"):
        given = given_of(kind, [SamplingParams(temperature=1.0)] * batch, vocabulary, (1, 1, 1), 1)
        # The same distributions for all rows, which differ by their seeds alone.
        logits_BMV, rules, _, draft, visible_BMM, seeds_B, positions_B = given
        assert draft.q_BMV is not None
        draft = drawn(draft.q_BMV[:1].log().expand(batch, -1, -1), (1, 1, 1), seeds_B, torch.float32)
        given = (logits_BMV[:1].expand(batch, -1, -1), rules, None, draft, visible_BMM, seeds_B, positions_B)
        assert (native(*given).next_B == UNDECIDED).sum() <= batch // 100
        found = accept_block_natively(*given)
        assert_same(found, accept_block_as_defined(*given))
        assert found.counts_B.sum() > accept_drawn_natively(*given).counts_B.sum()


def test_a_draft_of_the_target_itself_stays_whole() -> None:
    """Where p and q are alike but for rounding, no guess is refused."""
    logits_BMV, rules, past, _, visible_BMM, seeds_B, positions_B = given_of(
        "plain", [SamplingParams(temperature=1.0)] * 16, 30, (1, 1, 1), 2, torch.float32
    )
    draft = drawn(logits_BMV, (1, 1, 1), seeds_B, torch.float64)
    given = (logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B)
    found = accept_block_natively(*given)
    assert_same(found, accept_block_as_defined(*given))
    assert found.counts_B.tolist() == [3] * 16


def test_a_chain_ends_before_what_was_taken_out_and_what_q_cannot_have_drawn() -> None:
    for seed in range(20):
        params = [SamplingParams(temperature=1.0), SamplingParams()] * 4
        logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B = given_of("plain", params, 9, (1,) * 4, seed)
        assert draft.q_BMV is not None
        parents_BN, q_BMV = draft.parents_BN.clone(), draft.q_BMV.clone()
        parents_BN[::3, 2:], parents_BN[1::3] = UNUSED, UNUSED
        q_BMV[2, 1, draft.tokens_BN[2, 1]] = 0
        q_BMV[2, 1] /= q_BMV[2, 1].sum()
        cut = replace(draft, parents_BN=parents_BN, q_BMV=q_BMV)
        given = (logits_BMV, rules, past, cut, visible_BMM, seeds_B, positions_B)
        found = accept_block_natively(*given)
        assert_same(found, accept_block_as_defined(*given))
        assert found.counts_B[1::3].tolist() == [0, 0, 0] and found.counts_B[2] <= 1 and found.counts_B[::3].max() <= 2


def test_what_does_not_belong_together_is_refused() -> None:
    refuses_what_does_not_belong_together(native, depth=1)
