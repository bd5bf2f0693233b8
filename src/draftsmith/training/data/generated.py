"""Texts that the target wrote after prompts from the data: written once, kept in the run's folder, read several times.

They are made in numbered batches, each with its own prompts and seed, so that a run that was killed continues with the
first missing batch.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

import torch

from draftsmith.files import JsonLines
from draftsmith.training.data.given_texts import check_given, check_line
from draftsmith.training.data.loader import noise
from draftsmith.training.data.windows import Batch, Window, collate
from draftsmith.training.sections import OnPolicySection
from draftsmith.types import DraftsmithError

BATCHES_SORTED = 8
"""The texts of this many batches are grouped, and those of a batch in the group have similar lengths."""
FRESH_READS = 2
"""New texts are read this many times before more are written, because writing takes longer than learning. Three times
teach a little less per step, see benchmarks/README.md."""

Generate = Callable[[list[list[int]], int, int], list[list[int]]]
"""(prompts, max_tokens, seed) to continuations: each of `max_tokens` tokens, or up to the target's end token."""


class Prompts(Protocol):
    """A source of prompts, such as a `Loader`."""

    def next_window(self) -> Window:
        """Return the next prompt."""
        ...


class GeneratedText:
    """The sequences (prompt and continuation) of stage 2, and how many tokens of each are the prompt.

    Args:
        given: whether the file was named as `stage2.texts`, so that it may be of any kind.
    """

    def __init__(self, path: Path, section: OnPolicySection, seed: int, given: bool = False) -> None:
        self.path, self.section, self.seed = path, section, seed
        self.count = section.texts_needed
        self._orders: dict[tuple[int, int], list[int]] = {}
        # A last line that a kill cut off is made again.
        self.log = JsonLines(path, "restore it from a good copy, or delete it to write again", "go on with the run")
        self.sequences: list[list[int]] = []
        self.prompts: list[int] = []
        for line, record in enumerate(self.log.read(), 1):
            if given:
                check_line(record, path, line)
            if "prompts" not in record:
                raise DraftsmithError(f"{path} was written by an earlier version; start a new run.")
            self.sequences += record["sequences"]
            self.prompts += record["prompts"]

    @classmethod
    def of(
        cls, path: Path, section: OnPolicySection, seed: int, *, vocabulary: int, context: int
    ) -> "GeneratedText":
        """Open a file that another run wrote.

        Args:
            vocabulary: number of the target's tokens.
            context: most tokens that the target reads.

        Raises:
            DraftsmithError: the file is missing, or holds too few sequences, or longer continuations, or texts that the
                target cannot read.
        """
        check_given(path)
        found = cls(path, section, seed, given=True)
        if found.missing:
            raise DraftsmithError(
                f"stage2.texts {path} holds {len(found.sequences)} sequences, but {found.count} are needed; lower "
                "stage2.steps, or raise stage2.epochs."
            )
        written = max(len(tokens) - prompt for tokens, prompt in zip(found.sequences, found.prompts, strict=True))
        if written > section.new_tokens:
            raise DraftsmithError(
                f"stage2.texts {path} has continuations of {written} tokens, but stage2.new_tokens is "
                f"{section.new_tokens}; make them agree."
            )
        found._check_readable(vocabulary, context)
        return found

    def _check_readable(self, vocabulary: int, context: int) -> None:
        largest, longest = max(map(max, self.sequences)), max(map(len, self.sequences))
        if largest >= vocabulary:
            raise DraftsmithError(
                f"stage2.texts {self.path} has token {largest}, but the target's tokens end at {vocabulary - 1}; give "
                "the generated.jsonl of a run of this target."
            )
        if longest > context:
            raise DraftsmithError(
                f"stage2.texts {self.path} has a text of {longest} tokens, but the target's context has {context}; "
                "give the generated.jsonl of a run of this target."
            )

    @property
    def missing(self) -> int:
        """The number of sequences still to be made."""
        return max(0, self.count - len(self.sequences))

    @property
    def _together(self) -> int:
        return self.section.batch * BATCHES_SORTED

    @property
    def _fresh_reads(self) -> int:
        return min(FRESH_READS, self.section.epochs)

    def needed(self, number: int) -> int:
        """Return how many sequences micro-batch `number` needs: at first, they are read as they are written."""
        last = (number + 1) * self.section.batch - 1
        group = last // (self._together * self._fresh_reads)
        return min(self.count, (group + 1) * self._together)

    def make(self, prompts: Prompts, generate: Generate, end_tokens: Collection[int] = ()) -> Iterator[int]:
        """Make the missing sequences, one batch per iteration; yield the number of sequences after each.

        Raises:
            DraftsmithError: a continuation is too short and does not end with one of the end tokens, or the file cannot
                be written.
        """
        for _ in range(len(self.sequences)):
            prompts.next_window()
        while self.missing:
            batch = [prompts.next_window().tokens for _ in range(min(self.section.generate_batch, self.missing))]
            wanted = self.section.new_tokens
            written = generate(batch, wanted, noise(self.seed, "generate", len(self.sequences)))
            whole = (len(tokens) == wanted or (tokens[-1:] and tokens[-1] in end_tokens) for tokens in written)
            if len(written) != len(batch) or not all(whole):
                raise DraftsmithError(
                    f"the target did not write {wanted} tokens, or up to its end token, after each of {len(batch)} "
                    "prompts; shorten stage2.new_tokens to what fits its context."
                )
            fresh = [prompt + list(tokens) for prompt, tokens in zip(batch, written, strict=True)]
            lengths = [len(prompt) for prompt in batch]
            self.log.append({"sequences": fresh, "prompts": lengths})
            self.sequences += fresh
            self.prompts += lengths
            yield len(self.sequences)

    def window(self, place: int) -> Window:
        """Return a sequence, in which only the target's text is learnt."""
        tokens = self.sequences[place]
        return Window(tokens, [(self.prompts[place], len(tokens))])

    def batch(self, number: int, room: int = 0) -> Batch:
        """Return micro-batch `number` of the stage, see `collate`; every epoch has another order."""
        size, most = self.section.batch, max(map(len, self.sequences[: self.needed(number)]))
        windows = [self.window(self._place(number * size + i)) for i in range(size)]
        return collate(windows, most, room, again=self.section.epochs > 1)

    def _place(self, draw: int) -> int:
        """Return the sequence of a draw, where draws are counted from the beginning of the stage."""
        epoch, index = divmod(draw, self.count)
        if epoch < self._fresh_reads:
            # Group by group, each as often as all epochs during which texts are still written would read it.
            group, rest = divmod(draw, self._together * self._fresh_reads)
            size = min(self._together, self.count - group * self._together)
            epoch, at = divmod(rest, size)
        else:
            group, at = divmod(index, self._together)
        return self._order(epoch, group)[at]

    def _order(self, epoch: int, group: int) -> list[int]:
        """Return sequences in the order of reading, those of a batch with similar lengths.

        The target reads padding too. So sequences are grouped, in the order of writing in the first epochs, at random
        later. Within a group, the shortest sequences make one batch, and so on; the batches come in random order.
        """
        if (epoch, group) not in self._orders:
            size, generator = self.section.batch, torch.Generator().manual_seed(noise(self.seed, "order", epoch))
            fresh = epoch < self._fresh_reads
            drawn = range(self.count) if fresh else torch.randperm(self.count, generator=generator).tolist()
            some = drawn[group * self._together : (group + 1) * self._together]
            alike = sorted(some, key=lambda place: len(self.sequences[place]))
            whole = len(alike) // size
            generator.manual_seed(noise(self.seed, "batches", epoch, group))
            batches = torch.randperm(whole, generator=generator).tolist()
            order = [place for at in batches for place in alike[at * size : (at + 1) * size]] + alike[whole * size :]
            # A batch may reach from one epoch into the next.
            self._orders = dict([*self._orders.items()][-1:]) | {(epoch, group): order}
        return self._orders[epoch, group]
