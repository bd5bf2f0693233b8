"""Imports point downward only: each part of draftsmith may import parts of a lower layer, and itself."""

import ast
from pathlib import Path

import pytest

from draftsmith.drafters.registry import BUILT_IN

SOURCE = Path(__file__).parent.parent / "src" / "draftsmith"

LAYERS = (
    ("dates", "memory", "replays", "types"),
    ("files", "patterns", "references", "system", "text_files", "user_cache"),
    ("alternatives", "assets", "native", "plan", "processor", "provenance"),
    ("constraints", "dtypes"),
    ("targets", "verify", "grammar_process"),
    ("drafters",),
    ("engine",),
    ("serving", "evaluation", "training"),
    ("workflows",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
STRANGERS = {("training", "engine")}
"""Downward imports that are forbidden all the same: training is handed a generator from outside."""

FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def imported_modules(path: Path, source: Path = SOURCE) -> set[str]:
    """Return the draftsmith modules that a file in the package's folder imports, anywhere in it."""
    package = ["draftsmith", *path.relative_to(source).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == "draftsmith"}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: Path):
    part = part_of(path)
    assert part in LEVEL, f"{part} has no layer; give it one in LAYERS."
    for name in imported_modules(path):
        if name in ("draftsmith", "draftsmith.__version__"):
            continue
        other = name.split(".")[1]
        assert other in LEVEL, f"{path.name} imports {name}; import the part that owns the name."
        allowed = other == part or (LEVEL[other] < LEVEL[part] and (part, other) not in STRANGERS)
        assert allowed, f"{part} ({path.name}) must not import {name}."


ABOVE = [
    path for path in FILES if part_of(path) in ("cli", "workflows", "serving", "evaluation", "training", "engine")
]


@pytest.mark.parametrize("path", ABOVE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_above_the_drafters_names_a_family(path: Path):
    """What has to be known of a family stands in its `Family`, so that one of another package is treated alike."""
    configs = {family.name: family.config.__module__ for family in BUILT_IN}
    modules = set(configs.values())
    for name, place in configs.items():
        # What computes has the name of its family, or, where it serves several, that of their options.
        own = {f"{place.rpartition('.')[0]}.{name.replace('-', '_')}", place.removesuffix("_config")}
        there = {module for module in own if (SOURCE.parent / f"{module.replace('.', '/')}.py").is_file()}
        assert there
        modules |= there
    for name in imported_modules(path):
        assert not any(name == module or name.startswith(f"{module}.") for module in modules), name
    known = {family.name for family in BUILT_IN}
    words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not known & {word for word in words if isinstance(word, str)}


def test_relative_and_nested_imports_are_seen(tmp_path: Path):
    (tmp_path / "engine").mkdir()
    file = tmp_path / "engine" / "step.py"
    file.write_text("from ..cli import app\nfrom . import policy\ndef f():\n    import draftsmith.training.loop\n")
    assert imported_modules(file, tmp_path) == {
        "draftsmith.cli.app",
        "draftsmith.engine.policy",
        "draftsmith.training.loop",
    }
