"""Every command, end to end, on a tiny target; and what each kind of mistake says and returns."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from draftsmith.cli import app
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.targets import Target
from draftsmith.types import TargetFacts
from tests.helpers.tiny import save_tiny_target

MODELS = ("--dtype", "fp32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny-target")


@pytest.fixture(scope="module")
def drafter(target: Path) -> Path:
    return save_drafter(target.parent / "tiny-drafter", Target.from_pretrained(target, dtype="fp32").facts())


def save_drafter(folder: Path, facts: TargetFacts) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = MLPConfig(
            hidden_size=facts.hidden_size, vocab_size=facts.vocab_size, n_predict=2, top_k_tokens_per_head=(3, 2)
        )
        MLPSpeculator(config).save_pretrained(folder, facts)
    return folder


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


def refused(result: Result, *parts: str) -> None:
    """Exit code 2, one sentence on stderr that names the value, nothing on stdout, no traceback."""
    assert result.exit_code == 2, result.output
    sentence = " ".join(result.stderr[max(0, result.stderr.find("Error: ")) :].split())
    assert sentence.startswith("Error: ") and sentence.endswith((".", "?")) and "Traceback" not in sentence
    for part in parts:
        assert part in sentence, sentence
    assert result.stdout == ""


def test_generate_streams_the_same_text_with_and_without_a_drafter(target: Path, drafter: Path, tmp_path: Path):
    plain = run("generate", "abc def", "--target", target, "--no-draft", "--max-tokens", "20", *MODELS)
    path = tmp_path / "r.json"
    words = ("generate", "abc def", "--target", target, "--drafter", drafter, "--max-tokens", "20", *MODELS)
    fitted = run(*words, "--stats")
    assert fitted.exit_code == 0 and fitted.stdout == plain.stdout
    assert re.search(r"[Dd]rafts.* machine.*measured", " ".join(fitted.stderr.split()))
    assert "plain decoding now" in fitted.stderr
    drafted = run(*words, "--stats", "--plan", "own", "--json", path)
    assert plain.exit_code == drafted.exit_code == 0
    assert drafted.stdout == plain.stdout and len(plain.stdout) > 5
    assert "tokens per step" in drafted.stderr
    record = json.loads(path.read_text())
    assert record["prompt"] == "abc def" and record["provenance"]["dtype"] == "float32"
    assert record["completions"][0]["statistics"]["drafted"] > 0
    assert str(tmp_path) not in json.dumps(record["provenance"])


def test_generate_tells_what_compiling_cost_and_gained(target: Path):
    words = ("generate", "abc def", "--target", target, "--max-tokens", "12", *MODELS)
    plain, compiled = run(*words), run(*words, "--compile", "trace")
    assert compiled.exit_code == 0 and compiled.stdout == plain.stdout
    assert re.search(r"Compiled \(trace\) in [\d.]+ s: a plain step takes [\d.]+ ms instead of", compiled.stderr)
    assert "PyTorch, loaded in" in plain.stderr and "Compiled" not in plain.stderr


def test_generate_with_int8_is_said_to_need_native_code(target: Path):
    result = run("generate", "abc", "--target", target, "--max-tokens", "3", "--quantize", "int8", *MODELS)
    assert result.exit_code == 2 and "needs the native kernels and a bf16 model on a CPU" in result.stderr


def test_generate_reads_a_file_or_standard_input(target: Path, tmp_path: Path):
    (tmp_path / "p.txt").write_text("abc def")
    words = ("--target", target, "--max-tokens", "5", *MODELS)
    outputs = {
        run("generate", "abc def", *words).stdout,
        run("generate", "--prompt-file", tmp_path / "p.txt", *words).stdout,
        run("generate", *words, stdin="abc def").stdout,
    }
    assert len(outputs) == 1


def test_generate_samples_several_repeatably(target: Path, drafter: Path):
    words = ("generate", "abc", "--target", target, "--drafter", drafter, "--max-tokens", "6", "-n", "2", *MODELS)
    shape = ("--plan", "2,2", "--candidates", "2", "--temperature", "1", "--top-k", "20", "--seed", "5")
    first, second = run(*words, *shape), run(*words, *shape)
    assert first.exit_code == 0 and first.stdout == second.stdout
    assert "--- 1 ---" in first.stdout and "--- 2 ---" in first.stdout


def test_generate_ends_only_what_the_target_cannot_read(target: Path, tmp_path: Path):
    """Of three continuations one meets a token whose embedding is NaN."""
    words = ("--max-tokens", "8", "--temperature", "1", "--seed", "7", "--dtype", "fp32", "--no-draft")
    path = tmp_path / "whole.json"
    whole = run("generate", "abc", "-n", "3", "--target", target, "--json", path, *words)
    completions = json.loads(path.read_text())["completions"]
    texts = [completion["tokens"] for completion in completions]
    others = {*completions[0]["prompt_tokens"], *texts[0], *texts[2]}
    token = next(token for token in texts[1][1:-1] if token not in others)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    shutil.copytree(target, tmp_path / "broken")
    model.save_pretrained(tmp_path / "broken")
    path = tmp_path / "broken.json"
    broken = run("generate", "abc", "-n", "3", "--target", tmp_path / "broken", "--json", path, *words)
    assert broken.exit_code == 2 and "Error: continuation 2: broken gave no finite logits" in broken.stderr
    sections, expected = broken.stdout.split("--- "), whole.stdout.split("--- ")
    assert sections[1] == expected[1] and sections[3] == expected[3] and sections[2] != expected[2]
    found = json.loads(path.read_text())["completions"]
    assert [completion["finish_reason"] for completion in found] == ["length", "error", "length"]
    assert found[1]["tokens"] == texts[1][: texts[1].index(token) + 1]


def test_generate_with_typical_acceptance_says_that_it_is_lossy(target: Path, drafter: Path, tmp_path: Path):
    words = ("generate", "abc", "--target", target, "--drafter", drafter, "--max-tokens", "12", "--seed", "4", *MODELS)
    shape = ("--plan", "4,4", "--beam", "3", "--nodes", "6", "--temperature", "1")
    rule = ("--acceptance", "typical", "--epsilon", "1e-4")
    typical = run(*words, *shape, *rule, "--stats", "--json", tmp_path / "t.json")
    exact = run(*words, *shape, "--stats", "--json", tmp_path / "e.json")
    assert typical.exit_code == exact.exit_code == 0, typical.output
    assert typical.stderr.count("lossy (typical acceptance)") == 2 and "lossy" not in exact.stderr
    assert "lossless" in exact.stderr and typical.stdout != exact.stdout
    records = [json.loads((tmp_path / name).read_text()) for name in ("t.json", "e.json")]
    assert [r["completions"][0]["statistics"]["lossless"] for r in records] == [False, True]
    plan = records[0]["provenance"]["plan"]
    assert (plan["nodes"], plan["beam"], plan["acceptance"], plan["epsilon"]) == (6, 3, "typical", 1e-4)


def test_generate_verifies_a_sampled_chain_as_a_block(target: Path, drafter: Path, tmp_path: Path):
    words = ("generate", "abc", "--target", target, "--drafter", drafter, "--max-tokens", "12", "--seed", "4", *MODELS)
    result = run(*words, "--sampled", "--acceptance", "block", "--temperature", "1", "--json", tmp_path / "b.json")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "b.json").read_text())
    plan = record["provenance"]["plan"]
    assert (plan["branching"], plan["sampled"], plan["acceptance"]) == ([1, 1], True, "block")
    assert record["completions"][0]["statistics"]["lossless"]


def test_bench_prints_the_table_and_writes_cells(target: Path, drafter: Path, tmp_path: Path):
    result = run(
        "bench", "--target", target, "--drafter", drafter, "--task", "code", "--batch", "1,2", "--candidates", "0,1,3",
        "--prompt-tokens", "16", "--new-tokens", "8", "--trials", "2", "--peer", "transformers",
        "--plots", tmp_path / "plots", "--json", tmp_path / "b.json", *MODELS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "prompts of 16" in result.stdout and "τ" in result.stdout
    # A bar where there is a terminal, and elsewhere a line at first, and later ones for those who wait for long.
    assert re.findall(r"now: .*", result.stderr)[0].startswith("now: prompt 16, batch 1, round 1 of 3, 1 of ")
    record = json.loads((tmp_path / "b.json").read_text())
    assert len(record["cells"]) == 7 and record["provenance"]["target"] == "tiny-target"
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"latency-16.png", "acceptance.png"}


def test_bench_measures_a_static_tree_whole(target: Path, drafter: Path, tmp_path: Path):
    tree = [[0], [0, 0], [0, 2], [1]]
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    words = ("bench", "--target", target, "--drafter", drafter, "--plan", tmp_path / "tree.json", *MODELS)
    result = run(
        *words, "--task", "code", "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "8", "--trials", "1",
        "--warmups", "0", "--json", tmp_path / "b.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    baseline, drafted = json.loads((tmp_path / "b.json").read_text())["cells"]
    assert (baseline["candidates"], baseline["nodes"]) == (0, 0) and "choices" not in baseline
    assert (drafted["candidates"], drafted["nodes"], drafted["branching"]) == (3, 4, [2, 3])
    assert drafted["choices"] == tree and drafted["identical_texts"] == 2
    refused(run(*words, "--candidates", "0,1"), "--candidates", "names every node")
    refused(run(*words, "--beam", "2"), "choices name every node")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ((), "Texts equal to the baseline's, token for token: 1 of 1"),
        (("--sampled", "--acceptance", "block"), "Texts are lossless: distributed as the baseline's"),
        (("--acceptance", "typical"), "Texts are lossy (typical acceptance)"),
    ],
)
def test_bench_says_how_its_texts_relate_to_the_baselines(
    target: Path, drafter: Path, tmp_path: Path, rule: tuple[str, ...], said: str
):
    result = run(
        "bench", "--target", target, "--drafter", drafter, "--task", "code", "--batch", "1", "--candidates", "0,1",
        "--prompt-tokens", "8", "--new-tokens", "6", "--trials", "1", "--warmups", "0", "--temperature", "0.8", *rule,
        "--json", tmp_path / "b.json", "--plots", tmp_path / "plots", *MODELS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert said in printed and ("; lossy (typical acceptance)" in printed) == ("typical" in rule)
    baseline, drafted = json.loads((tmp_path / "b.json").read_text())["cells"]
    assert baseline["lossless"] and drafted["lossless"] == ("typical" not in rule)
    assert drafted["acceptance"] == (rule[-1] if rule else "exact") and drafted["temperature"] == 0.8
    assert drafted["sampled"] == ("--sampled" in rule)


def test_train_from_a_recipe_leaves_a_drafter_that_generates(target: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "recipe.yaml").write_text(
        f"target: {{name: {target}, dtype: fp32}}\n"
        "drafter: {n_predict: 2}\n"
        f"data: {{sources: [{{path: {tmp_path / 'text.txt'}}}]}}\n"
        "stage1: {steps: 2, batch: 2, length: 32}\n"
        "stage2: {steps: 2, batch: 2, prompt_tokens: 8, new_tokens: 12, generate_batch: 2}\n"
        "optimizer: {precision: fp32}\n"
        f"output: {{folder: {tmp_path / 'run'}}}\n"
    )
    few = ("--eval-prompts", "1", "--eval-tokens", "8", "--eval-prompt-tokens", "16")
    planned = run("train", tmp_path / "recipe.yaml", f"output.folder={tmp_path / 'dry'}", "--dry-run", *few)
    assert planned.exit_code == 0, planned.output
    result = run("train", tmp_path / "recipe.yaml", "stage1.steps=1", *few, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["result"]["step"] == 3 and record["result"]["best"] >= 1
    made = record["result"]["drafter"]
    assert (
        run("generate", "the quick", "--target", target, "--drafter", made, "--max-tokens", "4", *MODELS).exit_code == 0
    )
    again = run("train", tmp_path / "recipe.yaml", "stage1.steps=1", *few)
    refused(again, "already holds a run")
    assert run("train", tmp_path / "recipe.yaml", "stage1.steps=1", *few, "--resume").exit_code == 0


def test_train_names_target_data_family_and_folder_as_all_commands_do(target: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    few = ("--eval-prompts", "1", "--eval-tokens", "8", "--eval-prompt-tokens", "16")
    small = ("target.dtype=fp32", "stage1.length=32", "stage2.prompt_tokens=8", "stage2.new_tokens=12")
    words = ("train", "--target", target, "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *few, *small)
    planned = run(*words, "--family", "medusa:num_heads=2", "--dry-run")
    assert planned.exit_code == 0, planned.output
    made = tmp_path / "run" / "dry-run"
    assert json.loads((made / "config.json").read_text())["medusa_num_heads"] == 2
    steps = ("stage1.steps=1", "stage2.steps=1", "stage2.batch=2", "stage1.batch=2", "optimizer.precision=fp32")
    result = run(*words, "--drafter", made, *steps)
    assert result.exit_code == 0, result.output
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["target"]["name"] == str(target)
    assert recipe["data"]["sources"][0]["path"] == str(tmp_path / "text.txt")
    assert recipe["drafter"]["family"] == "medusa" and recipe["drafter"]["num_heads"] == 2, "those of the drafter given"
    assert recipe["drafter"]["init_from"] == str(made) and (tmp_path / "run" / "drafter" / "config.json").exists()


def test_train_of_a_family_needs_no_recipe(target: Path, tmp_path: Path):
    lengths = ("stage1.length=32", "stage2.prompt_tokens=8", "stage2.new_tokens=12", "--eval-prompt-tokens", "16")
    words = ("train", "--out", tmp_path / "run", "--dry-run", f"target.name={target}", *lengths)
    result = run(*words, "drafter.family=medusa", "drafter.num_heads=2")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run/dry-run/config.json").read_text())["medusa_num_heads"] == 2


def test_demo_measures_trains_times_and_reports(target: Path, drafter: Path, tmp_path: Path):
    result = run(
        "demo", "--target", target, "--init-from", drafter, "--minutes", "0.03", "--prompts", "2", "--new-tokens", "12",
        "--prompt-tokens", "16", "--out", tmp_path / "report", "--json", tmp_path / "d.json", *MODELS,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for part in (
        "before",
        "after",
        "ratio",
        "identical, code (trained live): yes (2 of 2",
        "confirms 2 of 2",
        "Only the embedded target is made larger",
        "A sample",
    ):
        assert part in " ".join(result.stdout.split()), result.stdout
    record = json.loads((tmp_path / "d.json").read_text())
    [speeds] = record["speeds"]
    prose = speeds["tasks"]["prose"]["trained live"]
    assert prose["new_tokens_plain"] == prose["new_tokens_drafted"] == 24
    report = (tmp_path / "report" / "report.md").read_text()
    pictures = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert len(pictures) == 5 and all(f"]({name})" in report for name in pictures)
    assert (tmp_path / "report" / "report.json").is_file() and str(tmp_path) not in report
    assert (tmp_path / "report" / "drafter" / "config.json").is_file()


def test_missing_checkpoints_are_named(target: Path, tmp_path: Path):
    refused(run("generate", "x", "--target", tmp_path / "absent"), "absent")
    (tmp_path / "empty").mkdir()
    refused(run("generate", "x", "--target", tmp_path / "empty"), "config.json")
    refused(run("generate", "x", "--target", target, "--drafter", tmp_path / "absent"), "absent")


def test_a_half_written_drafter_is_refused(target: Path, drafter: Path, tmp_path: Path):
    for file in drafter.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    refused(run("generate", "x", "--target", target, "--drafter", tmp_path, *MODELS))


def test_a_speculator_of_another_target_is_refused(target: Path, tmp_path: Path):
    wide = save_drafter(tmp_path / "wide", TargetFacts(64, 257, None, "another"))
    refused(run("generate", "x", "--target", target, "--drafter", wide, *MODELS), "64", "32")
    foreign = save_drafter(tmp_path / "foreign", TargetFacts(32, 257, "0" * 64, "another"))
    refused(run("generate", "x", "--target", target, "--drafter", foreign, *MODELS), "tokenizer")


def test_a_prompt_longer_than_the_context_is_refused(target: Path):
    refused(run("generate", "x" * 200, "--target", target, "--max-tokens", "5", *MODELS), "the prompt has 200", "128")
    refused(run("generate", "x", "--target", target, "--max-tokens", "500", *MODELS), "has 1 token and asks for 500")


def test_bad_plans_are_refused(target: Path, drafter: Path):
    words = ("generate", "x", "--target", target, "--drafter", drafter, *MODELS)
    refused(run(*words, "--plan", "2,x"), "--plan", "'2,x'")
    refused(run(*words, "--plan", "2,0"), "the plan 2,0 has a depth without children")
    refused(run(*words, "--candidates", "-2"), "-2")
    block = ("--sampled", "--acceptance", "block", "--temperature", "1")
    refused(run(*words, *block, "--plan", "2,1"), "(2, 1), sampled")
    refused(
        run("bench", "--target", target, "--candidates", "0,4", "--prompt-tokens", "9", "--new-tokens", "4"),
        "--drafter",
    )


def test_ctrl_c_is_one_sentence_and_130(target: Path):
    # A prompt that never ends keeps the command waiting where the signal finds it.
    code = "from draftsmith.cli import main; print('ready', flush=True); main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "generate", "--target", str(target)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell without job control starts background jobs, and so this suite, with the signal ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(3)  # until it waits for its prompt, on a busy machine too
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.startswith("Interrupted") and errors.count("\n") == 1
