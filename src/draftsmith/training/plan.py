"""The plan of a run, as a dry run prints it, and checks of its numbers."""

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.recipe import Recipe
from draftsmith.training.sections import StageSection
from draftsmith.training.wording import counted
from draftsmith.types import DraftsmithError


def stage_length(recipe: Recipe, stage: StageSection) -> int:
    """Return the most tokens that a sequence of a stage can have."""
    second = recipe.stage2
    return recipe.stage1.length if stage is recipe.stage1 else second.prompt_tokens + second.new_tokens


def check_stages(recipe: Recipe) -> None:
    """Refuse a run without steps, and a patience without measurements."""
    if recipe.stage1.steps + recipe.stage2.steps == 0:
        raise DraftsmithError("stage1.steps and stage2.steps are both 0; give at least one of them steps.")
    if recipe.evaluation.patience is not None and recipe.evaluation.every == 0:
        raise DraftsmithError(
            f"evaluation.patience is {recipe.evaluation.patience}, but evaluation.every is 0; set evaluation.every."
        )


def check_lengths(recipe: Recipe, drafter: TrainableModel, target: Target) -> None:
    """Refuse sequences that are too short for the drafter, or longer than the target's context."""
    shortest = drafter.max_depth + 3
    for name, stage in (
        ("stage1.length", recipe.stage1), ("stage2.prompt_tokens + stage2.new_tokens", recipe.stage2)
    ):
        length = stage_length(recipe, stage)
        if stage.steps and not shortest <= length <= target.max_length:
            raise DraftsmithError(
                f"{name} is {length}; this target and drafter need {shortest} to {target.max_length} tokens."
            )


def plan_lines(recipe: Recipe, drafter: TrainableModel) -> list[str]:
    """Return lines that describe both stages, and what is trained."""
    lines = []
    for name, stage in (("stage 1", recipe.stage1), ("stage 2", recipe.stage2)):
        sequences = stage.batch * stage.accumulate
        lines.append(
            f"{name}: {counted(stage.steps, 'step')} × {counted(sequences, 'sequence')}, at most "
            f"{counted(sequences * stage_length(recipe, stage) * stage.steps, 'token')}, rate {stage.rate:g} → "
            f"{stage.final_rate:g}"
        )
    count, deep = sum(p.numel() for p in drafter.parameters()), counted(drafter.max_depth, "token")
    lines.append(f"drafter: {recipe.drafter.family}, {count / 1e6:.2f} M parameters, {deep} deep")
    return lines
