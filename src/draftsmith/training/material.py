"""The texts of a run: windows of the data in stage 1, texts of the target in stage 2, and records about them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from draftsmith.targets import Target
from draftsmith.training.build import build_loader, build_prompts
from draftsmith.training.data.census import account_lines, census_lines, take_census
from draftsmith.training.data.generated import Generate, GeneratedText
from draftsmith.training.data.loader import Loader, Windowing, noise
from draftsmith.training.data.windows import Batch, Window
from draftsmith.training.recipe import Recipe
from draftsmith.training.run_folder import RunFolder
from draftsmith.training.samples import SHOWN_SAMPLES
from draftsmith.training.terminal import say
from draftsmith.types import DraftsmithError

CENSUS, STAGE1, PROMPTS = "documents", "stage1", "prompts"
"""The data's keys in run.json: everything that exists, and what was found while reading for each purpose."""

IN_WORDS = {STAGE1: "stage 1", PROMPTS: "prompts of stage 2"}


class Material:
    """Texts, read and written as they are needed, and recorded in the run's folder."""

    def __init__(self, recipe: Recipe, target: Target, folder: RunFolder, console: Console) -> None:
        self.recipe, self.target, self.folder, self.console = recipe, target, folder, console
        self._loader: Loader | None = None
        self._generated: GeneratedText | None = None
        self._prompts: Loader | None = None
        self._writing: Iterator[int] | None = None

    def check(self) -> dict[str, Any] | None:
        """Check, before anything is written, that both stages can be trained on the data.

        Returns the census of the data; None if no data are read.
        """
        first, second = self.recipe.stage1, self.recipe.stage2
        if first.steps:
            self.loader.first(1)
        if second.steps and second.texts is not None:
            self._given_text(second.texts)
        elif second.steps:
            self.prompts.first(1)
        if not first.steps and second.texts is not None:
            return None
        census = take_census(self.recipe.data, self.console)
        say(self.console, *census_lines(census))
        return {"sources": census}

    @property
    def loader(self) -> Loader:
        """The windows of stage 1."""
        if self._loader is None:
            self._loader = build_loader(self.recipe, self.target, Windowing(self.recipe.stage1.length), "stage1")
        return self._loader

    @property
    def documents(self) -> Loader | None:
        """A loader that holds documents in memory from the start, which saves reading them again; None if none does."""
        return self.prompts if not self.recipe.stage1.steps and self.recipe.stage2.texts is None else None

    @property
    def prompts(self) -> Loader:
        """The loader of the prompts that the target continues in stage 2; they are drawn only once."""
        if self._prompts is None:
            self._prompts = build_prompts(self.recipe, self.target)
        return self._prompts

    @property
    def generated(self) -> GeneratedText:
        """The texts of stage 2 that have been written so far."""
        if self._generated is None:
            texts = self.recipe.stage2.texts
            if texts is not None:
                self._generated = self._given_text(texts)
            else:
                self._generated = GeneratedText(self.folder.generated, self.recipe.stage2, self._seed)
        return self._generated

    @property
    def written(self) -> int:
        """How many texts for stage 2 are written already."""
        section = self.recipe.stage2
        return len(self.generated.sequences) if section.steps and section.texts is None else 0

    @property
    def _seed(self) -> int:
        return noise(self.recipe.seed, "stage2")

    def _given_text(self, texts: str) -> GeneratedText:
        return GeneratedText.of(
            Path(texts).expanduser(), self.recipe.stage2, self._seed, vocabulary=self.target.vocab_size,
            context=self.target.max_length,
        )

    def samples(self, stage: int) -> list[Window]:
        """Return the first few windows of a stage."""
        if stage == 1:
            return self.loader.first(SHOWN_SAMPLES)
        return [self.generated.window(place) for place in range(min(SHOWN_SAMPLES, len(self.generated.sequences)))]

    def batch(self, stage: int, number: int, room: int) -> Batch:
        """Return micro-batch `number` of a stage, see `collate`; those of stage 1 come in order."""
        if stage == 1:
            return self.loader.next_batch(self.recipe.stage1.batch, room)
        return self.generated.batch(number, room)

    def write_texts(self, count: int, generate: Generate, bars: Progress, interrupted: threading.Event) -> bool:
        """Let the target write until there are `count` texts for stage 2; return whether that was reached."""
        texts = self.generated
        if len(texts.sequences) >= count:
            return True
        if self._writing is None:
            self._writing = texts.make(self.prompts, generate, self.target.eos_token_ids)
        bar = bars.add_task("target writes", total=count, completed=len(texts.sequences))
        while len(texts.sequences) < count and not interrupted.is_set():
            bars.update(bar, completed=next(self._writing))
        bars.remove_task(bar)
        if self._prompts is not None and not texts.missing:
            self._show_account(PROMPTS, self._prompts)
        return len(texts.sequences) >= count

    def texts_for(self, number: int) -> int:
        """Return the number of texts that micro-batch `number` of stage 2 needs."""
        return self.generated.needed(number)

    def require_texts(self, step: int, last: int) -> None:
        """Refuse to resume stage 2 if texts are missing on which it was trained, up to micro-batch `last`."""
        lacking = self.texts_for(last) - len(self.generated.sequences)
        if lacking > 0:
            raise DraftsmithError(
                f"{self.generated.path} lacks {lacking} sequences that step {step} was trained on; "
                "restore it, or start a new run."
            )

    def note(self) -> None:
        """Record what was found in stage 1 so far, if it has begun."""
        if self._loader is not None:
            self.folder.note_data(STAGE1, self._loader.account())

    def show_account(self) -> None:
        """Print what stage 1 found that was not counted before."""
        self._show_account(STAGE1, self.loader)

    def _show_account(self, purpose: str, loader: Loader) -> None:
        self.folder.note_data(purpose, loader.account())
        census = self.folder.noted_data(CENSUS)
        counted = [source["source"] for source in census["sources"] if source["whole"]] if census else []
        say(self.console, *account_lines(loader.account(), IN_WORDS[purpose], counted))
