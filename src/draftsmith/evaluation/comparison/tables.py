"""The report of a comparison: tables, and a verdict in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.drafters.registry import families
from draftsmith.evaluation.comparison import fairness
from draftsmith.evaluation.comparison.methods import CHAIN, MODES, TREE_NODES, static_tree
from draftsmith.evaluation.comparison.orderings import HEADER, Cells, ordering_rows
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.reporting.result_files import markdown_table

FAMILY_HEADER = ["method", "parameters", "own memory, MB", "scores", "trained, s", "positions", "what it is"]
HOW_TO_READ = """\
- **τ** = 1 + accepted / steps: the tokens that a step brings. "τ chain" is of {chain} guesses in a row, so at most \
{deepest}; "τ tree" of the {nodes} nodes that a drafter is surest of, at most {deepest} deep but for lookups. \
{static}Otherwise both are the same for all, and their cost is left out. A drafter that is nearly always right gains \
more from a longer chain than from a tree, which spends nodes on second guesses.
- At T=1 chain and tree hold best guesses, which the target's draw often misses; "τ sampled" is of a chain of {chain} \
drawn from the drafter's own distribution, for those that have one.
- **Fastest draft**: the shape that was fastest here on two other prompts, and "its τ", which may be above both. \
"drafting" is its share of the decoding time; "a step costs" is its time over that of a plain step. Drafting pays \
where its τ is above that.
- **Same text** counts the rounds whose text was that of plain decoding. A sampled draft draws other text of the same \
distribution (`draftsmith prove` tests that), so there is nothing to count.
- **Own memory** is of the weights as they decode, packed, without what the target lends and without caches.
- Speeds are of decoding alone, one prompt at a time, every round with plain decoding and all methods in random \
order. The fastest is named on the same rounds that measured it, which flatters it a little.
- Intervals are 95 % bootstraps: over prompts for τ, over rounds for speed. Each is of a single cell, uncorrected for \
how many there are: expect about one in twenty to miss."""


def how_to_read(methods: Sequence[str]) -> str:
    """Say how to read the tables of these methods."""
    static = ""
    for name in methods:
        family = families().get(name)
        if family is not None and family.compared.static_tree:
            depth = max(map(len, static_tree(family.tree)))
            static += (
                f"{name}'s tree is the published static one cut to {TREE_NODES} nodes, which leaves it {depth} deep. "
            )
    return HOW_TO_READ.format(chain=CHAIN, deepest=CHAIN + 1, nodes=TREE_NODES, static=static)


def of(cells: Cells, task: str, mode: str) -> list[Mapping[str, Any]]:
    """Return the cells of one task and mode, the fastest first."""
    return sorted((c for c in cells if c["task"] == task and c["mode"] == mode), key=lambda c: -c["speedup"])


def family_rows(families: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each method: what it weighs and what it took."""
    return [
        [
            family["name"],
            f"{family['parameters'] / 1e6:.2f} M" if family["parameters"] else "–",
            f"{family['memory_bytes'] / 1e6:.1f}" if family["memory_bytes"] else "–",
            f"{family['scored_tokens']:,}" if family.get("scored_tokens") else "–",
            f"{family['training_s']:.0f}" if family.get("training_s") is not None else "–",
            f"{family['training_positions']:,}" if family.get("training_positions") else "–",
            family["summary"],
        ]
        for family in families
    ]


def shapes_of(mine: Cells) -> dict[str, str]:
    """Return the drafts that τ was measured with, by the header of their column."""
    shapes = {"τ chain": "chain", "τ tree": "tree"}
    return shapes | ({"τ sampled": "sampled_chain"} if any("sampled_chain" in cell for cell in mine) else {})


def cell_table(cells: Cells, task: str, mode: str) -> list[list[str]]:
    """Return the table of one task and mode: the header, then a line for each method, the fastest first."""
    mine = of(cells, task, mode)
    shapes = shapes_of(mine)
    header = [
        "method", *shapes, "accepted by depth (tree)", "fastest draft", "its τ", "drafting", "a step costs",
        "ms a token", "same text", "speed-up",
    ]
    rows = [
        [
            cell["method"],
            *("–" if shape not in cell else tau(cell[shape]) for shape in shapes.values()),
            " ".join(f"{share:.0%}" for share in cell["tree"]["accepted_by_depth"][:5]),
            cell["plan"],
            f"{cell['tokens_per_step_timed']:.2f}",
            f"{cell['share_drafting']:.0%}",
            f"{cell['step_cost']:.2f}×",
            f"{cell['ms_per_token']:.2f}",
            "sampled" if cell["sampled"] else f"{cell['identical']} of {cell['rounds']}",
            span(cell["speedup"], cell["speedup_ci"], "×"),
        ]
        for cell in mine
    ]
    return [header, *rows]


def short_table(cells: Cells, task: str, mode: str) -> list[list[str]]:
    """Return the same table, narrow enough for a terminal."""
    mine = of(cells, task, mode)
    shapes = shapes_of(mine)
    rows = [
        [
            cell["method"],
            *("–" if shape not in cell else f"{cell[shape]['tokens_per_step']:.2f}" for shape in shapes.values()),
            cell["plan"], f"{cell['step_cost']:.2f}×", span(cell["speedup"], cell["speedup_ci"], "×"),
        ]
        for cell in mine
    ]
    return [["method", *shapes, "fastest draft", "a step costs", "speed-up"], *rows]


def tau(guessed: Mapping[str, Any]) -> str:
    """Say τ and its interval."""
    return span(guessed["tokens_per_step"], guessed["tokens_per_step_ci"])


def span(value: float, ends: Sequence[float], unit: str = "") -> str:
    """Say a value and its interval."""
    return f"{value:.2f}{unit} ({ends[0]:.2f}–{ends[1]:.2f})"


FEW_POSITIONS = 50_000
"""A family that learnt from fewer positions, about half of what `compare` gives by default, still improves fast."""


def verdict(cells: Cells, tasks: Sequence[str]) -> list[str]:
    """Say which method to use for which task, how much it gains, and which methods never pay and why."""
    sentences = []
    for task in tasks:
        for mode in MODES:
            ranked = of(cells, task, mode)
            if not ranked:
                continue
            best = ranked[0]
            if best["speedup_ci"][0] <= 1:
                gain = span(best["speedup"], best["speedup_ci"], "×")
                loses = best["speedup_ci"][1] < 1
                sentences.append(
                    f"{task}, {mode}: decode plainly; the fastest, {best['method']} with {gain}, "
                    + ("is slower." if loses else "is no clear gain.")
                )
                continue
            gain = span(best["speedup"], best["speedup_ci"], "× plain decoding")
            sentence = f"{task}, {mode}: use {best['method']} ({best['plan']}), {gain}"
            sentences.append(f"{sentence}{behind(best, ranked[1:])}.")
    return unfaithful(cells) + sentences + losers(cells)


def behind(best: Mapping[str, Any], others: Cells) -> str:
    """Say how far the second is behind the fastest, by times in the same rounds, and who else is not clearly slower."""
    ahead = [ratio_interval(other["seconds_by_round"], best["seconds_by_round"]) for other in others]
    if not ahead:
        return ""
    said = (
        f"; next is {others[0]['method']} with {others[0]['speedup']:.2f}×, "
        f"{'clearly slower' if ahead[0].low > 1 else 'not told apart'}: in the same rounds {best['method']} is "
        f"{span(ahead[0].value, ahead[0].ends, '×')} as fast"
    )
    unsure = [
        f"{other['method']}, {span(ratio.value, ratio.ends, '×')}"
        for other, ratio in zip(others[1:], ahead[1:], strict=True) if ratio.low <= 1
    ]
    return said + (f"; further down, not told apart: {'; '.join(unsure)}" if unsure else "")


def unfaithful(cells: Cells) -> list[str]:
    """Name every method whose text differs from the plain text of a round; sampled drafts are exempt."""
    return [
        f"{cell['method']}, {cell['task']}, {cell['mode']}: {cell['rounds'] - cell['identical']} of "
        f"{cell['rounds']} texts differ from plain decoding; run draftsmith prove with it before anything else."
        for cell in cells if not cell["sampled"] and cell["identical"] < cell["rounds"]
    ]


def losers(cells: Cells) -> list[str]:
    """Say of every method that nowhere beats plain decoding why: drafting costs too much, or it guesses too little."""
    sentences = []
    for name in dict.fromkeys(cell["method"] for cell in cells):
        mine = [cell for cell in cells if cell["method"] == name]
        if any(cell["speedup_ci"][0] > 1 for cell in mine):
            continue
        best = max(mine, key=lambda cell: cell["speedup"])
        where = f"{best['task']}, {best['mode']}, {best['plan']}"
        if best["speedup"] > 1:
            sentences.append(
                f"{name} is nowhere clearly faster than plain decoding: its best is "
                f"{span(best['speedup'], best['speedup_ci'], '×')} ({where})."
            )
            continue
        drafting = best["share_drafting"] * best["step_cost"]
        room = best["tokens_per_step_timed"] - (best["step_cost"] - drafting)
        sentences.append(
            f"{name} does not beat plain decoding: at its best ({where}, {best['speedup']:.2f}×) a step brings "
            f"{best['tokens_per_step_timed']:.2f} tokens and costs {best['step_cost']:.2f} plain steps, "
            f"{drafting:.2f} of them drafting; "
            + (
                f"drafting is too slow, {room:.2f} would be the limit." if room > 0
                else "it guesses too little: verifying alone costs as much as that brings."
            )
        )
    return sentences


def too_short(families: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which families were trained too little for a judgement of the families."""
    short = {family["name"]: family["training_positions"] for family in families if family.get("training_positions")}
    short = {name: positions for name, positions in short.items() if positions < FEW_POSITIONS}
    if not short:
        return []
    least = f"{min(short.values()):,}"
    most = f"{max(short.values()):,}"
    seen = least if least == most else f"{least} to {most}"
    return [
        f"{', '.join(short)} learnt from {seen} positions only, so all of this says more of the budget than of "
        f"{'these families' if len(short) > 1 else 'this family'}; give more of them, or more minutes."
    ]


def to_markdown(result: Mapping[str, Any]) -> str:
    """Write the report."""
    parts = [
        "# Draft families compared",
        f"Target {result['target']}; {result['budget']}. τ on up to {result['prompts'][0]} prompts a task "
        f"({result['prompts'][1]} at T=1), speed in {result['rounds']} rounds.",
        "## Verdict",
        "\n".join(f"- {sentence}" for sentence in result["verdict"]),
        "## How to read the tables",
        how_to_read([family["name"] for family in result["families"]]),
        "## Methods",
        markdown_table(FAMILY_HEADER, family_rows(result["families"])),
    ]
    parts += ["## Texts kept apart", "\n".join(f"- {sentence}" for sentence in fairness.texts_sentences(result))]
    parts.append(markdown_table(fairness.TEXTS_HEADER, fairness.texts_rows(result["texts"])))
    if sentence := fairness.search_sentence(result):
        parts += ["## Rates and starts", sentence]
    if rows := fairness.search_rows(result["families"]):
        parts.append(markdown_table(fairness.SEARCH_HEADER, rows))
        parts.append(markdown_table(fairness.TRIALS_HEADER, fairness.trial_rows(result["families"])))
    for task in result["tasks"]:
        for mode in MODES:
            header, *rows = cell_table(result["cells"], task, mode)
            parts += [f"## {task}, {mode}", markdown_table(header, rows)]
        parts += [f"![speed-up](speedup-{task}.png)", f"![acceptance by depth](acceptance-{task}.png)"]
    if result["orderings"]:
        parts += [
            "## Orderings",
            "Differences in τ with the tree, on the same prompts. Trained drafters are held against the lookup that is "
            "best on these very prompts.",
            markdown_table(HEADER, ordering_rows(result["orderings"])),
        ]
    parts += ["![τ against cost](tau-and-cost.png)", f"Command: `{result['provenance']['command']}`"]
    return "\n\n".join(parts) + "\n"
