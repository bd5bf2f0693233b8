"""`export`: what is written for vLLM, what is refused, and whether a drafter that is misread there is noticed."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console
from typer.testing import CliRunner

import draftsmith
from draftsmith.assets import demo_drafter, demo_target
from draftsmith.cli import app
from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.evaluation.peers.acceptance import SideBySide
from draftsmith.evaluation.peers.vllm_process import Vllm
from draftsmith.evaluation.prompts import Prompt
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.checking import ragged
from tests.helpers import stand_in
from tests.helpers.taught import taught
from tests.helpers.tiny import save_tiny_target

KEPT = 40
TEXTS = ["Some words to begin with, and more of them.", "0123456789 and on", "the end of all things is near, they say"]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def target(place: Path) -> Target:
    return Target.from_pretrained(str(place), dtype="fp32", device="cpu", native=False)


def untrained(family: str, target: Target, **options: Any) -> TrainableModel:
    known = family_named(family)
    kept = torch.arange(0, 2 * KEPT, 2) if options.get("draft_vocab_size") else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = known.make(known.config.read(options, ""), target, kept)
    assert isinstance(made, TrainableModel)
    return made


def saved(folder: Path, family: str, target: Target, **options: Any) -> Path:
    untrained(family, target, **options).save_pretrained(folder / "drafter", target.facts())
    return folder / "drafter"


def written(folder: Path, file: str = "model.safetensors") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), safetensors.torch.load_file(folder / file)


def test_an_eagle_drafter_gets_the_name_and_the_length_that_vllm_wants(tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, "eagle", target)
    result = draftsmith.export(source, place, out=tmp_path / "out", guesses=3)
    config, tensors = written(result.folder)
    before, same = written(source)
    assert config["architectures"] == ["EagleLlamaForCausalLM"] != before["architectures"]
    assert config["max_position_embeddings"] == target.max_length and "max_position_embeddings" not in before
    assert tensors.keys() == same.keys() and all(torch.equal(tensors[name], same[name]) for name in same)
    assert result.settings == {
        "method": "eagle", "model": str((tmp_path / "out").resolve()), "num_speculative_tokens": 3,
    }
    assert json.loads((result.folder / "speculative_config.json").read_text()) == result.settings
    told = (result.folder / "README.md").read_text()
    assert result.command in told and f"the drafter in `{tmp_path.name}/drafter`" in told


def test_an_export_through_a_link_replaces_what_it_points_at(tmp_path: Path, place: Path, target: Target):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    for guesses in (3, 4):
        draftsmith.export(saved(tmp_path, "eagle", target), place, out=tmp_path / "out", guesses=guesses)
    settings = json.loads((tmp_path / "disk" / "speculative_config.json").read_text())
    assert settings["model"] == str(tmp_path / "disk") and settings["num_speculative_tokens"] == 4
    assert (tmp_path / "out").is_symlink() and {path.name for path in tmp_path.iterdir()} == {"disk", "drafter", "out"}


def test_an_eagle_drafter_of_few_tokens_scores_all_of_them_in_vllm(tmp_path: Path, place: Path, target: Target):
    result = draftsmith.export(
        saved(tmp_path, "eagle", target, draft_vocab_size=KEPT), place, out=tmp_path / "out"
    )
    config, tensors = written(result.folder)
    assert "d2t" not in tensors and "draft_vocab_size" not in config


def test_an_eagle3_drafter_keeps_its_tokens_as_offsets(tmp_path: Path, place: Path, target: Target):
    result = draftsmith.export(
        saved(tmp_path, "eagle3", target, draft_vocab_size=KEPT), place, out=tmp_path / "out"
    )
    config, tensors = written(result.folder)
    assert config["draft_vocab_size"] == KEPT and config["max_position_embeddings"] == target.max_length
    assert (torch.arange(KEPT) + tensors["d2t"]).tolist() == list(range(0, 2 * KEPT, 2))
    assert result.settings["method"] == "eagle3" and result.settings["num_speculative_tokens"] == 5


def test_medusa_heads_that_share_the_targets_projection_take_it_along(tmp_path: Path, place: Path, target: Target):
    drafter = saved(tmp_path, "medusa", target, tie_to_target=True, num_heads=3)
    result = draftsmith.export(drafter, place, out=tmp_path / "out", dtype="fp32")
    config, tensors = written(result.folder, "medusa_lm_head.safetensors")
    assert config["original_lm_head"] is True
    assert torch.equal(tensors["lm_heads.0.weight"], target.head_weight_VF)
    assert result.settings == {
        "method": "medusa", "model": str(result.folder.resolve()), "num_speculative_tokens": 3,
    }


def test_such_heads_of_few_tokens_score_all_of_them_in_vllm(tmp_path: Path, place: Path, target: Target):
    drafter = saved(tmp_path, "medusa", target, tie_to_target=True, draft_vocab_size=KEPT)
    config, tensors = written(
        draftsmith.export(drafter, place, out=tmp_path / "out", dtype="fp32").folder, "medusa_lm_head.safetensors"
    )
    assert "draft_vocab_size" not in config and "d2t" not in tensors
    assert torch.equal(tensors["lm_heads.0.weight"], target.head_weight_VF)


def test_heads_of_their_own_stay_as_published(tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, "medusa", target)
    config, tensors = written(draftsmith.export(source, place, out=tmp_path / "o").folder, "medusa_lm_head.safetensors")
    _, same = written(source, "medusa_lm_head.safetensors")
    assert config["architectures"] == ["MedusaModel"] and "original_lm_head" not in config
    # vLLM builds the blocks without biases if this key does not say that there are some, and drops them silently.
    assert config["medusa_fc_bias"] is True and any(name.endswith("linear.bias") for name in tensors)
    assert tensors.keys() == same.keys() and all(torch.equal(tensors[name], same[name]) for name in same)


def test_a_small_language_model_is_a_draft_model(tmp_path: Path, place: Path, target: Target):
    result = draftsmith.export(saved(tmp_path, "small-lm", target), place, out=tmp_path / "out", guesses=7)
    config, _ = written(result.folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert result.settings["method"] == "draft_model" and result.settings["num_speculative_tokens"] == 7
    own = draftsmith.export(saved(tmp_path / "own", "small-lm", target, guesses=3), place, out=tmp_path / "written")
    assert own.settings["num_speculative_tokens"] == 3


REFUSED = {
    "bias": ("eagle", {"bias": True}, {}, "no EAGLE drafter with a bias; train one with drafter.bias=false"),
    "own heads, few tokens": (
        "medusa", {"draft_vocab_size": KEPT}, {}, "projections of their own; train some with drafter.draft",
    ),
    "other family": ("hydra", {}, {}, "'hydra', of which vLLM 0.32.0 runs none; train one of eagle, eagle3, medusa"),
    "more than there are heads": ("medusa", {}, {"guesses": 9}, "guesses up to 4 tokens a step, not 9; give another"),
    "none": ("eagle", {}, {"guesses": 0}, "at least one token a step, not 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_cannot_run_is_refused_and_nothing_is_written(
    case: str, tmp_path: Path, place: Path, target: Target
):
    family, options, asked, said = REFUSED[case]
    source = saved(tmp_path, family, target, **options)
    with pytest.raises(DraftsmithError, match=said):
        draftsmith.export(source, place, out=tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, "eagle", target)
    with pytest.raises(DraftsmithError, match="is there already"):
        draftsmith.export(source, place, out=source)
    with pytest.raises(DraftsmithError, match="hidden size .* load the target it was trained for"):
        draftsmith.export(source, demo_target(), out=tmp_path / "out")
    with pytest.raises(DraftsmithError, match="'mlp', of which vLLM"):
        draftsmith.export(demo_drafter(), out=tmp_path / "out")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(DraftsmithError, match="is damaged"):
        draftsmith.export(source, place, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_heads_is_told_so(tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, "medusa", target)
    safetensors.torch.save_file({"other": torch.zeros(1)}, source / "medusa_lm_head.safetensors")
    (source / "manifest.json").unlink()
    with pytest.raises(DraftsmithError, match="medusa_lm_head.safetensors holds no Medusa heads"):
        draftsmith.export(source, place, out=tmp_path / "out")


def test_a_target_that_was_trained_along_is_another_one(tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, "eagle", target)
    config = json.loads((source / "config.json").read_text())
    config["draftsmith"]["target"]["fingerprint"] = "0123456789abcdef"
    (source / "config.json").write_text(json.dumps(config))
    (source / "manifest.json").unlink()
    with pytest.raises(DraftsmithError, match=r"with weights changed in training .* has unchanged weights"):
        draftsmith.export(source, place, out=tmp_path / "out")


@pytest.mark.parametrize("family", ["eagle", "medusa"])
def test_files_of_others_are_held_against_the_targets_width(family: str, tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, family, target)
    config = json.loads((source / "config.json").read_text())
    del config["draftsmith"]
    (source / "config.json").write_text(json.dumps(config))
    (source / "manifest.json").unlink()
    assert draftsmith.export(source, place, out=tmp_path / "out").passed
    larger = tmp_path / "larger"
    changed = json.loads((place / "config.json").read_text()) | {"hidden_size": 2 * target.hidden_size}
    larger.mkdir()
    (larger / "config.json").write_text(json.dumps(changed))
    with pytest.raises(DraftsmithError, match=f"hidden size {target.hidden_size}, but 'larger' has"):
        draftsmith.export(source, larger, out=tmp_path / "another")


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path, place: Path, target: Target):
    source = saved(tmp_path, "eagle", target)
    draftsmith.export(source, place, out=tmp_path / "out", guesses=3)
    again = draftsmith.export(source, place, out=tmp_path / "out", guesses=2)
    assert json.loads((again.folder / "speculative_config.json").read_text())["num_speculative_tokens"] == 2
    (again.folder / "notes.txt").write_text("mine")
    with pytest.raises(DraftsmithError, match=r"notes\.txt is not part of the drafter there"):
        draftsmith.export(source, place, out=tmp_path / "out")
    assert (again.folder / "notes.txt").read_text() == "mine"


def test_the_command_can_be_pasted_into_a_shell(tmp_path: Path, target: Target):
    place = save_tiny_target(tmp_path / "my model's")
    result = draftsmith.export(saved(tmp_path, "eagle", target), place, out=tmp_path / "out", trust_remote_code=True)
    words = shlex.split(result.command)
    assert words[:5] == ["vllm", "serve", str(place), "--trust-remote-code", "--speculative-config"]
    assert json.loads(words[5]) == result.settings


# ---- in vLLM


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which `vllm` is our stand-in."""
    program = tmp_path_factory.mktemp("environment") / "bin" / "python"
    program.parent.mkdir()
    source = Path(draftsmith.__file__).parents[1]
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{Path(stand_in.__file__).parent}:{source}" exec "{sys.executable}" "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    starts = ragged(target, [Prompt("text", "", text) for text in TEXTS], len(TEXTS), NEW_TOKENS, Console(quiet=True))
    taught(target, untrained("medusa", target, num_heads=2), starts, NEW_TOKENS).save_pretrained(
        folder / "drafter", target.facts()
    )
    return folder / "drafter"


def test_the_same_prompts_are_decoded_in_both(tmp_path: Path, place: Path, drafter: Path, python: Path):
    result = draftsmith.export(
        drafter, place, out=tmp_path / "out", check=python, prompts=TEXTS, prompt_count=3, new_tokens=NEW_TOKENS,
        dtype="fp32", device="cpu",
    )
    compared = result.compared
    assert compared is not None and result.passed and compared.version == "0.0.0-stand-in"
    assert compared.steps == compared.steps_there and compared.stayed == compared.stayed_there
    assert compared.same_texts == 3 and compared.stayed[0] > 0 and compared.tau > 1.2
    assert compared.ratio.value == 1 and "No fewer guesses stay there" in compared.sentence()


def test_a_drafter_that_is_misread_there_fails(
    tmp_path: Path, place: Path, drafter: Path, python: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STAND_IN_MISREADS", "1")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    ran = CliRunner().invoke(app, [
        "export", "--target", str(place), "--drafter", str(drafter), "--out", str(tmp_path / "out"), "--check",
        str(python), "--data", str(tmp_path / "texts.jsonl"), "--prompts", "3", "--new-tokens", str(NEW_TOKENS),
        "--dtype", "fp32", "--device", "cpu", "--json", str(tmp_path / "result.json"),
    ])
    assert ran.exit_code == 1, ran.output
    assert "vLLM reads the drafter wrongly" in " ".join(ran.output.split())
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["compared"]["passed"] is False and found["compared"]["tau_vllm"] == 1


def test_a_vllm_that_does_not_start_is_told_with_its_reason(tmp_path: Path, python: Path):
    place = save_tiny_target(tmp_path / "no-vllm-knows-this")
    target = Target.from_pretrained(str(place), dtype="fp32", device="cpu", native=False)
    with pytest.raises(DraftsmithError, match=r"vLLM ended without an answer: ValueError: .*Unheard.* not supported"):
        draftsmith.export(
            saved(tmp_path, "medusa", target), place, out=tmp_path / "out", check=python, prompts=TEXTS, prompt_count=3,
            new_tokens=8, dtype="fp32", device="cpu",
        )


def test_a_vllm_that_hangs_while_it_starts_is_given_up(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Waiting for a lock.' >&2\nexec sleep 600\n")
    program.chmod(0o755)
    with pytest.raises(DraftsmithError, match=r"not started within 1 seconds; .* reported last: Waiting for a lock\."):
        Vllm(program, {}, patience_s=1)


@pytest.mark.parametrize("option", ["--prompts", "--new-tokens", "--task"])
def test_what_says_how_to_check_is_not_ignored_without_a_check(option: str, tmp_path: Path):
    ran = CliRunner().invoke(app, ["export", "--drafter", str(tmp_path), "--out", str(tmp_path / "out"), option, "9"])
    assert ran.exit_code == 2
    assert f"{option} says what to decode in a check; give --check too" in " ".join(ran.output.split())


def test_where_hardly_a_guess_stays_nothing_is_claimed():
    few = SideBySide("1", 101, [97, 99, 100, 99], [100, 98, 99, 100], [5], [3], 4)
    assert not few.tells and not few.passed and "it cannot be told" in few.sentence()
    none = SideBySide("1", 101, [50, 50, 50, 50], [100, 100, 100, 100], [50], [0], 4)
    assert none.tells is False and not none.passed and "reads the drafter wrongly" in none.sentence()
    same = SideBySide("1", 101, [50, 40, 45, 50], [50, 41, 45, 50], [50], [50], 4)
    assert same.passed and "as far as 4 texts tell" in same.sentence()


def test_an_environment_is_told_from_its_python(tmp_path: Path, place: Path, python: Path, drafter: Path):
    with pytest.raises(DraftsmithError, match=f"cannot be run; did you mean {python}"):
        draftsmith.export(drafter, place, out=tmp_path / "out", check=str(python.parents[1]))
    assert not (tmp_path / "out").exists()
