"""`check` passes a healthy drafter and fails planted faults, naming the depth and the cause."""

import json
import re
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import draftsmith
from draftsmith.cli import app
from draftsmith.drafters.base import NoDrafter
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.models.small_lm import SmallLM
from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.engine import Engine
from draftsmith.evaluation.checking.check import check_drafter, check_files, check_packing, check_tokens
from draftsmith.evaluation.checking.parity import measure_parity, own_texts
from draftsmith.evaluation.measuring.measure import Measurement
from draftsmith.evaluation.prompts import Prompt, cut, embedded_prompts
from draftsmith.evaluation.proof.shared_rows import WrappedTarget
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.types import Context, DraftsmithError, SamplingParams, TargetFacts
from draftsmith.workflows import given
from draftsmith.workflows.bridge import EngineBridge
from tests.helpers.taught import taught
from tests.helpers.tiny import TOKENIZER_SIZE, prompts, save_tiny_target, tiny_model, tiny_target, tiny_tokenizer

NEW_TOKENS = 24
PROMPTS = prompts(9, shortest=3, longest=40, seed=6)


def fitted(target: Target, starts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> MLPSpeculator:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drafter = MLPSpeculator(MLPConfig(inner_dim=64, n_predict=3).for_target(target))
    return taught(target, drafter, starts, new_tokens)


def fitted_small_lm(target: Target, starts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> SmallLM:
    family = family_named("small-lm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        trained_model = family.make(family.config.read({}, ""), target, None)
    assert isinstance(trained_model, SmallLM)
    return taught(target, trained_model, starts, new_tokens)


class LaggingFeatures(MLPSpeculator):
    """Drafts from the state that predicted the token before the root."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        self.memory: dict[int, torch.Tensor] = {}

    def begin(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        root_B, _ = context.root()
        states = []
        for b, row in enumerate(context.rows_B.tolist()):
            count = int(context.counts_B[b])
            last_F = context.features_BTF[b, count - 1]
            before_F = context.features_BTF[b, count - 2] if count > 1 else self.memory.get(row, last_F)
            self.memory[row] = last_F
            states.append(before_F)
        return root_B, self.start(torch.stack(states))

    def reset_rows(self, rows: list[int]) -> None:
        for row in rows:
            self.memory.pop(row, None)


class LostState(MLPSpeculator):
    """Hands the second stage the state of the first unchanged depth after depth."""

    def top_k(self, depth, state, tokens_R, k, scores):  # type: ignore[no-untyped-def]
        best, tokens, after = super().top_k(depth, state, tokens_R, k, scores)
        return best, tokens, after if depth == 0 else state


class SeesOtherRows(MLPSpeculator):
    """Takes the first row's state for every row: right at batch 1."""

    def begin(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        root_B, state_BF = super().begin(context)
        return root_B, state_BF[:1].expand_as(state_BF)


class TurnsAtATie(MLPSpeculator):
    """Of two guesses with the same score, makes one in a batch and the other alone."""

    tied = (0, 0)

    def top_k(self, depth, state, tokens_R, k, scores):  # type: ignore[no-untyped-def]
        best, tokens_Rk, after = super().top_k(depth, state, tokens_R, k, scores)
        alone, together = self.tied
        either = (tokens_Rk == alone) | (tokens_Rk == together)
        return best, tokens_Rk.masked_fill(either, together if len(tokens_R) > 1 else alone), after


class TargetTurnsAtATie(WrappedTarget):
    """Of two tokens with the same logit, prefers one in a batch and the other alone."""

    def __init__(self, inner: Target, tied: tuple[int, int]) -> None:
        super().__init__(inner)
        self.tied = tied

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, features_BMF = super().forward(cache, nodes, taps, keep_logits)
        preferred = self.tied[len(nodes.tokens_BM) > 1]
        logits = logits.clone()
        logits[..., preferred] *= 1 + 4 * torch.finfo(logits.dtype).eps * logits[..., preferred].sign()
        return logits, features_BMF


class LosesTheFirstToken(DraftModel):
    """Reads a prompt from its second token on."""

    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        return super().take_in(replace(context, first_B=None))


def test_a_healthy_drafter_passes_and_its_guesses_are_worth_comparing():
    target = tiny_target()
    drafter = fitted(target)
    report = check_drafter(target, drafter, drafter, PROMPTS, NEW_TOKENS)
    assert report.passed, report.sentence()
    assert report.parity is not None and not report.parity.gaps and report.parity.roots > 50
    assert report.parity.measured == report.parity.predicted and report.parity.measured[2] > 0.2
    assert {check.name for check in report.checks} >= {"alignment of features", "positions, long prompts"}


@pytest.mark.parametrize(
    ("kind", "failing", "words"),
    [
        (LaggingFeatures, "parity, depth by depth", "depth 1 first .*features off by one.*token before"),
        (LostState, "parity, depth by depth", "depth 3 first .*what one stage hands to the next"),
        (SeesOtherRows, "masks, ragged batch of 8 against 1", "in the batch .*mask or an index"),
    ],
)
def test_a_planted_fault_fails_with_depth_and_cause(kind: type[MLPSpeculator], failing: str, words: str):
    target = tiny_target()
    healthy = fitted(target)
    faulty = kind(healthy.config).to(target.dtype).eval().requires_grad_(False)
    faulty.load_state_dict(healthy.state_dict())
    report = check_drafter(target, faulty, faulty, PROMPTS, NEW_TOKENS)
    failed = {check.name: check.detail for check in report.checks if not check.passed}
    assert not report.passed and failing in failed
    assert re.search(words, failed[failing]), failed[failing]


def tied_tokens(target: Target) -> tuple[int, int]:
    """Return the most frequent token of the target's texts, and one that they do not have."""
    counts = Counter(token for text in own_texts(target, NoDrafter(), 0, PROMPTS, NEW_TOKENS) for token in text.tokens)
    return counts.most_common(1)[0][0], next(token for token in range(target.vocab_size) if not counts[token])


def test_a_batch_that_turns_at_a_tie_of_the_drafters_has_no_fault():
    target = tiny_target()
    healthy = fitted(target)
    drafter = TurnsAtATie(healthy.config).to(target.dtype).eval().requires_grad_(False)
    drafter.load_state_dict(healthy.state_dict())
    drafter.tied = tied_tokens(target)
    for head in drafter.head:
        head.weight[drafter.tied[1]] = head.weight[drafter.tied[0]]
    report = check_drafter(target, drafter, drafter, PROMPTS, NEW_TOKENS)
    assert report.passed, report.sentence()
    assert re.search("make the same drafts, [1-9] of them up to a tie", report.checks[-1].detail)


def test_a_batch_that_turns_at_a_tie_of_the_targets_has_no_fault():
    healthy = tiny_target()
    drafter, tied = fitted(healthy), tied_tokens(healthy)
    model = deepcopy(tiny_model())
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[tied[1]] = head[tied[0]]
    target = TargetTurnsAtATie(Target(model, native=False), tied)
    report = check_drafter(target, drafter, drafter, PROMPTS, NEW_TOKENS)
    assert re.search("make the same drafts, [1-9] of them up to a tie", report.checks[-1].detail), report.checks[-1]


def test_a_small_lm_is_held_against_its_forward_and_a_token_that_it_loses_is_seen():
    target = tiny_target()
    trained_model = fitted_small_lm(target)
    drafter = trained_model.for_decoding(target)
    assert isinstance(drafter, DraftModel)
    report = check_drafter(target, trained_model, drafter, PROMPTS, NEW_TOKENS)
    assert report.passed, report.sentence()
    assert report.parity is not None and not report.parity.gaps and report.parity.roots > 50
    assert report.parity.measured[3] > 0.2 and "alignment of guesses" in {check.name for check in report.checks}
    faulty = LosesTheFirstToken(drafter.model, target.vocab_size, drafter.guesses)
    assert check_drafter(target, trained_model, faulty, PROMPTS, NEW_TOKENS).sentence().startswith("FAILED: parity")


def test_what_is_measured_ends_where_serving_ends():
    """A text ends at the target's end token, and what would come after it is in no figure."""
    healthy = Target(tiny_model(vocabulary=TOKENIZER_SIZE), tiny_tokenizer(), native=False)
    drafter = fitted(healthy)
    text = own_texts(healthy, drafter, 3, PROMPTS[:1], NEW_TOKENS)[0].tokens
    end = next(token for token in text[4:] if token not in text[:4])
    target = Target(tiny_model(vocabulary=TOKENIZER_SIZE, eos_token_id=end), tiny_tokenizer(), native=False)
    served = Engine(target, drafter, plan=Plan((1, 1, 1))).generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert served[0].tokens == text[: text.index(end) + 1]
    _, packed, _ = check_packing(target, drafter, drafter, 3, PROMPTS, NEW_TOKENS)
    assert packed == Measurement(served, 1.0).accepted_by_depth()

    questions = [Prompt("text", "x", "draft verify"), Prompt("text", "y", "token root")]
    found = EngineBridge(target, questions, 2, NEW_TOKENS, 12, {}).evaluate(drafter)
    asked = cut(target, questions, 12, 2, exact=False)
    answers = Engine(target, drafter).generate(asked, SamplingParams(max_tokens=NEW_TOKENS))
    assert found["tokens_per_step"] == Measurement(answers, 1.0).tokens_per_step


def test_a_small_lm_that_hits_nothing_leaves_nothing_to_compare():
    target = tiny_target()
    trained_model = fitted_small_lm(target, PROMPTS[:1], 2)
    with torch.no_grad():
        trained_model.lm.lm_head.weight.zero_()  # guesses token 0 for ever
    report = check_drafter(target, trained_model, trained_model.for_decoding(target), PROMPTS[:3], NEW_TOKENS)
    assert report.sentence().startswith("FAILED: alignment of guesses") and "nothing to compare" in report.sentence()


def test_a_tie_is_not_a_fault_and_is_counted():
    target = tiny_target()
    drafter = fitted(target)
    texts = own_texts(target, drafter, 3, PROMPTS[:2], NEW_TOKENS)
    step = next(i for i, length in enumerate(texts[0].accepted_lengths) if length)
    texts[0].accepted_lengths[step] -= 1  # as if the guess had gone the other way
    with torch.no_grad():
        for head in drafter.head:
            head.weight.zero_()  # every score equal
    parity = measure_parity(target, drafter, texts)
    assert parity.gaps and all(gap.tie for gap in parity.gaps) and parity.holds


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_target(folder / "target")
    target = Target.from_pretrained(folder / "target", dtype="fp32")
    windows = zip(cut(target, embedded_prompts(), 120, 3), (8, 64, 120), strict=True)
    drafter = fitted(target, [window[:size] for window, size in windows], 8)
    facts = target.facts()
    other = TargetFacts(facts.hidden_size, facts.vocab_size, "0" * 64, facts.name)
    for name, made_for in (("drafter", facts), ("stranger", other)):
        drafter.save_pretrained(folder / name, made_for)
    fitted_small_lm(target, [window[:64] for window in cut(target, embedded_prompts(), 120, 3)], 8).save_pretrained(
        folder / "small-lm", facts
    )
    return folder


def run(*words: object) -> tuple[int, str]:
    size = ("--dtype", "fp64", "--serving-dtype", "fp32", "--prompts", "3", "--new-tokens", "8")
    found = CliRunner().invoke(app, ["check", *map(str, words), *size])
    return found.exit_code, found.output


def test_the_command_passes_a_healthy_folder_and_writes_json(models: Path):
    code, output = run(models / "drafter", "--target", models / "target", "--json", models / "check.json")
    assert code == 0, output
    written = json.loads((models / "check.json").read_text())
    assert written["passed"] and written["parity"]["faults"] == 0
    assert [check["name"] for check in written["checks"]][:3] == ["files", "weights and dtype", "made for this target"]
    assert len(written["accepted_by_depth_as_decoded"]) == 3


def test_the_command_passes_a_small_lm_and_refuses_a_model_that_nothing_here_trained(models: Path, tmp_path: Path):
    code, output = run(models / "small-lm", "--target", models / "target")
    assert code == 0 and "alignment of guesses" in output, output
    strange = tmp_path / "strange"
    strange.mkdir()
    for file in (models / "small-lm").iterdir():
        (strange / file.name).write_bytes(file.read_bytes())
    config, manifest = (storage.read_json(strange / name) for name in ("config.json", storage.MANIFEST))
    del config["draftsmith"]
    storage.write_json(strange / "config.json", config)
    storage.write_json(strange / storage.MANIFEST, manifest | {"config.json": storage.sha256(strange / "config.json")})
    code, output = run(strange, "--target", models / "target")
    assert code == 2 and "without a training forward" in " ".join(output.split()), output


def test_another_tokenizer_fails_loudly(models: Path):
    code, output = run(models / "stranger", "--target", models / "target")
    assert code == 1 and "tokenizer hash" in output and "FAILED" in output


def test_a_target_trained_further_is_told_from_the_one_the_drafter_was_made_for(models: Path, tmp_path: Path):
    changed = Target.from_pretrained(models / "target", dtype="fp32", native=False).model
    with torch.no_grad():
        changed.model.layers[0].mlp.down_proj.weight += 0.01
    changed.save_pretrained(tmp_path / "changed")
    tiny_tokenizer().save_pretrained(tmp_path / "changed")
    code, output = run(models / "drafter", "--target", tmp_path / "changed", "--json", tmp_path / "check.json")
    assert code == 1 and "FAILED: made for this target" in " ".join(output.split()), output
    assert "was trained for other weights than 'changed' has here" in " ".join(output.split())
    names = [check["name"] for check in json.loads((tmp_path / "check.json").read_text())["checks"]]
    assert "parity, depth by depth" in names, "what it costs is measured all the same"


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_same_weights_are_known_in_every_precision(models: Path, dtype: str):
    (expected,) = {Target.from_pretrained(models / "target", dtype=kind).weights_hash for kind in (dtype, "bf16")}
    assert Target.from_pretrained(models / "target", dtype=dtype, quantize="none").facts().weights_hash == expected


def test_a_damaged_file_fails_before_anything_is_decoded(models: Path, tmp_path: Path):
    assert [check.passed for check in check_files(models / "drafter")] == [True, True]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (models / "drafter").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    (damaged,) = check_files(copy)
    assert damaged.passed is False and "damaged" in damaged.detail
    (copy / "manifest.json").unlink()
    assert "no manifest.json" in check_files(copy)[0].detail


def test_a_drafter_that_hits_nothing_leaves_nothing_to_compare_and_does_not_pass():
    target = tiny_target()
    drafter = fitted(target, PROMPTS[:1], 2)
    with torch.no_grad():
        for head in drafter.head:
            head.weight.zero_()  # guesses token 0 for ever
    report = check_drafter(target, drafter, drafter, PROMPTS[:3], NEW_TOKENS)
    assert not report.passed and "nothing to compare" in report.sentence()


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "recurrent"])
def test_the_files_of_every_published_layout_are_found(tmp_path: Path, name: str):
    family = family_named(name)
    with torch.random.fork_rng(devices=[]):
        drafter = family.make(family.config.read({}, ""), tiny_target(), None)
    assert isinstance(drafter, TrainableModel)
    drafter.save_pretrained(tmp_path / name, tiny_target().facts())
    checks = check_files(tmp_path / name)
    assert [check.passed for check in checks] == [True, True], checks
    (tmp_path / name / drafter.weights_file).unlink()
    assert not check_files(tmp_path / name)[0].passed


def test_conversations_that_the_target_has_no_room_for_are_passed_over_and_told(tmp_path: Path):
    folder = tmp_path / "target"
    save_tiny_target(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    target = Target.from_pretrained(folder, dtype="fp32")
    fitted(target, PROMPTS[:1], 2).save_pretrained(tmp_path / "drafter", target.facts())
    long, short = ({"messages": [{"role": "user", "content": "a" * size}]} for size in (target.max_length, 20))

    def checked(*records: object) -> str:
        asked = tmp_path / "asked.jsonl"
        asked.write_text("".join(json.dumps(record) + "\n" for record in records))
        return " ".join(run(tmp_path / "drafter", "--target", folder, "--data", asked)[1].split())

    said = f"takes {target.max_length} tokens, {target.max_length - 8} of them before 8 new ones, and the longest"
    output = checked(long)
    assert "no conversation is short enough" in output and said in output and f"has {target.max_length};" in output
    output = checked(long, short)
    assert "1 of 2 conversations are passed over" in output and "parity, depth by depth" in output


def test_what_was_not_compared_is_said(models: Path, tmp_path: Path):
    target = Target.from_pretrained(models / "target", dtype="fp32")
    detail = check_tokens(models / "drafter", target).detail
    assert detail == "texts and conversations become the same tokens"
    assert "not compared" in check_tokens(models / "drafter", tiny_target()).detail
    older = tmp_path / "config.json"
    config = storage.read_json(models / "drafter" / "config.json")
    del config["draftsmith"]["target"]["template_hash"]
    storage.write_json(older, config)
    detail = check_tokens(tmp_path, target).detail
    assert detail.startswith("texts become the same tokens; conversations were not compared, because"), detail


def test_short_prompts_are_checked_on(models: Path):
    lines = [json.dumps({"text": text}) for text in ("def f(x):", "a = 1", "return", "for i in range(3):")]
    (models / "short.jsonl").write_text("\n".join(lines))
    code, output = run(models / "drafter", "--target", models / "target", "--data", models / "short.jsonl")
    assert code in (0, 1) and "parity, depth by depth" in " ".join(output.split()), output


def test_the_drafter_is_named_as_in_all_commands_and_only_once(models: Path, tmp_path: Path):
    code, output = run(models / "drafter", "--drafter", models / "drafter")
    assert code == 2 and "give one of them" in output
    code, output = run("--target", models / "target", "--drafter", tmp_path / "absent")
    assert code == 2 and "absent does not exist" in " ".join(output.split())


@pytest.mark.parametrize(
    ("word", "part"),
    [("ngram", "'ngram' is not trained"), ("ngram:max_length=4", "'ngram' is not"), ("mlp", "'mlp' is a family")],
)
def test_a_word_in_place_of_a_folder_is_no_folder_that_is_missing(word: str, part: str):
    done = CliRunner().invoke(app, ["check", "--drafter", word])
    sentence = " ".join(done.stderr.split())
    assert done.exit_code == 2 and part in sentence and "give the folder of a trained drafter." in sentence
    with pytest.raises(DraftsmithError, match=part):
        draftsmith.check(word)


def test_a_folder_called_as_a_family_is_a_folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models / "drafter", tmp_path / "ngram")
    given.require_trained(Path("ngram"))
