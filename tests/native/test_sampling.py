"""What the native operator chooses under every rule of a request, against the PyTorch that defines it: the same tokens.

B rows, N guesses, M = N + 1 nodes (root first), V vocabulary.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.native import LIBRARY, why_missing
from draftsmith.types import UNUSED, Draft, SamplingParams
from draftsmith.verify import (
    Acceptance,
    History,
    SamplingBatch,
    accept_defined,
    accept_greedy,
    accept_natively,
    can_accept_natively,
    shape_logits,
    tree_tables,
)
from draftsmith.verify.choices import UNDECIDED
from draftsmith.verify.noise import Stream, arrivals
from tests.verify.test_tree import random_parents

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith

DTYPES = [torch.bfloat16, torch.float32]
TEMPERATURES = (0.1, 0.5, 0.7, 1.0, 1.0, 1.7, 3.0)
KINDS = ("plain", "wide", "narrow", "ties", "minus infinity", "nan", "infinity", "flat", "nothing")


def logits_of(kind: str, batch: int, nodes: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Draw logits (B, M, V; fp32) with what may be special about them."""
    logits_BMV = 3 * torch.randn((batch, nodes, vocabulary), generator=generator)
    some_BMV = torch.rand(logits_BMV.shape, generator=generator)
    match kind:
        case "wide":
            return 4 * logits_BMV
        case "narrow":
            return logits_BMV / 30
        case "ties":
            return logits_BMV.round()
        case "minus infinity":
            return logits_BMV.masked_fill(some_BMV < 0.3, -torch.inf)
        case "nan":
            return logits_BMV.masked_fill(some_BMV < 0.5 / vocabulary, torch.nan)
        case "infinity":
            return logits_BMV.masked_fill(some_BMV < 0.5 / vocabulary, torch.inf)
        case "flat":
            return torch.full_like(logits_BMV, -2.5)
        case "nothing":
            return logits_BMV.masked_fill(some_BMV[:, :1, :1] < 0.5, -torch.inf)
    return logits_BMV


def rules_of(generator: random.Random, vocabulary: int, greedy: bool, shaped: bool) -> SamplingParams:
    """Draw the parameters of a request."""
    pick = generator.choice
    sampled = {
        "temperature": pick(TEMPERATURES),
        "top_k": pick((0, 0, 0, 1, 2, 5, 50, vocabulary - 1, vocabulary)),
        "top_p": pick((1.0, 1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 1e-6)),
        "min_p": pick((0.0, 0.0, 0.01, 0.2, 1.0)),
    }
    changes = {
        "repetition_penalty": pick((1.0, 1.3, 0.7)),
        "presence_penalty": pick((0.0, 0.4, -1.0)),
        "frequency_penalty": pick((0.0, 0.3, -0.2)),
        "logit_bias": {generator.randrange(vocabulary): generator.uniform(-4, 4) for _ in range(pick((0, 0, 3)))},
    }
    return SamplingParams(**(({} if greedy else sampled) | (changes if shaped else {})))  # type: ignore[arg-type]


def past_of(generator: random.Random, batch: int, vocabulary: int) -> History:
    """Draw histories in which tokens repeat, in slots that are not in the order of their rows."""
    few = min(vocabulary, 12)
    prompts, outputs = (
        [[generator.randrange(few) for _ in range(generator.randrange(6))] for _ in range(batch)] for _ in range(2)
    )
    past = History.of(prompts, outputs, vocabulary, "cpu")
    return past.at(torch.tensor(generator.sample(range(batch), batch)))


def native(
    logits_BMV: Tensor, batch: SamplingBatch, past: History | None, draft: Draft, visible_BMM: Tensor, seeds_B: Tensor,
    positions_B: Tensor,
) -> Acceptance:
    """What the operator says by itself, without PyTorch's help where it is undecided."""
    bias = [] if batch.bias is None else [batch.bias.rows_K, batch.bias.tokens_K, batch.bias.values_K]
    return Acceptance(*ops.accept_choices(
        logits_BMV, draft.tokens_BN, draft.parents_BN, visible_BMM, draft.depth, batch.rules_BX, batch.top_k_B, seeds_B,
        positions_B, bias, [] if past is None else past.tensors,
    ))


def assert_same(ours: Acceptance, theirs: Acceptance) -> None:
    assert torch.equal(ours.counts_B, theirs.counts_B)
    assert torch.equal(ours.next_B, theirs.next_B)
    for row, count in enumerate(theirs.counts_B.tolist()):
        assert ours.path_BD[row, :count].tolist() == theirs.path_BD[row, :count].tolist()


def nothing_drafted(batch: int) -> tuple[Draft, Tensor]:
    none_BN = torch.empty((batch, 0), dtype=torch.long)
    return Draft(none_BN, none_BN, 0), torch.ones((batch, 1, 1), dtype=torch.bool)


# ---- plain decoding: one node a row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocabulary", "batch", "runs"), [(1, 2, 10), (7, 12, 60), (512, 12, 40), (4099, 6, 10)])
def test_tokens_are_those_of_the_definition(
    kind: str, dtype: torch.dtype, vocabulary: int, batch: int, runs: int, request: pytest.FixtureRequest
) -> None:
    generator, numbers = random.Random(request.node.name), torch.Generator().manual_seed(vocabulary)
    draft, visible_BMM = nothing_drafted(batch)
    for run in range(runs):
        params = [rules_of(generator, vocabulary, row % 4 == 0, (row + run) % 2 == 0) for row in range(batch)]
        rules = SamplingBatch.build(params, vocabulary, "cpu")
        past = past_of(generator, batch, vocabulary) if rules.needs_history else None
        logits_BMV = logits_of(kind, batch, 1, vocabulary, numbers).to(dtype)
        seeds_B, positions_B = torch.randint(2**40, (batch,)), torch.randint(10_000, (batch,))
        given = (logits_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B)
        found = native(*given)
        assert UNDECIDED not in found.next_B.tolist()
        assert_same(found, accept_defined(*given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=0.8, top_k=50),
        SamplingParams(temperature=1.5, top_k=5_000, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=3.0, top_p=0.8, min_p=1e-3),
        SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.2),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={49_151: 14.0}),
    ],
    ids=str,
)
def test_tokens_of_a_large_vocabulary(rule: SamplingParams, dtype: torch.dtype) -> None:
    vocabulary, batch = 49_152, 8
    numbers, generator = torch.Generator().manual_seed(3), random.Random(3)
    draft, visible_BMM = nothing_drafted(batch)
    rules = SamplingBatch.build([rule] * batch, vocabulary, "cpu")
    drawn = set()
    for _ in range(6):
        past = past_of(generator, batch, vocabulary) if rules.needs_history else None
        logits_BMV = logits_of("plain", batch, 1, vocabulary, numbers).to(dtype)
        given = (logits_BMV, rules, past, draft, visible_BMM, torch.randint(2**40, (batch,)), torch.arange(batch))
        found = native(*given)
        assert_same(found, accept_defined(*given))
        drawn.update(found.next_B.tolist())
    assert len(drawn) > 1 or rule.logit_bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_light_tokens_that_weigh_as_much_as_a_heavy_one_are_drawn_as_often(
    dtype: torch.dtype, instructions: str
) -> None:
    vocabulary, batch, heavy = 40_000, 96, 25_000
    draft, visible_BMM = nothing_drafted(batch)
    for temperature in (1.0, 0.5):
        rules = SamplingBatch.build([SamplingParams(temperature=temperature)] * batch, vocabulary, "cpu")
        logits_BMV = torch.full((batch, 1, vocabulary), -temperature * math.log(vocabulary), dtype=dtype)
        logits_BMV[..., heavy] = 0.0
        given = (logits_BMV, rules, None, draft, visible_BMM, torch.arange(batch), torch.zeros(batch).long())
        found = native(*given)
        assert UNDECIDED not in found.next_B.tolist()
        assert_same(found, accept_defined(*given))
        assert 30 < (found.next_B == heavy).sum() < 66, "half of 96, give or take 3.7 standard deviations"


def test_draws_near_every_boundary_are_those_of_the_definition(instructions: str) -> None:
    """Few tokens, many draws: the shares of all tokens are met at both ends."""
    batch = 2_000
    draft, visible_BMM = nothing_drafted(batch)
    for rule in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01)):
        rules = SamplingBatch.build([rule] * batch, 40, "cpu")
        for kind in ("plain", "narrow", "ties", "flat"):
            logits_BMV = logits_of(kind, 1, 1, 40, torch.Generator().manual_seed(1)).expand(batch, 1, 40)
            given = (logits_BMV, rules, None, draft, visible_BMM, torch.arange(batch), torch.zeros(batch).long())
            found = native(*given)
            assert_same(found, accept_defined(*given))
            assert len(found.next_B.unique()) > 1


@pytest.mark.parametrize("others", [-torch.inf, -80.0])
@pytest.mark.parametrize(("seed", "token"), [(4_400_933, 1_188), (7_352_519, 36_177)])
def test_whoever_arrives_first_is_found_however_late_that_is(seed: int, token: int, others: float, instructions: str):
    """These two tokens, found by searching, are later than 25 times the mean, and yet nobody is sooner."""
    seeds_B, positions_B = torch.tensor([seed]), torch.zeros(1, dtype=torch.long)
    assert arrivals(torch.tensor([token]), seeds_B, positions_B, Stream.TARGET).item() > 25
    logits_BMV = torch.full((1, 1, 40_000), others)
    logits_BMV[..., token] = 3.0
    rules = SamplingBatch.build([SamplingParams(temperature=1.0)], 40_000, "cpu")
    given = (logits_BMV, rules, None, *nothing_drafted(1), seeds_B, positions_B)
    assert native(*given).next_B.tolist() == accept_defined(*given).next_B.tolist() == [token]


def test_every_instruction_set_takes_the_tokens_of_the_definition(instructions: str) -> None:
    generator, numbers, batch = random.Random(5), torch.Generator().manual_seed(5), 16
    draft, visible_BMM = nothing_drafted(batch)
    for kind in KINDS:
        for vocabulary in (300, 1_000):
            params = [rules_of(generator, vocabulary, row % 4 == 0, True) for row in range(batch)]
            rules, past = SamplingBatch.build(params, vocabulary, "cpu"), past_of(generator, batch, vocabulary)
            logits_BMV = logits_of(kind, batch, 1, vocabulary, numbers).bfloat16()
            given = (logits_BMV, rules, past, draft, visible_BMM, torch.arange(batch), torch.arange(batch))
            assert_same(native(*given), accept_defined(*given))


def test_shares_that_fp32_hardly_tells_apart_are_left_to_the_definition() -> None:
    params = [
        SamplingParams(temperature=1.0, top_p=1 - 1e-7), SamplingParams(temperature=1.0, min_p=1e-35),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, logit_bias={3: 1.0, 4: 2.0}),
        SamplingParams(temperature=1.3, top_p=1 - 1e-6, repetition_penalty=1.5, logit_bias={3: 1.0, 9: 2.0}),
        SamplingParams(temperature=1e-4), SamplingParams(temperature=1e4),
    ]
    draft, visible_BMM = nothing_drafted(6)
    rules, past = SamplingBatch.build(params, 100, "cpu"), past_of(random.Random(0), 6, 100)
    for seed in range(20):
        logits_BMV = logits_of("plain", 6, 1, 100, torch.Generator().manual_seed(seed))
        given = (logits_BMV, rules, past, draft, visible_BMM, torch.arange(6) + seed, torch.arange(6))
        undecided = (native(*given).next_B == UNDECIDED).nonzero().flatten()
        assert undecided.tolist() == [0, 1, 3]
        assert_same(accept_natively(*given), accept_defined(*given))


# ---- trees


def drafted(generator: random.Random, batch: int, nodes: int, depth: int, likely: list[list[int]]) -> Draft:
    """Draw trees whose guesses are among the likely tokens of their row, siblings that repeat a token included."""
    parents = [random_parents(generator, nodes, depth) for _ in range(batch)]
    tokens = [[generator.choice(likely[b]) for _ in range(nodes)] for b in range(batch)]
    return Draft(torch.tensor(tokens), torch.tensor(parents), depth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("greedy", [True, False])
def test_paths_of_trees_are_those_of_the_definition(greedy: bool, dtype: torch.dtype) -> None:
    generator, numbers = random.Random(7), torch.Generator().manual_seed(7)
    accepted = 0
    for run in range(60):
        batch, nodes, depth, vocabulary = 6, generator.choice((1, 4, 9)), 3, generator.choice((6, 30))
        params = [rules_of(generator, vocabulary, greedy or row == 0, row % 2 == run % 2) for row in range(batch)]
        rules = SamplingBatch.build(params, vocabulary, "cpu")
        past = past_of(generator, batch, vocabulary) if rules.needs_history else None
        # Nodes of a row have like logits, so that guesses among the best few are right now and then.
        logits_BMV = logits_of("plain", batch, 1, vocabulary, numbers) + torch.randn((batch, nodes + 1, vocabulary)) / 2
        draft = drafted(generator, batch, nodes, depth, logits_BMV[:, 0].topk(3).indices.tolist())
        visible_BMM, _ = tree_tables(draft.parents_BN, depth)
        wider_BMV = torch.cat([logits_BMV, logits_BMV], dim=1).to(dtype)[:, : nodes + 1]
        seeds_B, positions_B = torch.randint(2**40, (batch,)), torch.randint(99, (batch,))
        given = (wider_BMV, rules, past, draft, visible_BMM, seeds_B, positions_B)
        found = native(*given)
        assert_same(found, accept_defined(*given))
        if greedy:
            shaped_BMV = shape_logits(wider_BMV, rules, past, draft.tokens_BN, visible_BMM)
            assert_same(found, accept_greedy(shaped_BMV.argmax(-1), draft))
        accepted += int(found.counts_B.sum())
        assert found.path_BD.shape == (batch, depth)
        assert ((found.path_BD >= 0) & (found.path_BD <= nodes)).all()
    assert accepted > 60


def test_penalties_count_what_a_node_can_see() -> None:
    """The tree's own table says which guesses are on a path, and a table that says otherwise is believed."""
    draft = Draft(torch.tensor([[3, 3, 5]]), torch.tensor([[-1, 0, 1]]), 3)
    visible_BMM, _ = tree_tables(draft.parents_BN, 3)
    logits_BMV = torch.zeros((1, 4, 6))
    logits_BMV[:, :, 3], logits_BMV[:, :, 5] = 2.0, 1.0
    rules = SamplingBatch.build([SamplingParams(frequency_penalty=0.6)], 6, "cpu")
    past, seeds_B = History.of([[]], [[]], 6, "cpu"), torch.tensor([0])
    # Token 3 has 2.0, then 1.4 and 0.8 as it repeats, and 5 has 1.0, then 0.4.
    found = native(logits_BMV, rules, past, draft, visible_BMM, seeds_B, seeds_B)
    assert (found.path_BD.tolist(), found.counts_B.tolist(), found.next_B.tolist()) == ([[1, 2, 3]], [3], [3])
    blind_BMM = visible_BMM.clone()
    blind_BMM[:, :, 1:] = False
    found = native(logits_BMV, rules, past, draft, blind_BMM, seeds_B, seeds_B)
    assert (found.counts_B.tolist(), found.next_B.tolist()) == ([2], [3])


@pytest.mark.parametrize("others", [-torch.inf, -30.0])
def test_tokens_that_arrive_nearly_together_are_told_apart_as_the_definition_does(others: float) -> None:
    batch, vocabulary, pair = 400, 600, (17, 450)
    seeds_B, positions_B = torch.arange(batch), torch.zeros(batch, dtype=torch.long)
    times_BN = arrivals(torch.tensor(pair), seeds_B, positions_B, Stream.TARGET)
    for temperature in (1.0, 0.7):
        rules = SamplingBatch.build([SamplingParams(temperature=temperature)] * batch, vocabulary, "cpu")
        logits_BMV = torch.full((batch, 1, vocabulary), others * temperature)
        apart_B = torch.tensor([0.0, 1e-7, -1e-7, 1e-6, -1e-6]).repeat(batch // 5)
        logits_BMV[:, 0, pair[0]] = 0.0
        logits_BMV[:, 0, pair[1]] = temperature * (times_BN[:, 1] / times_BN[:, 0]).log().float() + apart_B
        given = (logits_BMV, rules, None, *nothing_drafted(batch), seeds_B, positions_B)
        found = native(*given)
        assert_same(found, accept_defined(*given))
        assert set(found.next_B.tolist()) == set(pair)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_that_share_a_row_draw_the_token_of_the_definition(dtype: torch.dtype, two_threads: None) -> None:
    """One row of many tokens, the likeliest of which lies in the part of one thread or of the other."""
    vocabulary, numbers = 66_001, torch.Generator().manual_seed(2)
    drawn = []
    for temperature in (0.5, 1.0, 4.0):
        rules = SamplingBatch.build([SamplingParams(temperature=temperature)], vocabulary, "cpu")
        for seed in range(25):
            logits_BMV = logits_of("plain", 1, 1, vocabulary, numbers).to(dtype)
            given = (logits_BMV, rules, None, *nothing_drafted(1), torch.tensor([seed]), torch.tensor([seed]))
            found = native(*given)
            assert_same(found, accept_defined(*given))
            drawn += found.next_B.tolist()
    assert min(drawn) < vocabulary // 2 < max(drawn)


def test_threads_change_no_token(two_threads: None) -> None:
    generator, batch, vocabulary = random.Random(1), 17, 2_000
    params = [rules_of(generator, vocabulary, row % 5 == 0, row % 2 == 0) for row in range(batch)]
    rules, past = SamplingBatch.build(params, vocabulary, "cpu"), past_of(generator, batch, vocabulary)
    draft, visible_BMM = nothing_drafted(batch)
    logits_BMV = logits_of("plain", batch, 1, vocabulary, torch.Generator().manual_seed(1)).bfloat16()
    given = (logits_BMV, rules, past, draft, visible_BMM, torch.arange(batch), torch.arange(batch))
    assert_same(native(*given), accept_defined(*given))


# ---- the history


def test_seen_tokens_are_listed_once_as_text_grows() -> None:
    generator, vocabulary, slots = random.Random(2), 30, 4
    past = History.empty(slots, vocabulary, "cpu")
    texts: list[tuple[list[int], list[int]]] = []
    for slot in range(slots):
        texts.append(([generator.randrange(40) for _ in range(5)], [generator.randrange(vocabulary) for _ in range(2)]))
        past.enter(slot, *texts[slot])
    for _ in range(40):
        slots_B = torch.tensor(generator.sample(range(slots), 3))
        tokens_BT = torch.tensor([[generator.randrange(vocabulary) for _ in range(3)] for _ in range(3)])
        counts_B = torch.tensor([generator.randrange(4) for _ in range(3)])
        past.at(slots_B).commit(tokens_BT, counts_B)
        for slot, tokens, count in zip(slots_B.tolist(), tokens_BT.tolist(), counts_B.tolist(), strict=True):
            texts[slot][1].extend(tokens[:count])
        if generator.random() < 0.1:
            slot = generator.randrange(slots)
            texts[slot] = ([generator.randrange(vocabulary)], [])
            past.enter(slot, *texts[slot])
        assert past.seen_RV is not None and past.seen_R is not None
        for slot, (prompt, output) in enumerate(texts):
            seen = past.seen_RV[slot, : int(past.seen_R[slot])].tolist()
            assert sorted(seen) == sorted({t for t in prompt if t < vocabulary} | set(output))
            assert past.output_counts_RV[slot].tolist() == [output.count(t) for t in range(vocabulary)]


def test_committing_what_is_no_token_is_refused() -> None:
    past = History.empty(2, 5, "cpu")
    with pytest.raises(IndexError, match="draftsmith: there is no token 5"):
        past.commit(torch.tensor([[1], [5]]), torch.tensor([1, 1]))
    with pytest.raises(IndexError, match="draftsmith: a row cannot have 2 of 1 tokens"):
        past.commit(torch.tensor([[1], [4]]), torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="draftsmith: the history has no slot 2"):
        past.at(torch.tensor([2])).commit(torch.tensor([[1]]), torch.tensor([1]))


# ---- what is refused


def test_what_does_not_belong_together_is_refused() -> None:
    draft = Draft(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-1, 0], [-1, UNUSED]]), 2)
    visible_BMM, _ = tree_tables(draft.parents_BN, 2)
    rules = SamplingBatch.build([SamplingParams(repetition_penalty=2.0)] * 2, 6, "cpu")
    past, rows_B, logits_BMV = History.empty(2, 6, "cpu"), torch.tensor([0, 1]), torch.zeros((2, 3, 6))

    def given(**changes: object) -> dict[str, object]:
        rows = {"seeds_B": rows_B, "positions_B": rows_B}
        return {"logits_BMV": logits_BMV, "batch": rules, "past": past, "draft": draft, "visible_BMM": visible_BMM} | (
            rows | changes
        )

    def refused(error: type[Exception], message: str, **changes: object) -> None:
        with pytest.raises(error, match=f"^draftsmith: {message}"):
            native(**given(**changes))  # type: ignore[arg-type]

    assert native(**given()).counts_B.shape == (2,)  # type: ignore[arg-type]
    belong, no_rules = "logits and tree do not belong to one draft", "these are no rules for 2 rows"
    refused(RuntimeError, belong, logits_BMV=logits_BMV[:, 1:])
    refused(RuntimeError, belong, logits_BMV=logits_BMV.double())
    refused(RuntimeError, belong, visible_BMM=visible_BMM[:, 1:])
    refused(RuntimeError, no_rules, batch=rules.row(0))
    refused(RuntimeError, no_rules, seeds_B=rows_B[:1])
    refused(RuntimeError, "these tensors are no history", past=History.empty(2, 7, "cpu"))
    refused(IndexError, "the history has no slot 2", past=past.at(rows_B + 1))
    later = replace(draft, parents_BN=torch.tensor([[1, -1], [-1, 0]]))
    refused(IndexError, "the parent of node 0 comes behind it", draft=later)
    shallow = Draft(torch.zeros((2, 2), dtype=torch.long), torch.tensor([[-1, 0]] * 2), 1)
    refused(IndexError, "the draft is deeper than its plan", draft=shallow, past=None)
    cold = replace(rules, rules_BX=rules.rules_BX - 1)
    refused(RuntimeError, "a temperature is 0, or from 0.0001 to 10000", batch=cold)
    assert not can_accept_natively(logits_BMV.double(), None)
    assert not can_accept_natively(logits_BMV.transpose(1, 2), None)
    assert can_accept_natively(logits_BMV, past)
    assert not can_accept_natively(logits_BMV, replace(past, seen_RV=None))
