"""Drafting with whole models: separate ones of any kind, the target's first layers, its int8 copy."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from contract import check_drafter
from draftsmith.cli.common import load_engine
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.cross_vocabulary import CrossVocabularyDraftModel, SharedTokens, TranslatedText
from draftsmith.drafters.draft_model import draft_with
from draftsmith.drafters.early_exit import EarlyExit
from draftsmith.drafters.model_drafter import DraftModel
from draftsmith.drafters.reading import PathReader
from draftsmith.drafters.registry import families, load_drafter
from draftsmith.engine import Engine
from draftsmith.native import why_missing
from draftsmith.plan import Plan
from draftsmith.target import Target
from draftsmith.types import DraftsmithError, SamplingParams
from tiny import (
    TOKENIZER_EOS,
    TOKENIZER_SIZE,
    VOCABULARY,
    greedy_reference,
    prompts,
    save_tiny_target,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from toy import chi_square_p_value

TREE = Plan((3, 2, 1))
CONFIDENCE = Plan((3, 3, 3), beam=2, nodes=7)
CHAIN = Plan((1, 1, 1), sampled=True)
SAMPLED_TREE = Plan((2, 2), sampled=True)
# Two nodes have guesses under them, then one.
NARROWING = Plan(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
native_only = pytest.mark.skipif(bool(why_missing()), reason=why_missing())


def drafted(target: str, draft: str, seed: int = 0) -> DraftModel:
    return draft_with(tiny_target(draft, seed=seed), tiny_target(target))


@pytest.mark.parametrize(
    ("target", "draft", "plans"),
    [("gpt2", "llama", [None, TREE, CHAIN]), ("mistral", "gpt2", [CONFIDENCE, SAMPLED_TREE])],
)
def test_another_architecture_drafts(target: str, draft: str, plans: list[Plan | None]):
    check_drafter(lambda: drafted(target, draft), tiny_target(target), tiny_model(target), plans)


@pytest.mark.parametrize("draft", ["mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("plan", [None, TREE, Plan((2, 2, 2)), NARROWING, CHAIN])
def test_a_draft_model_equal_to_the_target_is_accepted_whole(draft: str, plan: Plan | None):
    """At every step, so its cache is right after whole and partial texts, joins and leaves."""
    questions = prompts(5)
    lengths = [20, 7, 18, 12, 20]
    drafter = drafted(draft, draft)
    depth = (plan or drafter.default_plan()).depth
    engine = Engine(tiny_target(draft), drafter, max_batch=3)
    params = [SamplingParams(max_tokens=n, temperature=float(plan is CHAIN), seed=1) for n in lengths]
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
    [("llama", [None, TREE]), ("gpt2", [CONFIDENCE, CHAIN]), ("mistral", [SAMPLED_TREE, None])],
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


def test_the_joint_law_of_three_tokens():
    """A draft of another kind, sampled chains and trees: texts come as often as the target says."""
    width, draws = 5, 4_000
    target = Target(tiny_model("llama", vocabulary=width))
    drafter = draft_with(Target(tiny_model("gpt2", vocabulary=width)), target)
    every = torch.tensor([[1, 2, *text] for text in product(range(width), repeat=3)])
    _, logits_BTV = target.encode(every, logits=True)
    assert logits_BTV is not None
    p_BTV = (logits_BTV / 1.5).softmax(-1)[:, 1:4]
    joint = p_BTV.gather(2, every[:, 2:].unsqueeze(2)).squeeze(2).prod(1)
    engine = Engine(target, drafter, max_batch=2000, max_length=12)
    for plan in (Plan((1, 1), sampled=True), Plan((2, 1), sampled=True)):
        params = [SamplingParams(max_tokens=3, temperature=1.5, seed=seed) for seed in range(draws)]
        texts = torch.tensor([c.tokens for c in engine.generate([[1, 2]] * draws, params, plan)])
        counts = torch.bincount(texts @ torch.tensor([width * width, width, 1]), minlength=width**3)
        assert chi_square_p_value(counts, joint * draws) > 1e-4


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


@pytest.mark.parametrize("early", [False, True])
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
    """In bf16 by native code: one equal to the target, its own layers, and its int8 copy."""
    target = Target(tiny_model(architecture, dtype=torch.bfloat16))
    twin = Target(tiny_model(architecture, dtype=torch.bfloat16))
    questions = prompts(4)
    greedy = SamplingParams(max_tokens=16)
    plain = [c.tokens for c in Engine(target).generate(questions, greedy)]
    drafters: list[Drafter] = [draft_with(twin, target), EarlyExit(target, 2, 4), EarlyExit(target, 1, 4)]
    accepted = []
    for drafter in [*drafters, load_drafter("int8-self:guesses=4", target)]:
        for plan in (None, TREE):
            found = Engine(target, drafter, max_batch=3).generate(questions, greedy, plan)
            assert [c.tokens for c in found] == plain
            if plan is None:
                accepted.append([c.accepted_lengths for c in found])
    assert accepted[0] == accepted[1] == [[4, 4, 4]] * 4
    assert sum(map(sum, accepted[3])) > sum(map(sum, accepted[2]))


@native_only
def test_the_int8_copy_drafts_for_a_target_of_any_dtype():
    check_drafter(lambda: load_drafter("int8-self", tiny_target()), tiny_target(), tiny_model(), [None, CHAIN])


def other_tokenizer(kind: str):
    """A tokenizer with merges, bytes under other numbers, and specials elsewhere."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    if kind == "bytes":
        ids = {"<s>": 0, "</s>": 1} | {symbol: 2 + i for i, symbol in enumerate(symbols)}
        merges = [(a, b) for a in "aeiou1234" for b in "nrst5678"]
        ids |= {a + b: len(ids) + i for i, (a, b) in enumerate(merges)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        letters = ["\u2581", *map(chr, range(33, 127))]
        ids = {"<unk>": 0, "<s>": 1, "</s>": 2}
        ids |= {letter: 3 + i for i, letter in enumerate(letters)}
        ids |= {f"<0x{byte:02X}>": len(ids) + byte for byte in range(256)}
        merges = [("\u2581", letter) for letter in "abcdef"] + [("a", "b"), ("1", "2")]
        ids |= {a + b: len(ids) + i for i, (a, b) in enumerate(merges)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def speaker(tokenizer, architecture: str = "llama", seed: int = 0) -> Target:
    model = tiny_model(architecture, seed=seed, vocabulary=len(tokenizer))
    model.generation_config.eos_token_id = []  # else the end token would be the tokenizer's
    return Target(model, tokenizer, architecture)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_a_draft_model_with_another_tokenizer(kind: str):
    """The text of a random target is mostly no UTF-8: whatever the draft model makes of it, it stays."""
    target = speaker(tiny_tokenizer())
    drafter = draft_with(speaker(other_tokenizer(kind), "gpt2"), target)
    assert isinstance(drafter, CrossVocabularyDraftModel)
    # Every byte, and the end token by its role; in the other tokenizer bytes that are letters go by the letters.
    assert drafter.coverage == 1
    plans = [None, CHAIN] if kind == "bytes" else [SAMPLED_TREE]
    check_drafter(lambda: drafter, target, tiny_model(vocabulary=TOKENIZER_SIZE), plans)


@pytest.mark.parametrize("plan", [None, TREE])
def test_a_renumbered_twin_of_the_target_is_accepted_whole(plan: Plan | None):
    """The same model under other ids, of which the tokenizer knows."""
    target = speaker(tiny_tokenizer())
    turned = torch.arange(TOKENIZER_SIZE).flip(0)
    model = tiny_model(vocabulary=TOKENIZER_SIZE)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.copy_(module.weight[turned])
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"] = {token: TOKENIZER_SIZE - 1 - n for token, n in state["model"]["vocab"].items()}
    state["added_tokens"] = []
    state["model"]["vocab"]["<eos>"] = 0
    renumbered = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>")
    drafter = draft_with(Target(model, renumbered), target)
    assert isinstance(drafter, CrossVocabularyDraftModel) and drafter.coverage == 1
    depth = (plan or drafter.default_plan()).depth
    params = SamplingParams(max_tokens=61)
    for completion in Engine(target, drafter, max_batch=2).generate(prompts(3), params, plan):
        assert completion.accepted_lengths == [depth] * (60 // (depth + 1)), "past the window, too"


ENGLISH = "ab a cab 1256: the naïve user's 12 trees, ab cd ef — 12 abab 16 and or in\n\n  is 17 über 25\tab end 12ab "


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
@pytest.mark.parametrize("pace", [1, 3, 1000])
def test_text_that_grows_is_read_as_if_it_had_come_at_once(kind: str, pace: int):
    ours, theirs = tiny_tokenizer(), other_tokenizer(kind)
    shared = SharedTokens(ours, theirs, len(ours), len(theirs))
    text = TranslatedText(shared)
    tokens = ours(ENGLISH * 3)["input_ids"]
    for start in range(0, len(tokens), pace):
        text.extend(tokens[start : start + pace])
    expected = theirs(ENGLISH * 3, add_special_tokens=False)["input_ids"]
    assert text.tokens == expected
    spelled = b"".join(shared.draft.text[token] for token in text.tokens)
    assert spelled.removeprefix(b" ") == (ENGLISH * 3).encode()


def test_a_text_cut_within_a_character_goes_on_in_bytes():
    ours, theirs = tiny_tokenizer(), other_tokenizer("bytes")
    shared = SharedTokens(ours, theirs, len(ours), len(theirs))
    text = TranslatedText(shared)
    tokens = ours("an é")["input_ids"]
    text.extend(tokens[:-1])
    whole = theirs("an é")["input_ids"]
    assert text.tokens == whole[:-1]
    text.extend(tokens[-1:])
    assert text.tokens == whole
    text.extend([TOKENIZER_EOS])
    assert text.tokens == [*whole, theirs.eos_token_id]


def test_coverage_counts_what_both_have():
    ours, theirs = tiny_tokenizer(), other_tokenizer("bytes")
    shared = SharedTokens(theirs, ours, len(theirs), len(ours))
    assert shared.coverage == 257 / len(theirs)
    assert shared.coverage_of(["", "a"]) == 1 and shared.coverage_of([]) == 0
    text, tokens = ENGLISH, theirs(ENGLISH, add_special_tokens=False)["input_ids"]
    assert shared.coverage_of([text, text]) == sum(token in shared.pairs for token in tokens) / len(tokens) < 1
    letters = shared.of_target[shared.of_draft == ours.convert_tokens_to_ids("a")]
    assert theirs.convert_ids_to_tokens(letters.tolist()) == ["a"]


def test_a_command_says_what_the_shared_tokens_are_worth(tmp_path: Path):
    model, tokenizer = speaker(other_tokenizer("bytes"), "gpt2").model, other_tokenizer("bytes")
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    console = Console(record=True, width=300)
    load_engine(
        console, target=str(save_tiny_target(tmp_path / "large")), drafter=str(tmp_path / "small"), dtype="fp32",
        native=False,
    )
    assert "257 of 257 tokens (100%) are shared, and 100.0% of those in the texts that ship" in console.export_text()


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


def test_vocabularies_that_cannot_be_compared_are_refused():
    with pytest.raises(DraftsmithError, match="has 257 tokens and tiny-llama has 96, and tiny-llama has no tokenizer"):
        draft_with(speaker(tiny_tokenizer(), "gpt2"), tiny_target())
