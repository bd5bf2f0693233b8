"""Counts documents before a run begins: how many there are, how many are used, and what is left out and why."""

import time
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console

from draftsmith.training.data.sources import Source
from draftsmith.training.sections import DataSection
from draftsmith.training.terminal import progress_bar

COUNTING_SECONDS = 4.0
"""The most seconds spent on counting, so that a run on very much text does not wait for it."""
SHOWN_EVERY = 500


def take_census(data: DataSection, console: Console, seconds: float = COUNTING_SECONDS) -> list[dict[str, Any]]:
    """Read every local source once and return what is in it, as plain JSON; nothing is turned into tokens.

    `whole` says whether a source was counted completely. Data sets on the hub, which come over the network, are not
    counted at all. A source that takes more than its share of the seconds, plus what other sources left over, is
    counted only in part.

    Raises:
        DraftsmithError: a file that cannot be read, or a source without a document to train on.
    """
    begun, found = time.monotonic(), []
    with progress_bar(console) as progress:
        for number, section in enumerate(data.sources, 1):
            source = Source(section, data.held_out_every, data.piece_characters)
            bar = progress.add_task(f"counting {source.label}", total=None)
            whole = section.name is None
            for count, _ in enumerate(source.pieces() if whole else ()):
                if count % SHOWN_EVERY == 0:
                    progress.update(bar, completed=source.read)
                    if time.monotonic() - begun >= seconds * number / len(data.sources):
                        whole = False
                        break
            progress.remove_task(bar)
            found.append({**source.account(), "whole": whole})
    return found


def census_lines(census: Sequence[dict[str, Any]]) -> list[str]:
    """Return the census as text, one line per source."""
    lines = []
    for source in census:
        if source["whole"]:
            said = _in_words(source)
        elif source["documents"]:
            said = f"{_in_words(source)}, so far; it is too large to be counted first, so the rest is as it is read"
        else:
            said = "not counted first; its documents are counted as they are read"
        lines.append(f"data: {source['source']}: {said}")
    return [*lines, "data: documents that give no tokens to learn are counted as they are read"]


def account_lines(account: dict[str, Any], purpose: str, counted: Collection[str]) -> list[str]:
    """Return lines about reading for a purpose: sources that were not `counted` first, and unusable pieces."""
    lines = [
        f"data: {source['source']}: {_in_words(source)}, in the last pass over it"
        for source in account["sources"] if source["source"] not in counted
    ]
    return lines + [
        f"data: {count:,} of {account['pieces']:,} pieces drawn for {purpose} cannot be used: {reason}"
        for reason, count in account["unusable"].items()
    ]


def _in_words(source: dict[str, Any]) -> str:
    files = f" in {source['files']} files" if source["files"] > 1 else ""
    left_out = {**source["files_left_out"], **source["left_out"]}
    missing = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "nothing"
    documents = f"{source['documents']:,} document{'s' if source['documents'] != 1 else ''}{files}"
    return f"{documents}, {source['used']:,} used; left out: {missing}"
