"""What takes part in a comparison, and the budget and recipe that every family is trained by."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.drafters.family import Family, read_spec
from draftsmith.drafters.registry import families, family_named
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.types import DraftsmithError
from draftsmith.workflows.choice import Choice
from draftsmith.workflows.partition import TRAINING

if TYPE_CHECKING:
    from draftsmith.targets import Target

PROMPT_TOKENS, BATCH, POSITIONS = 64, 16, 48
SCORED = 2048
# Positions of the default budget. With search and decoding, all families take three quarters of an hour on two cores.
DEFAULT_POSITIONS = 100_000
SEARCH_SHARE = 0.15


@dataclass(frozen=True)
class Budget:
    """What every family may learn from: a number of positions, or of minutes, of text that the target writes.

    The target writes `texts` texts of `text_tokens` tokens each. They continue beginnings of `data`, or of the embedded
    texts if `data` is None. Runs are kept under `folder`. Each trial of the search for rate and start gets
    `search_share` of the steps, in addition to the budget; 0 skips the search.
    """

    folder: Path
    positions: int | None = None
    minutes: float | None = None
    data: Path | None = None
    texts: int = 2048
    text_tokens: int = 128
    seed: int = 0
    search_share: float = SEARCH_SHARE

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

    def steps(self, seconds_a_step: Callable[[], float]) -> int:
        """Return the steps that the budget allows; `seconds_a_step` is called only if the budget is in minutes."""
        if self.minutes is not None:
            return max(1, int(60 * self.minutes / seconds_a_step()))
        return -(-(self.positions or DEFAULT_POSITIONS) // (BATCH * POSITIONS))

    def sentence(self) -> str:
        """Return the budget in words."""
        positions = f"{self.positions or DEFAULT_POSITIONS:,} positions"
        each = f"{self.minutes:g} minutes" if self.minutes is not None else positions
        return f"{each} a family, of {self.texts:,} texts of {self.text_tokens} tokens that the target wrote"


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


def ready(family: Family) -> bool:
    """Tell whether a drafter of the family can be made with its defaults."""
    return not any(field.is_required() for field in family.config.options().values())


def recipe_for(
    entry: Entry, choice: Choice, target: "Target", budget: Budget, steps: int, run: str, epochs: int | None = None
) -> Recipe:
    """Return the recipe that trains an entry; it is saved beside the run, and `draftsmith train` can run it."""
    scored = {} if target.vocab_size <= SCORED else {"draft_vocab_size": SCORED}
    return build_recipe(
        {
            "drafter": {"family": entry.family.name, **scored, **choice.options},
            "data": {"sources": [{"path": str(budget.parts / f"{TRAINING}.jsonl")}], "held_out_every": 0},
            "stage2": {
                "steps": steps, "batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "new_tokens": budget.text_tokens,
                "temperature": 0, "epochs": epochs or -(-steps * BATCH // budget.texts), "generate_batch": 64,
                "positions_per_sequence": POSITIONS, "rate": choice.rate, "final_rate": choice.rate / 20,
                "texts": str(budget.path),
            },
            "distillation": {"weight": 0.5},
            "output": {"folder": str(budget.folder / "runs" / run), "keep": 1, "save_every": 100},
            "seed": budget.seed,
        }
    )
