"""Writes results to disk, JSON and report folders, each file whole or not at all; also checks beforehand if it can."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.files import is_special, replace_text, replacing
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ensure_writable(path: Path) -> None:
    """Raise DraftsmithError unless a file can be written at `path`; missing folders are made."""
    if str(path) == "-":
        raise DraftsmithError("results do not go to '-'; give /dev/stdout, or the name of a file.")
    if path.is_dir():
        raise DraftsmithError(f"{path} is a folder; name a file in it.")
    if not is_special(path):
        ensure_folder(path.resolve().parent)


def ensure_folder(folder: Path) -> None:
    """Make a folder, and raise DraftsmithError unless a file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DraftsmithError(f"the folder {folder} cannot be written to ({error.strerror}); use another.") from error


def _unwritten(path: Path, error: OSError) -> DraftsmithError:
    return DraftsmithError(f"{path} could not be written ({error.strerror}); free some space, or choose another place.")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; DraftsmithError where that is not possible."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise _unwritten(path, error) from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a PNG whole or not at all."""
    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    except OSError as error:
        raise _unwritten(path, error) from error


def write_report(folder: Path, markdown: str, data: Mapping[str, Any], figures: "Mapping[str, Figure]") -> Path:
    """Write `figures` (file name -> picture), report.json and, last, report.md, which links them; return its path."""
    ensure_folder(folder)
    for name, figure in figures.items():
        write_figure(folder / name, figure)
    write_json(folder / "report.json", data)
    write_text(folder / "report.md", markdown)
    return folder / "report.md"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Lay out a Markdown table: first column to the left, numbers to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))
