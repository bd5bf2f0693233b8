"""`draftsmith generate` with a schema, a pattern, a grammar, or a text that is expected."""

import json
import re
from pathlib import Path

import pytest

from draftsmith import assets
from tests.cli.test_cli_generate import refused, run

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["good", "bad"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
}


def test_a_schema_in_a_file(tmp_path: Path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    done = run("As JSON: ", "--json-schema", tmp_path / "schema.json", "--compile", "off", "--plan", "own")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["kind"] in ("good", "bad") and 0 <= found["count"] <= 99


def test_a_pattern_and_a_grammar(tmp_path: Path):
    done = run("On ", "--regex", "[0-9]{4}-[0-9]{2}", "--temperature", "0.8", "--seed", "1", "--compile", "off")
    assert done.exit_code == 0 and re.fullmatch("[0-9]{4}-[0-9]{2}", done.stdout.strip()), done.output
    (tmp_path / "sums.ebnf").write_text('root ::= [0-9] ("+" [0-9]){2}\n')
    done = run("3+4 is ", "--grammar", tmp_path / "sums.ebnf", "--no-draft")
    assert done.exit_code == 0 and re.fullmatch(r"\d\+\d\+\d", done.stdout.strip()), done.output


def test_a_prediction_is_counted(tmp_path: Path):
    words = ("It was a bright cold day", "--max-tokens", "30", "--compile", "off")
    plain = run(*words, "--no-draft")
    (tmp_path / "before.txt").write_text(plain.stdout.removesuffix("\n"))
    done = run(*words, "--prediction", tmp_path / "before.txt", "--stats", "--json", tmp_path / "done.json")
    assert done.exit_code == 0, done.output
    assert done.stdout == plain.stdout
    told = json.loads((tmp_path / "done.json").read_text())["completions"][0]["statistics"]
    assert told["accepted_prediction"] > 15 and told["rejected_prediction"] is not None
    assert "accepted / rejected of the prediction" in done.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--json-schema", "absent.json"), ("--json-schema is 'absent.json'", "cannot be read")),
        (("--grammar", "absent.ebnf"), ("--grammar is 'absent.ebnf'", "cannot be read")),
        (("--prediction", "absent.txt"), ("--prediction is 'absent.txt'", "cannot be read")),
        (("--regex", "a", "--grammar", "absent.ebnf"), ("there are --grammar and --regex; give one of them",)),
        (("--regex", "(" * 100), ("brackets inside each other",)),
        (("--regex", "(a"), ("the regular expression cannot be compiled",)),
        (("--prediction", "absent.txt", "--no-draft"), ("--no-draft decodes plainly",)),
    ],
)
def test_what_cannot_be_followed_is_refused(words: tuple[str, ...], parts: tuple[str, ...]):
    refused(run("Once", "--target", assets.demo_target(), "--compile", "off", *words), *parts)
