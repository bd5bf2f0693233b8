"""What a contest says: tables, pictures, and a verdict in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter
from rich.console import Console
from rich.table import Table

from draftsmith.evaluation.contest import EDIT, MODES, order
from draftsmith.evaluation.intervals import Interval
from draftsmith.evaluation.plots import INK, SERIES, acceptance_by_depth, canvas, finish, ranked_bars
from draftsmith.evaluation.report import markdown_table

Cells = Sequence[Mapping[str, Any]]

ORDERINGS = (
    ("mlp", "medusa"), ("hydra", "medusa"), ("eagle2", "eagle"), ("ngram", "mlp"), ("suffix", "mlp"),
)
FAMILY_HEADER = ["contender", "parameters", "memory, MB", "trained, s", "positions", "what it is"]
CELL_HEADER = [
    "contender", "τ chain", "τ tree", "accepted by depth (tree)", "drafts here", "τ", "drafting", "a step costs",
    "ms a token", "same text", "speed-up",
]
SHORT_HEADER = ["contender", "τ chain", "τ tree", "drafts here", "drafting", "a step costs", "speed-up"]


def of(cells: Cells, task: str, mode: str) -> list[Mapping[str, Any]]:
    """Return the cells of one task and mode, the fastest first."""
    return sorted((c for c in cells if c["task"] == task and c["mode"] == mode), key=lambda c: -c["speedup"])


def family_rows(families: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each contender: what it weighs and what it took."""
    return [
        [
            family["name"],
            f"{family['parameters'] / 1e6:.2f} M" if family["parameters"] else "–",
            f"{family['memory_bytes'] / 1e6:.1f}" if family["memory_bytes"] else "–",
            f"{family['training_s']:.0f}" if family.get("training_s") is not None else "–",
            f"{family['training_positions']:,}" if family.get("training_positions") else "–",
            family["summary"],
        ]
        for family in families
    ]


def cell_rows(cells: Cells, task: str, mode: str) -> list[list[str]]:
    """Return a line for each contender of one task and mode, the fastest first."""

    def span(value: float, ends: Sequence[float]) -> str:
        return f"{value:.2f} ({ends[0]:.2f}–{ends[1]:.2f})"

    return [
        [
            cell["contender"],
            span(cell["chain"]["tokens_per_step"], cell["chain"]["tokens_per_step_ci"]),
            span(cell["tree"]["tokens_per_step"], cell["tree"]["tokens_per_step_ci"]),
            " ".join(f"{share:.0%}" for share in cell["tree"]["accepted_by_depth"][:5]),
            cell["plan"],
            f"{cell['tokens_per_step_timed']:.2f}",
            f"{cell['share_drafting']:.0%}",
            f"{cell['step_cost']:.2f}×",
            f"{cell['ms_per_token']:.2f}",
            f"{cell['identical']} of {cell['rounds']}",
            f"{cell['speedup']:.2f}× ({cell['speedup_ci'][0]:.2f}–{cell['speedup_ci'][1]:.2f})",
        ]
        for cell in of(cells, task, mode)
    ]


def short_rows(cells: Cells, task: str, mode: str) -> list[list[str]]:
    """Return the same lines, narrow enough for a terminal."""
    return [
        [
            cell["contender"], f"{cell['chain']['tokens_per_step']:.2f}", f"{cell['tree']['tokens_per_step']:.2f}",
            cell["plan"], f"{cell['share_drafting']:.0%}", f"{cell['step_cost']:.2f}×",
            f"{cell['speedup']:.2f}× ({cell['speedup_ci'][0]:.2f}–{cell['speedup_ci'][1]:.2f})",
        ]
        for cell in of(cells, task, mode)
    ]


def verdict(cells: Cells, tasks: Sequence[str]) -> list[str]:
    """Say which contender to use for which task, by how much, and who never pays and why."""
    sentences = []
    for task in tasks:
        for mode in MODES:
            ranked = of(cells, task, mode)
            if not ranked:
                continue
            best = ranked[0]
            if best["speedup_ci"][0] <= 1:
                sentences.append(
                    f"{task}, {mode}: decode plainly; the best, {best['contender']}, gives {best['speedup']:.2f}× "
                    f"({best['speedup_ci'][0]:.2f}–{best['speedup_ci'][1]:.2f}), which may be no gain."
                )
                continue
            sentence = (
                f"{task}, {mode}: use {best['contender']} ({best['plan']}), {best['speedup']:.2f}× plain decoding "
                f"({best['speedup_ci'][0]:.2f}–{best['speedup_ci'][1]:.2f})"
            )
            if len(ranked) > 1:
                second = ranked[1]
                clear = best["speedup_ci"][0] > second["speedup_ci"][1]
                sentence += (
                    f"; next is {second['contender']} with {second['speedup']:.2f}×"
                    + (", clearly slower" if clear else ", which the intervals do not tell apart")
                )
            sentences.append(sentence + ".")
    return unfaithful(cells) + sentences + losers(cells)


def unfaithful(cells: Cells) -> list[str]:
    """Name every contender whose greedy text was not always the plain text of the same round."""
    return [
        f"{cell['contender']}, {cell['task']}: {cell['rounds'] - cell['identical']} of {cell['rounds']} greedy texts "
        "differ from plain decoding; run draftsmith prove with it before anything else."
        for cell in cells if cell["mode"] == "greedy" and cell["identical"] < cell["rounds"]
    ]


def losers(cells: Cells) -> list[str]:
    """Say of every contender that beats plain decoding nowhere where its time goes."""
    sentences = []
    for name in dict.fromkeys(cell["contender"] for cell in cells):
        mine = [cell for cell in cells if cell["contender"] == name]
        if any(cell["speedup_ci"][0] > 1 for cell in mine):
            continue
        best = max(mine, key=lambda cell: cell["speedup"])
        reason = (
            f"a step costs {best['step_cost']:.2f} plain ones ({best['share_drafting']:.0%} of it drafting) and brings "
            f"{best['tokens_per_step_timed']:.2f} tokens"
        )
        sentences.append(
            f"{name} does not beat plain decoding here: at its best ({best['task']}, {best['mode']}, "
            f"{best['speedup']:.2f}×) {reason}."
        )
    return sentences


def orderings(cells: Cells, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the differences in greedy τ that the literature is clear about, paired by prompt."""
    found = []
    for better, worse in ORDERINGS:
        for task in tasks:
            if better in ("ngram", "suffix") and task != EDIT:
                continue
            difference = order(cells, better, worse, task)
            if difference is not None:
                found.append(
                    {
                        "better": better, "worse": worse, "task": task, "difference": difference.value,
                        "difference_ci": difference.ends,
                    }
                )
    return found


def ordering_rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a line for each ordering."""

    def says(ends: Sequence[float]) -> str:
        return "yes" if ends[0] > 0 else "no" if ends[1] < 0 else "not told apart"

    return [
        [
            f"{item['better']} over {item['worse']}", item["task"],
            f"{item['difference']:+.2f} ({item['difference_ci'][0]:+.2f}–{item['difference_ci'][1]:+.2f})",
            says(item["difference_ci"]),
        ]
        for item in found
    ]


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        wordy = index == 0 or name in ("what it is", "drafts here", "task", "holds here")
        table.add_column(name, justify="left" if wordy else "right", overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def figures(cells: Cells, tasks: Sequence[str]) -> dict[str, Figure]:
    """Draw speed-up bars a task, acceptance by depth a task, and τ against what a step costs."""
    drawn: dict[str, Figure] = {}
    names = list(dict.fromkeys(cell["contender"] for cell in cells))
    for task in tasks:
        ranked = of(cells, task, "greedy")
        drawn[f"acceptance-{task}.png"] = acceptance_by_depth(
            {cell["contender"]: cell["tree"]["accepted_by_depth"] for cell in ranked}
        )
        bars = {cell["contender"]: Interval(cell["speedup"], *cell["speedup_ci"]) for cell in ranked}
        drawn[f"speedup-{task}.png"] = ranked_bars(bars, f"speed-up over plain decoding, {task}, greedy")
    drawn["tau-and-cost.png"] = tau_against_cost(cells, names)
    return drawn


def tau_against_cost(cells: Cells, names: Sequence[str]) -> Figure:
    """Points: tokens a step over the cost of a step in plain steps, greedy; above the line drafting pays."""
    figure, axes = canvas(6.4, 4.4)
    mine = [cell for cell in cells if cell["mode"] == "greedy"]
    for index, name in enumerate(names):
        own = [cell for cell in mine if cell["contender"] == name]
        axes.scatter(
            [cell["step_cost"] for cell in own], [cell["tokens_per_step_timed"] for cell in own], s=26, label=name,
            color=SERIES[index % len(SERIES)], marker="osD^vP*X"[index // len(SERIES) % 8],
        )
    most = max([c["step_cost"] for c in mine] + [c["tokens_per_step_timed"] for c in mine], default=2.0)
    axes.plot([1, most], [1, most], color=INK, linewidth=0.8, linestyle=":")
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_locator(FixedLocator([tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick <= most * 1.2]))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("cost of a step, in plain steps")
    axes.set_ylabel("tokens a step, τ")
    finish(axes, legend=True)
    return figure


def to_markdown(result: Mapping[str, Any]) -> str:
    """Write the report."""
    parts = [
        "# Draft families compared",
        f"Target {result['target']}; {result['budget']}. Speeds are of decoding alone, one prompt at a time, every "
        "round with plain decoding and all contenders in random order; intervals are 95 % bootstraps. "
        "τ = 1 + accepted / steps.",
        "## Verdict",
        "\n".join(f"- {sentence}" for sentence in result["verdict"]),
        "## Contenders",
        markdown_table(FAMILY_HEADER, family_rows(result["families"])),
    ]
    for task in result["tasks"]:
        for mode in MODES:
            parts += [f"## {task}, {mode}", markdown_table(CELL_HEADER, cell_rows(result["cells"], task, mode))]
        parts += [f"![speed-up](speedup-{task}.png)", f"![acceptance by depth](acceptance-{task}.png)"]
    if result["orderings"]:
        header = ["ordering", "task", "difference in τ (tree)", "holds here"]
        parts += ["## Orderings", markdown_table(header, ordering_rows(result["orderings"]))]
    parts += ["![τ against cost](tau-and-cost.png)", f"Command: `{result['provenance']['command']}`"]
    return "\n\n".join(parts) + "\n"
