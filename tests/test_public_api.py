"""What `import draftsmith` offers, and what it must not drag in."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import draftsmith

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_exactly_these():
    assert draftsmith.__all__ == [
        "AsyncEngine",
        "Constraint",
        "DraftsmithError",
        "Engine",
        "Plan",
        "SamplingParams",
        "Target",
        "__version__",
        "bench",
        "check",
        "compare",
        "export",
        "fit_drafts",
        "load_drafter",
        "prove",
        "train",
        "tune_layers",
        "wrap",
    ]
    assert dir(draftsmith) == sorted(draftsmith.__all__)


@pytest.mark.parametrize("name", draftsmith.__all__)
def test_every_public_name_loads(name: str):
    assert getattr(draftsmith, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Motor'"):
        draftsmith.Motor  # noqa: B018 - reading it is the test


def test_the_version_is_dotted_and_in_the_changelog():
    assert re.fullmatch(r"\d+\.\d+\.\d+", draftsmith.__version__)
    assert draftsmith.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_importing_brings_neither_the_commands_nor_the_plots():
    """Not with the names that load the most, behind which nothing more is brought by the bare import."""
    names = "('draftsmith.cli', 'matplotlib', 'typer')"
    loaded = f"[m for m in {names} if m in sys.modules]"
    code = f"import sys; from draftsmith import Engine, Target, load_drafter; print({loaded})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert run.stdout.strip() == "[]"


def test_the_bare_import_is_light():
    code = "import sys; import draftsmith; print('torch' in sys.modules, 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert run.stdout.strip() == "False False"
