"""Serving over HTTP: loads target and drafters, measures the drafts that pay, and runs the server until it is ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import embedded
from draftsmith.engine import Engine, Fixed, OffAbove, Policy
from draftsmith.engine.guarded import Guarded
from draftsmith.plan import Plan
from draftsmith.serving.access import log_as_json
from draftsmith.serving.run import listen, run
from draftsmith.serving.service import Service
from draftsmith.serving.settings import Settings
from draftsmith.serving.starting import answering
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.fitting import fit_drafts, shape_in_words
from draftsmith.workflows.models import Loading, load_target, name_of, open_drafter, quiet


@dataclass(frozen=True)
class Sizes:
    """How much is decoded at a time: rows, and tokens per row; None stands for the target's context."""

    max_batch: int = 8
    max_length: int | None = None


@dataclass(frozen=True)
class DraftRules:
    """How the server drafts when a request does not say.

    Args:
        plan: for every row; None takes what pays on this machine, or, with `own`, the first drafter's own plan.
        rows: the most rows at a time with which it drafts; only with a plan or `own`.
        remeasure: measure anew what pays, whatever an earlier run has kept; only without a plan and `own`.
    """

    plan: Plan | None = None
    own: bool = False
    rows: int | None = None
    remeasure: bool = False


def serve(
    target: Target | str | Path | None = None,
    drafters: Sequence[str | Path] = (),
    *,
    settings: Settings | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    draft: bool = True,
    rules: DraftRules | None = None,
    sizes: Sizes | None = None,
    loading: Loading | None = None,
    console: Console | None = None,
    on_ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve a target until a signal comes; then new requests are refused, and running ones are finished.

    While it loads, requests are refused too (503), and a signal ends it at once.

    Args:
        target: a folder, a hub name or a loaded `Target`; the embedded one by default, with its own drafter.
        drafters: folders, hub names or words such as `ngram`; each text gets the drafter whose guesses are accepted in
            it, or, with a plan, the first.
        settings: names, keys and limits; without a name the target's is used, without keys everybody has access.
        host, port: where to listen; port 0 takes a free one.
        draft: False decodes without drafts.
        on_ready: called with the address once requests are accepted.

    Raises:
        DraftsmithError: models that cannot be loaded, an address that cannot be used, an engine that has stopped.
    """
    console, sizes, rules = console or quiet(), sizes or Sizes(), rules or DraftRules()
    settings = settings or Settings()
    bound = listen(host, port)
    try:
        with answering(bound, settings):
            engine, named = make_engine(target, drafters if draft else (), draft, rules, sizes, loading, console)
        settings = replace(
            settings, names=settings.names or (engine.target.name,), root=settings.root or root_of(target)
        )
        log_as_json()
        where = bound.getsockname()
        if engine.target.tokenizer is not None:
            engine.grammars.guard(settings.grammar_seconds)
        try:
            run(Service(engine, settings, named), bound, lambda: on_ready(where[0], where[1]))
        finally:
            engine.grammars.close()
    finally:
        bound.close()


def make_engine(
    target: Target | str | Path | None,
    drafters: Sequence[str | Path],
    draft: bool,
    rules: DraftRules,
    sizes: Sizes,
    loading: Loading | None,
    console: Console,
) -> tuple[Engine, dict[str, Drafter]]:
    """Load everything; return the server's engine, and its drafters by name."""
    loaded = load_target(target, loading or Loading(), console)
    if sizes.max_length is not None and sizes.max_length > loaded.max_length:
        raise DraftsmithError(
            f"--max-length is {sizes.max_length}, but the context of {loaded.name} is {loaded.max_length} tokens; use "
            "at most that."
        )
    given: list[str | Path] = list(drafters)
    if draft and not given and target is None:
        given = [embedded()]
    if not given:
        console.print(f"[dim]{loaded.name} is decoded without a drafter.[/dim]", highlight=False)
        return Engine(loaded, max_batch=sizes.max_batch, max_length=sizes.max_length), {}
    names = named(given)
    found = {name: open_drafter(drafter, loaded, console) for name, drafter in names.items()}
    policy = policy_of(loaded, found, names, rules, sizes, console)
    guarded: dict[str, Drafter] = {name: Guarded(drafter, name, loaded.vocab_size) for name, drafter in found.items()}
    return Engine(loaded, guarded, policy=policy, max_batch=sizes.max_batch, max_length=sizes.max_length), guarded


def policy_of(
    target: Target, drafters: Mapping[str, Drafter], loaded_from: Mapping[str, str | Path], rules: DraftRules,
    sizes: Sizes, console: Console,
) -> Policy:
    """Return the policy by which the server drafts, and report it."""
    if rules.plan is not None or rules.own:
        plan = next(iter(drafters.values())).default_plan() if rules.plan is None else rules.plan
        above = "" if rules.rows is None else f", with at most {rules.rows} rows"
        console.print(f"[dim]Drafts: {shape_in_words(plan)}{above}.[/dim]", highlight=False)
        return Fixed(plan) if rules.rows is None else OffAbove(plan, rules.rows)
    engine = Engine(target, drafters, max_batch=sizes.max_batch, max_length=sizes.max_length)
    return fit_drafts(engine, loaded_from, console, anew=rules.remeasure).core.policy


def named(drafters: Sequence[str | Path]) -> Mapping[str, str | Path]:
    """Return the drafters by their names in requests: a folder's name, or a word without its options."""
    found: dict[str, str | Path] = {}
    for drafter in drafters:
        name = (name_of(drafter) or "drafter").partition(":")[0]
        same = sum(known == name or known.startswith(f"{name}-") for known in found)
        found[f"{name}-{same + 1}" if same else name] = drafter
    return found


def root_of(target: Target | str | Path | None) -> str:
    """Return what a target was loaded from, as `/v1/models` shows it: a hub name, or the last part of a folder."""
    if isinstance(target, Target):
        return target.name
    folder = assets.demo_target() if target is None else Path(target)
    # Clients on the network must not learn where the folder is on the disk.
    return folder.resolve().name if folder.is_dir() else str(target)
