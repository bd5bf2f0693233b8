"""A drafter from a recipe, with τ measured by decoding: `draftsmith train`, from Python."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.family import read_spec
from draftsmith.drafters.registry import family_of
from draftsmith.drafters.trainable import storage
from draftsmith.evaluation.prompts import write_prompts
from draftsmith.processor import Watch, use_threads
from draftsmith.provenance import provenance
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.interruption import interrupted_before_a_checkpoint
from draftsmith.training.overrides import keys_in
from draftsmith.training.recipe import Recipe, check_vocabulary
from draftsmith.training.result import TrainingResult
from draftsmith.training.run_folder import check_same
from draftsmith.training.sections import DataSection
from draftsmith.types import DraftsmithError
from draftsmith.workflows.held_out import OWN, Evaluation, Probe, settle
from draftsmith.workflows.models import Loading, load_target, quiet
from draftsmith.workflows.recipes import (
    DRAFTER,
    check_data,
    check_paths,
    embedded_run,
    family_in,
    family_options,
    final_rates,
    kept_recipe,
    names_another,
    options_in,
    read_recipe,
    reads_embedded,
    starter_recipe,
    without_options,
)
from draftsmith.workflows.sources import gather_prompts

if TYPE_CHECKING:
    from draftsmith.targets import Target
    from draftsmith.training.progress import Work
    from draftsmith.training.step import TrainingStep
    from draftsmith.workflows.estimate import Pace

# Modules that compute are imported where they are used, so that wrong names, paths and keys are reported quickly.


@dataclass(frozen=True)
class TrainResult:
    """Result of a run: `training.drafter` is the folder to decode with; `measured_on` says what τ was measured on.

    `target` is the folder or name of the target as given; None for the embedded one and for a `Target` object.
    `prompts` is the file of what τ was measured on; None for the embedded prompts, and for texts handed over.
    """

    provenance: Mapping[str, Any]
    training: TrainingResult
    measured_on: Probe
    target: str | None = None
    prompts: Path | None = None

    @property
    def drafter(self) -> Path:
        """The folder of the exported drafter, the one with the best τ."""
        return self.training.drafter

    @property
    def best(self) -> float | None:
        """The best τ, in tokens per step, measured by decoding; None if nothing was trained."""
        return self.training.best

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith train --json` writes."""
        paths = {name: str(path) for name, path in vars(self.training).items() if isinstance(path, Path)}
        measured_on = {
            "source": self.measured_on.source, "prompts": self.measured_on.count,
            "prompt_tokens": self.measured_on.prompt_tokens, "new_tokens": self.measured_on.new_tokens,
        }
        return {
            "provenance": dict(self.provenance), "result": asdict(self.training) | paths, "measured_on": measured_on,
        }


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    target: "Target | str | Path | None" = None,
    data: Path | str | Sequence[Path | str] | None = None,
    family: str | None = None,
    init_from: str | Path | None = None,
    out: str | Path | None = None,
    minutes: float | None = None,
    resume: bool = False,
    dry_run: bool = False,
    evaluation: Evaluation | None = None,
    trust_remote_code: bool = False,
    console: Console | None = None,
    threads: int | None = None,
) -> TrainResult:
    """Train a drafter for a frozen target: on text, then on what the target itself writes.

    Args:
        recipe: a YAML file, its values, or a `Recipe`. None is a small run for the given target, data or family, see
            `starter_recipe`, with sizes chosen by target, data and machine; if none of these is given, in the
            overrides neither, it is the second stage of the embedded speculator. With `resume`, None takes the recipe
            of the run in the folder.
        overrides: `section.field=value`, as on the command line.
        target: a folder or hub name that replaces the recipe's `target.name`; or a `Target`, used as it is.
        data: files or folders of text that replace the recipe's `data.sources`.
        family: of the drafter, optionally with options, such as "mlp:n_predict=4"; replaces the recipe's.
        init_from: start a new run from this drafter (a warm start, not a resume).
        out: folder of the run; replaces the recipe's `output.folder`.
        minutes: what a run without a recipe may take, 20 by default: the steps of the stages that have none are chosen
            by it, so at least one stage must have none.
        resume: continue the run in that folder.
        dry_run: write an untrained drafter only; with `resume`, say where the run stands and what is left of it.
        evaluation: what τ is measured on.
        trust_remote_code: run the target's own code.
        console: where progress is shown; nowhere by default.
        threads: CPU threads of the whole process; by default as many as fit, see docs/native.md.

    Raises:
        DraftsmithError: bad data, folder or recipe, or a loss that is not finite. TrainingInterrupted after Ctrl-C,
            except after a second one in a run that has a checkpoint.
    """
    wrapped = target if target is not None and not isinstance(target, str | Path) else None
    another = target is not None or data is not None or family is not None or names_another(overrides)
    base, starts = recipe, recipe is None and another and not resume
    if minutes is not None and not starts:
        if resume:
            instead = "leave it out to go on"
        elif recipe is None:
            instead = "say for what with --target, --data or --family, or set stage1.steps and stage2.steps instead"
        else:
            instead = "set stage1.steps and stage2.steps instead"
        raise DraftsmithError(f"--minutes is for a new run of your own without a recipe; {instead}.")
    if minutes is not None and minutes <= 0:
        raise DraftsmithError(f"--minutes is {minutes:g}; give a positive number.")
    chosen = [*named(target, data, family, init_from, out), *overrides]
    chosen += final_rates(overrides) if starts else []
    asked, shown, kept = evaluation or Evaluation(), console or quiet(), None
    looked_at: list[DataSection] = []

    def check(planned: Recipe) -> None:
        check_paths(planned, None if wrapped is not None else planned.target.name)
        if planned.drafter.init_from is not None and not resume:
            storage.require_folder(Path(planned.drafter.init_from).expanduser())
        checkpoints = Checkpoints(Path(planned.output.folder).expanduser(), planned.output.keep)
        if not dry_run:
            checkpoints.check_begin(resume)
        elif resume:
            checkpoints.check_found(resume)
        if asked.prompts is not None:
            gather_prompts(asked.prompts)
        if planned.data not in looked_at:  # the settled recipe nearly always has the data of the planned one
            check_data(planned)
            looked_at.append(planned.data)

    if recipe is None:
        start = starter_recipe(family_in(family, overrides)) if another else embedded_run()
        planned = without_options(start, chosen)
        kept = kept_recipe(planned) if resume else None
        if kept is None:
            # The options of the embedded drafter, and of a drafter to start from, are read from its weights.
            check(planned)
        elif family is not None and kept[DRAFTER]["family"] == family_in(family, ()):
            # Options that are not named now were chosen when the run began.
            chosen = [*named(target, data, None, init_from, out), *family_options(family), *overrides]
        recipe = kept or (start if another else {**start, DRAFTER: options_in(assets.demo_first_stage())})
    # A run that goes on keeps its own options; what it started from may be gone.
    if base is None and kept is None and init_from is not None and family is None and family_of(init_from) is not None:
        assert isinstance(recipe, dict)
        recipe |= {DRAFTER: options_in(Path(init_from))}
    settled = recipe if isinstance(recipe, Recipe) and not chosen else read_recipe(recipe, chosen)
    if minutes is not None and {"stage1.steps", "stage2.steps"} <= {*keys_in(chosen)}:
        raise DraftsmithError(
            f"--minutes is {minutes:g}, but stage1.steps and stage2.steps are set, so that no step is left to choose; "
            "leave out --minutes or one of them."
        )
    check(settled)
    if resume:
        check_same(settled)

    checkpoints = Checkpoints(Path(settled.output.folder).expanduser(), settled.output.keep)
    watch = Watch()
    with interrupted_before_a_checkpoint(checkpoints), ExitStack() as opened:
        from draftsmith.training.disturbance import LONG_ESTIMATE, SHORT_PLAN, watched
        from draftsmith.training.neighbours import yielding
        from draftsmith.training.terminal import say
        from draftsmith.training.train import train as run
        from draftsmith.workflows.bridge import EngineBridge
        from draftsmith.workflows.estimate import foretold, try_out
        from draftsmith.workflows.sizes import DEFAULT_MINUTES, choose

        note = use_threads(threads)
        if note is not None:
            say(shown, note)
        look = opened.enter_context(yielding(shown, threads, watch))
        frozen, dtype = settled.joint is None, settled.target.dtype
        if not frozen and dtype == "auto":
            dtype = "fp32"
        loading = Loading(
            dtype, settled.target.device, trust_remote_code, native=frozen, dtype_option="target.dtype="
        )
        loaded = load_target(wrapped if wrapped is not None else settled.target.name, loading, shown)
        check_vocabulary(settled, loaded.vocab_size, loaded.name)
        probe = settle(asked, settled.data, reads_embedded(settled), loaded)
        second = settled.stage2
        bridge = EngineBridge(
            loaded, probe.prompts, probe.prompts_a_task, probe.new_tokens, probe.prompt_tokens,
            {"temperature": second.temperature, "top_k": second.top_k},
        )
        look()
        pace: Pace | None = None
        disturbed: list[str] = []
        if starts:
            assert isinstance(recipe, dict)
            given_minutes = DEFAULT_MINUTES if minutes is None else minutes
            fixed = {"stage1.steps", "stage2.steps"} <= {word.partition("=")[0] for word in chosen}
            with watched(shown, LONG_ESTIMATE if fixed else SHORT_PLAN) as disturbed:
                settled, pace = choose(recipe, chosen, loaded, bridge, minutes=given_minutes, console=shown)
        for sentence in filter(None, (probe.sentence(), probe.warning)):
            shown.print(sentence, highlight=False, markup=False)

        def foretell(work: "Work", step: "TrainingStep") -> None:
            known = pace
            if known is None:
                with watched(shown, LONG_ESTIMATE), shown.status("Measuring a step …"):
                    known = try_out(settled, loaded, step, bridge.generate, bridge.every_prompt, bridge.new_tokens)
            say(shown, foretold(settled, loaded, known, work))

        result = run(
            settled, target=loaded, generate=bridge.generate, evaluate=bridge.evaluate, resume=resume, dry_run=dry_run,
            console=shown, on_drafter=bridge.use, foretell=foretell, measured_on=bridge.digest, on_step=look,
        )
        for sentence in disturbed:  # once more, where it is seen: the result may be worse for it
            say(shown, sentence)
    given = None if wrapped is not None else settled.target.name
    return TrainResult(provenance(target=loaded.name), result, probe, given, prompt_file(asked, probe, result, dry_run))


def prompt_file(asked: Evaluation, probe: Probe, result: TrainingResult, dry_run: bool) -> Path | None:
    """Return the file of what τ was measured on; held-out texts of the user's own are written into the run's folder."""
    if isinstance(asked.prompts, str | Path):
        return Path(asked.prompts)
    if dry_run or probe.source != OWN:
        return None
    path = result.folder / "held-out.jsonl"
    try:
        write_prompts(path, probe.prompts)
    except OSError as error:
        raise DraftsmithError(f"cannot write {path} ({error.strerror}); the drafter is in {result.drafter}.") from error
    return path


def named(
    target: "Target | str | Path | None", data: Path | str | Sequence[Path | str] | None, family: str | None,
    init_from: str | Path | None, out: str | Path | None,
) -> list[str]:
    """Return the overrides that the arguments of `train` stand for."""
    found = []
    if isinstance(target, str | Path):
        found.append(f"target.name={json.dumps(str(target))}")
    if data is not None:
        paths = [data] if isinstance(data, str | Path) else data
        found.append(f"data.sources={json.dumps([{'path': str(path)} for path in paths])}")
    if family is not None:
        name, options = read_spec(family)
        found.append(f"{DRAFTER}={json.dumps({'family': name, **options})}")
    if init_from is not None:
        found.append(f"drafter.init_from={json.dumps(str(init_from))}")
    if out is not None:
        found.append(f"output.folder={json.dumps(str(out))}")
    return found
