"""Does a drafter decode as well as its training promises? `draftsmith check`, from Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.trainable import storage
from draftsmith.evaluation.checking.check import (
    Check,
    CheckReport,
    check_drafter,
    check_files,
    check_packing,
    check_tokens,
    load_pair,
    training_form,
)
from draftsmith.evaluation.prompts import Prompt, cut
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.given import require_trained
from draftsmith.workflows.models import Loading, load_target, quiet
from draftsmith.workflows.sources import fitting_conversations, gather_prompts

SHORTEST, LONGEST = 8, 160


@dataclass(frozen=True)
class CheckResult:
    """All checks, and what they were made with."""

    provenance: Mapping[str, Any]
    report: CheckReport

    @property
    def passed(self) -> bool:
        """Whether all checks ran and none failed."""
        return self.report.passed

    def sentence(self) -> str:
        """Return the result and the first failure with its cause, in words."""
        return self.report.sentence()

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith check --json` writes."""
        return {"provenance": dict(self.provenance), **self.report.summary()}


def check(
    drafter: str | Path | None = None,
    target: str | Path | None = None,
    *,
    dtype: str = "fp32",
    serving_dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    prompts: Path | str | Sequence[str | Prompt] | None = None,
    task: str | None = None,
    prompt_count: int = 24,
    new_tokens: int = 64,
    console: Console | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> CheckResult:
    """Check a trained drafter before it is published: decoding has to accept what training predicts.

    Checks that an earlier failure makes impossible are skipped.

    Args:
        drafter: the folder of a trained drafter; the embedded one by default.
        target: a folder or hub name, because it is loaded in two precisions; the embedded one by default.
        dtype: precision of the comparison with training: fp32 or fp64 for agreement down to the last guess.
        serving_dtype: precision of the target and drafter that decode.
        device: auto, cpu, cuda and so on.
        trust_remote_code: run code that comes with the model.
        prompts: a file, or texts; the embedded held-out ones by default.
        task: use only the prompts of this task.
        prompt_count: how many prompts, of 8 to 160 tokens; at least 3.
        new_tokens: greedy tokens per prompt, at least 4.
        console: where loading is reported; nowhere by default.
        on_progress: receives what is being done.

    Raises:
        DraftsmithError: too few prompts or tokens, or a folder that does not exist.
    """
    if prompt_count < 3 or new_tokens < 4:
        raise DraftsmithError(f"{prompt_count} prompts of {new_tokens} tokens are too few; use at least 3 of 4 tokens.")
    folder = Path(drafter) if drafter is not None else assets.demo_drafter()
    require_trained(folder, "check")
    folder = storage.standing(folder)
    texts, shown = gather_prompts(prompts, task), console or quiet()

    def load(kind: str, native: bool) -> Target:
        option = "--serving-dtype " if native else "--dtype "
        return load_target(
            target, Loading(kind, device, trust_remote_code, native, dtype_option=option), shown
        )

    report, name = check_folder(
        folder, load, dtype, serving_dtype, texts, prompt_count, new_tokens, on_progress, shown
    )
    where = provenance(
        target=name, drafter=folder.name, dtype=dtype, serving_dtype=serving_dtype, prompts=prompt_count,
        new_tokens=new_tokens,
    )
    return CheckResult(where, report)


def check_folder(
    folder: Path,
    load: Callable[[str, bool], Target],
    dtype: str,
    serving_dtype: str,
    texts: Sequence[Prompt],
    prompts: int,
    new_tokens: int,
    say: Callable[[str], None],
    console: Console,
) -> tuple[CheckReport, str]:
    """Run every check that earlier failures leave possible on a folder; return the report and the target's name."""
    report = CheckReport(check_files(folder))
    reference = load(dtype, False)
    if not report.passed:
        return report, reference.name
    drafter, made_for = load_pair(folder, reference)
    report.checks.append(made_for)
    if drafter is None:
        return report, reference.name
    report.checks.append(check_tokens(folder, reference))
    trained_model = training_form(folder, drafter, reference)
    windows = ragged(reference, texts, prompts, new_tokens, console)
    found = check_drafter(reference, trained_model, drafter, windows, new_tokens, say)
    report.checks += found.checks
    report.parity = found.parity
    say("measuring the copy that decodes")
    serving = load(serving_dtype, True)
    packed, loads = load_pair(folder, serving)
    if packed is None:
        report.checks.append(Check("the copy that decodes", False, loads.detail))
        return report, reference.name
    cost, report.packed, report.unpacked = check_packing(
        serving, packed, drafter, trained_model.max_depth, windows, new_tokens
    )
    report.checks.append(cost)
    return report, reference.name


def ragged(
    target: Target, texts: Sequence[Prompt], count: int, new_tokens: int, console: Console
) -> list[list[int]]:
    """Return `count` prompts: conversations uncut, then beginnings of texts, each longer than the one before.

    Conversations that are too long are left out, see `fitting_conversations`.
    """
    longest = min(LONGEST, target.max_length - new_tokens)
    chats = fitting_conversations(target, texts, new_tokens, console)[:count]
    texts, count = [prompt for prompt in texts if prompt.conversation is None], count - len(chats)
    if not texts or count < 2:
        return [chats[index % len(chats)] for index in range(len(chats) + count)]
    windows = cut(target, texts, longest, count, exact=False)
    return chats + [window[: SHORTEST + (longest - SHORTEST) * i // (count - 1)] for i, window in enumerate(windows)]
