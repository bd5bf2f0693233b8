"""What a comparison decodes: prompts of every task, cut from texts that nothing was trained or tuned on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.evaluation.prompts import Prompt, cut, distinct, tokenizer_of
from draftsmith.targets.token_ids import body_ids, opening_ids
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

CODE, EDIT = "code", "edit"
# In the task `edit` a file is this many times as long as a prompt; half a prompt of its beginning is then repeated.
REPEATED = 3
# Prompts by which shapes are chosen; they are not measured on.
CALIBRATION = 2


@dataclass(frozen=True)
class Settings:
    """How much to measure of every task: τ on `prompts` prompts, exactly `new_tokens` each, and timed rounds.

    Without `tasks`, all tasks of the prompts are measured. At temperature 1 the first `sampled_prompts` are enough: τ
    varies less from prompt to prompt there, and measuring it takes more steps.
    """

    tasks: tuple[str, ...] = ()
    prompts: int = 40
    sampled_prompts: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    rounds: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "sampled_prompts", "prompt_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise DraftsmithError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.new_tokens < 2:
            raise DraftsmithError(f"new_tokens is {self.new_tokens}; it must be at least 2.")


@dataclass(frozen=True)
class Questions:
    """The prompts of a task: two by which shapes of drafts are chosen, and those measured on.

    Those measured on are all different; `texts` and `sources` count the texts and sources that they are cut from.
    """

    calibration: list[list[int]]
    measured: list[list[int]]
    texts: int
    sources: int


def gather(
    target: "Target", prompts: Sequence[Prompt], tuning: Sequence[Prompt], settings: Settings
) -> dict[str, Questions]:
    """Return the prompts of every task; short texts are taken whole.

    The task `edit` is made from code: a file, and then its beginning again, as an editor's model is asked to write it.

    Args:
        tuning: texts to choose shapes by; those of the same task where there are any.

    Raises:
        DraftsmithError: a task without prompts, or a prompt that the target has no room for.
    """
    count = max(settings.prompts, settings.sampled_prompts)
    chosen = {}
    for task in settings.tasks or tasks_of(prompts):
        kind = CODE if task == EDIT else task
        mine = [prompt for prompt in prompts if prompt.task == kind]
        if not mine:
            known = ", ".join(tasks_of(prompts))
            raise DraftsmithError(
                f"there are no prompts of task {kind!r}; give some with --prompts, or leave it out: there are {known}."
            )
        alike = [prompt for prompt in tuning if prompt.task == kind] or tuning
        # Conversations come first, see `cut`.
        used = sorted(mine, key=lambda prompt: prompt.conversation is None)[:count]
        chosen[task] = Questions(
            windows(target, alike, task, settings, CALIBRATION), distinct(windows(target, mine, task, settings, count)),
            len(used), len({prompt.source for prompt in used} - {""}),
        )
    room = target.max_length - settings.new_tokens
    for task, questions in chosen.items():
        for number, tokens in enumerate([*questions.measured, *questions.calibration], 1):
            if len(tokens) > room:
                raise DraftsmithError(
                    f"prompt {number} of task {task!r} has {len(tokens)} tokens, but {target.name!r} has room for "
                    f"{room} before {settings.new_tokens} new ones; leave the task out, give shorter prompts, or ask "
                    "for fewer new tokens."
                )
    return chosen


def tasks_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return the tasks of the prompts, and `edit` where there is code."""
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    return [*tasks, EDIT] if CODE in tasks else tasks


def windows(
    target: "Target", prompts: Sequence[Prompt], task: str, settings: Settings, count: int
) -> list[list[int]]:
    """Return `count` prompts of a task, cut from texts."""
    if task != EDIT:
        return cut(target, prompts, settings.prompt_tokens, count, exact=False)
    files = cut(target, prompts, REPEATED * settings.prompt_tokens, count, exact=False)
    tokenizer = tokenizer_of(target)
    again, begun = body_ids(tokenizer, "\n\n# The same file, edited:\n"), len(opening_ids(tokenizer))
    return [file + again + file[begun : len(file) // (2 * REPEATED)] for file in files]
