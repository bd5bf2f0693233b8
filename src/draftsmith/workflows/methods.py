"""The methods of a comparison: each family trained by the same trainer, on the same texts and budget."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.family import Choices
from draftsmith.drafters.registry import load_drafter
from draftsmith.evaluation.comparison import fairness
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.methods import Method
from draftsmith.evaluation.prompts import Prompt
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter, build_prompts, frequent_tokens
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.data.loader import NothingUsable, noise
from draftsmith.training.recipe import Recipe
from draftsmith.training.step import TrainingStep
from draftsmith.training.terminal import progress_bar
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from draftsmith.workflows.bridge import EngineBridge
from draftsmith.workflows.choice import Choice
from draftsmith.workflows.entries import BATCH, POSITIONS, PROMPT_TOKENS, Budget, Entry, recipe_for
from draftsmith.workflows.models import open_drafter, telling
from draftsmith.workflows.search import Judge, search, try_out
from draftsmith.workflows.sizes import ENOUGH_COVERAGE

EVALUATION_PROMPTS, EVALUATION_TOKENS = 2, 48
PROBED_STEPS = 3
FEWEST_SCORED = 2048
"""The least number of tokens that drafters are made to score; it is doubled until they cover enough."""


def write_texts(entry: Entry, target: Target, budget: Budget, bridge: EngineBridge, console: Console) -> None:
    """Let the target write the texts that all families learn from, unless that is done already."""
    recipe = recipe_for(entry, entry.suggested(), target, budget, -(-budget.texts_read // BATCH), "texts", epochs=1)
    section = recipe.stage2
    texts = GeneratedText(budget.path, section, noise(recipe.seed, "stage2"))
    prompts = build_prompts(recipe, target)
    with progress_bar(console) as progress:
        bar = progress.add_task("target writes", total=texts.count, completed=len(texts.sequences))
        try:
            for made in texts.make(prompts, bridge.generate, target.eos_token_ids):
                progress.update(bar, completed=made)
        except NothingUsable as error:
            raise DraftsmithError(
                f"no text that is kept to be trained on can begin one of the target's ({error.reasons}); give texts of "
                f"at least {PROMPT_TOKENS} tokens with --data."
            ) from error


def scored_tokens(entry: Entry, target: Target, budget: Budget) -> dict[str, Any]:
    """Return how many tokens drafters score, 0 for all: as few as cover nearly all that the target wrote."""
    size, recipe = FEWEST_SCORED, recipe_for(entry, entry.suggested(), target, budget, 1, "texts")
    texts = GeneratedText(budget.path, recipe.stage2, 0)
    written = Counter(
        token for tokens, prompt in zip(texts.sequences, texts.prompts, strict=True) for token in tokens[prompt:]
    )
    while size < target.vocab_size:
        covered = sum(written[token] for token in frequent_tokens(recipe, target, size).tolist()) / written.total()
        if covered >= ENOUGH_COVERAGE:
            return {"tokens": size, "covered": covered}
        size *= 2
    return {"tokens": 0, "covered": 1.0}


def seconds_a_step(recipe: Recipe, target: Target, texts: Path) -> tuple[float, float]:
    """Train a throwaway drafter for a few steps; return the seconds of one on new texts, and of one on the same again.

    The target's states of texts that are read several times are kept, so that it reads each of them once.
    """
    section = recipe.stage2
    step = TrainingStep(build_drafter(recipe, target), target, recipe.optimizer, recipe.distillation)
    sequences = GeneratedText(texts, section, 0)
    seconds = [0.0, 0.0]
    for number in range(PROBED_STEPS + 1):
        batch = sequences.batch(number, step.drafter.max_depth - 1)
        for again in (0, 1):
            begun = time.monotonic()
            step([batch], rate=0.0, positions=section.positions_per_sequence, seed=(number, again))
            if number:  # the first one warms up
                seconds[again] += (time.monotonic() - begun) / PROBED_STEPS
    return seconds[0], seconds[1]


def steps_for(entry: Entry, target: Target, budget: Budget, measurement_log: MeasurementLog) -> int:
    """Return the number of steps for which an entry is trained."""

    def pace() -> tuple[float, float]:
        # Two epochs of twice as many steps, so that the texts of the probe count as read several times.
        probe = recipe_for(entry, entry.suggested(), target, budget, 2 * (PROBED_STEPS + 1), entry.folder, epochs=2)
        first, later = measurement_log.once(f"pace|{entry.name}", lambda: seconds_a_step(probe, target, budget.path))
        return first, later

    return budget.steps(pace)


def choose(
    entry: Entry, target: Target, budget: Budget, steps: int, judge: Judge, measurement_log: MeasurementLog,
    console: Console,
) -> Choice:
    """Search for an entry's rate and start, with a share of its steps per trial; finished trials are kept."""
    suggested = entry.suggested()
    if budget.search_share == 0:
        return suggested
    short = max(1, round(budget.search_share * steps))

    def run(rate: float, options: Mapping[str, Any]) -> dict[str, Any]:
        start = {name: options[name] for name in entry.starts}
        recipe = recipe_for(entry, Choice(rate, options), target, budget, short, entry.folder)

        def make() -> dict[str, Any]:
            with console.status(f"{entry.name}: trying rate {rate:.2g}, start {fairness.start(start)}"):
                return {"rate": rate, "options": dict(options), **try_out(recipe, target, judge)}

        found: dict[str, Any] = measurement_log.once(f"trial|{entry.name}|{rate:.4g}|{json.dumps(start)}", make)
        return found

    found = search(suggested.rate, suggested.options, entry.starts, run)
    told = fairness.start({name: found.options[name] for name in entry.starts})
    console.print(f"{entry.name}: rate {found.rate:.2g}, start {told}, the best of {len(found.trials)} trials")
    return found


def searched(entry: Entry, choice: Choice) -> dict[str, Any]:
    """Return what a report says about a search."""
    return {
        "rate": choice.rate,
        "suggested_rate": entry.family.rate,
        "start": {name: choice.options[name] for name in entry.starts},
        "rate_at_edge": choice.at_edge,
        "search": {
            "trials": list(choice.trials),
            "seconds": sum(trial["seconds"] for trial in choice.trials),
            "positions": sum(trial["steps"] for trial in choice.trials) * BATCH * POSITIONS,
        },
    }


def train_entry(
    entry: Entry, choice: Choice, target: Target, budget: Budget, steps: int, bridge: EngineBridge,
    measurement_log: MeasurementLog, console: Console,
) -> dict[str, Any]:
    """Train one entry, or resume its run; return its folder and the cost of its training."""
    recipe = recipe_for(entry, choice, target, budget, steps, entry.folder)

    def run() -> dict[str, Any]:
        resume = bool(Checkpoints(Path(recipe.output.folder), recipe.output.keep).steps())
        result = train(
            recipe, target=target, generate=bridge.generate, evaluate=bridge.evaluate, resume=resume, console=console,
            go_on="give the same command again to go on",
        )
        return {
            "drafter": str(result.drafter),
            "training_s": result.seconds,
            "training_positions": recipe.stage2.steps * BATCH * POSITIONS,
            "training_steps": recipe.stage2.steps,
            "scored_tokens": recipe.drafter.config.draft_vocab_size or target.vocab_size,
        }

    trained: dict[str, Any] = measurement_log.once(f"train|{entry.name}", run)
    return trained


def prepare_methods(
    target: Target, entries: list[Entry], given: Mapping[str, str | Path], budget: Budget, tuning: Sequence[Prompt],
    judge: Judge, measurement_log: MeasurementLog, console: Console,
) -> tuple[list[Method], list[dict[str, Any]]]:
    """Train what is not trained yet; return all methods, and each one's size and training cost.

    Args:
        given: folders of trained drafters, by the names to show for them.
        tuning: prompts by which the exported checkpoint is chosen.
        judge: decides which rate and start are best.
    """
    methods: list[Method] = []
    weighed: list[dict[str, Any]] = []

    def add(
        name: str, drafter: Drafter, summary: str, trained: bool = True, tree: Choices = (), **facts: Any
    ) -> None:
        methods.append(Method(name, drafter, tree))
        weighed.append(
            {
                "name": name, "summary": summary, "trained": trained, "parameters": drafter.parameter_count(),
                "memory_bytes": drafter.memory_bytes(), **facts,
            }
        )

    trainable = [entry for entry in entries if entry.family.trainable]
    bridge = EngineBridge(
        target, tuning, EVALUATION_PROMPTS, EVALUATION_TOKENS, PROMPT_TOKENS, {"temperature": 0.0}
    )
    if trainable:
        write_texts(trainable[0], target, budget, bridge, console)
        if budget.scored is None:
            found = measurement_log.once("scored", lambda: scored_tokens(trainable[0], target, budget))
            budget = replace(budget, scored=found["tokens"])
            if budget.scored:
                console.print(
                    f"drafters score the {budget.scored:,} most frequent tokens of the data, {found['covered']:.1%} of "
                    "what the target wrote; a family named with :draft_vocab_size=0 scores all"
                )
    for entry in trainable:
        console.print(f"[bold]{entry.name}[/bold]: {entry.family.summary}")
        steps = steps_for(entry, target, budget, measurement_log)
        choice = choose(entry, target, budget, steps, judge, measurement_log, console)
        facts = train_entry(entry, choice, target, budget, steps, bridge, measurement_log, console)
        facts = {**facts, **searched(entry, choice)}
        drafter = load_drafter(facts.pop("drafter"), target)
        # A family that was named with options is compared for these options, with the tree that all methods have.
        add(entry.name, drafter, entry.family.summary, tree=entry.family.tree if entry.as_published else (), **facts)
        if entry.twin is not None:
            facts.pop("search")  # reported once, for the weights that it found
            add(entry.twin, drafter, f"the same weights as {entry.name}, with a tree of what it is surest of", **facts)
    for entry in entries:
        if not entry.family.trainable:
            config = entry.family.config.read(entry.options, f"{entry.name}:")
            with telling(console):
                drafter = entry.family.ready(config, target)
            add(entry.name, drafter, entry.family.summary, trained=False)
    for name, folder in given.items():
        add(name, open_drafter(folder, target, console), f"trained before: {Path(folder).name}")
    if not methods:
        raise DraftsmithError("there is nothing to compare; name a family or a drafter.")
    return methods, weighed
