"""Shows the first samples of a stage as text, so that users see what a run learns before it costs anything."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.files import replace_text
from draftsmith.targets.loading.tokens import TokenText
from draftsmith.training.data.windows import Window

SHOWN_SAMPLES = 3
SHOWN_CHARACTERS = 600


def parts_of(window: Window, text: TokenText) -> list[tuple[str, bool]]:
    """Return the text of a window in parts, each with whether it is learnt; special tokens are written out.

    A part is what its tokens add to the text before them, so spaces are kept where they belong. A character whose
    tokens lie in two parts belongs to the part in which it ends.
    """
    whole = text.decode(window.tokens, skip_special_tokens=False)
    edges = sorted({0, len(window.tokens), *(edge for span in window.spans for edge in span)})
    parts, shown = [], 0
    for begin, end in pairwise(edges):
        so_far = text.decode(window.tokens[:end], skip_special_tokens=False)
        learnt = any(first <= begin and end <= last for first, last in window.spans)
        # A character without its last byte decodes as another character.
        same = (at for at, (one, two) in enumerate(zip(so_far, whole, strict=False)) if one != two)
        agreed = next(same, min(len(so_far), len(whole)))
        parts.append((whole[shown:agreed], learnt))
        shown = max(shown, agreed)
    return parts


def show_samples(windows: Sequence[Window], text: TokenText, title: str, console: Console) -> list[dict[str, Any]]:
    """Print the first windows, one per line, with unlearnt text dimmed; return all of them as records."""
    records = []
    console.print(f"[bold]{title}[/bold] [dim](dimmed: read, but not learnt)[/dim]", highlight=False)
    for number, window in enumerate(windows[:SHOWN_SAMPLES], 1):
        parts = parts_of(window, text)
        shown = Text(f"{number}. ", style="bold")
        left = SHOWN_CHARACTERS
        for words, learnt in parts:
            shown.append(words[:left].replace("\n", "⏎"), style="not bold" if learnt else "not bold dim")
            left -= len(words[:left])
        shown.append(" …" if left == 0 else "")
        console.print(shown, soft_wrap=True)
        records.append(
            {
                "of": title, "tokens": window.tokens, "learnt": [list(span) for span in window.spans],
                "text": "".join(words for words, _ in parts),
                "parts": [{"text": words, "learnt": learnt} for words, learnt in parts],
            }
        )
    return records


def keep_samples(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write samples into a file, one per line; they replace earlier samples of the same stage."""
    fresh = {record["of"] for record in records}
    old = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    kept = [record for record in old if record["of"] not in fresh]
    replace_text(path, "".join(json.dumps(record) + "\n" for record in [*kept, *records]))
