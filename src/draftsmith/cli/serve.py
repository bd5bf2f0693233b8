"""`draftsmith serve`: the target behind HTTP, for clients of OpenAI's and Anthropic's APIs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from draftsmith.cli.common import (
    MODELS,
    DeviceOption,
    DtypeOption,
    NativeOption,
    QuantizeOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    importing,
    set_up,
)
from draftsmith.cli.plans import (
    DRAFTS,
    OWN,
    RemeasureOption,
    ShapeOption,
    check_draft_rows,
    named,
    read_shape,
    refuse_without_drafter,
)
from draftsmith.serving.settings import Settings
from draftsmith.types import DraftsmithError
from draftsmith.workflows.models import Loading

ADDRESS, LIMITS = "Address", "Limits"
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "jinja2")
DEFAULT = Settings()


def serve(
    target: TargetOption = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or hub name of a drafter, or a word such as ngram; may be repeated: each text gets the "
            "one whose guesses stay in it. By default the embedded target's own.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the model; may be repeated. The target's name by default.", rich_help_panel=MODELS
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    quantize: QuantizeOption = "none",
    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=ADDRESS)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.", rich_help_panel=ADDRESS)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Let in requests with this key alone; may be repeated. Other users of the machine can see it.",
            rich_help_panel=ADDRESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Read keys from a file, one a line.", rich_help_panel=ADDRESS)
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Most texts written at a time.", rich_help_panel=LIMITS)] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and text; the context by default.", rich_help_panel=LIMITS)
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Most texts that wait; more are refused with 429.", rich_help_panel=LIMITS)
    ] = DEFAULT.max_waiting,
    request_timeout: Annotated[
        float, typer.Option(help="Most seconds for a request, waiting included.", rich_help_panel=LIMITS)
    ] = DEFAULT.request_timeout,
    drain_seconds: Annotated[
        float,
        typer.Option(help="After a signal to end, let what runs go on for so long.", rich_help_panel=LIMITS),
    ] = DEFAULT.drain_seconds,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest body of a request.", rich_help_panel=LIMITS)
    ] = DEFAULT.max_body_bytes,
    plan: ShapeOption = None,
    draft_rows: Annotated[
        int | None,
        typer.Option(help="With --plan: draft only while at most so many texts are written.", rich_help_panel=DRAFTS),
    ] = None,
    remeasure: RemeasureOption = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding.", rich_help_panel=DRAFTS)] = False,
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        typer.Option(
            help="Tell the statistics of its drafts with every answer: none, summary or detailed.", metavar="HOW",
            rich_help_panel=DRAFTS,
        ),
    ] = "none",
    native: NativeOption = True,
    threads: ThreadsOption = None,
) -> None:
    """Serve a target over HTTP: OpenAI's completions and chats, Anthropic's messages, Prometheus metrics.

    Text is the target's own, whatever drafts. The log on standard error is a line of JSON for every request, without
    what it said. A signal to end lets what runs come to its end first.

    Example: `draftsmith serve --port 8000`, then `curl localhost:8000/v1/completions -H 'content-type:
    application/json' -d '{"prompt": "def main():", "max_tokens": 40}'`
    """
    check_packages()
    if not 0 <= port <= 65535:
        raise DraftsmithError(f"--port is {port}; give a number from 0 to 65535.")
    if max_batch < 1:
        raise DraftsmithError(f"--max-batch is {max_batch}; use at least 1.")
    if max_length is not None and max_length < 2:
        raise DraftsmithError(f"--max-length is {max_length}; a prompt and its text need at least 2.")
    if no_draft and (plan is not None or drafter):
        raise DraftsmithError("--no-draft drafts nothing; leave out --plan and --drafter, or --no-draft.")
    if remeasure and (no_draft or plan is not None):
        told = "--no-draft" if no_draft else "--plan"
        raise DraftsmithError(f"--remeasure finds out which drafts pay, and {told} says it; leave one of them out.")
    drafts = {"--plan": plan, "--draft-rows": draft_rows, "--remeasure": remeasure or None}
    if not no_draft:
        refuse_without_drafter(named(drafts), target, bool(drafter))
    check_draft_rows(draft_rows, plan)
    settings = Settings(
        names=tuple(served_model_name or ()),
        keys=read_keys(api_key or [], api_key_file),
        max_waiting=max_waiting,
        request_timeout=request_timeout,
        drain_seconds=drain_seconds,
        max_body_bytes=max_body_bytes,
        metrics=per_request_spec_decode_metrics,
    )
    from draftsmith.workflows.given import check_models

    check_models(target, drafter or (), (dtype,), device)
    shape = None if plan is None else read_shape(plan)
    notes = Console(stderr=True)
    with importing():
        from draftsmith.workflows.serving import DraftRules, Sizes
        from draftsmith.workflows.serving import serve as run
    set_up(threads, notes)

    def say_ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"Listening at http://{shown}:{port}")

    run(
        target, drafter or (), settings=settings, host=host, port=port, draft=not no_draft,
        rules=DraftRules(shape, plan == OWN, draft_rows, remeasure), sizes=Sizes(max_batch, max_length),
        loading=Loading(dtype, device, trust_remote_code, native, quantize), console=notes, on_ready=say_ready,
    )


def read_keys(given: list[str], path: Path | None) -> tuple[str, ...]:
    """Return the keys of the options and of a file; DraftsmithError where that has none, or cannot be read."""
    keys = list(given)
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DraftsmithError(f"the file of API keys {path} cannot be read as text; check the path.") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise DraftsmithError(f"the file of API keys {path} holds none; write one a line.")
        keys += found
    wrong = next((key for key in keys if not key.isascii() or not key.isprintable() or " " in key), None)
    if wrong is not None:
        raise DraftsmithError("an API key has a space or a character that no HTTP header holds; choose another one.")
    return tuple(keys)


def check_packages() -> None:
    """Raise DraftsmithError where what the server needs is not installed."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise DraftsmithError(
            f"the server needs packages that are not installed ({', '.join(missing)}); run "
            'pip install "draftsmith[serve]".'
        )
