"""What comes with the server speaks to it: the load generator, the page in a browser, the dashboard."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.cli import app
from tests.helpers.browser import Browser, chromium
from tests.serving.toy import NAME, PROMPTS, get, listening, make_service, plainly
from tests.test_deploy import expressions, read_metrics


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with listening(make_service()) as url:
        yield url


def load(url: str, file: Path, *words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["load", "--base-url", url, "--json", str(file), *words])
    assert done.exit_code == 0, done.output
    (level,) = json.loads(file.read_text())["levels"]
    return dict(level)


def test_the_load_generator_counts_what_the_server_wrote(server: str, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    words = ("--dataset", str(prompts), "--num-prompts", "8", "--output-len", "12", "--ignore-eos", "--save-detailed")
    level = load(server, tmp_path / "load.json", *words, "--max-concurrency", "2", "--result-dir", str(tmp_path))
    assert level["output_lens"] == [12] * 8 and level["failed"] == 0
    texts = {plainly(text, max_tokens=12, ignore_eos=True, temperature=0.0).text for text in PROMPTS}
    assert set(level["generated_texts"]) == texts  # type: ignore[call-overload]
    drafts, accepted = level["spec_decode_num_drafts"], level["spec_decode_num_accepted_tokens"]
    assert drafts > 0 and level["spec_decode_acceptance_length"] == 1 + accepted / drafts  # type: ignore[operator]


def test_prompts_are_cut_by_the_servers_tokenizer(server: str, tmp_path: Path):
    words = ("--num-prompts", "3", "--dataset", "code", "--input-len", "9", "--output-len", "2")
    level = load(server, tmp_path / "load.json", *words)
    assert level["total_input_tokens"] == 27
    level = load(server, tmp_path / "load.json", "--num-prompts", "2", "--dataset", "random", "--output-len", "2")
    assert level["total_input_tokens"] == 128


def test_the_dashboard_reads_what_the_server_tells():
    told = set(re.findall(r"^# TYPE vllm:(\w+) ", get("/metrics").text, flags=re.M))
    read = set().union(*map(read_metrics, expressions()))
    assert read <= told, read - told


def test_the_page_shows_an_answer_and_a_race(server: str, tmp_path: Path):
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine, and the page is looked at in one")

    def value(of: Browser, script: str) -> object:
        return of.evaluate(script)

    with Browser(program, tmp_path) as browser:
        browser.open(f"{server}/")
        browser.until(f"document.getElementById('model').textContent === 'model: {NAME}'")
        browser.evaluate(f"document.getElementById('prompt').value = '{PROMPTS[1]}'")
        browser.evaluate("document.getElementById('max-tokens').value = '24'")
        for button in ("write", "race"):
            browser.evaluate(f"document.getElementById('{button}').click()")
            browser.until("document.getElementById('stop').disabled")
            assert value(browser, "document.getElementById('trouble').textContent") == ""
        lanes = ("plain-text", "drafted-text")
        shown = [value(browser, f"document.getElementById('{name}').textContent") for name in lanes]
        assert shown == [plainly(PROMPTS[1], max_tokens=24, temperature=0.0).text] * 2
        assert "Both texts are equal." in str(value(browser, "document.getElementById('verdict').textContent"))
        assert int(str(value(browser, "document.querySelectorAll('#drafted-text .by').length"))) > 0
        assert value(browser, "document.querySelectorAll('#plain-text .by').length") == 0
        assert value(browser, "document.querySelectorAll('#plans tbody td')[0].textContent") == "2,1,1"
        assert value(browser, "document.querySelector('#tree svg') !== null")
        assert browser.complaints == []
