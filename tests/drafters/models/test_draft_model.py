"""Drafting with whole models: separate ones of any kind, the target's first layers, its quantised copies."""

from pathlib import Path

import pytest
import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.models.cross_vocabulary import CrossVocabularyDraftModel
from draftsmith.drafters.models.draft_model import draft_with
from draftsmith.drafters.models.early_exit import EarlyExit
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.models.path_reader import PathReader
from draftsmith.drafters.registry import families, load_drafter
from draftsmith.engine import Engine
from draftsmith.native import why_missing
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.contract import FEW, check_drafter, check_joint_distribution
from tests.helpers.recorder import OnCPU
from tests.helpers.tiny import (
    VOCABULARY,
    greedy_reference,
    prompts,
    save_tiny_target,
    tiny_model,
    tiny_target,
)

TREE = Plan((3, 2, 1))
CONFIDENCE = Plan((3, 3, 3), beam=2, nodes=7)
CHAIN = Plan((1, 1, 1), sampled=True)
# Where rows are sampled its guesses are what the target's own noise makes of the draft model.
SHARING = Plan((1, 1, 1))
SAMPLED_TREE = Plan((2, 2), sampled=True)
# Two nodes have guesses under them, then one.
NARROWING = Plan(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
COPIES = ("int8-self", "int4-self")
native_only = pytest.mark.skipif(bool(why_missing()), reason=why_missing())


def drafted(target: str, draft: str, seed: int = 0) -> DraftModel:
    return draft_with(tiny_target(draft, seed=seed), tiny_target(target))


@pytest.mark.parametrize(
    ("target", "draft", "plans"),
    [
        ("mistral", "gpt2", [CONFIDENCE, SAMPLED_TREE]),
        pytest.param("gpt2", "llama", [None, TREE, CHAIN], marks=pytest.mark.slow),
    ],
)
def test_another_architecture_drafts(target: str, draft: str, plans: list[Plan | None]):
    check_drafter(lambda: drafted(target, draft), tiny_target(target), tiny_model(target), plans)


@pytest.mark.parametrize("draft", ["mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("plan", [None, TREE, Plan((2, 2, 2)), NARROWING, CHAIN, SHARING])
def test_a_draft_model_equal_to_the_target_is_accepted_whole(draft: str, plan: Plan | None):
    """At every step, so its cache is right after whole and partial texts, joins and leaves."""
    questions = prompts(5)
    lengths = [20, 7, 18, 12, 20]
    drafter = drafted(draft, draft)
    depth = (plan or drafter.default_plan()).depth
    engine = Engine(tiny_target(draft), drafter, max_batch=3)
    params = [SamplingParams(max_tokens=n, temperature=float(plan in (CHAIN, SHARING)), seed=1) for n in lengths]
    for length, completion in zip(lengths, engine.generate(questions, params, plan), strict=True):
        assert len(completion.tokens) == length
        whole, rest = divmod(length - 1, depth + 1)
        assert completion.accepted_lengths == [depth] * whole + ([rest - 1] if rest else [])


class BestLast(DraftModel):
    """Hands over the best children last, so that the path which the cache holds in the end is the worst."""

    def top_k(self, depth, state, tokens_R, k, scores):
        log_q_Rk, tokens_Rk, state = super().top_k(depth, state, tokens_R, k, scores)
        return log_q_Rk.flip(1) if scores else None, tokens_Rk.flip(1), state


@pytest.mark.parametrize("plan", [Plan((2, 2, 1)), Plan((2, 1, 1, 1)), Plan((1, 1, 3))])
def test_guesses_that_were_read_but_refused_are_forgotten(plan: Plan):
    engine = Engine(tiny_target(), BestLast(tiny_target(), VOCABULARY, 4))
    for completion in engine.generate(prompts(3), SamplingParams(max_tokens=1 + 6 * (plan.depth + 1)), plan):
        assert completion.accepted_lengths == [plan.depth] * 6


class Misled(DraftModel):
    """Errs at its second guess in every other draft."""

    turns = 0

    def top_k(self, depth, state, tokens_R, k, scores):
        log_q_Rk, tokens_Rk, state = super().top_k(depth, state, tokens_R, k, scores)
        self.turns += depth == 0
        if depth == 1 and self.turns % 2:
            tokens_Rk = (tokens_Rk + 1) % VOCABULARY
        return log_q_Rk, tokens_Rk, state


def test_a_chain_that_was_accepted_in_part_leaves_no_trace():
    engine = Engine(tiny_target(), Misled(tiny_target(), VOCABULARY, 4))
    for completion in engine.generate(prompts(3), SamplingParams(max_tokens=1 + 3 * (2 + 5))):
        assert completion.accepted_lengths == [1, 4] * 3


@pytest.mark.parametrize(
    ("architecture", "plans"),
    [("llama", [None, TREE]), ("gpt2", [CONFIDENCE, CHAIN]), ("mistral", [SAMPLED_TREE])],
)
def test_early_exit(architecture: str, plans: list[Plan | None]):
    target = tiny_target(architecture)
    check_drafter(lambda: EarlyExit(target, 1, 3), target, tiny_model(architecture), plans)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("plan", [None, TREE])
def test_early_exit_after_all_layers_is_accepted_whole(architecture: str, plan: Plan | None):
    target = tiny_target(architecture)
    drafter = EarlyExit(target, target.layers, 3)
    engine = Engine(target, drafter, max_batch=2)
    for completion in engine.generate(prompts(3), SamplingParams(max_tokens=13), plan):
        assert completion.accepted_lengths == [3, 3, 3]


@pytest.mark.parametrize(
    "plan", [Plan((4, 4, 2), nodes=8), Plan((2, 2, 2, 2), paths=2), Plan((4, 4, 4, 1, 1))], ids=str
)
def test_early_exit_has_room_for_trees_that_are_wider_than_what_is_kept_of_them(plan: Plan):
    """Its guesses lie in the target's cache, behind a text that nearly fills its block of 64 tokens."""
    [question] = prompts(1, shortest=20, longest=20)
    target = tiny_target("llama")
    engine = Engine(target, EarlyExit(target, 1, 5), max_batch=1)
    [found] = engine.generate([question], SamplingParams(max_tokens=60), plan)
    assert found.tokens == greedy_reference(tiny_model("llama"), question, 60)


def test_early_exit_reads_only_its_layers():
    """Half the layers say what a model of those layers says."""
    model = tiny_model("llama")
    short = tiny_model("llama")
    short.model.layers = short.model.layers[:1]
    short.config.num_hidden_layers = 1
    view = Target(model).truncated(1)
    cache = view.new_cache(1, 64)
    [question] = prompts(1)
    logits = PathReader(view, cache).read([0], [question])
    torch.testing.assert_close(logits[0], short(torch.tensor([question])).logits[0, -1], rtol=0, atol=1e-10)
    assert len(cache.tensors) == 2
    with pytest.raises(DraftsmithError, match="has 2 layers, so 3 of them"):
        Target(model).truncated(3)


def test_chunks_and_paths_read_what_one_sequence_says():
    """Ragged texts in pieces, then paths in several forwards: each as the model says of the sequence alone."""
    model = tiny_model("mistral")
    target = tiny_target("mistral")
    reader = PathReader(target, target.new_cache(3, 40), chunk=4)
    texts = prompts(3, longest=19)
    held = [len(text) for text in texts]
    for logits_V, text in zip(reader.read([0, 0, 0], texts), texts, strict=True):
        torch.testing.assert_close(logits_V, model(torch.tensor([text])).logits[0, -1], rtol=0, atol=1e-10)
    paths = torch.tensor(prompts(36, shortest=3, longest=3)).view(3, 12, 3)
    logits_RV, kept = reader.read_paths(held, paths)
    for logits_V, path, text in zip(logits_RV, paths.flatten(0, 1), [t for t in texts for _ in range(12)], strict=True):
        whole = torch.tensor([[*text, *path.tolist()]])
        torch.testing.assert_close(logits_V, model(whole).logits[0, -1], rtol=0, atol=1e-10)
    assert kept > 0, "the paths took more than one forward"
    [more] = prompts(1, seed=5)
    again = reader.read([n + 3 for n in held], [more[:2]] * 3)
    for logits_V, text, path in zip(again, texts, paths[:, kept].tolist(), strict=True):
        whole = torch.tensor([[*text, *path, *more[:2]]])
        torch.testing.assert_close(logits_V, model(whole).logits[0, -1], rtol=0, atol=1e-10)
    texts = prompts(2, shortest=30, longest=30)
    reader.read([0, 0], [texts[0], texts[1][:1]])
    fresh = [[1, 2], texts[1][1:]]
    for logits_V, text in zip(reader.read([30, 1], fresh), [texts[0] + [1, 2], texts[1]], strict=True):
        torch.testing.assert_close(logits_V, model(torch.tensor([text])).logits[0, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("native", [False, True])
def test_rows_are_read_where_their_slots_are(native: bool):
    """Ragged rows in slots of any order, some of them done long before others, each as if it were alone."""
    target = Target(tiny_model("llama").bfloat16()) if native else tiny_target("llama")
    texts, slots_B = prompts(4, shortest=3, longest=21), torch.tensor([5, 0, 3, 1])
    reader = PathReader(target, target.new_cache(6, 60), chunk=5)
    found_BV = reader.read([0] * 4, texts, slots_B)
    paths_BFD = torch.tensor(prompts(8, shortest=2, longest=2, seed=4)).view(4, 2, 2)
    found_RV, _ = reader.read_paths([len(text) for text in texts], paths_BFD, slots_B)
    for b, text in enumerate(texts):
        alone = PathReader(target, target.new_cache(1, 60), chunk=5)
        close = {"rtol": 0, "atol": 0 if target.backend.reads_apart else 1e-10}
        torch.testing.assert_close(found_BV[b], alone.read([0], [text])[0], **close)
        mine_RV, _ = alone.read_paths([len(text)], paths_BFD[b : b + 1])
        torch.testing.assert_close(found_RV.view(4, 2, -1)[b], mine_RV, **close)


def test_the_joint_distribution_of_three_tokens():
    """A draft of another kind, sampled chains and trees: texts come as often as the target says."""
    target = Target(tiny_model("llama", vocabulary=FEW))
    check_joint_distribution(target, draft_with(Target(tiny_model("gpt2", vocabulary=FEW)), target))


@pytest.mark.parametrize("plan", [None, TREE, CHAIN])
def test_texts_longer_than_the_context_of_the_draft_model_go_on_without_guesses(plan: Plan | None):
    short = tiny_model("gpt2")
    short.config.n_positions = 24
    short.transformer.wpe.weight.data = short.transformer.wpe.weight.data[:24]
    target = tiny_target()
    drafter = draft_with(Target(short), target)
    questions = prompts(4, shortest=4, longest=40)
    temperature = float(plan is CHAIN)
    found = Engine(target, drafter).generate(questions, SamplingParams(max_tokens=30, temperature=temperature), plan)
    if not temperature:
        expected = [greedy_reference(tiny_model(), question, 30) for question in questions]
        assert [c.tokens for c in found] == expected
    longest = max(found, key=lambda c: len(c.prompt_tokens))
    assert len(longest.prompt_tokens) > 24 and longest.statistics.drafted == 0
    assert all(c.statistics.drafted > 0 for c in found if len(c.prompt_tokens) < 20)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_steps_pad_the_batch(early: bool):
    questions = prompts(3)
    drafter = EarlyExit(tiny_target(), 1, 4) if early else drafted("llama", "gpt2")
    found = Engine(tiny_target(), drafter, max_batch=3, compile="trace").generate(
        questions, SamplingParams(max_tokens=9)
    )
    assert [c.tokens for c in found] == [greedy_reference(tiny_model(), question, 9) for question in questions]


@native_only
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_native_models_draft(architecture: str):
    """In bf16 by native code: one equal to the target, its own layers, and its quantised copies."""
    target = Target(tiny_model(architecture, dtype=torch.bfloat16))
    twin = Target(tiny_model(architecture, dtype=torch.bfloat16))
    questions = prompts(4)
    greedy = SamplingParams(max_tokens=16)
    plain = [c.tokens for c in Engine(target).generate(questions, greedy)]
    drafters: list[Drafter] = [draft_with(twin, target), EarlyExit(target, 2, 4), EarlyExit(target, 1, 4)]
    accepted = []
    copies = [load_drafter(f"{name}:guesses=4", target) for name in COPIES]
    for drafter in [*drafters, *copies]:
        for plan in (None, TREE):
            found = Engine(target, drafter, max_batch=3).generate(questions, greedy, plan)
            assert [c.tokens for c in found] == plain
            if plan is None:
                accepted.append([c.accepted_lengths for c in found])
    assert accepted[0] == accepted[1] == [[4, 4, 4]] * 4
    assert all(sum(map(sum, of_copy)) > sum(map(sum, accepted[2])) for of_copy in accepted[3:])


def test_a_folder_of_a_language_model_loads_as_a_draft_model(tmp_path: Path):
    folder = save_tiny_target(tmp_path / "small", "gpt2", seed=3)
    target = Target.from_pretrained(save_tiny_target(tmp_path / "large"), dtype="fp32")
    for word in (str(folder), f"draft-model:path={folder},guesses=4"):
        drafter = load_drafter(word, target)
        assert isinstance(drafter, DraftModel) and not isinstance(drafter, CrossVocabularyDraftModel)
        assert drafter.model.config.model_type == "gpt2" and drafter.model.dtype == torch.float32
        assert drafter.default_plan() == Plan((1, 1, 1, 1))
    [found] = Engine(target, drafter).generate(["ab"], SamplingParams(max_tokens=8, ignore_eos=True))
    [plain] = Engine(target).generate(["ab"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert found.tokens == plain.tokens and found.statistics.drafted > 0
    assert list(families())[-1] == "draft-model", "its rule is the widest"


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("early-exit:layers=3", "tiny-llama has 2 layers, so 3 of them"),
        ("early-exit:guesses=0", "early-exit:guesses is 0; use at least 1"),
        ("draft-model", "draft-model:path is missing; it has no default"),
        ("draft-model:path=/nowhere/to/be", "no draft model from '/nowhere/to/be'"),
    ],
)
def test_wrong_words_are_refused(word: str, complaint: str):
    with pytest.raises(DraftsmithError, match=complaint):
        load_drafter(word, tiny_target())


def test_recorded_forwards_read_the_same():
    """As on a GPU: committed tokens and guesses in turns, with several paths read a few at a time."""
    target, recorder = tiny_target("llama"), OnCPU()
    plain, recorded = (
        PathReader(target, target.new_cache(3, 26), chunk=8, recorder=one) for one in (None, recorder)
    )
    held = [0, 0, 0]
    for turn in range(8):
        fresh = [[(7 * turn + 5 * b + t) % VOCABULARY for t in range(1 + (turn + b) % 3)] for b in range(3)]
        ends = [before + len(tokens) for before, tokens in zip(held, fresh, strict=True)]
        paths_BFD = torch.arange(3 * 40 * 2).view(3, 40, 2) % VOCABULARY if turn % 2 else torch.full((3, 1, 1), turn)
        read = [(one.read(held, fresh), one.read_paths(ends, paths_BFD)[0]) for one in (plain, recorded)]
        for expected, found in zip(*read, strict=True):
            torch.testing.assert_close(found, expected)
        held = ends
    assert recorder.replays > 5
