"""What every drafter must pass, whatever it guesses: the text stays the target's own, and drafts are well-formed."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from transformers import PreTrainedModel

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.engine.requests.request import Request
from draftsmith.evaluation.proof.draws import draw
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import KVCache, Target
from draftsmith.types import ROOT, UNUSED, Context, Draft, SamplingParams
from tests.helpers.tiny import greedy_reference, prompts
from tests.helpers.toy import chi_square_p_value

NEW_TOKENS = 12
"""Enough that rows of other lengths end, wait and join between, and that text leaves the windows of tiny targets."""
FEW = 5
"""Tokens of a target all of whose short texts are drawn often."""


class CheckedDrafter(Drafter):
    """Passes everything on to another drafter, and checks and keeps the drafts that come back."""

    def __init__(self, inner: Drafter, target: Target) -> None:
        self.inner, self.target = inner, target
        self.taps, self.reads_prompt = inner.taps, inner.reads_prompt
        self.can_sample, self.observes, self.borrows_layers = inner.can_sample, inner.observes, inner.borrows_layers
        self.parts = inner.parts
        self.proposed: tuple[Context, Draft] | None = None
        self.drafts: list[Draft] = []
        self.rows_seen: set[int] = set()
        self.rows_reset: set[int] = set()

    def default_plan(self) -> Plan:
        return self.inner.default_plan()

    def attach(self, cache: KVCache, plan: Plan) -> None:
        self.inner.attach(cache, plan)

    def reset_rows(self, rows: list[int]) -> None:
        self.rows_reset.update(rows)
        self.inner.reset_rows(rows)

    def follow(self, context: Context) -> None:
        self.inner.follow(context)

    def observe(self, context: Context, draft: Draft, choice_BM: torch.Tensor) -> None:
        assert self.observes and self.proposed is not None
        assert context is self.proposed[0] and draft is self.proposed[1]
        self.proposed = None
        assert choice_BM.shape == (draft.tokens_BN.shape[0], draft.tokens_BN.shape[1] + 1)
        self.inner.observe(context, draft, choice_BM)

    def propose(self, context: Context, plan: Plan) -> Draft:
        batch, width = context.tokens_BT.shape
        assert context.features_BTF.shape == (batch, width, self.target.feature_size(self.taps))
        assert bool((context.counts_B >= 1).all()) and bool((context.counts_B <= width).all())
        assert bool((context.counts_B <= context.lengths_B).all())
        self.rows_seen.update(context.rows_B.tolist())
        draft = self.inner.propose(context, plan)
        check_draft(draft, plan, batch, self.target.vocab_size, self.can_sample)
        assert not self.observes or self.proposed is None, "what was drafted last was not shown to it"
        self.proposed = context, draft
        self.drafts.append(draft)
        return draft


def check_draft(draft: Draft, plan: Plan, batch: int, vocabulary: int, can_sample: bool = True) -> None:
    """Assert the shapes and the order that the engine relies on."""
    nodes = draft.tokens_BN.shape[1]
    assert draft.tokens_BN.shape == draft.parents_BN.shape == (batch, nodes) and nodes <= plan.max_nodes
    assert draft.depth <= plan.depth
    assert draft.tokens_BN.dtype == draft.parents_BN.dtype == torch.int64
    assert bool((draft.tokens_BN >= 0).all()) and bool((draft.tokens_BN < vocabulary).all())
    assert (draft.q_BMV is not None) == (plan.sampled and plan.depth > 0 and can_sample)
    for tokens, parents in zip(draft.tokens_BN.tolist(), draft.parents_BN.tolist(), strict=True):
        depths: list[int] = []
        siblings = set()
        for node, parent in enumerate(parents):
            assert parent == UNUSED or ROOT <= parent < node
            assert parent < 0 or parents[parent] != UNUSED
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            if parent != UNUSED:
                assert (parent, tokens[node]) not in siblings, "two siblings guess the same token"
                siblings.add((parent, tokens[node]))
        assert max(depths, default=0) <= draft.depth


def check_drafter(
    make_drafter: Callable[[], Drafter],
    target: Target,
    model: PreTrainedModel | None,
    plans: Sequence[Plan | None] = (None,),
) -> None:
    """Run one drafter through the engine in many ways; `model` is the target's model untouched, for reference.

    The prompts are `contract_prompts()`; deterministic plans also keep sampled text token for token. Without a model
    the reference is plain decoding: in bf16 the model's own code may break ties in another way.
    """
    questions = contract_prompts()
    greedy = SamplingParams(max_tokens=NEW_TOKENS, seed=3)
    if model is None:
        answers = [c.tokens for c in Engine(target, max_batch=1).generate(questions, greedy)]
    else:
        answers = [greedy_reference(model, question, NEW_TOKENS) for question in questions]
    sampled = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=seed)
        for seed in range(len(questions))
    ]
    drafter = CheckedDrafter(make_drafter(), target)
    engine = Engine(target, drafter, max_batch=8)
    plain = [c.tokens for c in engine.generate(questions, sampled, plan=NO_DRAFT)]
    for number, plan in enumerate(plans):
        accepted = {}
        for size in (8, 3) if number else (1, 8, 3):  # one row alone is no other case by another plan
            found = engine.generate(questions[:size], greedy, plan=plan)
            assert [c.tokens for c in found] == answers[:size]
            accepted[size] = [c.accepted_lengths for c in found]
        shape = plan if plan is not None else engine.plan
        if not shape.sampled and shape.lossless:
            assert [c.tokens for c in engine.generate(questions, sampled, plan=plan)] == plain
        narrow = Engine(target, CheckedDrafter(make_drafter(), target), max_batch=3)
        lengths = [1 + 5 * i % NEW_TOKENS for i in range(len(questions))]
        found = narrow.generate(questions, [SamplingParams(max_tokens=n) for n in lengths], plan=plan)
        assert [c.tokens for c in found] == [answer[:n] for answer, n in zip(answers, lengths, strict=True)]
        again = engine.generate(questions[:3], greedy, plan=plan)
        assert [c.accepted_lengths for c in again] == accepted[3], (
            "a drafter that remembers nothing of ended rows drafts the same twice"
        )
    # `prove` draws without drafts, too.
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    drawn = draw(target, make_drafter(), questions[0], params, NO_DRAFT, 2, batch=2, seed=0)
    assert drawn.texts == [Engine(target, max_batch=1).generate([questions[0]], params)[0].tokens] * 2
    # Where drafting stops above a load, a drafter must not lose track of what is written meanwhile.
    switching = Engine(target, CheckedDrafter(make_drafter(), target), max_batch=3, draft_rows=1)
    found = switching.generate(questions[:3], [SamplingParams(max_tokens=n) for n in (NEW_TOKENS, 5, 9)])
    assert [c.tokens for c in found] == [answers[0], answers[1][:5], answers[2][:9]]
    assert all(c.statistics.drafted == 0 for c in found[1:]), "two of the rows never ran alone"
    assert drafter.parts or drafter.rows_seen - {-1} <= drafter.rows_reset, "parts are told themselves"


def contract_prompts() -> list[list[int]]:
    """Return the eight ragged prompts of `check_drafter`, for drafters that want to know them."""
    return prompts(8, seed=11)


class _Recorder(CheckedDrafter):
    """Keeps what was drafted for which row at which length."""

    def __init__(self, inner: Drafter, target: Target) -> None:
        super().__init__(inner, target)
        self.records: list[tuple[int, int, list[int]]] = []

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        self.records += zip(
            context.rows_B.tolist(), context.lengths_B.tolist(), draft.tokens_BN.tolist(), strict=True
        )
        return draft


@torch.no_grad()
def check_forward_agreement(
    drafter: TrainableDrafter, target: Target, inside: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    fewest: int = 16,
) -> None:
    """Assert that what a float64 drafter drafts while the engine decodes is what its `forward` predicts.

    Rows differ in length, wait for a free slot, join and leave, so that each kind of step occurs; `forward` reads the
    whole text anew, with the drafter's own guesses behind it. With `inside` the engine has the drafter that this makes
    of it, which drafts `fewest` times by it.
    """
    depth = drafter.max_depth
    recorder = _Recorder(drafter.for_decoding(target), target)
    engine = Engine(target, inside(recorder), max_batch=3)
    questions = contract_prompts()[:5]
    rules = [SamplingParams(max_tokens=3 + 4 * i) for i in range(len(questions))]
    answers = engine.generate(questions, rules, plan=Plan((1,) * depth))
    assert len(recorder.records) >= fewest
    for row, length, guesses in recorder.records:
        text = (questions[row] + answers[row].tokens)[:length]
        features_1TF, _ = target.encode(torch.tensor([text[:-1]]), drafter.taps)
        unknown_1DF = features_1TF.new_zeros((1, depth, features_1TF.shape[2]))
        tokens_1T = torch.tensor([text[1:] + guesses])
        logits = drafter(tokens_1T, torch.cat([features_1TF, unknown_1DF], dim=1))
        assert [logits[d][0, length - 2].argmax().item() for d in range(depth)] == guesses


def run_out(engine: Engine) -> list[Request]:
    """Step until nothing is left; return the requests in the order in which they ended."""
    ended = []
    while engine.core.has_work:
        progress = engine.core.step()
        assert len({one.request.id for one in progress}) == len(progress)
        ended += [one.request for one in progress if one.finished]
    return ended


def check_joint_distribution(target: Target, drafter: Drafter) -> None:
    """Draft sampled chains and trees for a target of `FEW` tokens: texts of three come as often as the target says."""
    draws, prompt = 4_000, [1, 2]
    every = torch.tensor([[*prompt, *text] for text in product(range(FEW), repeat=3)])
    _, logits_BTV = target.encode(every, logits=True)
    assert logits_BTV is not None
    p_BTV = (logits_BTV.double() / 1.5).softmax(-1)[:, 1:4]
    joint = p_BTV.gather(2, every[:, 2:].unsqueeze(2)).squeeze(2).prod(1)
    engine = Engine(target, drafter, max_batch=2000, max_length=12)
    for plan in (Plan((1, 1), sampled=True), Plan((2, 1), sampled=True)):
        params = [SamplingParams(max_tokens=3, temperature=1.5, seed=seed) for seed in range(draws)]
        texts = torch.tensor([c.tokens for c in engine.generate([prompt] * draws, params, plan)])
        counts = torch.bincount(texts @ torch.tensor([FEW * FEW, FEW, 1]), minlength=FEW**3)
        assert chi_square_p_value(counts, joint * draws) > 1e-4
