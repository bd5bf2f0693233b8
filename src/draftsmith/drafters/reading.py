"""Reads tokens with a whole model behind what the rows of its cache hold, and keeps those rows in the engine's order.

Shapes: B rows, M nodes of a forward, F frontier nodes a row, D tokens of a path, R = B × F, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.target import KVCache, Target

ROOM = 256
"""Entries that a cache needs behind the longest text: for the paths of a forward, and the padding of ragged rows."""
SCRATCH = -1
"""The number of a row that is only padding."""


class PathReader:
    """Reads with a model behind the rows of a cache, row b in slot b.

    Args:
        cache: of the model's own shapes, or one whose first layers are the model's.
        chunk: most tokens a row in one forward, at most `ROOM`.
    """

    def __init__(self, model: Target, cache: KVCache, chunk: int = ROOM) -> None:
        self.model, self.cache, self.chunk = model, cache, chunk

    def read(self, held: Sequence[int], fresh: Sequence[Sequence[int]]) -> Tensor:
        """Read `fresh[b]`, at least one token, behind the first `held[b]` tokens of row b.

        Returns the logits after the last token of every row (B, V). Rows from the first with a whole text to read on
        go by themselves, so that the others do not wait for their length.
        """
        joined = next((b for b, tokens in enumerate(fresh) if not held[b] and len(tokens) > 1), len(held))
        parts = [(0, joined), (joined, len(held))]
        return torch.cat([self._read_rows(held[a:z], fresh[a:z], a) for a, z in parts if a < z])

    def _read_rows(self, held: Sequence[int], fresh: Sequence[Sequence[int]], first_row: int) -> Tensor:
        lengths = [len(tokens) for tokens in fresh]
        last: list[Tensor | None] = [None] * len(fresh)
        for start in range(0, max(lengths), self.chunk):
            pieces = [tokens[start : start + self.chunk] for tokens in fresh]
            # Shorter rows are padded behind their end, where the next forward overwrites.
            size = max(len(piece) for piece in pieces)
            tokens_BM = torch.tensor([[*piece, *[0] * (size - len(piece))] for piece in pieces])
            ends = {b: length - 1 - start for b, length in enumerate(lengths) if start < length <= start + size}
            columns = sorted(set(ends.values())) or [0]
            before = [h + min(start, length) for h, length in zip(held, lengths, strict=True)]
            device = self.model.device
            logits_BUV, _ = self.model.read_chain(
                self.cache, tokens_BM.to(device), torch.tensor(before, device=device), (), first_row,
                torch.tensor(columns, device=device), max(before),
            )
            for b, end in ends.items():
                last[b] = logits_BUV[b, columns.index(end)]
        return torch.stack([logits_V for logits_V in last if logits_V is not None])

    def read_paths(self, held: Sequence[int], paths_BFD: Tensor) -> tuple[Tensor, int]:
        """Read F paths a row behind its first `held[b]` tokens, none seeing another.

        They are read as one tree, or as several where the cache has no room for it.

        Returns:
            the logits after the last token of every path (R, V), and which path lies right behind the `held` tokens
            in the end, token after token, as if it were text.
        """
        frontier, length = paths_BFD.shape[1:]
        most = max(1, (self.cache.capacity - max(held)) // length)
        logits = []
        for start in range(0, frontier, most):
            nodes_BM = paths_BFD[:, start : start + most].flatten(1)
            count = nodes_BM.shape[1] // length
            path_M = torch.arange(count).repeat_interleave(length)
            visible_MM = (path_M.unsqueeze(1) == path_M) & torch.ones((len(path_M),) * 2, dtype=torch.bool).tril()
            columns = list(range(length - 1, count * length, length))
            logits.append(self._read_tree(nodes_BM, torch.arange(length).repeat(count), visible_MM, held, columns))
        return torch.cat(logits, dim=1).flatten(0, 1), start

    def _read_tree(
        self, tokens_BM: Tensor, depths_M: Tensor, visible_MM: Tensor, held: Sequence[int], columns: list[int]
    ) -> Tensor:
        batch, nodes = tokens_BM.shape
        device = self.model.device
        logits_BUV, _ = self.model.forward(
            self.cache,
            tokens_BM,
            depths_M.to(device).expand(batch, -1),
            visible_MM.to(device).expand(batch, -1, -1),
            torch.tensor(held, device=device),
            None if self.model.is_native else torch.arange(max(held) + nodes, device=device),
            taps=(),
            keep_logits=None if len(columns) == nodes else torch.tensor(columns, device=device),
        )
        return logits_BUV


class RowSlots:
    """Says which row of the engine lies in which slot of a cache, and moves rows until that is the engine's order.

    The cache needs one slot more than there are rows at a time.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows = [SCRATCH] * cache.slots

    def arrange(self, order: Sequence[int], held: Mapping[int, int]) -> None:
        """Bring row `order[b]` to slot b; `held` says how many tokens of each row are worth moving, if any."""
        wanted = {row for row in order if row != SCRATCH}
        for slot, row in enumerate(order):
            occupant = self.rows[slot]
            if occupant == row:
                continue
            if occupant in wanted:
                free = next(s for s, other in enumerate(self.rows) if other not in wanted)
                self._move(slot, free, held)
            if row in self.rows and row != SCRATCH:
                self._move(self.rows.index(row), slot, held)
            self.rows[slot] = row

    def forget(self, rows: Sequence[int]) -> None:
        """Free the slots of these rows."""
        self.rows = [SCRATCH if row in rows else row for row in self.rows]

    def _move(self, source: int, destination: int, held: Mapping[int, int]) -> None:
        self.cache.copy_row(source, destination, held.get(self.rows[source], 0))
        self.rows[destination], self.rows[source] = self.rows[source], SCRATCH
