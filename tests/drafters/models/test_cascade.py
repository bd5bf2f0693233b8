"""Drafting in two levels: a copy of the target in fewer bits drafts, and a cheap drafter guesses for the copy."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.heads.medusa import MedusaDrafter
from draftsmith.drafters.heads.medusa_config import MedusaConfig
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.models.cascade import Cascade
from draftsmith.drafters.models.inner import ByState, Inner, all_inside
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.native import LIBRARY, why_missing
from draftsmith.native.layers import Int4Linear
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Target
from draftsmith.types import UNUSED, Context, Draft, DraftsmithError, SamplingParams
from tests.helpers.contract import FEW, check_drafter, check_joint_distribution
from tests.helpers.heads_toy import demo_target
from tests.helpers.tiny import prompts, tiny_model, tiny_target

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

INNERS = ("ngram:min_length=1", "suffix", "mlp", "medusa", "ngram:min_length=1+mlp")
LENGTHS = [20, 7, 18, 12, 20, 1]


@cache
def bf16_target(architecture: str) -> Target:
    return Target(tiny_model(architecture, dtype=torch.bfloat16), name=architecture)


@cache
def guesser(name: str, target: Target) -> Drafter:
    """Return an inner drafter; a trained one is untrained here, and so mostly wrong."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "mlp":
            return MLPSpeculator.new(MLPConfig(n_predict=4, inner_dim=16), target, None).make_ready(target)
        if name == "medusa":
            return MedusaDrafter.new(MedusaConfig(num_heads=3), target, None).make_ready(target)
        return load_drafter(name, target)


def cascade(target: Target, name: str, **options: Any) -> "Compared":
    copy = QuantisedSelf(target, "int4", guesses=6)
    inner = all_inside({part: guesser(part, target) for part in name.split("+")}, 3)
    return Compared(copy, inner, **{"guesses": 6, "tail": 0} | options)


class Compared(Cascade):
    """Holds every chain against the one that the copy drafts alone."""

    agreed = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        alone = self.copy.propose(context, plan)
        draft = super().propose(context, plan)
        if plan.sampled or max(plan.branching) > 1:
            return draft
        own = plan.depth - min(self.tail, plan.depth // 4)
        assert torch.equal(draft.tokens_BN[:, :own], alone.tokens_BN[:, :own])
        assert torch.equal(draft.parents_BN[:, :own], alone.parents_BN[:, :own])
        if self.tail:
            beyond_BN = draft.parents_BN[:, own:]
            follows_BN = beyond_BN == torch.arange(own - 1, own - 1 + beyond_BN.shape[1])
            assert bool((follows_BN | (beyond_BN == UNUSED)).all())
        self.agreed += draft.tokens_BN.shape[0]
        return draft


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("tail", [0, 1])
def test_the_chain_is_the_one_that_the_copy_drafts_alone(architecture: str, inner: str, tail: int):
    """Rows of unlike lengths that join and leave, one at a time and four, in blocks and past a window."""
    target = bf16_target(architecture)
    params = [SamplingParams(max_tokens=length) for length in LENGTHS]
    plain = [c.tokens for c in Engine(target, max_batch=3).generate(prompts(6), params)]
    for batch in (1, 4):
        drafter = cascade(target, inner, tail=tail)
        found = Engine(target, drafter, max_batch=batch).generate(prompts(6), params)
        assert [c.tokens for c in found] == plain
        assert drafter.agreed > 10


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("inner", INNERS)
def test_sampled_rows_draft_in_two_levels_by_the_target_s_noise(inner: str, every: int):
    """Alone and beside greedy rows: the copy's own draws, and the text that everybody has by itself."""
    target = bf16_target("llama")
    params = [
        SamplingParams(max_tokens=20, temperature=0.8 if number % every == 0 else 0.0, seed=number)
        for number in range(6)
    ]
    plain = [c.tokens for c in Engine(target, max_batch=1).generate(prompts(6), params)]
    for batch, tail in ((1, 0), (4, 0), (4, 1)):
        drafter = cascade(target, inner, tail=tail)
        found = Engine(target, drafter, max_batch=batch).generate(prompts(6), params)
        assert [c.tokens for c in found] == plain and drafter.passes > 0 and drafter.agreed > 10
        assert all(c.statistics.accepted > 0 for c in found)


@pytest.mark.parametrize("inner", [str(assets.demo_drafter()), f"ngram+{assets.demo_drafter()}"])
def test_good_guesses_save_passes_for_sampled_rows_too(inner: str):
    target = demo_target()
    texts = ["def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", "Once upon a time", "1, 2, 3, 1, 2, 3, 1, 2,"]
    params = [SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.7, seed=seed) for seed in range(3)]
    plain = [c.tokens for c in Engine(target, max_batch=1).generate(texts, params)]
    words = inner.split("+")
    drafter = Compared(
        QuantisedSelf(target, "int4", 8), all_inside({word: load_drafter(word, target) for word in words}), 8, 0
    )
    found = Engine(target, drafter, max_batch=1).generate(texts, params)
    assert [c.tokens for c in found] == plain
    assert drafter.passes < 0.8 * 8 * drafter.agreed


@pytest.mark.parametrize("inner", [str(assets.demo_drafter()), f"ngram+{assets.demo_drafter()}"])
def test_good_guesses_for_the_copy_save_it_passes(inner: str):
    """Of a target with a trained speculator, where the copy agrees with many guesses."""
    target = demo_target()
    texts = ["def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", "Once upon a time", "1, 2, 3, 1, 2, 3, 1, 2,"]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = [c.tokens for c in Engine(target, max_batch=1).generate(texts, params)]
    for batch, tail in ((1, 0), (3, 0), (3, 3)):
        words = inner.split("+")
        drafter = Compared(
            QuantisedSelf(target, "int4", 8), all_inside({word: load_drafter(word, target) for word in words}), 8, tail
        )
        found = Engine(target, drafter, max_batch=batch).generate(texts, params)
        assert [c.tokens for c in found] == plain
        if batch == 1:
            assert drafter.passes < 0.6 * 8 * drafter.agreed


@pytest.mark.parametrize("inner", ["suffix", "suffix+mlp"])
def test_a_cascade_is_a_drafter_like_all(inner: str):
    """Trees and sampled plans are the copy's; all keep the text."""
    target = bf16_target("qwen3")
    made = cascade(target, inner, tail=1)
    plans = [None, Plan((1,)), Plan((2, 1)), Plan((1, 1, 1), sampled=True)]
    check_drafter(lambda: made, target, None, plans)


def test_sampled_drafts_of_a_cascade_keep_the_distribution():
    target = Target(tiny_model("llama", vocabulary=FEW, dtype=torch.bfloat16))
    check_joint_distribution(target, cascade(target, "ngram:min_length=1"))


class Oracle(Inner):
    """Knows what the copy will say of some rows, and guesses wrongly for the others."""

    def __init__(self, copy: QuantisedSelf, right: set[int]) -> None:
        super().__init__([], 3)
        self.copy, self.right = copy, right
        self.asked: list[list[int]] = []

    def begin(self, context: Context) -> None:
        self.known = self.copy.propose(context, Plan((1,) * 12)).tokens_BN.tolist()

    def guess(self, rows: Any, chains: Any, states_RF: torch.Tensor, count: int) -> list[list[int]]:
        self.asked.append(list(rows))
        assert len(states_RF) == len(rows) == len(chains)
        guesses = [self.known[row][len(chain) : len(chain) + count] for row, chain in zip(rows, chains, strict=True)]
        wrong = [[(token + 1) % 96 for token in some] for some in guesses]
        return [some if row in self.right else bad for row, some, bad in zip(rows, guesses, wrong, strict=True)]


def test_a_row_that_has_enough_is_not_read_again():
    """Two rows whose guesses are right beside one whose guesses never are."""
    target = bf16_target("llama")
    copy = QuantisedSelf(target, "int4", 8)
    oracle = Oracle(copy, {0, 2})
    drafter = Compared(copy, oracle, guesses=8, tail=0)
    params = SamplingParams(max_tokens=9)
    found = Engine(target, drafter, max_batch=3).generate(prompts(3), params)
    assert [c.tokens for c in found] == [c.tokens for c in Engine(target).generate(prompts(3), params)]
    assert oracle.asked[:7] == [[0, 1, 2], [0, 1, 2], *[[1]] * 5], "four tokens a pass, and one"


class Copy(QuantisedSelf):
    """Shows its cache."""

    def attach(self, cache: KVCache, plan: Plan) -> None:
        super().attach(cache, plan)
        self.cache = cache


class Audited(ByState):
    """Holds every state that it is handed against what the copy says of the chain, read anew, or the target's own."""

    audited = 0

    def __init__(self, copy: Copy, drafter: Drafter) -> None:
        super().__init__(drafter, 3)
        self.copy, self.taps = copy, drafter.taps

    def begin(self, context: Context) -> None:
        super().begin(context)
        self.context = context

    def guess(self, rows: Any, chains: Any, states_RF: torch.Tensor, count: int) -> Any:
        roots_B, own_BF = self.context.root()
        assert self.context.slots_B is not None
        for row, chain, state_F in zip(rows, chains, states_RF, strict=True):
            expected_F = own_BF[row]
            if chain:
                tokens_1M = torch.tensor([[roots_B[row], *chain[:-1]]])
                held_1, slots_1 = self.context.lengths_B[row : row + 1] - 1, self.context.slots_B[row : row + 1]
                _, states_1MF = self.copy.model.read_chain(self.copy.cache, tokens_1M, held_1, self.taps, slots_1)
                expected_F = states_1MF[0, -1]
                self.audited += 1
            assert torch.equal(state_F, expected_F)
        return super().guess(rows, chains, states_RF, count)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_inner_drafter_sees_the_copy_s_state_behind_the_newest_token(batch: int):
    target = demo_target()
    copy = Copy(target, "int4", 8)
    audited = Audited(copy, load_drafter(assets.demo_drafter(), target))
    texts = ["def add(a, b):\n    return", "Once upon a time", "1, 2, 3, 1, 2, 3, 1, 2,", "The"]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (16, 9, 12, 16)]
    Engine(target, Cascade(copy, audited, 8, 2), max_batch=batch).generate(texts, params)
    assert audited.audited > 20


def test_a_cascade_says_what_it_needs(tmp_path: Path):
    target = bf16_target("llama")
    options = "inner=[ngram:min_length=1,max_length=3],quantize=int8,guesses=5,ahead=2,tail=1"
    made = load_drafter(f"cascade:{options}", target)
    assert isinstance(made, Cascade) and made.default_plan() == Plan((1,) * 5) and made.reads_prompt
    assert (made.inner.most, made.tail, made.parameter_count()) == (2, 1, target.weights)
    assert made.memory_bytes() == load_drafter("int8-self", target).memory_bytes()
    both = load_drafter("cascade:inner=[ngram:min_length=1,max_length=3,suffix]", target)
    assert isinstance(both, Cascade) and len(both.inner.drafters) == 2 and both.default_plan().depth == 8
    plain, calibrated = (load_drafter(name, target) for name in ("cascade", "cascade:calibrate=64"))
    alike = load_drafter("int4-self:calibrate=64", target)
    assert isinstance(plain, Cascade) and isinstance(calibrated, Cascade) and isinstance(alike, QuantisedSelf)
    first, second, third = (
        torch.cat([one.packed.flatten() for one in copy.model.model.modules() if isinstance(one, Int4Linear)])
        for copy in (calibrated.copy, alike, plain.copy)
    )
    assert torch.equal(first, second) and not torch.equal(first, third), "the copy is that of int4-self, rounded alike"
    for spec, sentence in {
        "cascade:inner=lookahead": "'lookahead' cannot guess for a copy of the target, because it keeps a memory",
        "cascade:inner=int4-self": "'int4-self' cannot guess for a copy of the target",
        "cascade:inner=cascade": "'cascade', but a cascade has none inside; use ngram, suffix or a",
        "cascade:inner=nagram": "cascade:inner is 'nagram': .* did you mean ngram",
        "cascade:inner=mlp": "has to be trained; give the folder of one",
        f"cascade:inner={tmp_path / 'gone'}": "does not exist",
        "cascade:quantize=int5": "cascade:quantize is 'int5'; give 'int8' or 'int4'",
        "cascade:quantize=int8,calibrate=64": "calibrate is 64, but only weights in 4 bits are rounded by a text",
        "cascade:inner=[]": "cascade:inner is .*; .*at least 1",
        "cascade:tail=-1": "cascade:tail is -1; use at least 0",
    }.items():
        with pytest.raises(DraftsmithError, match=sentence):
            load_drafter(spec, target)
    with pytest.raises(DraftsmithError, match="'mlp' always has a guess, so what stands behind it has no turn; put it"):
        all_inside({"mlp": guesser("mlp", target), "ngram": guesser("ngram", target)})
    with pytest.raises(DraftsmithError, match="over the cache of a bf16 target, but .* is in torch.float64; give"):
        load_drafter("cascade", tiny_target())
