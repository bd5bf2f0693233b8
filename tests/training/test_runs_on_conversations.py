"""Runs on conversations and texts: what they show and record, other tokens noticed later, and going on."""

import io
import json
import logging
import os
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

import draftsmith
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.evaluation.prompts import Prompt
from draftsmith.targets import Target
from draftsmith.targets.loading.tokens import TokenText
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from draftsmith.types import DraftsmithError
from draftsmith.workflows.bridge import EngineBridge
from tests.helpers.tiny_tokenizers import CHAT
from tests.helpers.token_toy import (
    ENDING,
    MESSAGES,
    ONE_ONE,
    TEXTS,
    recipe_for,
    save,
    target_of,
    tokenizer_of,
    trained,
)


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
