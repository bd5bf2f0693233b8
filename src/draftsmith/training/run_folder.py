"""The files of a run besides its checkpoints: recipe, commands, metrics, curves.

`recipe.yaml` is the effective recipe and can be run again. `run.json` lists every command with its versions, the
seconds it took, a digest of what τ is measured on and the data that were left out. `sources.json` has a hash of every
file of the data. `samples.jsonl` shows what is learnt, `metrics.jsonl` has one record per line, and `curves.png` draws
the metrics.
"""

import errno
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from draftsmith.drafters.trainable import storage
from draftsmith.files import JsonLines, replace_text
from draftsmith.provenance import provenance
from draftsmith.training.checkpoint import REPLACED, RUN, SOURCES
from draftsmith.training.data.identity import first_change, identify
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.types import DraftsmithError, TargetFacts

FREE_TO_CHANGE = ("output", "evaluation")
MEASURED_ON = "measured_on"


class RunFolder:
    """The folder of one run."""

    def __init__(self, recipe: Recipe, facts: TargetFacts) -> None:
        self.recipe, self.facts = recipe, facts
        self.path = Path(recipe.output.folder).expanduser()
        self.records: list[dict[str, Any]] = []
        self._board: Any = None
        self._runs: list[dict[str, Any]] = []
        self._begun = 0.0
        self.measured_on: str | None = None
        """Digest of what τ is measured on, kept in run.json; None if nobody says."""
        self._log = JsonLines(self.metrics, "restore it from a good copy, or delete it", "go on with the run")

    @property
    def metrics(self) -> Path:
        """The file with one record per line."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """The file with the first samples of every stage."""
        return self.path / "samples.jsonl"

    @property
    def generated(self) -> Path:
        """The file with what the target wrote for stage 2."""
        return self.path / "generated.jsonl"

    @property
    def sources(self) -> Path:
        """The file with the size and hash of every file of the data, as they were when the run began."""
        return self.path / SOURCES

    @property
    def seconds(self) -> float | None:
        """Seconds of all commands together, each up to its last `note_time`; None if one of them did not count."""
        counted = [run["seconds"] for run in self._runs if "seconds" in run]
        return float(sum(counted)) if len(counted) == len(self._runs) else None

    @staticmethod
    def check_place(path: Path) -> None:
        """Refuse a place where no folder can be written, before anything is created that stays."""
        place = path.absolute()
        while not place.exists() and not place.is_symlink():
            place = place.parent
        try:
            if place.is_dir():
                # Permissions do not tell: root has all of them in /proc too. Where possible, the file has no name.
                with tempfile.TemporaryFile(dir=place):
                    return
            reason = f"{place} is no folder"
        except OSError as error:
            known = error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT)
            reason = f"{place} cannot be written{f': {error.strerror}' if known else ''}"
        raise DraftsmithError(f"cannot write the run's folder {path} ({reason}); choose another output.folder.")

    @staticmethod
    def check_apart(path: Path, data: Path) -> None:
        """Refuse a place within a folder of data: who reads these next would take what the run wrote for text.

        Hidden folders are no data, so a run may be in one.
        """
        run, folder = path.resolve(), data.resolve()
        if not folder.is_dir() or not run.is_relative_to(folder):
            return
        if not any(part.startswith(".") for part in run.relative_to(folder).parts):
            raise DraftsmithError(
                f"the run's folder {path} is within the data {data}, so that what the run writes would be read as "
                "data; choose an output.folder (--out) outside of them (a run that is there already can be moved)."
            )

    def open(self, resumed_step: int | None) -> None:
        """Create the folder, or open an old one; records after `resumed_step` are dropped, since they come again.

        Raises:
            DraftsmithError: the folder cannot be written, or the run in it cannot be resumed, see `check_resumable`.
        """
        self._begun = time.monotonic()
        read = identify(self.recipe)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in REPLACED:
                for leftover in self.path.glob(f".{name}.*"):  # from a command that was killed while writing
                    leftover.unlink()
            if resumed_step is not None:
                self.check_resumable(read)
                self._rewind(resumed_step)
            else:
                for leftover in (self.metrics, self.generated, self.samples, self.sources):
                    if not self._is_given(leftover):
                        leftover.unlink(missing_ok=True)
            if not self.sources.exists():
                replace_text(self.sources, json.dumps(read, indent=2) + "\n")
            replace_text(self.path / "recipe.yaml", self.recipe.to_yaml())
            self._note_command(resumed_step)
        except OSError as error:
            raise DraftsmithError(
                f"cannot write the run's folder {self.path} ({error.strerror or error}); choose another output.folder."
            ) from error
        if self.recipe.output.report_to == "tensorboard":
            self._board = _tensorboard(self.path, 0 if resumed_step is None else resumed_step + 1)

    def check_resumable(self, read: Mapping[str, str]) -> None:
        """Refuse to resume as another run than the one that is here; nothing is written.

        Args:
            read: what the files of the data are now, from `identify`.

        Raises:
            DraftsmithError: the recipe, the target or the data are others than when the run began, or τ was measured on
                other prompts.
        """
        check_recipe(self.recipe, self.path)
        self._check_target()
        check_sources(read, self.path)
        self._check_measured_on()

    def _is_given(self, path: Path) -> bool:
        """Whether stage 2 learns from this file, which an earlier run has written here."""
        given = self.recipe.stage2.texts
        return given is not None and Path(given).expanduser().resolve() == path.resolve()

    def _check_target(self) -> None:
        path = self.path / RUN
        if not path.exists():
            return
        before, now = storage.read_json(path)["runs"][-1]["target"], asdict(self.facts)
        for name, what in (
            ("opening", "begins texts with other special tokens"), ("text_hash", "makes other tokens of a text"),
            ("template_hash", "has another chat template"),
        ):
            if name not in before:
                raise DraftsmithError(
                    f"the run in {self.path} was written by an earlier version, which did not record the target's "
                    f"{name}; start a new run."
                )
            if json.dumps(before[name]) != json.dumps(now[name]):
                raise DraftsmithError(
                    f"{self.facts.name!r} {what} than when the run in {self.path} began; restore its tokenizer files, "
                    "or start a new run."
                )
        if before.get("weights_hash", now["weights_hash"]) != now["weights_hash"]:
            raise DraftsmithError(
                f"{self.facts.name!r} has other weights than when the run in {self.path} began; give the target that "
                "it began with, or start a new run (drafter.init_from takes its weights along)."
            )

    def _check_measured_on(self) -> None:
        """Refuse other prompts, on which τ could not compete with the best so far; earlier versions kept no digest."""
        path = self.path / RUN
        runs = storage.read_json(path)["runs"] if path.exists() else []
        measured: dict[str, Any] = next((run for run in reversed(runs) if run.get(MEASURED_ON) is not None), {})
        if self.measured_on is None:
            self.measured_on = measured.get(MEASURED_ON)
        elif measured and measured[MEASURED_ON] != self.measured_on:
            raise DraftsmithError(
                f"the run in {self.path} has measured τ on other prompts or lengths than are given now; give the same "
                "data, --eval-data, --eval-prompts, --eval-prompt-tokens and --eval-tokens as its last command "
                f"(`{measured.get('command', 'see run.json')}`), or start a new run (drafter.init_from takes its "
                "weights along)."
            )

    def note_data(self, purpose: str, account: dict[str, Any]) -> None:
        """Record what was read for a purpose, and what was left out of it."""
        self._runs[-1].setdefault("data", {})[purpose] = account
        self.note_time()

    def noted_data(self, purpose: str) -> dict[str, Any] | None:
        """Return the last record for a purpose, by this or an earlier command; None if there is none."""
        return next((run["data"][purpose] for run in reversed(self._runs) if purpose in run.get("data", {})), None)

    def _rewind(self, step: int) -> None:
        self.records = [record for record in self._log.read() if record["step"] <= step]
        self._log.rewrite(self.records)

    def _note_command(self, resumed_step: int | None) -> None:
        path = self.path / RUN
        self._runs = storage.read_json(path)["runs"] if path.exists() and resumed_step is not None else []
        self._runs.append(
            provenance(target=asdict(self.facts)) | {"from_step": resumed_step or 0, MEASURED_ON: self.measured_on}
        )
        self.note_time()

    def note_time(self) -> None:
        """Record the seconds of this command so far; if it is killed, the time after the last record is not counted."""
        self._runs[-1]["seconds"] = time.monotonic() - self._begun
        path = self.path / RUN
        try:
            replace_text(path, json.dumps({"runs": self._runs}, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise DraftsmithError(
                f"cannot write {path} ({error.strerror}); free some space, then go on with the run."
            ) from error

    def log(self, record: dict[str, Any]) -> None:
        """Append a record, with its `step`, to the metrics."""
        self.records.append(record)
        self._log.append(record, flush=False)
        if self._board is not None:
            for key, value in _scalars(record):
                self._board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        """Count the seconds, draw the curves and flush."""
        from draftsmith.training.curves import draw_curves

        self.note_time()
        draw_curves(self.records, self.path / "curves.png")
        if self._board is not None:
            self._board.close()


def check_same(recipe: Recipe) -> None:
    """Refuse to resume the run in the recipe's folder with another recipe or other data; needs no target."""
    path = Path(recipe.output.folder).expanduser()
    check_recipe(recipe, path)
    check_sources(identify(recipe), path)


def check_recipe(recipe: Recipe, path: Path) -> None:
    """Refuse another recipe than that of the run in a folder, and name the first key that differs."""
    kept = path / "recipe.yaml"
    if not kept.exists():
        return
    old = build_recipe(yaml.safe_load(kept.read_text(encoding="utf-8"))).model_dump(mode="json")
    new = recipe.model_dump(mode="json")
    for section, value in new.items():
        if section in FREE_TO_CHANGE or old[section] == value:
            continue
        if not isinstance(value, dict) or not isinstance(old[section], dict):
            changed = [(section, old[section], value)]
        else:
            # Another family has other options, so that a key may be on one side alone.
            kept_value, keys = old[section], dict.fromkeys([*value, *old[section]])
            pairs = [(f"{section}.{key}", kept_value.get(key), value.get(key)) for key in keys]
            changed = [pair for pair in pairs if pair[1] != pair[2]]
        name, before, now = changed[0]
        raise DraftsmithError(
            f"{name} is {_in_words(now)}, but the run in {path} has {_in_words(before)}; go on with the same recipe, "
            "or start a new run (drafter.init_from takes its weights along)."
        )


def check_sources(read: Mapping[str, str], path: Path) -> None:
    """Refuse data of which a file is not what it was; earlier versions did not record what they were.

    Args:
        read: what the files of the data are now, from `identify`.
        path: the folder of the run.
    """
    sources = path / SOURCES
    change = first_change(storage.read_json(sources), read) if sources.exists() else None
    if change is not None:
        raise DraftsmithError(
            f"{change} since the run in {path} began; restore the data as they were, or start a new run "
            "(drafter.init_from takes its weights along)."
        )


def _in_words(value: Any) -> str:
    """Return a value of a recipe for a message; a list, of sources for example, by what is in it."""
    if isinstance(value, list):
        return ", ".join(map(_in_words, value)) or "nothing"
    if isinstance(value, dict) and "path" in value and "name" in value:
        source = value["path"] or " ".join(filter(None, (value["name"], value["configuration"], value["split"])))
        return f"{source} with weight {value['weight']:g}" if value["weight"] != 1 else str(source)
    return repr(value)


def _tensorboard(path: Path, first_step: int) -> Any:
    """Open the event files; readers ignore earlier events from `first_step` on, because those steps come again."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DraftsmithError("output.report_to needs tensorboard; install draftsmith[train].") from error
    return SummaryWriter(str(path / "tensorboard"), purge_step=first_step)


def _scalars(record: dict[str, Any], where: str = "") -> list[tuple[str, float]]:
    found = []
    for key, value in record.items():
        name = f"{where}{key}"
        if isinstance(value, dict):
            found += _scalars(value, f"{name}/")
        elif isinstance(value, list):
            found += [(f"{name}/{i + 1}", v) for i, v in enumerate(value)]
        elif isinstance(value, int | float) and key != "step":
            found.append((name, value))
    return found
