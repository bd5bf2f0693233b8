"""Where a job's prompts come from: the embedded held-out texts, a file, or texts handed over."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from rich.console import Console

    from draftsmith.evaluation.prompts import Prompt
    from draftsmith.targets import Target

EMBEDDED = "embedded held-out prompts"


def gather_prompts(source: "Path | str | Sequence[str | Prompt] | None", task: str | None = None) -> "list[Prompt]":
    """Return prompts from a file or from a sequence of texts; None takes the embedded held-out ones.

    Args:
        source: a path (JSONL with `text` or `messages` on each line, or a text file), or texts, with or without tasks.
        task: only prompts of this task; all by default.
    """
    from draftsmith.evaluation.prompts import Prompt, embedded_prompts, load_prompts

    if source is None:
        return embedded_prompts(task)
    if isinstance(source, str | Path):
        prompts = load_prompts(Path(source))
    else:
        prompts = [item if isinstance(item, Prompt) else Prompt("text", "", item) for item in source]
    chosen = [prompt for prompt in prompts if task is None or prompt.task == task]
    if not chosen:
        place = source if isinstance(source, str | Path) else "what was given"
        known = ", ".join(sorted({prompt.task for prompt in prompts})) or "none at all"
        raise DraftsmithError(f"{place} holds no prompt of task {task!r}; choose one of {known}.")
    return chosen


def fitting_conversations(
    target: "Target", prompts: "Sequence[Prompt]", new_tokens: int, console: "Console"
) -> list[list[int]]:
    """Return the conversations among the prompts, uncut; the console reports how many are too long for the target.

    Raises:
        DraftsmithError: no prompt is left.
    """
    from draftsmith.evaluation.prompts import whole

    every, room = whole(target, prompts), target.max_length - new_tokens
    fitting = [tokens for tokens in every if len(tokens) <= room]
    if len(fitting) < len(every):
        said = (
            f"{target.name!r} takes {target.max_length} tokens, {room} of them before {new_tokens} new ones, and the "
            f"longest conversation has {max(map(len, every))}"
        )
        if not fitting and all(prompt.conversation is not None for prompt in prompts):
            raise DraftsmithError(f"no conversation is short enough: {said}; give shorter ones.")
        passed_over = len(every) - len(fitting)
        console.print(f"{passed_over} of {len(every)} conversations are passed over: {said}.", style="dim")
    return fitting


def name_of_source(source: "Path | str | Sequence[str | Prompt] | None") -> str:
    """Return a name for the origin of the prompts, as results show it, without folders."""
    if source is None:
        return EMBEDDED
    return Path(source).name if isinstance(source, str | Path) else f"{len(source)} texts"
