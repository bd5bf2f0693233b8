"""`draftsmith generate`: what it reads as a prompt, and what it says of the precision it reads weights in."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from draftsmith.cli import app
from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from tests.helpers.tiny import save_tiny_target

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FEW = ("--max-tokens", "5", "--dtype", "fp32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny-target")


@pytest.fixture(scope="module")
def chatty(target: Path) -> Path:
    folder = target.parent / "chatty"
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(*words: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *(str(word) for word in words)], input=stdin)


def refused(result: Result, *parts: str) -> None:
    """Exit code 2, one sentence on stderr with these parts, nothing on stdout."""
    assert result.exit_code == 2, result.output
    sentence = " ".join(result.stderr[result.stderr.find("Error: ") :].split())
    assert sentence.startswith("Error: ") and sentence.endswith(".") and "Traceback" not in sentence
    assert all(part in sentence for part in parts), sentence
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), "[user] Hi\n[assistant] "),
        (("--system", "Be kind."), "[system] Be kind.\n[user] Hi\n[assistant] "),
        (("--system", ""), "[system] \n[user] Hi\n[assistant] "),
    ],
)
def test_a_chat_is_the_text_in_the_template(chatty: Path, tmp_path: Path, words: tuple[str, ...], asked: str):
    chat = run("Hi", "--chat", *words, "--target", chatty, "--json", tmp_path / "c.json", *FEW)
    plain = run(asked, "--target", chatty, "--json", tmp_path / "p.json", *FEW)
    assert chat.exit_code == plain.exit_code == 0, chat.output
    assert chat.stdout == plain.stdout
    records = [json.loads((tmp_path / name).read_text()) for name in ("c.json", "p.json")]
    tokens = [record["completions"][0]["prompt_tokens"] for record in records]
    assert tokens[0] == tokens[1] == list(AutoTokenizer.from_pretrained(chatty)(asked)["input_ids"])
    assert records[1]["prompt"] == asked and records[0]["prompt"][-1] == {"role": "user", "content": "Hi"}


def test_a_chat_comes_from_standard_input_and_in_several_copies_too(chatty: Path):
    words = ("--chat", "--target", chatty, *FEW)
    assert run(*words, stdin="Hi").stdout == run("Hi", *words).stdout
    several = run("Hi", "-n", "2", "--temperature", "1", "--seed", "3", *words)
    assert several.exit_code == 0 and "--- 2 ---" in several.stdout


def test_a_chat_needs_a_template_and_a_system_message_a_chat(target: Path):
    refused(run("Hi", "--chat", "--target", target, *FEW), "'tiny-target' has none; leave out --chat")
    refused(run("Hi", "--system", "Be kind."), "--system is 'Be kind.'", "add --chat")


@pytest.mark.parametrize("given", [b"caf\xe9", b"\xff\xfea\x00", b"abc \xe4\xbd"])
def test_standard_input_that_is_not_utf8_is_one_sentence(target: Path, given: bytes):
    at = next(i for i, byte in enumerate(given) if byte > 127)
    refused(run("--target", target, *FEW, stdin=given), "standard input is not UTF-8", f"byte {at + 1} is 0x", "iconv")


def test_standard_input_is_utf8_and_output_is_whole_whatever_the_locale(target: Path):
    command = [sys.executable, "-m", "draftsmith", "generate", "--target", str(target), *FEW]
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": ":".join(sys.path)}
    good = subprocess.run(command, input="caf\xe9\r\n".encode(), capture_output=True, env=environment, check=False)
    bad = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environment, check=False)
    engine = Engine(Target.from_pretrained(target, dtype="fp32"))
    text = engine.generate(["café\n"], SamplingParams(max_tokens=5))[0].text
    assert good.returncode == 0, good.stderr
    assert not text.isascii()
    assert good.stdout.decode("ascii") == text.encode("ascii", "backslashreplace").decode() + "\n"
    assert (bad.returncode, bad.stdout) == (2, b"") and b"standard input is not UTF-8" in bad.stderr
    assert b"Traceback" not in bad.stderr


def test_an_argument_that_is_not_utf8_is_one_sentence(target: Path):
    refused(run("caf\udce9", "--target", target, *FEW), "prompt 0 has '\\udce9' at character 3")


@pytest.mark.parametrize(("stored", "named"), [(torch.float64, "fp64"), (torch.float32, "fp32")])
def test_weights_that_lose_precision_are_named_once(tmp_path: Path, stored: torch.dtype, named: str):
    folder = save_tiny_target(tmp_path / "wide", dtype=stored)
    used = resolve_dtype("auto", torch.device("cpu"))
    coarser = torch.finfo(used).bits < torch.finfo(stored).bits
    short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[used]
    said = " ".join(run("abc", "--target", folder, "--max-tokens", "2").stderr.split())
    line = f"wide: weights are {named} on disk; using {short} here (--dtype {named} keeps them)."
    assert said.count(line) == coarser
    assert "on disk" not in run("abc", "--target", folder, "--max-tokens", "2", "--dtype", "bf16").stderr
    kept = run("abc", "--target", folder, "--max-tokens", "2", "--dtype", named)
    assert kept.exit_code == 0 and "on disk" not in kept.stderr


def test_weights_that_lose_nothing_are_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = save_tiny_target(tmp_path / "narrow", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"  # what the files hold counts, not what the config says
    (folder / "config.json").write_text(json.dumps(config))
    assert Target.from_pretrained(folder).precision_on_disk == ""
    with caplog.at_level("INFO", logger="draftsmith"):
        wide = save_tiny_target(tmp_path / "wide", dtype=torch.float64)
        assert Target.from_pretrained(wide).precision_on_disk == "fp64"
    assert sum("wide: weights are fp64 on disk; using" in record.getMessage() for record in caplog.records) == 1


def test_advice_can_be_followed_on_the_command_line(target: Path):
    refused(run("x" * 200, "--target", target, *FEW), "shorten the prompt to at most 123 tokens")
    assert run("x" * 123, "--target", target, *FEW).exit_code == 0


def test_a_prompt_file_that_cannot_be_read_says_why(target: Path, tmp_path: Path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    refused(run("--prompt-file", tmp_path / "latin"), "latin is not UTF-8 (byte 4 is 0xe9)", "convert it")
    refused(run("--prompt-file", tmp_path), f"{tmp_path} is a folder", "give a file")
    refused(run("--prompt-file", tmp_path / "absent"), "absent cannot be read", "check the path")


def test_a_target_without_tokenizer_says_which_file_it_lacks(target: Path, tmp_path: Path):
    folder = Path(shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")))
    for words in ((), ("--chat",)):
        refused(run("Hi", "--target", folder, *words, *FEW), "bare has no tokenizer", "tokenizer.json", "from Python")


def test_statistics_compare_with_plain_decoding_only_where_something_was_drafted(target: Path):
    plain = run("Hi", "--target", target, "--no-draft", "--stats", *FEW)
    drafted = run("Hi", "--target", target, "--drafter", "early-exit", "--plan", "1", "--stats", *FEW)
    assert plain.exit_code == drafted.exit_code == 0
    assert "0 / 0" in plain.stderr and "the same without prompts" in plain.stderr
    told = re.compile("so this is|no ratio")  # the latter where other programs disturb it
    assert not told.search(plain.stderr)
    assert "0 / 0" not in drafted.stderr and told.search(drafted.stderr)


def test_several_greedy_texts_are_said_to_be_the_same(target: Path):
    words = ("Hi", "--target", target, "--no-draft", "--n", "3", *FEW)
    assert "At temperature 0 all 3 texts are the same" in " ".join(run(*words).stderr.split())
    assert "are the same" not in run(*words, "--temperature", "1").stderr


def test_draft_rows_bounds_the_plan_beside_it(target: Path):
    words = ("Hi", "--target", target, "--drafter", "early-exit", "--plan", "1", "--draft-rows", "2", "--stats", *FEW)
    few, many = run(*words, "--n", "2"), run(*words, "--n", "3")
    assert few.exit_code == many.exit_code == 0
    assert "0 / 0" not in few.stderr and "0 / 0" in many.stderr
    assert "a chain of 1" in few.stderr
