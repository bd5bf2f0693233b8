"""`draftsmith check` on folders: what passes, what is refused, and what is said of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import draftsmith
from draftsmith.cli import app
from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.evaluation.checking.check import check_files, check_tokens
from draftsmith.evaluation.prompts import cut, embedded_prompts
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, TargetFacts
from draftsmith.workflows import given
from tests.evaluation.test_check import PROMPTS, fitted, fitted_small_lm
from tests.helpers.tiny import save_tiny_target, tiny_target, tiny_tokenizer


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
    given.require_trained(Path("ngram"), "check")
