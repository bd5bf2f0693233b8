"""Which method guesses better: differences in τ on the same prompts, for pairs that the literature has ordered.

τ is that of the tables, with the common tree: over a whole task, not the mean over prompts. The interval of a
difference resamples the same prompts for both methods. The tree holds best guesses, not sampled ones, at every
temperature, so both methods write the same text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.drafters.family import Compared
from draftsmith.drafters.registry import families as known_families
from draftsmith.evaluation.comparison.methods import MODES
from draftsmith.evaluation.comparison.questions import EDIT
from draftsmith.evaluation.measuring.intervals import Interval, ratio_difference

Cells = Sequence[Mapping[str, Any]]

HEADER = ["ordering", "task", "temperature", "difference in τ", "holds here"]
# The task where lookups should win, as its text repeats what came before, and the one where trained drafters should.
REPEATED, NEW = EDIT, "prose"
BETWEEN, LOOKED_UP, TRAINED = "between trained", "looked up over trained", "trained over looked up"
KINDS = (BETWEEN, LOOKED_UP, TRAINED)


def orderings(
    cells: Cells, tasks: Sequence[str], families: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return every known ordering of two methods with the difference in τ, greedy and at temperature 1."""
    names = [family["name"] for family in families]
    found = []
    for task in tasks:
        for mode, temperature in MODES.items():
            taus = {c["method"]: c["tree"] for c in cells if c["task"] == task and c["mode"] == mode}
            for kind, better, worse in pairs(task, taus, families):
                apart = difference(taus[better], taus[worse])
                found.append(
                    {
                        "kind": kind, "better": better, "worse": worse, "task": task, "temperature": temperature,
                        "difference": apart.value, "difference_ci": apart.ends,
                        "prompts": len(taus[better]["steps_by_prompt"]),
                    }
                )
    return sorted(found, key=lambda item: (KINDS.index(item["kind"]), names.index(item["better"])))


def pairs(
    task: str, taus: Mapping[str, Mapping[str, Any]], families: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """Return (kind, better, worse) for every pair to compare on one task."""
    trained = [family["name"] for family in families if family["trained"]]
    lookups = [f["name"] for f in families if not f["trained"] and facts_of(f["name"]).looks_up]
    wanted = []
    for name, family in known_families().items():
        wanted += [(BETWEEN, name, worse) for worse in family.compared.beats_in_papers]
        if family.compared.confident_twin is not None:
            wanted.append((BETWEEN, family.compared.confident_twin, name))
    if task == REPEATED:
        wanted += [
            (LOOKED_UP, f["name"], worse) for f in families for worse in facts_of(f["name"]).better_on_repeats
        ]
    if task == NEW and lookups:
        # The best lookup on these very prompts, which favours the lookup.
        best = max(lookups, key=lambda name: taus[name]["tokens_per_step"])
        wanted += [(TRAINED, name, best) for name in trained]
    return [(kind, better, worse) for kind, better, worse in wanted if better in taus and worse in taus]


def facts_of(method: str) -> Compared:
    """Return what the family of a method states for comparisons; the method is named with or without options."""
    family = known_families().get(method.partition(":")[0])
    return family.compared if family is not None else Compared()


def difference(better: Mapping[str, Any], worse: Mapping[str, Any]) -> Interval:
    """Return how much larger the τ of `better` is, paired by prompt."""
    return ratio_difference(
        (better["tokens_by_prompt"], better["steps_by_prompt"]), (worse["tokens_by_prompt"], worse["steps_by_prompt"])
    )


def ordering_rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each ordering, the temperatures of one task below each other."""

    def says(ends: Sequence[float]) -> str:
        return "yes" if ends[0] > 0 else "no" if ends[1] < 0 else "not told apart"

    return [
        [
            f"{item['better']} over {item['worse']}", item["task"], f"{item['temperature']:g}",
            f"{item['difference']:+.2f} ({item['difference_ci'][0]:+.2f} to {item['difference_ci'][1]:+.2f})",
            says(item["difference_ci"]),
        ]
        for item in found
    ]


def summary(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in a sentence a temperature whether trained drafters guess new text better than looking it up."""
    sentences = []
    for mode, temperature in MODES.items():
        mine = [item for item in found if item["kind"] == TRAINED and item["temperature"] == temperature]
        if mine:
            above = sum(item["difference_ci"][0] > 0 for item in mine)
            below = sum(item["difference_ci"][1] < 0 for item in mine)
            sentences.append(
                f"{NEW.capitalize()}, {mode}: trained drafters that guess better than the best lookup "
                f"({mine[0]['worse']}): {above} of {len(mine)}; worse: {below}; too close to tell: "
                f"{len(mine) - above - below}."
            )
    return sentences
