"""What takes part in a comparison, and the budget and recipe that every family is trained by."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.drafters.family import Family, read_spec
from draftsmith.drafters.registry import families, family_named
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.schedule import last_rate
from draftsmith.training.wording import counted
from draftsmith.types import DraftsmithError
from draftsmith.workflows.choice import Choice
from draftsmith.workflows.partition import TRAINING

if TYPE_CHECKING:
    from draftsmith.targets import Target

PROMPT_TOKENS, BATCH, POSITIONS = 64, 16, 48
DEFAULT_TEXTS = 2048
# Positions of the default budget, by which each of the default texts is read once. With search and decoding, all
# families take three quarters of an hour on two cores.
DEFAULT_POSITIONS = DEFAULT_TEXTS * POSITIONS
SEARCH_SHARE = 0.15


@dataclass(frozen=True)
class Budget:
    """What every family may learn from: a number of positions, or of minutes, of text that the target writes.

    The target writes `texts` texts of `text_tokens` tokens each. They continue beginnings of `data`, or of the embedded
    texts if `data` is None. Runs are kept under `folder`. Each trial of the search for rate and start gets
    `search_share` of the steps, in addition to the budget; 0 skips the search. Drafters score the `scored` most
    frequent tokens of the data; 0 is all, None as few as cover what the target wrote.
    """

    folder: Path
    positions: int | None = None
    minutes: float | None = None
    data: Path | None = None
    texts: int = DEFAULT_TEXTS
    text_tokens: int = 128
    seed: int = 0
    search_share: float = SEARCH_SHARE
    scored: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and self.minutes is not None:
            raise DraftsmithError("positions and minutes are two budgets; give one of them.")
        for name in ("positions", "minutes", "texts", "text_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise DraftsmithError(f"{name} is {value}; give a positive number.")
        if not 0 <= self.search_share <= 1:
            raise DraftsmithError(f"search_share is {self.search_share:g}; give a number from 0 (no search) to 1.")
        if self.texts % BATCH:
            raise DraftsmithError(f"texts is {self.texts}; give a multiple of {BATCH}, the sequences of one step.")

    @property
    def path(self) -> Path:
        """The file of the texts that all families learn from."""
        return self.folder / "texts.jsonl"

    @property
    def parts(self) -> Path:
        """The folder of the texts that are trained, tuned and measured on."""
        return self.folder / "parts"

    def steps(self, seconds_a_step: Callable[[], tuple[float, float]]) -> int:
        """Return the steps that the budget allows.

        Args:
            seconds_a_step: returns the seconds of a step on texts that are read for the first time, and of one on texts
                that were read before; it is called only if the budget is in minutes.
        """
        if self.minutes is None:
            return -(-(self.positions or DEFAULT_POSITIONS) // (BATCH * POSITIONS))
        (first, later), seconds, fresh = seconds_a_step(), 60 * self.minutes, self.texts // BATCH
        if seconds <= first * fresh:
            return max(1, int(seconds / first))
        return fresh + int((seconds - first * fresh) / later)

    @property
    def texts_read(self) -> int:
        """How many texts a family reads; with a budget in minutes, at most so many."""
        if self.minutes is not None:
            return self.texts
        drawn = self.steps(lambda: (0.0, 0.0)) * BATCH
        return -(-drawn // passes(drawn, self.texts))

    def sentence(self) -> str:
        """Return the budget in words."""
        positions = counted(self.positions or DEFAULT_POSITIONS, "position")
        each = counted(self.minutes, "minute") if self.minutes is not None else positions
        return f"{each} a family, of {self.texts_read:,} texts of {self.text_tokens} tokens that the target wrote"


@dataclass(frozen=True)
class Entry:
    """A family with its options, as the user named it: `mlp`, `mlp:n_predict=7`, `ngram:max_length=4`.

    Options in `asked` are kept as they are; for the others, the search looks for the best start.
    """

    name: str
    family: Family
    options: Mapping[str, Any]
    asked: Collection[str] = ()

    @property
    def folder(self) -> str:
        """A name for its run."""
        return "".join(c if c.isalnum() or c in "-_=." else "-" for c in self.name)

    @property
    def as_published(self) -> bool:
        """Whether it has no options of its own, so that it takes the tree of its paper, if there is one."""
        return self.name == self.family.name and bool(self.family.compared.static_tree)

    @property
    def twin(self) -> str | None:
        """The name of the method that drafts with the same weights, but with a tree of what it is surest of."""
        return self.family.compared.confident_twin if self.as_published else None

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods that it is compared as."""
        return (self.name,) if self.twin is None else (self.name, self.twin)

    @property
    def starts(self) -> dict[str, tuple[Any, ...]]:
        """The options that say how it may start, and the values to try for each."""
        return {name: values for name, values in self.family.compared.starts.items() if name not in self.asked}

    def suggested(self) -> Choice:
        """Return the family's own rate and start, with all options of the start written out."""
        told = self.family.config.read(self.options, f"{self.name}:").chosen()
        return Choice(self.family.rate, {**self.options, **{name: told[name] for name in self.starts}})


def read_entries(specs: list[str]) -> list[Entry]:
    """Parse the entries to compare; without any, take all families that can be made with their defaults."""
    if not specs:
        return [Entry(name, known, known.compared.options) for name, known in families().items() if ready(known)]
    entries = []
    for spec in specs:
        name, values = read_spec(spec)
        family = family_named(name)
        options = {**family.compared.options, **values}
        family.config.read(options, f"{name}:")
        entries.append(Entry(spec, family, options, frozenset(values)))
    if len({entry.folder for entry in entries}) < len(entries):
        raise DraftsmithError("a family is named twice with the same options; name each once.")
    return entries


def entries_beside(given: Collection[str], specs: list[str]) -> list[Entry]:
    """Parse the entries to compare with trained drafters of these names; without either, take all families.

    Raises:
        DraftsmithError: an unknown family or option, or two methods of the same name, by which a comparison knows them.
    """
    entries = read_entries(specs) if specs or not given else []
    names = Counter([*given, *(name for entry in entries for name in entry.methods)])
    for name, count in names.items():
        if count > 1:
            raise DraftsmithError(
                f"{count} methods would be called {name!r}; name a trained drafter otherwise, as --drafter NAME=FOLDER."
            )
    return entries


def passes(drawn: int, texts: int) -> int:
    """Return how often each text is read if `drawn` are read in all, and there are `texts`."""
    return -(-drawn // texts)


def ready(family: Family) -> bool:
    """Tell whether a drafter of the family can be made with its defaults."""
    return not any(field.is_required() for field in family.config.options().values())


def recipe_for(
    entry: Entry, choice: Choice, target: "Target", budget: Budget, steps: int, run: str, epochs: int | None = None
) -> Recipe:
    """Return the recipe that trains an entry; it is saved beside the run, and `draftsmith train` can run it."""
    scored = {"draft_vocab_size": budget.scored} if budget.scored else {}
    return build_recipe(
        {
            "drafter": {"family": entry.family.name, **scored, **choice.options},
            "data": {"sources": [{"path": str(budget.parts / f"{TRAINING}.jsonl")}], "held_out_every": 0},
            "stage2": {
                "steps": steps, "batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "new_tokens": budget.text_tokens,
                "temperature": 0, "epochs": epochs or passes(steps * BATCH, budget.texts), "generate_batch": 64,
                "positions_per_sequence": POSITIONS, "rate": choice.rate, "final_rate": last_rate(choice.rate),
                "texts": str(budget.path),
            },
            "distillation": {"weight": 0.5},
            "output": {"folder": str(budget.folder / "runs" / run), "keep": 1, "save_every": 100},
            "seed": budget.seed,
        }
    )
