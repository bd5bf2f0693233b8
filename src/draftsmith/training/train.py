"""Trains what a recipe describes: the drafter alone, or drafter and target together."""

from collections.abc import Callable

from rich.console import Console

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.data.generated import Generate
from draftsmith.training.joint import JointTrainingRun
from draftsmith.training.measuring import Evaluate
from draftsmith.training.recipe import Recipe
from draftsmith.training.result import TrainingResult
from draftsmith.training.terminal import one_gentle_interrupt
from draftsmith.training.trainer import Foretell, TrainingRun


def train(
    recipe: Recipe,
    *,
    target: Target,
    generate: Generate,
    evaluate: Evaluate,
    resume: bool = False,
    dry_run: bool = False,
    console: Console | None = None,
    on_drafter: Callable[[TrainableModel], None] | None = None,
    foretell: Foretell | None = None,
    go_on: str | None = None,
    measured_on: str | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Train the recipe's drafter for a frozen target or, with a section `joint`, the target as well.

    Args:
        generate: (prompts, max_tokens, seed) to a continuation for each prompt, of exactly max_tokens tokens or up to
            an end token; has to depend on its inputs alone.
        evaluate: measures a speculator by decoding; its result is logged, and has `tokens_per_step`, which chooses the
            best checkpoint and ends stages early.
        resume: continue from the last good checkpoint in output.folder.
        dry_run: print the plan and write an initialised checkpoint only; with `resume`, write nothing, and say where
            the run stands and what is left of it.
        go_on: how to resume after Ctrl-C, for the message, if not with `resume`.
        on_drafter: receives the speculator so far before stage 2 generates, to make generating faster.
        measured_on: digest of what `evaluate` decodes; a run is not resumed with another one.
        on_step: called after every step.
        foretell: receives the work before it is done, and a step to try out that changes nothing.

    Raises:
        DraftsmithError: bad data, folder or recipe, or a loss that is not finite. TrainingInterrupted after Ctrl-C.
    """
    kind = TrainingRun if recipe.joint is None else JointTrainingRun
    run = kind(recipe, target, generate, evaluate, console or Console(quiet=True), on_drafter, foretell)
    if go_on is not None:
        run.go_on = go_on
    run.folder.measured_on = measured_on
    run.on_step = on_step
    if dry_run:
        return run.plan_only(resume)
    with one_gentle_interrupt() as interrupted:
        return run.go(resume, interrupted)
