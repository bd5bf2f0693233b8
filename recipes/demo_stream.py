"""The order in which the demo target reads its data: a function of the number of the window alone.

So a run that goes on needs no memory of what it read, only the number of its step. Sources take turns by their share.
Each source is read in epochs; of an epoch the documents are shuffled, put in a row, cut into windows, and the windows
shuffled again.
"""

import random
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.trainable import storage
from draftsmith.types import DraftsmithError


class Source:
    """The documents of one source, as windows of `length` + 1 tokens that overlap by one."""

    def __init__(self, path: Path, length: int, seed: int) -> None:
        kept = storage.read_tensor_file(path)
        self.tokens, self.ends = kept["tokens"], kept["ends"].tolist()
        self.length, self.seed = length, seed
        self.windows = (len(self.tokens) - 1) // length
        if not self.windows:
            raise DraftsmithError(f"{path} has fewer than {length + 1} tokens; prepare more text, or shorten --length.")
        self._epoch = -1
        self._row = self.tokens
        self._order: list[int] = []

    def window(self, number: int) -> Tensor:
        """Return the window with this number, from 0 on over all epochs."""
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            self._shuffle(epoch)
        begin = self._order[place] * self.length
        return self._row[begin : begin + self.length + 1].long()

    def _shuffle(self, epoch: int) -> None:
        rng = random.Random(f"{self.seed} {epoch}")
        begins = [0, *self.ends[:-1]]
        documents = rng.sample(range(len(begins)), len(begins))
        self._row = torch.cat([self.tokens[begins[index] : self.ends[index]] for index in documents])
        self._order = rng.sample(range(self.windows), self.windows)
        self._epoch = epoch


class Stream:
    """Batches of all sources by their shares.

    Args:
        folder: what `demo_data.py` wrote.
        shares: how much of the tokens each source gives; they need not add up to 1.
    """

    def __init__(self, folder: Path, shares: Mapping[str, float], length: int, batch: int, seed: int) -> None:
        self.shares = dict(shares)
        self.batch = batch
        self.sources = {name: Source(folder / f"{name}.safetensors", length, seed) for name in shares}
        self._taken = dict.fromkeys(shares, 0)

    def skip(self, steps: int) -> None:
        """Go on behind so many batches."""
        for _ in range(steps * self.batch):
            self._turn()

    def next_batch(self) -> Tensor:
        """Return the next batch: (batch, length + 1)."""
        rows = []
        for _ in range(self.batch):
            name, number = self._turn()
            rows.append(self.sources[name].window(number))
        return torch.stack(rows)

    def epochs(self) -> dict[str, float]:
        """Return how often each source was read so far."""
        return {name: round(self._taken[name] / source.windows, 3) for name, source in self.sources.items()}

    def _turn(self) -> tuple[str, int]:
        """Return whose turn it is, the source that is furthest behind its share, and the number of its window."""
        name = min(self.shares, key=lambda each: (self._taken[each] + 0.5) / self.shares[each])
        self._taken[name] += 1
        return name, self._taken[name] - 1


def held_out_windows(folder: Path, name: str, length: int, count: int) -> Tensor:
    """Return windows of a source's held-out documents, in a row as training reads them: (count, length + 1)."""
    tokens = storage.read_tensor_file(folder / f"{name}.held-out.safetensors")["tokens"]
    count = min(count, (len(tokens) - 1) // length)
    if not count:
        raise DraftsmithError(f"{name} has fewer than {length + 1} held-out tokens; shorten --length.")
    # Spread over the documents, so that the loss is not that of the first ones alone.
    apart = (len(tokens) - 1 - length) // max(1, count - 1) if count > 1 else 0
    return torch.stack([tokens[index * apart : index * apart + length + 1].long() for index in range(count)])
