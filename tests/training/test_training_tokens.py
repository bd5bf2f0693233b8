"""What a drafter sees in training is what it sees in serving: tokens, masks, and no other text."""

import io
import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import draftsmith
from draftsmith.drafters.registry import family_named, load_drafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.engine import Engine
from draftsmith.evaluation.prompts import Prompt, load_prompts, whole
from draftsmith.evaluation.prompts import cut as cut_prompts
from draftsmith.targets import Target
from draftsmith.targets.loading.tokens import TokenText
from draftsmith.targets.token_ids import Conversation, conversation_ids
from draftsmith.training.build import build_loader, build_prompts
from draftsmith.training.data.batches import draw, prepare
from draftsmith.training.data.loader import Loader, Windowing
from draftsmith.training.data.reader import Reader, Unusable
from draftsmith.training.data.sources import Piece
from draftsmith.training.data.windows import Window, collate, cut
from draftsmith.training.recipe import build_recipe
from draftsmith.training.samples import parts_of
from draftsmith.training.sections import DistillationSection
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.workflows.bridge import EngineBridge
from tests.helpers.tiny import tiny_tokenizer
from tests.helpers.tiny_tokenizers import CHAT
from tests.helpers.token_toy import (
    ENDING,
    KINDS,
    MARKING,
    MESSAGES,
    ONE_ONE,
    TEXTS,
    recipe_for,
    save,
    target_of,
    tokenizer_of,
    trained,
)

FORGETFUL = ENDING.replace(
    "<|{{ message['role'] }}|>",
    "<|{{ message['role'] }}|>{% if loop.last and message['role'] == 'assistant' %}think {% endif %}",
)
ONE = SamplingParams(max_tokens=1)


def served(target: Target, prompt: Any) -> list[int]:
    return Engine(target).generate([prompt], ONE)[0].prompt_tokens


def take(reader: Loader, count: int) -> list[Window]:
    return [reader.next_window() for _ in range(count)]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [MARKING, ENDING], ids=["marked", "found"])
def test_of_a_conversation_only_the_assistants_words_are_learnt(kind: str, template: str, tmp_path: Path):
    target = target_of(kind, template)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    end = min(target.eos_token_ids)
    tokens, spans = conversation_ids(tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    assert tokens == tokenizer.apply_chat_template(MESSAGES)["input_ids"]
    said = [tokenizer.decode(tokens[begin:last]).replace(" ", "") for begin, last in spans]
    assert said == [MESSAGES[at]["content"].replace(" ", "") + "</s>" for at in (2, 4)]
    for (begin, _), at in zip(spans, (2, 4), strict=True):
        assert tokens[:begin] == served(target, MESSAGES[:at]), "the first word follows what serving reads"
    recipe = recipe_for(tmp_path, [{"messages": MESSAGES}])
    (window,) = take(build_loader(recipe, target, Windowing(1000), "stage1"), 1)
    assert window == Window(tokens, spans) and window.tokens.count(end) == 2
    everything = build_loader(
        build_recipe(recipe.model_dump(), ["data.learn=everything"]), target, Windowing(1000), "x"
    )
    assert take(everything, 1) == [Window(tokens, [(0, len(tokens))])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_marked_part_that_ends_with_a_dropped_space_ends_there(kind: str):
    target = target_of(kind, MARKING.replace("{{ message['content'] }}</s>", "{{ message['content'] }} \n "))
    assert target.tokenizer is not None
    tokens, spans = conversation_ids(target.tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    said = [target.tokenizer.decode(tokens[begin:last]).replace(" ", "").strip() for begin, last in spans]
    assert said == [MESSAGES[at]["content"].replace(" ", "") for at in (2, 4)]


def test_a_template_without_an_end_token_ends_the_turn_where_the_next_begins():
    target = target_of("llama", CHAT)
    assert target.tokenizer is not None
    tokens, spans = conversation_ids(target.tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    said = [target.tokenizer.decode(tokens[begin:last]) for begin, last in spans]
    assert [words.strip() for words in said] == [MESSAGES[at]["content"] for at in (2, 4)]


def test_a_turn_that_the_template_rewrites_later_is_not_learnt():
    """As of templates that drop the reasoning of earlier turns: only the last turn stands as it was written."""
    target = target_of("llama", FORGETFUL)
    assert target.tokenizer is not None
    tokens, spans = conversation_ids(target.tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    (said,) = [target.tokenizer.decode(tokens[begin:last]) for begin, last in spans]
    assert MESSAGES[4]["content"] in said


def test_what_else_a_record_has_goes_to_the_template(tmp_path: Path):
    template = "{{ bos_token }}{% for tool in tools %}{{ tool['name'] }} {% endfor %}{{ mood }}" + ENDING
    target = target_of("llama", template.replace("}}{{ bos_token }}", "}}"))
    record = {"messages": ONE_ONE, "tools": '[{"name": "house"}]', "chat_template_kwargs": {"mood": "strange"}}
    (window,) = take(build_loader(recipe_for(tmp_path, [record]), target, Windowing(1000), "stage1"), 1)
    assert target.tokenizer is not None
    assert target.tokenizer.decode(window.tokens).startswith("<s> house strange")


def test_records_of_every_kind_are_one_conversation(tmp_path: Path):
    target = target_of("llama", ENDING)
    shared = [{"from": "human", "value": ONE_ONE[0]["content"]}, {"from": "gpt", "value": ONE_ONE[1]["content"]}]
    records = [
        {"messages": ONE_ONE}, {"conversations": shared}, {"conversations": ONE_ONE},
        {"prompt": ONE_ONE[:1], "completion": ONE_ONE[1:]}, {"conversations": shared, "system": ""},
    ]
    windows = []
    for number, record in enumerate(records):
        (tmp_path / str(number)).mkdir()
        reader = build_loader(recipe_for(tmp_path / str(number), [record]), target, Windowing(1000), "stage1")
        windows += take(reader, 1)
    assert all(window == windows[0] for window in windows)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_completion_the_prompt_is_not_learnt(kind: str, tmp_path: Path):
    target = target_of(kind)
    record = {"prompt": "Who lives there?", "completion": " Nobody knew."}
    (window,) = take(build_loader(recipe_for(tmp_path, [record]), target, Windowing(1000), "stage1"), 1)
    ((begin, last),) = window.spans
    assert window.tokens[:begin] == served(target, "Who lives there?")
    assert last == len(window.tokens) and window.tokens[-1] == min(target.eos_token_ids)


def test_conversations_need_a_template_and_an_assistant(tmp_path: Path):
    target = target_of("llama", None)
    with pytest.raises(DraftsmithError, match="holds conversations, but toy-llama has no chat template; give texts"):
        take(build_loader(recipe_for(tmp_path, [{"messages": MESSAGES}]), target, Windowing(100), "stage1"), 1)
    records = [{"messages": MESSAGES[:2]}, {"messages": MESSAGES}, {"messages": []}]
    reader = build_loader(recipe_for(tmp_path, records), target_of("llama", ENDING), Windowing(1000), "stage1")
    take(reader, 2)
    account = reader.account()
    assert set(account["unusable"]) == {"no turn of an assistant"}
    assert account["sources"][0]["left_out"] == {"empty": 1}


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


@pytest.mark.parametrize("kind", ["llama", "word-piece"])
def test_a_run_shows_what_it_learns_and_its_drafter_decodes_as_it_learnt(kind: str, tmp_path: Path):
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="standard")
    records = [{"messages": MESSAGES}, *({"text": text} for text in TEXTS), {"text": " "}]
    result = trained(tmp_path, kind, ENDING, records, console=console)
    shown = console.file.getvalue()
    assert "left out: 1 empty" in shown and "stage 1 learns from" in shown and "stage 2 learns from" in shown
    assert "\x1b[2m" in shown, "what is not learnt is dimmed"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["of"] for sample in samples} == {"stage 1 learns from", "stage 2 learns from"}
    for sample in samples:
        assert "".join(part["text"] for part in sample["parts"]) == sample["text"]
        assert sample["text"] == TokenText(tokenizer_of(kind)).decode(sample["tokens"], skip_special_tokens=False)
        assert sample["text"].startswith("<s>") and any(part["learnt"] for part in sample["parts"])
    (run,) = json.loads((tmp_path / "run" / "run.json").read_text())["runs"]
    assert {what: found["sources"][0]["left_out"] for what, found in run["data"].items()} == {
        "documents": {"empty": 1}, "stage1": {"empty": 1}, "prompts": {"empty": 1}
    }
    generated = [json.loads(line) for line in (tmp_path / "run" / "generated.jsonl").read_text().splitlines()]
    target = target_of(kind, ENDING)
    for batch in generated:
        for tokens, prompt in zip(batch["sequences"], batch["prompts"], strict=True):
            assert len(tokens) == prompt + 16 or tokens[-1] in target.eos_token_ids
            assert not set(tokens[prompt:-1]) & target.eos_token_ids

    folder = save(target, tmp_path / "target", ENDING)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(record) + "\n" for record in records[:4]))
    report = draftsmith.check(
        result.drafter, folder, dtype="fp32", serving_dtype="fp32", prompts=asked, prompt_count=6, new_tokens=16
    ).report
    checks = {check.name: check for check in report.checks}
    assert checks["tokens as in training"].passed, checks
    assert report.parity is not None and report.parity.roots > 20
    for predicted, measured in zip(report.parity.predicted, report.parity.measured, strict=True):
        assert abs(predicted - measured) <= 0.005


def test_a_character_that_an_edge_cuts_is_shown_whole():
    text = TokenText(tiny_tokenizer())
    tokens = tiny_tokenizer()("un café au lait")["input_ids"]
    cut_at = len("un caf") + 1
    assert parts_of(Window(tokens, [(cut_at, len(tokens))]), text) == [("un caf", False), ("é au lait", True)]


def test_a_planted_mismatch_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    result = trained(tmp_path, "llama", ENDING, [{"text": text} for text in TEXTS])
    same = save(target_of("llama"), tmp_path / "same", ENDING)
    with caplog.at_level(logging.WARNING):
        load_drafter(result.drafter, Target.from_pretrained(same, dtype="fp32"))
    assert not caplog.records
    other = save(target_of("llama"), tmp_path / "template", CHAT)
    bare = save(target_of("llama"), tmp_path / "bos", ENDING)
    settings = json.loads((bare / "tokenizer.json").read_text())
    settings["post_processor"] = None
    (bare / "tokenizer.json").write_text(json.dumps(settings))
    rules = save(target_of("llama"), tmp_path / "rules", ENDING)
    settings = json.loads((rules / "tokenizer.json").read_text())
    settings["model"]["merges"] = settings["model"]["merges"][:5]
    (rules / "tokenizer.json").write_text(json.dumps(settings))
    for folder, words in (
        (other, "was trained on another chat template than 'template' has now"),
        (bare, r"trained on texts that begin with the tokens \[1\], but 'bos' now begins them with no special token"),
        (rules, "was trained on other tokens of the same text than the tokenizer of 'rules' makes now"),
    ):
        caplog.clear()
        target = Target.from_pretrained(folder, dtype="fp32")
        with caplog.at_level(logging.WARNING):
            load_drafter(result.drafter, target)
        assert len(caplog.records) == 1 and caplog.records[0].message.endswith(".")
        report = draftsmith.check(
            result.drafter, folder, dtype="fp32", serving_dtype="fp32", prompts=TEXTS, prompt_count=3, new_tokens=8
        ).report
        (found,) = [check for check in report.checks if check.name == "tokens as in training"]
        assert found.passed is False
        assert not report.passed and re.search(words, found.detail), found.detail
    with pytest.raises(DraftsmithError, match="has another chat template than when the run in .* began; restore"):
        draftsmith.train(
            recipe_for(tmp_path, [{"text": text} for text in TEXTS]), resume=True,
            target=Target.from_pretrained(other, dtype="fp32"),
        )


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


def test_a_run_on_conversations_and_texts_resumes_as_if_it_had_never_stopped(tmp_path: Path):
    target = target_of("llama", ENDING)
    records = [{"messages": MESSAGES}, {"messages": ONE_ONE}, *({"text": text} for text in TEXTS)]
    bridge = EngineBridge(target, [Prompt("text", "x", TEXTS[0])], 1, 4, 8, {"temperature": 1.0, "top_k": 10})
    places = [tmp_path / name for name in ("calm", "twice")]
    for place in places:
        place.mkdir()

    def run(place: Path, stops: int = 0, resume: bool = False) -> None:
        seen = 0

        def evaluate(drafter: TrainableModel) -> dict[str, float]:
            nonlocal seen
            seen += 1
            if seen == stops:
                os.kill(os.getpid(), signal.SIGINT)
            return {"tokens_per_step": 1.0 + sum(float(p.detach().abs().mean()) for p in drafter.parameters())}

        every = ["evaluation.every=7", "stage1.steps=12", "stage2.steps=12", "stage1.accumulate=2"]
        train(
            recipe_for(place, records, *every), target=target, generate=bridge.generate, evaluate=evaluate,
            resume=resume,
        )

    run(places[0])
    for resume in (False, True):
        with pytest.raises(TrainingInterrupted):
            run(places[1], 2, resume)
    run(places[1], resume=True)
    for name in ("latest/model.safetensors", "latest/optimizer.safetensors", "generated.jsonl", "samples.jsonl"):
        assert (places[0] / "run" / name).read_bytes() == (places[1] / "run" / name).read_bytes(), name
