"""`draftsmith train` as a stranger meets it: a model folder and a text file, mistakes, and what the run says."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from draftsmith.cli import app
from draftsmith.cli.compare import named_folder
from draftsmith.cli.train import sort_words
from draftsmith.processor import busy_seconds
from draftsmith.training import disturbance
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.keys import recipe_keys
from tests.helpers.tiny import save_tiny_target
from tests.helpers.tiny_tokenizers import tiny_tokenizer_of

TEXT = "the quick brown fox jumps over the lazy dog. "
ASKED = ("--eval-prompts", "2", "--eval-tokens", "8", "--eval-prompt-tokens", "8")
FEW = ("--minutes", "0.001", *ASKED)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    save_tiny_target(folder / "model")
    (folder / "corpus.txt").write_text(TEXT * 100)
    lines = [json.dumps({"text": f"{i} {TEXT * 2}"}) for i in range(12)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def save_target(folder: Path, vocabulary: int) -> Path:
    """Save a Llama whose vocabulary is larger than its tokenizer's, as they are padded in practice."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            num_hidden_layers=2, max_position_embeddings=96, bos_token_id=1, eos_token_id=2,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer_of("byte-level").save_pretrained(folder)
    return folder


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, words)])


def said(result: Result) -> str:
    return " ".join(result.output.split())


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    sentence = " ".join(result.stderr[max(0, result.stderr.find("Error: ")) :].split())
    assert sentence.startswith("Error: ") and "Traceback" not in sentence
    for part in parts:
        assert part in sentence, sentence


def test_a_model_folder_and_a_text_are_enough(place: Path, tmp_path: Path):
    words = ("--target", place / "model", "--data", place / "corpus.txt", "--out", tmp_path / "run", *FEW)
    result = run(*words, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    for part in (
        "chosen: stage1.length = 128", "chosen: stage1.steps = 10", "chosen: stage2.batch = 16", "estimate:",
        "2 prompts of at most 8 tokens from the held-out part of your data", "τ near 1", "held out at its end",
    ):
        assert part in said(result), part
    assert "draft_vocab_size" not in result.output
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["measured_on"]["source"] == "the held-out part of your data" and record["result"]["step"] == 20
    evaluations = record["result"]["evaluations"]
    assert evaluations[-1]["evaluation"]["held_out_loss"] < evaluations[0]["evaluation"]["held_out_loss"]
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["stage1"]["steps"] == 10 and recipe["stage2"]["prompt_tokens"] == 32
    stands = run(*words[:-8], "--resume", "--dry-run", *FEW[2:])
    assert stands.exit_code == 0 and "the run is done, after 20 steps" in said(stands), stands.output
    refused(run(*words[:4], "--out", tmp_path / "absent", "--resume", "--dry-run"), "no checkpoint to resume from")
    resumed = run(*words[:-8], "--resume", *FEW[2:])
    assert resumed.exit_code == 0, resumed.output
    refused(run(*words), "already holds a run")


def test_what_was_chosen_by_the_user_stays(place: Path, tmp_path: Path):
    own = ("stage1.steps=1", "stage2.steps=0", "stage1.batch=2", "stage1.length=24", "stage1.rate=0.01")
    result = run(
        "--target", place / "model", "--data", place / "corpus.jsonl", "--out", tmp_path / "run", *ASKED, *own
    )
    assert result.exit_code == 0, result.output
    assert "chosen: stage1." not in result.output and "left out: 1 held out" in said(result)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["stage1"]["batch"] == 2 and recipe["stage1"]["length"] == 24 and recipe["stage2"]["steps"] == 0


@pytest.mark.parametrize("vocabulary", [512, 9000])
def test_a_large_vocabulary_is_restricted_with_its_coverage(vocabulary: int, place: Path, tmp_path: Path):
    target = save_target(tmp_path / "model", vocabulary)
    words = ("--target", target, "--data", place / "corpus.jsonl", "--out", tmp_path / "run", *FEW)
    result = run(*words, "--family", "mlp", "stage2.steps=0", "stage1.batch=2", "--dry-run")
    assert result.exit_code == 0, result.output
    restricted = "chosen: drafter.draft_vocab_size = 8192: of the target's 9,000 tokens; these cover 100.0%"
    assert (restricted in said(result)) == (vocabulary == 9000)
    out = tmp_path / "other"
    refused(run(*words[:-8], *FEW, "--out", out, "drafter.draft_vocab_size=10000"), "10000", f"target's {vocabulary}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["data=corpus.jsonl"], ["--data corpus.jsonl", "data.sources.0.path=corpus.jsonl"]),
        (["target=M"], ["--target M", "target.name=M"]),
        (["steps=500"], ["stage1.steps=500", "stage2.steps=500"]),
        (["step=500"], ["stage1.steps=500"]),
        (["family=medusa"], ["--family medusa"]),
        (["stage1=500"], ["stage1.steps=VALUE"]),
        (["stage1.stesp=5"], ["did you mean stage1.steps?"]),
        (["--minutes", "0"], ["--minutes", "positive"]),
        (["--minutes", "5", "stage1.steps=9", "stage2.steps=0"], ["--minutes is 5", "leave out --minutes or one of"]),
        (["--minutes", "5", "stage1={steps: 9}", "stage2.steps=9"], ["stage1.steps and stage2.steps are set"]),
        (["--out", "/proc/absent/run"], ["/proc", "output.folder"]),
        (["stage1.length=500"], ["stage1.length is 500", "128"]),
        (["--eval-tokens", "100", "--eval-prompt-tokens", "100"], ["--eval-tokens", "128"]),
        (["stage2.prompt_tokens=120", "stage2.new_tokens=8", "data.piece_characters=64"], ["stage2.prompt_tokens"]),
    ],
)
def test_mistakes_are_answered_before_anything_is_written(
    words: list[str], parts: list[str], place: Path, tmp_path: Path
):
    given = ("--target", place / "model", "--data", place / "corpus.jsonl", "--out", tmp_path / "run")
    refused(run(*given, *words), *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_run_within_its_own_data_is_refused_and_goes_on_elsewhere(place: Path, tmp_path: Path):
    """Otherwise whoever reads the folder next, the run itself included, takes what the run wrote for text."""
    data, inside = tmp_path / "data", tmp_path / "data" / "runs" / "mine"
    data.mkdir()
    shutil.copy(place / "corpus.jsonl", data)
    words = ("--target", place / "model", "--data", data, *ASKED, "stage1.steps=1", "stage2.steps=0", "stage1.batch=1")
    refused(run(*words, "--out", inside), f"the run's folder {inside} is within the data {data}", "(--out) outside")
    refused(run(*words, "--out", data, "--dry-run"), f"the run's folder {data} is within the data {data}")
    assert [path.name for path in data.iterdir()] == ["corpus.jsonl"]
    assert run(*words, "--out", tmp_path / "mine").exit_code == 0
    shutil.move(tmp_path / "mine", data / "mine")
    refused(run("--resume", "--out", data / "mine", *ASKED), "is within the data", "is there already can be moved")
    shutil.move(data / "mine", tmp_path / "moved")
    assert run("--resume", "--out", tmp_path / "moved", *ASKED).exit_code == 0
    assert run(*words, "--out", data / ".runs" / "mine").exit_code == 0, "which is hidden from who reads the data"
    assert run(*words, "--out", tmp_path / "another").exit_code == 0


@pytest.mark.parametrize("more", [(), ("--resume",)], ids=["begin", "resume"])
def test_a_run_that_another_process_trains_is_left_alone(more: tuple[str, ...], place: Path, tmp_path: Path):
    words = ("--target", place / "model", "--data", place / "corpus.jsonl", "--out", tmp_path / "run", *more)
    with Checkpoints(tmp_path / "run", 2).held():
        refused(run(*words), f"another process trains in {tmp_path / 'run'}; wait for its end, or choose another")
    assert list((tmp_path / "run").iterdir()) == []


def test_data_named_by_an_override_alone_are_trained_on_as_with_the_option(place: Path, tmp_path: Path):
    """And not with the settings of the embedded run, which holds nothing out and has no first stage."""
    told, forms = [], ("data.sources.0.path={}", "data.sources=[{{path: {}}}]", "data={{sources: [{{path: {}}}]}}")
    overrides = [(form.format(place / "corpus.txt"),) for form in forms]
    for number, words in enumerate([("--data", place / "corpus.txt"), *overrides]):
        out = tmp_path / str(number)
        result = run(*words, "--out", out, *ASKED, "stage1.steps=1", "stage2.steps=1", "stage1.batch=1", "--dry-run")
        assert result.exit_code == 0, result.output
        assert "from the held-out part of your data" in said(result), "and not all of them trained on"
        chosen = [line.split(":")[1] for line in result.output.splitlines() if line.startswith("chosen: ")]
        told.append([line for line in chosen if "batch" not in line])
    assert told == told[:1] * 4 and " stage1.length = 256" in told[0]


def test_paths_with_an_equals_sign_in_them_are_paths(tmp_path: Path):
    run_folder = tmp_path / "mlp-n_predict=2"
    (run_folder / "drafter").mkdir(parents=True)
    recipe = str(run_folder / "recipe.yaml")
    Path(recipe).write_text("drafter: {}")
    assert sort_words([recipe, "stage1.steps=3"]) == (recipe, ["stage1.steps=3"])
    drafter = str(run_folder / "drafter")
    assert named_folder(drafter) == ("mlp-n_predict=2", drafter) and named_folder(f"own={drafter}") == ("own", drafter)


def test_mistyped_paths_name_the_nearest_one(place: Path, tmp_path: Path):
    out = ("--out", tmp_path / "run")
    refused(run("--target", place / "modle", "--data", place / "corpus.txt", *out), f"did you mean {place / 'model'}?")
    refused(run("--target", place / "model", "--data", place / "corpsu.txt", *out), f"{place / 'corpus.txt'}?")
    refused(run(place / "corpus.txt", *out), f"--data {place / 'corpus.txt'}")
    refused(run(place / "model", *out), f"--target {place / 'model'}")
    refused(run("--minutes", "3", *out), "--minutes")
    assert list(tmp_path.iterdir()) == []


def test_keys_lists_every_key_with_a_meaning():
    result = run("--keys", "--family", "medusa")
    assert result.exit_code == 0
    for part in ("stage1.steps=0  (whole number)", "data.sources.0.path=null", "drafter.num_heads=", "joint.decay="):
        assert part in result.output
    assert all(key.meaning and key.kind for key in recipe_keys())


@pytest.mark.skipif(busy_seconds() is None, reason="this system does not tell how busy its cores are")
def test_a_plan_that_other_programs_disturbed_is_said_to_be_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ("--target", place / "model", "--data", place / "corpus.jsonl", *FEW, "--dry-run")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"stage2": {"steps": 1, "batch": 2, "prompt_tokens": 8, "new_tokens": 8}}))
    sized = (recipe, *words[:4], *FEW[2:], "--dry-run")
    for busy, expected in ((1e9, False), (-1.0, True)):  # nothing others take is too much, and whatever they take is
        monkeypatch.setattr(disturbance, "BUSY", busy)
        planned = run(*words, "--out", tmp_path / "run")
        assert planned.exit_code == 0, planned.output
        assert ("while steps were timed, so the plan may have fewer steps than" in said(planned)) == expected
        assert "estimate may be too long" not in said(planned), "one sentence is enough"
        estimated = run(*sized, "--out", tmp_path / "sized")
        assert estimated.exit_code == 0, estimated.output
        assert ("so the estimate may be too long;" in said(estimated)) == expected
