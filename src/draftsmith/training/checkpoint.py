"""Checkpoints of a run: complete or absent, checked when read, the oldest removed; no pickles.

A run's folder holds `checkpoints/step-00000200/` and so on, and the links `latest` and `best`. Each checkpoint is a
drafter that can be loaded directly, with optimizer.safetensors and progress.json beside it.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.drafters.trainable import storage
from draftsmith.files import locked
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PREFIX = "step-"
LATEST, BEST = "latest", "best"
LOCK = ".lock"
PROGRESS, OPTIMIZER = "progress.json", "optimizer.safetensors"
RUN, SOURCES = "run.json", "sources.json"
"""One of these is in the folder of every run that was begun."""
REPLACED = ("metrics.jsonl", "recipe.yaml", RUN, SOURCES, "samples.jsonl", "generated.jsonl", "curves.png")
"""Files that are first written under another name, and then renamed."""


def warn(sentence: str) -> None:
    """Say something as a warning of Python's."""
    warnings.warn(sentence, RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run continues: the folder, counters and loaders as JSON, and the optimizer's tensors."""

    folder: Path
    progress: dict[str, Any]
    optimizer: "dict[str, Tensor]"


class Checkpoints:
    """The checkpoints of one run; the last `keep` of them stay, and the best one."""

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep = run, keep
        self.folder = run / "checkpoints"

    def at(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"{PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, whole or damaged, in order."""
        names = {path.name for path in self.folder.glob(f"{PREFIX}*") if path.is_dir()}
        names |= {path.name[1:].removesuffix(".old") for path in self.folder.glob(f".{PREFIX}*.old")}
        numbers = [name.removeprefix(PREFIX) for name in names]
        return sorted(int(number) for number in numbers if number.isdigit())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the run's folder, and keep other processes from training there inside the `with` block.

        Raises:
            DraftsmithError: another process trains there, or the folder cannot be written.
        """
        with ExitStack() as stack:
            try:
                self.run.mkdir(parents=True, exist_ok=True)
                held = stack.enter_context(locked(self.run / LOCK, wait=False))
            except OSError as error:
                raise DraftsmithError(
                    f"cannot write the run's folder {self.run} ({error.strerror}); choose another output.folder."
                ) from error
            if not held:
                raise DraftsmithError(
                    f"another process trains in {self.run}; wait for its end, or choose another output.folder (--out)."
                )
            yield

    def check_begin(self, resume: bool) -> None:
        """Refuse to begin a run where there is one, to resume where there is none, and to be a second process."""
        if (self.run / LOCK).exists():
            with self.held():
                pass
        self.check_found(resume)

    def check_found(self, resume: bool) -> None:
        """Refuse the same by the checkpoints alone, for the process that holds the run's lock."""
        steps = self.steps()
        if steps and not resume:
            raise DraftsmithError(
                f"{self.run} already holds a run, at step {steps[-1]}; "
                "add --resume (resume=True) to go on with it, or choose another output.folder (--out)."
            )
        if resume and not steps:
            raise self._nothing_to_resume()
        found = [name for name in REPLACED if (self.run / name).exists()]
        if found and not steps and RUN not in found and SOURCES not in found:
            raise DraftsmithError(
                f"the folder {str(self.run)!r} has no run in it, but {found[0]}, which a run would replace; choose "
                "another output.folder (--out)."
            )

    def _nothing_to_resume(self) -> DraftsmithError:
        return DraftsmithError(
            f"{self.run} has no checkpoint to resume from; name the folder of a run with --out (output.folder), or "
            "leave out --resume (resume=False) to start one."
        )

    def save(
        self, step: int, drafter_files: Callable[[Path], None], progress: Mapping[str, Any],
        optimizer: "Mapping[str, Tensor]", best: int | None = None,
    ) -> Path:
        """Write a checkpoint and `settle` it; a failed save leaves all earlier ones as they were.

        Raises:
            DraftsmithError: the disk is full, or the folder cannot be written.
        """

        def fill(aside: Path) -> None:
            drafter_files(aside)
            storage.write_tensors(aside / OPTIMIZER, optimizer)
            storage.write_json(aside / PROGRESS, {"step": step, **progress})

        storage.write_folder(self.at(step), fill)
        self.settle(step, best)
        return self.at(step)

    def settle(self, step: int, best: int | None) -> None:
        """Point `latest`, and `best` unless it is None, at checkpoints, and remove old ones.

        Resuming from a checkpoint repeats this, because a kill may have come between the save and this call.
        """
        self.link(LATEST, step)
        if best is not None:
            self.link(BEST, best)
        self.prune()

    def link(self, name: str, step: int) -> None:
        """Point a link at a step's checkpoint, atomically."""
        aside = self.run / f".{name}.tmp"
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(self.at(step).relative_to(self.run))
            os.replace(aside, self.run / name)
            storage.sync_folder(self.run)
        except OSError as error:
            reason = error.strerror
            raise DraftsmithError(
                f"cannot write {self.run / name} ({reason}); fix that, then go on with the run."
            ) from error

    def linked(self, name: str) -> int | None:
        """Return the step at which a link points, or None."""
        link = self.run / name
        return int(os.readlink(link).rpartition(PREFIX)[2]) if link.is_symlink() else None

    def prune(self) -> None:
        """Remove all but the best and the last `keep` up to the latest, and leftovers of killed saves.

        Checkpoints later than the latest are damaged, because otherwise the run would have continued from them.
        """
        for name in {leftover.name.split(".")[1] for leftover in self.folder.glob(f".{PREFIX}*")}:
            storage.clear_leftovers(self.folder / name)
        best, latest = self.linked(BEST), self.linked(LATEST)
        known = [step for step in self.steps() if latest is None or step <= latest]
        for step in known[: -self.keep]:
            if step != best:
                storage.remove_folder(self.at(step))

    def load(self, note: Callable[[str], None] = warn) -> Checkpoint:
        """Return the last good checkpoint; damaged ones are skipped.

        Args:
            note: receives a sentence for each that is skipped, which names what is damaged and the step to go on from.

        Raises:
            DraftsmithError: there is none, or all are damaged. A run never restarts from step 0 by itself.
        """
        damages: list[str] = []
        for step in reversed(self.steps()):
            folder = storage.standing(self.at(step))
            try:
                found = self._read(folder)
            except DraftsmithError as error:
                damages.append(str(error))
                continue
            for damage in damages:
                what, _, _ = damage.rpartition(";")  # the advice to restore it need not be followed
                note(f"{what}; the run goes on from its checkpoint of step {step} instead.")
            return found
        if damages:
            raise DraftsmithError(f"no checkpoint in {self.folder} is whole; the first one: {damages[-1]}")
        raise self._nothing_to_resume()

    def _read(self, folder: Path) -> Checkpoint:
        if not (folder / storage.MANIFEST).exists():
            raise DraftsmithError(
                f"{folder / storage.MANIFEST} is missing, so {folder.name} cannot be trusted; restore it from a good "
                "copy."
            )
        storage.verify_folder(folder)
        return Checkpoint(folder, storage.read_json(folder / PROGRESS), storage.read_tensor_file(folder / OPTIMIZER))


def optimizer_tensors(optimizers: "list[torch.optim.Optimizer]") -> "dict[str, Tensor]":
    """Return the optimizers' state as tensors named optimizer.parameter.key."""
    import torch

    return {
        f"{i}.{index}.{key}": torch.as_tensor(value)
        for i, optimizer in enumerate(optimizers)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def load_optimizer_tensors(optimizers: "list[torch.optim.Optimizer]", tensors: "Mapping[str, Tensor]") -> None:
    """Restore the named tensors; the parameter groups keep the recipe's settings."""
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            which, index, key = name.split(".")
            if int(which) == i:
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
