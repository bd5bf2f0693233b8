"""Text that the target wrote after prompts from the data: made once, kept in the run's folder, read several times.

It is made in numbered batches, each with its own prompts and seed, so a run that was killed goes on with the first
batch that is missing. Shapes: B sequences, L = prompt + new tokens.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.files import JsonLines
from draftsmith.training.data import Loader, noise
from draftsmith.training.recipe import OnPolicySection
from draftsmith.types import DraftsmithError

Generate = Callable[[list[list[int]], int, int], list[list[int]]]


class GeneratedText:
    """The sequences (prompt and continuation) of stage 2."""

    def __init__(self, path: Path, section: OnPolicySection, seed: int) -> None:
        self.path, self.section, self.seed = path, section, seed
        needed = section.steps * section.batch * section.accumulate
        self.count = -(-needed // section.epochs)
        self._orders: dict[int, list[int]] = {}
        # What a kill left of the last line is made again.
        self.log = JsonLines(path, "restore it from a good copy, or delete it to write again", "go on with the run")
        self.sequences: list[list[int]] = [tokens for record in self.log.read() for tokens in record["sequences"]]

    @classmethod
    def of(cls, path: Path, section: OnPolicySection, seed: int) -> "GeneratedText":
        """Take up a file that another run wrote.

        Raises:
            DraftsmithError: it is not there, or holds too few sequences, or sequences of another length.
        """
        if not path.is_file():
            raise DraftsmithError(f"stage2.texts {path} does not exist; give the generated.jsonl of a run.")
        found = cls(path, section, seed)
        if found.missing:
            raise DraftsmithError(
                f"stage2.texts {path} holds {len(found.sequences)} sequences, but {found.count} are needed; lower "
                "stage2.steps, or raise stage2.epochs."
            )
        length = section.prompt_tokens + section.new_tokens
        other = next((len(tokens) for tokens in found.sequences if len(tokens) != length), length)
        if other != length:
            raise DraftsmithError(
                f"stage2.texts {path} has sequences of {other} tokens, but stage2.prompt_tokens + stage2.new_tokens is "
                f"{length}; make them agree."
            )
        return found

    @property
    def missing(self) -> int:
        """Sequences still to be made."""
        return max(0, self.count - len(self.sequences))

    def make(self, prompts: Loader, generate: Generate) -> Iterator[int]:
        """Make what is missing, yielding how many sequences there are after each batch.

        Raises:
            DraftsmithError: a continuation is shorter than it should be, or the file cannot be written.
        """
        for _ in range(len(self.sequences)):
            prompts.next_window()
        while self.missing:
            batch = [prompts.next_window() for _ in range(min(self.section.generate_batch, self.missing))]
            wanted = self.section.new_tokens
            written = generate(batch, wanted, noise(self.seed, "generate", len(self.sequences)))
            if len(written) != len(batch) or any(len(tokens) != wanted for tokens in written):
                raise DraftsmithError(
                    f"the target did not write {wanted} tokens after each of {len(batch)} prompts; "
                    "shorten stage2.new_tokens to what fits its context."
                )
            fresh = [prompt + list(tokens) for prompt, tokens in zip(batch, written, strict=True)]
            self.log.append({"sequences": fresh})
            self.sequences += fresh
            yield len(self.sequences)

    def batch(self, number: int) -> Tensor:
        """Return tokens_BL of micro-batch `number` of the stage; every epoch reads the sequences in another order."""
        size = self.section.batch
        return torch.tensor([self.sequences[self._place(number * size + i)] for i in range(size)], dtype=torch.int64)

    def _place(self, draw: int) -> int:
        epoch, index = divmod(draw, self.count)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(noise(self.seed, "order", epoch))
            self._orders = {epoch: torch.randperm(self.count, generator=generator).tolist()} | {
                e: order for e, order in self._orders.items() if e == epoch - 1
            }
        return self._orders[epoch][index]
