"""`draftsmith train`: a speculator from a recipe, with τ measured by decoding."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftsmith.cli.common import MODELS, OUTPUT, JsonOption, ThreadsOption, check_outputs, out_folder
from draftsmith.memory import keep_freed_memory
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.workflows.training import TrainResult

LOW_TAU = 1.2
"""Below it a run says what to try."""
RECIPES = (".yaml", ".yml")


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE.yaml] [section.field=value]...",
            help="The recipe, and what to change in it. Without a recipe: a small run for the target, data or family "
            "that is named; where none is, the second stage of the embedded speculator.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in output.folder.")] = False,
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of a causal LM, in place of the recipe's; the embedded one by default.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Family of the drafter, with options or without: NAME or NAME:key=value,key=value; `draftsmith "
            "families` lists them.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", "--init-from", help="Start a new run from this drafter (a warm start, not a resume).",
            rich_help_panel=MODELS,
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of text to train on, in place of the recipe's. Repeat it for more."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="What a run without a recipe may take, 20 by default. By it stage1.steps and stage2.steps are chosen, "
            "or the one of them that is not set; it is refused where both are."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run: output.folder of the recipe.", parser=out_folder, metavar="<path>",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and write an untrained drafter; with --resume, say where the run stands and what is "
            "left.",
        ),
    ] = False,
    eval_data: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to measure τ on, a file or folder as for --data; the held-out part of the data by default."
        ),
    ] = None,
    eval_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts a task or source in each evaluation; 16, 32 of a single one.")
    ] = None,
    eval_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens of each of them; 64 where they fit.")
    ] = None,
    eval_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt; 64 where they fit.")
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every key of a recipe with type, default and meaning, and stop.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the target's own code.")] = False,
    threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Train a speculator for a frozen target: on text, then on what the target itself writes.

    A recipe with a section `joint` trains the target as well, which makes another model of it.

    Example: `draftsmith train --target my-model --data texts.jsonl --family mlp --out runs/mine stage1.steps=500`
    """
    check_outputs(json_path)
    recipe, overrides = sort_words(words or [])
    if keys:
        list_keys(recipe, overrides, family)
        return
    from draftsmith.workflows.training import Evaluation
    from draftsmith.workflows.training import train as run

    keep_freed_memory()
    result = run(
        recipe, *overrides, target=target, data=data, family=family, init_from=drafter, out=out,
        minutes=minutes, resume=resume, dry_run=dry_run,
        evaluation=Evaluation(eval_data, eval_prompts, eval_tokens, eval_prompt_tokens),
        trust_remote_code=trust_remote_code, console=Console(stderr=True), threads=threads,
    )
    if json_path is not None:
        from draftsmith.evaluation.reporting.result_files import write_json

        write_json(json_path, result.as_json())
    if not dry_run:
        tell(result)


def list_keys(recipe: str | None, overrides: Sequence[str], family: str | None) -> None:
    """Print every key of a recipe, one a line, with the options of the family that it names."""
    from draftsmith.training.keys import recipe_keys
    from draftsmith.workflows.recipes import read_recipe
    from draftsmith.workflows.training import named

    chosen = [*named(None, None, family, None, None), *overrides]
    for key in recipe_keys(read_recipe({} if recipe is None else recipe, chosen).drafter):
        typer.echo(f"{key.name}={key.default}  ({key.kind})  {key.meaning}")


def sort_words(words: list[str]) -> tuple[str | None, list[str]]:
    """Tell the recipe's file from the overrides, which have the form section.field=value."""
    overrides = [word for word in words if "=" in word and not _is_recipe(word)]
    files = [word for word in words if word not in overrides]
    for word in files:
        if (Path(word) / "config.json").is_file():
            raise DraftsmithError(f"{word} is the folder of a model, not a recipe; write --target {word}.")
        if Path(word).exists() and Path(word).suffix not in RECIPES:
            raise DraftsmithError(f"{word} is no recipe (.yaml); write --data {word} to train on it.")
    if len(files) > 1:
        raise DraftsmithError(f"{files[1]!r} is no override; write section.field=value behind the one recipe.")
    return files[0] if files else None, overrides


def _is_recipe(word: str) -> bool:
    """Whether a word names a recipe that exists, whatever folders it lies in."""
    return Path(word).suffix in RECIPES and Path(word).is_file()


def tell(result: "TrainResult") -> None:
    """Say what came out, what was measured, and how to use it."""
    from draftsmith.training.measuring import source_lines, tau_in_words
    from draftsmith.training.progress import early_in_words
    from draftsmith.training.wording import counted
    from draftsmith.workflows.held_out import NEW_TOKENS, PROMPT_TOKENS

    training = result.training
    scores = training.best_scores
    best = f", {tau_in_words(scores)} at step {training.best_step}" if scores is not None else ""
    took = f" in {training.seconds / 60:.1f} minutes" if training.seconds is not None else ""
    typer.echo(f"Trained {counted(training.step, 'step')}{took}{best}. The drafter is in {training.drafter}.")
    used_with = training.target or result.target
    words = ["draftsmith", "bench", *(["--target", str(used_with)] if used_with else [])]
    words += ["--drafter", str(training.drafter), *(["--data", str(result.prompts)] if result.prompts else [])]
    asked = result.measured_on
    if min(asked.prompt_tokens, asked.longest) < PROMPT_TOKENS or asked.new_tokens < NEW_TOKENS:  # bench asks for more
        enough = asked.longest >= asked.prompt_tokens
        length = asked.prompt_tokens if enough else max(1, asked.longest // 2)  # which more than one prompt has
        words += ["--prompt-tokens", str(length), "--new-tokens", str(asked.new_tokens)]
    typer.echo(f"Whether it is faster here: {shlex.join(words)}")
    for record in training.ended_early:
        sentence = early_in_words(record)
        typer.echo(sentence[0].upper() + sentence[1:])
    if scores is not None and training.best is not None:
        for line in source_lines(scores):
            typer.echo(line)
        typer.echo(result.measured_on.sentence())
        if training.best_step == 0 and training.step:
            typer.echo(
                "What was saved are the weights of step 0: none of those that were trained guessed better. Train "
                "longer (--minutes, or stage1.steps and stage2.steps of a recipe) or on more text (--data) before you "
                "use it."
            )
        if training.best < LOW_TAU:
            typer.echo(
                "τ near 1 means that hardly a guess is accepted: train longer (--minutes, or stage1.steps and "
                "stage2.steps of a recipe), on more text of the kind that you will decode (--data), or try another "
                "family (`draftsmith compare`); `draftsmith bench` with --drafter ngram shows what looking up brings."
            )
    if training.target is not None:
        typer.echo(f"The target was changed and is in {training.target}: use both together, with --target too.")
