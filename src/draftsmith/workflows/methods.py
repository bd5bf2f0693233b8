"""The methods of a comparison: each family trained by the same trainer, on the same texts and budget."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.family import Choices, Family, read_spec
from draftsmith.drafters.registry import families, family_named, load_drafter
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.methods import Method
from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter, build_prompts
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.data.loader import noise
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.step import TrainingStep
from draftsmith.training.terminal import progress_bar
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from draftsmith.workflows.bridge import EngineBridge

PROMPT_TOKENS, BATCH, POSITIONS = 64, 16, 48
SCORED = 2048
EVALUATION_PROMPTS, EVALUATION_TOKENS = 2, 48
PROBED_STEPS = 3
# What the default budget trains on: with the decoding, all families take half an hour or so on two cores.
DEFAULT_POSITIONS = 100_000


@dataclass(frozen=True)
class Budget:
    """What every family may learn from: so many positions, or minutes, of texts that the target writes.

    It writes `texts` of them, `text_tokens` each, after the beginnings of `data`, or of the embedded texts where that
    is None. Runs are kept under `folder`.
    """

    folder: Path
    positions: int | None = None
    minutes: float | None = None
    data: Path | None = None
    texts: int = 2048
    text_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.positions is not None and self.minutes is not None:
            raise DraftsmithError("positions and minutes are two budgets; give one of them.")
        for name in ("positions", "minutes", "texts", "text_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise DraftsmithError(f"{name} is {value}; give a positive number.")
        if self.texts % BATCH:
            raise DraftsmithError(f"texts is {self.texts}; give a multiple of {BATCH}, the sequences of one step.")

    @property
    def path(self) -> Path:
        """The file of the texts that all learn from."""
        return self.folder / "texts.jsonl"

    def steps(self, seconds_a_step: Callable[[], float]) -> int:
        """Return the steps that the budget allows; what one takes is only asked for where that matters."""
        if self.minutes is not None:
            return max(1, int(60 * self.minutes / seconds_a_step()))
        return -(-(self.positions or DEFAULT_POSITIONS) // (BATCH * POSITIONS))

    def sentence(self) -> str:
        """Say it in words."""
        positions = f"{self.positions or DEFAULT_POSITIONS:,} positions"
        each = f"{self.minutes:g} minutes" if self.minutes is not None else positions
        return f"{each} a family, of {self.texts:,} texts of {self.text_tokens} tokens that the target wrote"


@dataclass(frozen=True)
class Entry:
    """A family with its options, as asked for: `mlp`, `mlp:n_predict=7`, `ngram:max_length=4`."""

    name: str
    family: Family
    options: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """A name for its run."""
        return "".join(c if c.isalnum() or c in "-_=." else "-" for c in self.name)


def read_entries(specs: list[str]) -> list[Entry]:
    """Read what to compare; all families that can be made without more being said where nothing is asked for."""
    if not specs:
        return [Entry(name, known, known.compared.options) for name, known in families().items() if ready(known)]
    entries = []
    for spec in specs:
        name, values = read_spec(spec)
        family = family_named(name)
        options = {**family.compared.options, **values}
        family.config.read(options, f"{name}:")
        entries.append(Entry(spec, family, options))
    if len({entry.folder for entry in entries}) < len(entries):
        raise DraftsmithError("a family is named twice with the same options; name each once.")
    return entries


def ready(family: Family) -> bool:
    """Tell whether a drafter of the family can be made with its defaults."""
    return not any(field.is_required() for field in family.config.options().values())


def recipe_for(entry: Entry, target: Target, budget: Budget, steps: int, run: str, epochs: int | None = None) -> Recipe:
    """Return the recipe that trains an entry; it is saved beside the run and can be run by `draftsmith train`."""
    source = budget.data if budget.data is not None else assets.prompt_file("train")
    scored = {} if target.vocab_size <= SCORED else {"draft_vocab_size": SCORED}
    return build_recipe(
        {
            "drafter": {"family": entry.family.name, **scored, **entry.options},
            "data": {"sources": [{"path": str(source)}], "held_out_every": 0},
            "stage2": {
                "steps": steps, "batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "new_tokens": budget.text_tokens,
                "temperature": 0, "epochs": epochs or -(-steps * BATCH // budget.texts), "generate_batch": 64,
                "positions_per_sequence": POSITIONS, "rate": entry.family.rate, "final_rate": entry.family.rate / 20,
                "texts": str(budget.path),
            },
            "distillation": {"weight": 0.5},
            "output": {"folder": str(budget.folder / "runs" / run), "keep": 1, "save_every": 100},
            "seed": budget.seed,
        }
    )


def write_texts(entry: Entry, target: Target, budget: Budget, bridge: EngineBridge, console: Console) -> None:
    """Let the target write what all families learn from, as far as that is not done yet."""
    recipe = recipe_for(entry, target, budget, budget.texts // BATCH, "texts", epochs=1)
    section = recipe.stage2
    texts = GeneratedText(budget.path, section, noise(recipe.seed, "stage2"))
    prompts = build_prompts(recipe, target)
    with progress_bar(console) as progress:
        bar = progress.add_task("target writes", total=texts.count, completed=len(texts.sequences))
        for made in texts.make(prompts, bridge.generate, target.eos_token_ids):
            progress.update(bar, completed=made)


def seconds_a_step(recipe: Recipe, target: Target, texts: Path) -> float:
    """Train a throwaway drafter for a few steps, and return what one takes."""
    section = recipe.stage2
    step = TrainingStep(build_drafter(recipe, target), target, recipe.optimizer, recipe.distillation)
    sequences = GeneratedText(texts, section, 0)
    begun = time.monotonic()
    for number in range(PROBED_STEPS + 1):
        if number == 1:  # the first one warms up
            begun = time.monotonic()
        batch = sequences.batch(number, step.drafter.max_depth - 1)
        step([batch], rate=0.0, positions=section.positions_per_sequence, seed=(number,))
    return (time.monotonic() - begun) / PROBED_STEPS


def train_entry(
    entry: Entry, target: Target, budget: Budget, bridge: EngineBridge, measurement_log: MeasurementLog,
    console: Console
) -> dict[str, Any]:
    """Train one entry, or go on with its run; return its folder and what it took."""

    def pace() -> float:
        probe = recipe_for(entry, target, budget, PROBED_STEPS + 1, entry.folder)
        seconds: float = measurement_log.once(f"pace|{entry.name}", lambda: seconds_a_step(probe, target, budget.path))
        return seconds

    recipe = recipe_for(entry, target, budget, budget.steps(pace), entry.folder)

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
        }

    console.print(f"[bold]{entry.name}[/bold]: {entry.family.summary}")
    trained: dict[str, Any] = measurement_log.once(f"train|{entry.name}", run)
    return trained


def prepare_methods(
    target: Target, entries: list[Entry], given: Mapping[str, str | Path], budget: Budget,
    measurement_log: MeasurementLog,
    console: Console,
) -> tuple[list[Method], list[dict[str, Any]]]:
    """Train what has to be trained; return all methods, and what each weighs and took.

    Args:
        given: folders of drafters that are trained already, by the name to call them.
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
        target, embedded_prompts(), EVALUATION_PROMPTS, EVALUATION_TOKENS, PROMPT_TOKENS,
        {"temperature": 0.0},
    )
    if trainable:
        write_texts(trainable[0], target, budget, bridge, console)
    for entry in trainable:
        facts = dict(train_entry(entry, target, budget, bridge, measurement_log, console))
        drafter = load_drafter(facts.pop("drafter"), target)
        # A family with options is compared for these, with the tree that all have.
        as_published = entry.name == entry.family.name and entry.family.compared.static_tree
        add(entry.name, drafter, entry.family.summary, tree=entry.family.tree if as_published else (), **facts)
        twin = entry.family.compared.confident_twin
        if as_published and twin is not None:
            add(twin, drafter, f"the same weights as {entry.name}, with a tree of what it is surest of", **facts)
    for entry in entries:
        if not entry.family.trainable:
            config = entry.family.config.read(entry.options, f"{entry.name}:")
            add(entry.name, entry.family.ready(config, target), entry.family.summary, trained=False)
    for name, folder in given.items():
        add(name, load_drafter(folder, target), f"trained before: {Path(folder).name}")
    if not methods:
        raise DraftsmithError("there is nothing to compare; name a family or a drafter.")
    return methods, weighed
