"""Every `draftsmith …` command that README.md and docs/ show has options that exist, and the cheap ones run.

The Python that docs/python-api.md shows has arguments that exist.
"""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.drafters.family import read_spec
from draftsmith.drafters.registry import families, family_named
from draftsmith.training.recipe import load_recipe
from draftsmith.workflows import sizes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
PLACEHOLDERS = {"…": "placeholder", "...": "placeholder"}
CHEAP = ("families", "doctor", "--version")
DEMO = ("generate", "train")
"""Also cheap where they use the embedded models alone and train nothing."""
FILES = {
    "tree.json": "[[0], [0, 0], [1]]",
    "schema.json": '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}',
    "sums.ebnf": 'root ::= number ("+" number){1,3}\nnumber ::= [1-9] [0-9]{0,2}\n',
    "prompt.txt": "It was a bright cold day in April, and",
    "before.txt": "the clocks were striking thirteen.",
}
"""What the commands that run here read."""


def commands_on(page: Path) -> list[str]:
    """Return every command of a page, of code blocks and in running text, as a line without continuation marks."""
    text = page.read_text().replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        shown = re.match(r"(?: {4,}|\$ )?(?:[\w.]+=\S+ )*(?:\.venv/bin/)?draftsmith ([a-z-].*)", line)
        if shown is not None and (line.startswith(("    ", "$", "draftsmith", ".venv"))):
            found.append(shown[1])
    found += [re.sub(r"\s+", " ", inline) for inline in re.findall(r"`draftsmith ([a-z-][^`]*)`", text)]
    return found


SHOWN = sorted({(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands_on(page)})


def words_of(command: str) -> list[str]:
    """Split as a shell does, up to a pipe or a redirection."""
    words = shlex.split(command, comments=True)
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&", ";")]
    return [PLACEHOLDERS.get(word, word.rstrip(";")) for word in words[: ends[0] if ends else None]]


def test_there_are_commands_of_every_kind_to_look_at():
    named = {words_of(command)[0] for _, command in SHOWN}
    assert named >= {"generate", "train", "bench", "compare", "check", "prove", "families", "doctor"}
    assert len(SHOWN) > 25


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_shown_command_can_be_read(page: str, command: str):
    name, *arguments = words_of(command)
    group = typer.main.get_command(app)
    if name.startswith("-"):
        assert CliRunner().invoke(app, [name, *arguments]).exit_code == 0
        return
    chosen = group.commands.get(name)  # type: ignore[attr-defined]
    assert chosen is not None, f"{page}: there is no command {name}"
    with chosen.make_context(name, arguments) as context:
        assert context.params


RECIPES = sorted({command for _, command in SHOWN if command.startswith("train recipes/")})


@pytest.mark.parametrize("command", RECIPES)
def test_the_recipe_of_a_shown_command_exists_and_takes_its_changes(command: str):
    _, recipe, *rest = words_of(command)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    assert load_recipe(ROOT / recipe, overrides).drafter.family in families()


SPECS = sorted({spec for _, command in SHOWN for spec in re.findall(r"--family (\S+)", command) if "mixer" not in spec})


@pytest.mark.parametrize("spec", SPECS)
def test_a_shown_family_exists_with_its_options(spec: str):
    name, options = read_spec(spec)
    family_named(name).config.read(options, f"{name}:")


@pytest.mark.parametrize(
    "command",
    sorted({
        command for _, command in SHOWN
        if command.startswith(CHEAP)
        or (command.startswith(DEMO[0] + " ") and not re.search("--(target|drafter|data)|…", command))
        or (command.startswith(DEMO[1] + " ") and "--dry-run" in command and "recipes/" not in command)
    }),
)
def test_a_cheap_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With small batches where a step of training is timed: that it is timed is what a command does, not how long."""
    monkeypatch.setattr(sizes, "BATCH", 2)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, words_of(command))
    assert result.exit_code == 0, result.output


CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python-api.md").read_text(), flags=re.S)


@pytest.mark.parametrize("code", CODE)
def test_the_python_that_is_shown_imports_and_calls_what_exists(code: str):
    tree = ast.parse(code)
    names: dict[str, object] = {}
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "docs/python-api.md", "exec"), names)
    called = 0
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        known = ast.unparse(call.func)
        if known.split(".")[0] not in names:
            continue
        made = eval(known, names)
        inspect.signature(made).bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg})
        called += 1
    assert called >= 4
