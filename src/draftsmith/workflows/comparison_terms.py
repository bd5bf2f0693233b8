"""The terms of a comparison: all of its measurements stand side by side, so they are the same for every command."""

from collections.abc import Iterator, Mapping
from typing import Any

OPTIONS = {
    "dtype": "--dtype", "positions": "--positions", "minutes": "--minutes", "search_share": "--search-share",
    "scored": "the number of tokens scored", "seed": "--seed", "device": "--device",
    "implementation": "what reads the target (--native, or another machine)",
}
LISTS = {
    "written": ("--texts", "--text-tokens"),
    "prompts": ("--prompt-count", "--sampled-prompt-count", "--prompt-tokens", "--new-tokens"),
}
"""What terms are called on the command line: those of one value, and those of several."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a part of a sentence that names every term that differs, with both values where these tell anything."""
    return ", ".join(_differing(before, now))


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if before["target"][0] != now["target"][0]:
        yield _changed("--target", before["target"][0], now["target"][0])
    elif before["target"] != now["target"]:
        yield f"the target {now['target'][0]!r} has other weights"
    for key, option in OPTIONS.items():
        if before[key] != now[key]:
            yield _changed(option, before[key], now[key])
    for key, options in LISTS.items():
        for option, old, new in zip(options, before[key], now[key], strict=True):
            if old != new:
                yield _changed(option, old, new)
    for name in {**before["given"], **now["given"]}:
        old, new = (terms["given"].get(name) for terms in (before, now))
        if old is None:
            yield f"--drafter {name!r} was not given"
        elif new is None:
            yield f"--drafter {name!r} was given and is not now"
        elif old != new:
            yield f"--drafter {name!r} has changed"
    if before["texts"] != now["texts"]:
        yield "the texts are others (--data, --prompts)"


def _changed(what: str, old: Any, new: Any) -> str:
    before, now = ("not given" if value is None else repr(value) for value in (old, new))
    return f"{what} was {before} and is {now}"
