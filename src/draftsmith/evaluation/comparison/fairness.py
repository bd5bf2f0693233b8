"""How a comparison reports its terms: which texts were kept apart, and how rates and starts were chosen."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXTS_HEADER = ["part", "task", "texts", "sources"]
SEARCH_HEADER = ["method", "suggested", "rate", "start", "trials", "search, s", "positions"]
TRIALS_HEADER = ["method", "rate", "start", "τ on tuning prompts"]
MOST_NAMES = 7
BY_DOCUMENT, BY_PLACE = "document", "place"
"""How texts are separated into parts where sources are not enough."""


def texts_rows(texts: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each part and task."""
    return [[part["part"], part["task"], str(part["texts"]), sources_of(part)] for part in texts["parts"]]


def sources_of(part: Mapping[str, Any]) -> str:
    """Name the sources of texts, or count them where they are many."""
    names = part["sources"]
    told = [", ".join(names[:MOST_NAMES])] if names else []
    if len(names) > MOST_NAMES:
        told.append(f"{len(names) - MOST_NAMES} more")
    if part["without_source"]:
        told.append(f"{part['without_source']} texts without")
    return ", ".join(told)


def texts_sentences(result: Mapping[str, Any]) -> list[str]:
    """Say which texts were kept apart, what the check found, and what could not be checked."""
    texts = result["texts"]
    data, prompts, parts = texts["data"], texts["prompts"], texts["parts"]
    said = [
        f"What is trained, tuned and measured on is all of {data}, told apart {apart(texts)}." if prompts is None else
        f"What is measured on is of {prompts}. What is trained and tuned on is of {data}, told apart {apart(texts)}."
    ]
    left_out = "; ".join(f"{count} {reason}" for reason, count in texts["left_out"].items())
    said.append(f"Left out of training and tuning: {left_out or 'nothing had to be'}.")
    said.append(
        f"Found by the check of what remains, between any two parts: {len(texts['shared_sources'])} shared sources, "
        f"{texts['shared_texts']} shared texts, {texts['shared_windows']} times 13 words in a row"
        + (f" beside {texts['common_windows']} that more than 10 texts have." if texts["common_windows"] else ".")
    )
    if texts["shared_sources"]:
        names = ", ".join(texts["shared_sources"][:MOST_NAMES])
        said.append(f"**Texts of one source are in several parts** ({names}), so what is measured on is familiar.")
    unnamed, total = sum(part["without_source"] for part in parts), sum(part["texts"] for part in parts)
    if unnamed:
        said.append(
            f"{unnamed} of {total} texts name no source, so of these only the words were compared: give each record a "
            "`source` to have sources kept apart."
        )
    if texts["only_the_first_characters"] is not None:
        said.append(f"Only the first {texts['only_the_first_characters']:,} characters of the data were read.")
    before = [f["name"] for f in result["families"] if f["trained"] and f.get("search") is None and "rate" not in f]
    if before:
        said.append(f"Trained before, on texts that are not known here: {', '.join(before)}.")
    said.append("Measured on: " + "; ".join(map(measured, result["measured"])) + ".")
    return said


def apart(texts: Mapping[str, Any]) -> str:
    """Say how texts were separated into parts: by source, by document, or by place."""
    if texts["told_apart_by"] == BY_PLACE:
        return "by their place, the beginning, the middle and the end of each, as there are too few documents"
    if texts["told_apart_by"] == BY_DOCUMENT:
        return "by document, as there are too few sources"
    own = [part for part in texts["parts"] if texts["prompts"] is None or part["part"] != "measured"]
    if not any(part["without_source"] for part in own):
        return "by their sources"
    if not any(part["sources"] for part in own):
        return "by document, as none names a source"
    return "by their sources, and by document where none is named"


def measured(item: Mapping[str, Any]) -> str:
    """Say what a task was measured on."""
    sources = f" of {item['sources']} source{'s' if item['sources'] != 1 else ''}" if item["sources"] else ""
    plural = "s" if item["texts"] != 1 else ""
    return f"{item['task']}, {item['prompts']} prompts cut from {item['texts']} text{plural}{sources}"


def search_rows(families: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each method with a search: what was chosen, and what the search cost."""
    return [
        [
            f["name"], f"{f['suggested_rate']:.2g}", f"{f['rate']:.2g}{' (edge)' if f['rate_at_edge'] else ''}",
            start(f["start"]), str(len(f["search"]["trials"])), f"{f['search']['seconds']:.0f}",
            f"{f['search']['positions']:,}",
        ]
        for f in searched(families)
    ]


def trial_rows(families: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each trial, in the order in which they were made."""
    return [
        [f["name"], f"{trial['rate']:.2g}", start({name: trial["options"][name] for name in f["start"]}), score(trial)]
        for f in searched(families) for trial in f["search"]["trials"]
    ]


def searched(families: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the methods with a search, each set of weights once."""
    return [f for f in families if f.get("search") is not None and f["search"]["trials"]]


def start(options: Mapping[str, Any]) -> str:
    """Say how a drafter starts; – where there is nothing to choose."""
    return ", ".join(f"{name}={word(value)}" for name, value in options.items()) or "–"


def word(value: Any) -> str:
    """Return a value as it is given to a recipe or a command."""
    return value if isinstance(value, str) else json.dumps(value)


def score(trial: Mapping[str, Any]) -> str:
    """Say the τ that a trial was judged by, with its interval."""
    if trial["tokens_per_step"] is None:
        return "the loss blew up"
    low, high = trial["tokens_per_step_ci"]
    return f"{trial['tokens_per_step']:.3f} ({low:.3f}–{high:.3f})"


def search_sentence(result: Mapping[str, Any]) -> str:
    """Say how rates and starts were chosen, or that they were not."""
    if result["search_share"] == 0:
        return "No search: every family was trained with the rate and the start that it suggests."
    families = searched(result["families"])
    if not families:
        return ""
    seconds, share = sum(f["search"]["seconds"] for f in families), result["search_share"]
    return (
        "Of every family that is trained, a third of the suggested rate, that rate and three times it were tried, one "
        "more where the best lay at an edge, and then other starts where the family has some: each trial with "
        f"{share:.0%} of the steps and the same schedule, judged by τ of a greedy chain on the same prompts of the "
        "tuning part. \"Edge\" marks a rate beyond which none was tried. The search comes on top of the budget and "
        f"took {seconds:.0f} s in all."
    )
