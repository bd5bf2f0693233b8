"""`draftsmith doctor`: what runs here, how fast memory is, and what would make decoding faster."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import JsonOption, ThreadsOption, check_outputs, set_up

if TYPE_CHECKING:
    from draftsmith.workflows.doctor import Diagnosis

SHOWN_VERSIONS = ("draftsmith", "python", "torch", "transformers")


def doctor(threads: ThreadsOption = None, json_path: JsonOption = None) -> None:
    """Say what Draftsmith finds on this machine, and what would make it faster; takes some seconds.

    Nothing is loaded or changed. Memory is read for half a second, because its bandwidth bounds plain decoding.

    Example: `draftsmith doctor --json doctor.json`
    """
    check_outputs(json_path)
    from draftsmith.evaluation.reporting.result_files import write_json
    from draftsmith.workflows.doctor import examine

    set_up(threads, Console(stderr=True))
    found = examine()
    if json_path is not None:
        write_json(json_path, found.as_json())
    show(Console(), found)


def show(console: Console, found: "Diagnosis") -> None:
    """Print what was found as a table, then what it means and what to do."""
    table = Table(title="What runs here", title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for row in rows(found):
        table.add_row(*row)
    console.print(table, highlight=False, markup=False)
    console.print(meaning(found), highlight=False, markup=False)
    said = found.advice()
    console.print("\n[bold]What would make it faster[/bold]")
    for sentence in said or ["Nothing was found that would."]:
        console.print(f"· {sentence}", highlight=False, markup=False)


def rows(found: "Diagnosis") -> list[tuple[str, str]]:
    """Return the lines of the table."""
    here, versions = found.available, found.provenance["versions"]
    has = [name for name, there in found.features.items() if there]
    lacks = [name for name, there in found.features.items() if not there]
    listed = ", ".join(has) or "none that matter"
    features = f"{listed}; not {', '.join(lacks)}" if lacks else listed
    cores = f"{here.cores} of {found.machine_cores} usable"
    if here.physical < here.cores:
        cores += f", {here.physical} with arithmetic of their own"
    by = f", by {found.chosen_by}" if found.chosen_by is not None else ""
    free = "unknown"
    if found.free_gb is not None and found.memory_gb is not None:
        free = f"{found.free_gb:.1f} of {found.memory_gb:.1f} GB free"
    packed = found.packed
    kept = f"{packed.bytes / 1e9:.2f} of at most {packed.most_bytes / 1e9:g} GB kept in {packed.folder}"
    others = found.measured.others
    neighbours = "" if others is None else f"; other programs took {others:.1f} of {here.cores} cores meanwhile"
    return [
        ("processor", found.model),
        ("its features", features if found.features else "not told by this system"),
        ("native kernels", found.kernels or f"none: {found.kernels_missing}"),
        ("--dtype auto", found.auto_dtype),
        ("threads", f"{found.threads}{by}"),
        ("cores", cores),
        ("quota", "none" if here.quota is None else f"{here.quota:.4g} cores' worth of time"),
        ("memory", free),
        ("packed weights", kept),
        ("bandwidth", f"{found.measured.gb_per_s:.1f} GB/s, read by {found.measured.by}{neighbours}"),
        ("GPU", ", ".join(found.gpus) or "none that PyTorch sees"),
        ("versions", ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS)),
    ]


def meaning(found: "Diagnosis") -> str:
    """Say what the bandwidth means for plain decoding."""
    from draftsmith.workflows.doctor import MODEL_SIZES_GB

    rate = found.measured.gb_per_s
    limits = " and ".join(
        f"{found.measured.tokens_per_second(size):.1f} for {size} GB ({parameters} parameters)"
        for parameters, size in MODEL_SIZES_GB.items()
    )
    return (
        "Plain decoding reads every weight for every token: a bf16 model of N GB that no cache holds cannot write more "
        f"than {rate:.1f} / N tokens a second at this bandwidth, {limits}. Guesses that are accepted come on top."
    )
