"""`draftsmith load`: any OpenAI-compatible server under load, its latency, throughput and acceptance."""

import json
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn

from draftsmith.cli.common import OUTPUT, JsonOption, check_outputs, numbers
from draftsmith.cli.progress import counted
from draftsmith.evaluation.load.settings import (
    METRICS,
    PERCENTILES,
    Arrivals,
    Endpoint,
    LoadSettings,
    RampStrategy,
    Server,
    Workload,
    read_goodput,
)
from draftsmith.types import DraftsmithError

ALL_METRICS = ",".join(METRICS)
USUAL_PERCENTILES = ",".join(f"{value:g}" for value in PERCENTILES)
SERVER, LOAD, REQUESTS, REPORTED = "Server", "Load", "Requests", "What is reported"


def load(
    more: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="METRIC:MS")] = None,
    base_url: Annotated[
        str, typer.Option(help="Where the server is; nothing is sent anywhere else.", rich_help_panel=SERVER)
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Its name there; by default the only one there is.", rich_help_panel=SERVER)
    ] = None,
    endpoint: Annotated[
        Endpoint, typer.Option(help="Plain prompts or conversations.", rich_help_panel=SERVER)
    ] = "completions",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="DRAFTSMITH_API_KEY", show_envvar=True, rich_help_panel=SERVER,
            help="Sent as a bearer token. Never written to a result.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a request counts as failed.", rich_help_panel=SERVER)
    ] = 600.0,
    ready_check_timeout_sec: Annotated[
        float,
        typer.Option(
            help="Most seconds to wait until the server is ready; 0 does not wait.", rich_help_panel=SERVER
        ),
    ] = 600.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Clients: most requests in flight. No limit by default.", rich_help_panel=LOAD)
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Measure with each of these numbers of clients: 1,2,4,8.", rich_help_panel=LOAD)
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second; inf sends as soon as a client is free.", rich_help_panel=LOAD)
    ] = inf,
    burstiness: Annotated[
        float, typer.Option(help="Of arrivals: 1 is Poisson, less burstier, more evener.", rich_help_panel=LOAD)
    ] = 1.0,
    ramp_up_strategy: Annotated[
        RampStrategy | None, typer.Option(help="Let the rate rise over the requests.", rich_help_panel=LOAD)
    ] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="Rate of its start.", rich_help_panel=LOAD)] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="Rate of its end.", rich_help_panel=LOAD)] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests of a level.", rich_help_panel=REQUESTS)] = 64,
    num_warmups: Annotated[int, typer.Option(help="Requests before them, not counted.", rich_help_panel=REQUESTS)] = 0,
    dataset: Annotated[
        str,
        typer.Option(
            help="Embedded prompts: code, prose, dialogue or mixed; random token ids: random; or a JSONL or text file.",
            rich_help_panel=REQUESTS,
        ),
    ] = "mixed",
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len", "--random-input-len", rich_help_panel=REQUESTS,
            help="Tokens of a prompt. Several with commas are a mixture, drawn for each request.",
        ),
    ] = None,
    output_len: Annotated[
        str,
        typer.Option(
            "--output-len", "--random-output-len", rich_help_panel=REQUESTS,
            help="Tokens to write at most, one or a mixture. With --ignore-eos exactly so many.",
        ),
    ] = "128",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Ids that random prompts draw from; by default those that the server's /tokenize gives for embedded "
            "texts.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for texts that nothing ends early.", rich_help_panel=REQUESTS)
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=REQUESTS)] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object whose fields every request carries too.", rich_help_panel=REQUESTS)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.", rich_help_panel=REQUESTS)] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits of a good request, in ms: ttft:200 tpot:30 e2el:2000.", rich_help_panel=REPORTED),
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics to report.", rich_help_panel=REPORTED)
    ] = ALL_METRICS,
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles of each.", rich_help_panel=REPORTED)
    ] = USUAL_PERCENTILES,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Send nothing: hold two results of --json against each other.", rich_help_panel=REPORTED),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNGs into this folder.", rich_help_panel=OUTPUT)] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line a level.", rich_help_panel=OUTPUT)] = None,
    save_result: Annotated[
        bool,
        typer.Option("--save-result", help="Write a JSON a level, as vLLM's benchmark does.", rich_help_panel=OUTPUT),
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With times and text of every request.", rich_help_panel=OUTPUT)
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option(help="Where --save-result writes; by default here.", rich_help_panel=OUTPUT)
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Measure a server: time to the first token, time a token, throughput, and how drafts were accepted.

    Example: `draftsmith load --sweep 1,2,4,8 --num-prompts 32 --ignore-eos --json load.json --plots plots`
    """
    if compare is not None:
        if json_path is not None or csv is not None or save_result or save_detailed:
            raise DraftsmithError("--compare writes pictures alone; leave out --json, --csv and --save-result.")
        compare_results(compare, plots)
        return
    if sweep is not None and max_concurrency is not None:
        raise DraftsmithError("--sweep and --max-concurrency exclude each other; give one of them.")
    limits = list(goodput or [])
    if more and not limits:
        raise DraftsmithError(f"{more[0]!r} belongs to no option; see draftsmith load --help.")
    settings = LoadSettings(
        server=Server(base_url, model, endpoint, api_key or None, timeout, ready_check_timeout_sec),
        workload=Workload(
            dataset=dataset,
            input_lens=None if input_len is None else numbers(input_len, "--input-len"),
            output_lens=numbers(output_len, "--output-len"),
            vocab_size=vocab_size,
            temperature=temperature,
            ignore_eos=ignore_eos,
            extra_body=read_extra_body(extra_body),
            seed=seed,
        ),
        arrivals=Arrivals(request_rate, burstiness, ramp_up_strategy, ramp_up_start_rps, ramp_up_end_rps),
        clients=(max_concurrency,) if sweep is None else numbers(sweep, "--sweep"),
        prompts=num_prompts,
        warmups=num_warmups,
        goodput=read_goodput([word for group in [*limits, *(more or [])] for word in group.split()]),
        metrics=tuple(parts_of(percentile_metrics)),
        percentiles=read_percentiles(metric_percentiles),
    )
    folder = (result_dir or Path()) if save_result or save_detailed else None
    for file in (json_path, csv):
        check_outputs(file)
    for place in (plots, folder):
        check_outputs(folder=place)
    measure(settings, json_path, csv, plots, folder, save_detailed)


def measure(
    settings: LoadSettings, json_path: Path | None, csv: Path | None, plots: Path | None, folder: Path | None, raw: bool
) -> None:
    """Measure, and write what is there after every level, so that nothing is lost that was measured."""
    from draftsmith.cli.load_tables import show
    from draftsmith.evaluation.load.results import as_csv, common_file
    from draftsmith.evaluation.reporting.result_files import write_json, write_text
    from draftsmith.workflows.load import LoadResult, measure_load

    kept: list[LoadResult] = []

    def keep(found: LoadResult) -> None:
        kept[:] = [found]
        if json_path is not None:
            write_json(json_path, found.as_json(details=raw))
        if csv is not None:
            write_text(csv, as_csv(found.levels))
        if folder is not None:
            level = found.levels[-1] | (found.details[-1] if raw else {})
            name, content = common_file(level, found.settings, found.date, number_of(found.levels))
            write_json(folder / name, content)

    console, notes = Console(), Console(stderr=True)
    try:
        with counted(notes, "measuring", TimeElapsedColumn()) as report:
            measure_load(
                settings, on_level=keep, on_progress=report,
                on_wait=lambda told: notes.print(told, style="dim", highlight=False, markup=False),
            )
    finally:
        # After Ctrl-C too: what was measured is shown, and is in the files already.
        for found in kept:
            show(console, found.levels, settings)
            for note in found.notes:
                notes.print(f"Note: {note}", style="yellow", highlight=False, markup=False)
            if plots is not None:
                write_plots(plots, found.levels, settings)


def number_of(levels: Sequence[dict[str, Any]]) -> int:
    """Return how many levels before the last one had as many clients."""
    clients = [level["max_concurrency"] for level in levels]
    return clients[:-1].count(clients[-1])


def read_extra_body(text: str | None) -> dict[str, Any]:
    """Read a JSON object; DraftsmithError for anything else."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DraftsmithError(f"--extra-body is {text!r}; give a JSON object, such as '{{\"top_p\": 0.9}}'.")
    return found


def parts_of(text: str) -> list[str]:
    """Return what stands between commas; nothing of an empty text."""
    return [part.strip() for part in text.split(",")] if text.strip() else []


def read_percentiles(text: str) -> tuple[float, ...]:
    """Read "50,95,99.9"; DraftsmithError for anything else."""
    try:
        return tuple(map(float, parts_of(text)))
    except ValueError as error:
        raise DraftsmithError(
            f"--metric-percentiles is {text!r}; give numbers with commas, such as 50,95,99."
        ) from error


def write_plots(folder: Path, levels: Sequence[dict[str, Any]], settings: LoadSettings) -> None:
    """Write latency against throughput, and of every metric its percentiles over the clients."""
    from draftsmith.evaluation.load.plots import latency_against_throughput, percentiles_over_clients
    from draftsmith.evaluation.reporting.result_files import write_figure

    if "tpot" in settings.metrics:
        write_figure(folder / "latency-throughput.png", latency_against_throughput({"measured": levels}))
    if len(levels) > 1 and settings.percentiles:
        names = [f"p{value:g}" for value in settings.percentiles]
        for metric in settings.metrics:
            write_figure(folder / f"{metric}.png", percentiles_over_clients(levels, metric, names))


def compare_results(files: tuple[Path, Path], plots: Path | None) -> None:
    """Print two results beside each other, level for level, and draw both curves."""
    from draftsmith.cli.load_tables import show_both
    from draftsmith.evaluation.load.results import differences, read_result

    saved = [read_result(path) for path in files]
    first, second = (one.levels for one in saved)
    check_outputs(folder=plots)
    names = (files[0].stem, files[1].stem) if files[0].stem != files[1].stem else (str(files[0]), str(files[1]))
    show_both(Console(), names, first, second)
    for line in differences(*saved):
        Console(stderr=True).print(f"Note: {line}", style="yellow", highlight=False, markup=False)
    if plots is not None:
        from draftsmith.evaluation.load.plots import latency_against_throughput
        from draftsmith.evaluation.reporting.result_files import write_figure

        write_figure(plots / "compare.png", latency_against_throughput(dict(zip(names, (first, second), strict=True))))
