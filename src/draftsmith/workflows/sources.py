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
    """Return prompts from a file or folder or from a sequence of texts; None takes the embedded held-out ones.

    Args:
        source: a path, read as training data are, or texts, with or without tasks.
        task: only prompts of this task; all by default.

    Raises:
        DraftsmithError: a path without a prompt of the task, or one that cannot be read.
    """
    from draftsmith.evaluation.prompts import Prompt, embedded_prompts

    if source is None:
        return embedded_prompts(task)
    if isinstance(source, str | Path):
        return read_prompts(Path(source).expanduser(), task)
    prompts = [item if isinstance(item, Prompt) else Prompt("text", "", item) for item in source]
    chosen = [prompt for prompt in prompts if task is None or prompt.task == task]
    if not chosen:
        known = ", ".join(sorted({prompt.task for prompt in prompts})) or "none at all"
        raise DraftsmithError(f"what was given holds no prompt of task {task!r}; choose one of {known}.")
    return chosen


def read_prompts(path: Path, task: str | None) -> "list[Prompt]":
    """Return the prompts of a task in a file or folder, read as training data are read."""
    from draftsmith.evaluation.prompts import prompts_of
    from draftsmith.training.data.record_files import advice_on_missing, records_at

    if not path.exists():
        raise DraftsmithError(f"{path} cannot be read, because it does not exist; {advice_on_missing(path)}")
    try:
        return prompts_of(records_at(path), path, task)
    except OSError as error:
        raise DraftsmithError(f"{path} cannot be read ({error.strerror or error}); check its permissions.") from error


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
