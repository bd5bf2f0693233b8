"""What a drafter sees in training is what it sees in serving: tokens, masks, and no other text."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.evaluation.prompts import cut as cut_prompts
from draftsmith.evaluation.prompts import load_prompts, whole
from draftsmith.targets.loading.tokens import TokenText
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.build import build_loader, build_prompts
from draftsmith.training.data.batches import draw, prepare
from draftsmith.training.data.loader import Windowing
from draftsmith.training.data.reader import Reader, Unusable
from draftsmith.training.data.sources import Piece
from draftsmith.training.data.windows import Window, collate, cut
from draftsmith.training.samples import parts_of
from draftsmith.training.sections import DistillationSection
from draftsmith.types import DraftsmithError
from tests.helpers.tiny import tiny_tokenizer
from tests.helpers.token_toy import (
    ENDING,
    KINDS,
    MESSAGES,
    TEXTS,
    recipe_for,
    served,
    take,
    target_of,
)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_texts_are_the_tokens_that_serving_makes(kind: str, tmp_path: Path):
    target = target_of(kind)
    end = min(target.eos_token_ids)
    whole = {(*served(target, text), end) for text in TEXTS}
    recipe = recipe_for(tmp_path, [{"text": text} for text in TEXTS], "stage1.length=100000")
    windows = take(build_loader(recipe, target, Windowing(100_000), "stage1"), 3)
    assert {tuple(window.tokens) for window in windows} == whole
    opening = 0 if kind == "byte-level" else 1
    assert all(window.spans == [(opening, len(window.tokens))] for window in windows)
    assert all(window.tokens.count(end) == 1 for window in windows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_goes_on_has_its_opening_before_every_window(kind: str, tmp_path: Path):
    target = target_of(kind)
    assert target.tokenizer is not None
    opening = [] if kind == "byte-level" else [target.tokenizer.bos_token_id]
    whole = [*served(target, TEXTS[2]), min(target.eos_token_ids)]
    recipe = recipe_for(tmp_path, [{"text": TEXTS[2]}])
    reader = build_loader(recipe, target, Windowing(20), "stage1")
    read, place = whole[:20], 20
    windows = {tuple(window.tokens) for window in take(reader, 60)}
    expected = {tuple(read)}
    while place < len(whole):
        piece = whole[place : place + 20 - len(opening)]
        place += len(piece)
        if len(opening) + len(piece) > 2:
            expected.add((*opening, *piece))
    assert windows == expected


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_that_serving_would_get(kind: str, tmp_path: Path):
    target = target_of(kind)
    recipe = recipe_for(tmp_path, [{"text": TEXTS[2]}, {"messages": MESSAGES}, {"prompt": TEXTS[0], "completion": "x"}])
    prompts = {tuple(window.tokens) for window in take(build_prompts(recipe, target), 60)}
    chats = {tuple(served(target, MESSAGES[:at])) for at in (2, 4)}
    assert chats | {tuple(served(target, TEXTS[0]))} <= prompts
    words = TEXTS[2].split(" ")
    begun = {tuple(served(target, " ".join(words[at:]))[:6]) for at in range(len(words) - 1)}
    texts = {prompt for prompt in prompts - chats if len(prompt) == 6}
    assert texts and texts <= begun


def test_no_earlier_turn_is_asked_for_where_the_drawn_one_fits():
    """The template refuses the shorter conversations, which a prompt that fits never needs."""
    refusing = "{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}" + ENDING
    target = target_of("llama", refusing)
    reader = Reader.of(target, "assistant")
    piece = Piece(Conversation(MESSAGES))
    assert reader.prompt(piece, 6, 1000, lambda purpose: 1) == served(target, MESSAGES[:4])
    with pytest.raises(Unusable, match="refused by the chat template"):
        reader.prompt(piece, 6, 1000, lambda purpose: 0)


@pytest.mark.parametrize("family", ["mlp", "eagle", "eagle3", "medusa", "hydra", "small-lm", "firp", "recurrent"])
def test_no_token_sees_another_document_and_padding_costs_no_family_anything(family: str):
    """The losses of a batch of unlike windows are those of every window where nothing else is learnt."""
    target = target_of("llama")
    windows = [
        Window(list(range(3, 33)), [(3, 12), (20, 27)]), Window(list(range(50, 62)), [(1, 12)]),
        Window(list(range(90, 110)), [(10, 20)]),
    ]
    known = family_named(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = known.make(known.config.read({}, ""), target, None)
    assert isinstance(drafter, TrainableModel)
    drafter.bind(target)
    depth = drafter.max_depth

    def examples(some: list[Window]) -> tuple[TrainingBatch, torch.Tensor]:
        task = draw(collate(some, 99, depth - 1), depth, None, ())
        return prepare(drafter, target, task, distillation=DistillationSection(weight=0.4), seed=()), task.counts_N

    whole, counts_N = examples(windows)
    loss_N, accuracy_N = drafter.losses(whole)
    counts_N = counts_N[: len(loss_N)]
    losses, hits = torch.zeros(len(loss_N)), torch.zeros(len(loss_N))
    for row, window in enumerate(windows):
        # What a family draws depends on the row's place alone.
        alone, own_N = examples([Window([5, 6, 7], [])] * row + [window])
        length = len(window.tokens) - 1
        torch.testing.assert_close(
            whole.features_BTF[row, :length], alone.features_BTF[row, :length], rtol=1e-4, atol=1e-4
        )
        own_loss_N, own_accuracy_N = drafter.losses(alone)
        losses += own_loss_N.detach() * own_N[: len(loss_N)]
        hits += own_accuracy_N.detach() * own_N[: len(loss_N)]
    torch.testing.assert_close(loss_N.detach(), losses / counts_N, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(accuracy_N.detach(), hits / counts_N, rtol=1e-4, atol=1e-5)


def test_cutting_keeps_every_token_and_its_mask():
    window = Window(list(range(100, 150)), [(5, 12), (18, 31), (49, 50)])
    pieces = cut(window, [7], 16)
    seen = {}
    for piece in pieces:
        learnt = {at for begin, end in piece.spans for at in range(begin, end)}
        assert len(piece.tokens) <= 16 and (piece.tokens[0] in (7, 100))
        seen |= {token: at in learnt for at, token in enumerate(piece.tokens) if token != 7}
    expected = {token: any(b <= at < e for b, e in window.spans) for at, token in enumerate(window.tokens)}
    assert all(seen[token] == learnt for token, learnt in expected.items() if token in seen)
    assert {token for token, learnt in expected.items() if learnt} <= set(seen)


def test_a_character_that_an_edge_cuts_is_shown_whole():
    text = TokenText(tiny_tokenizer())
    tokens = tiny_tokenizer()("un café au lait")["input_ids"]
    cut_at = len("un caf") + 1
    assert parts_of(Window(tokens, [(cut_at, len(tokens))]), text) == [("un caf", False), ("é au lait", True)]


def test_a_small_lm_learns_with_the_token_that_begins_a_text():
    """No state predicted it, but whoever reads whole texts reads it in serving too."""
    target, known = target_of("llama"), family_named("small-lm")
    with torch.random.fork_rng(devices=[]):
        trained_model = known.make(known.config.read({}, ""), target, None)
    assert isinstance(trained_model, TrainableModel)
    tokens_1L = torch.tensor([[1, *range(40, 60)]])
    window = Window(tokens_1L[0].tolist(), [(1, 21)])
    task = draw(collate([window], 99, trained_model.max_depth - 1), trained_model.max_depth, None, ())
    examples = prepare(trained_model, target, task, distillation=DistillationSection(), seed=())
    logits_1TV = trained_model(tokens_1L, torch.empty(1, 21, 0))[0]
    expected = torch.nn.functional.cross_entropy(logits_1TV[0, 1:-1], tokens_1L[0, 2:])
    torch.testing.assert_close(trained_model.losses(examples)[0][0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_on_are_prompts_as_serving_gets_them(kind: str, tmp_path: Path):
    target = target_of(kind, ENDING)
    path = tmp_path / "asked.jsonl"
    records = [{"text": TEXTS[2]}, {"messages": MESSAGES}, {"messages": MESSAGES[:2]}, {"prompt": TEXTS[0]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = load_prompts(path)
    chats = [served(target, MESSAGES[:4]), served(target, MESSAGES[:2])]
    assert whole(target, prompts) == chats
    texts = [served(target, text)[:12] for text in (TEXTS[2], TEXTS[0])]
    assert cut_prompts(target, prompts, 12, 4, exact=False) == chats + texts
    ends = [chat[-12:] for chat in chats]
    windows = cut_prompts(target, prompts, 12, 5)
    assert windows[:4] == ends + texts and len(windows[4]) == 12
    opening = [] if kind == "byte-level" else [target.tokenizer.bos_token_id]  # type: ignore[union-attr]
    assert windows[4] == opening + served(target, TEXTS[2])[12 : 24 - len(opening)]
    tools = {"tools": '[{"name": "house"}]', "chat_template_kwargs": {"mood": "strange"}}
    shared = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Nobody."}]
    records = [{"messages": MESSAGES[:2], **tools}, {"conversations": shared}, {"prompt": TEXTS[0], "completion": "x"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = [prompt.conversation for prompt in load_prompts(path)]
    assert found[0] == Conversation(MESSAGES[:2], {"tools": [{"name": "house"}], "mood": "strange"})
    assert found[1] == Conversation([{"role": "user", "content": "Who?"}]) and found[2] is None
    path.write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    with pytest.raises(DraftsmithError, match=r"line 1 of .* `messages` that begin with a user's"):
        load_prompts(path)
