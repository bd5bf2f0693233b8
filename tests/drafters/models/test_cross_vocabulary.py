"""Draft models with a tokenizer of their own: what both vocabularies share, and text that grows token by token."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.cli.common import load_engine
from draftsmith.drafters.models.cross_vocabulary import CrossVocabularyDraftModel, SharedTokens, TranslatedText
from draftsmith.drafters.models.draft_model import draft_with
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.contract import check_drafter
from tests.helpers.tiny import (
    TOKENIZER_EOS,
    TOKENIZER_SIZE,
    prompts,
    save_tiny_target,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

TREE = Plan((3, 2, 1))
CHAIN = Plan((1, 1, 1), sampled=True)
SAMPLED_TREE = Plan((2, 2), sampled=True)


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


@pytest.mark.parametrize("kind", [pytest.param("bytes", marks=pytest.mark.slow), "spaces"])
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


def test_vocabularies_that_cannot_be_compared_are_refused():
    with pytest.raises(DraftsmithError, match="has 257 tokens and tiny-llama has 96, and tiny-llama has no tokenizer"):
        draft_with(speaker(tiny_tokenizer(), "gpt2"), tiny_target())
