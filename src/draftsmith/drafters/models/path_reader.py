"""Reads tokens with a whole model, behind the tokens that its cache holds.

Shapes: B rows, M nodes of a forward, F frontier nodes a row, D tokens of a path, R = B × F, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.replays import CudaGraphs, Recorder, Replays, can_replay, few_spans
from draftsmith.targets import KVCache, Nodes, Target

ROOM = 256
"""Cache entries needed behind the longest text, for the paths of a forward."""
SCRATCH = -1
"""The row number that marks padding."""
RECORDED = 16
"""Forwards of up to so many tokens a row are recorded on a GPU: guesses, and what a step committed."""


class PathReader:
    """Reads with a model behind the rows of a cache.

    Args:
        cache: of the model's own shapes, or one whose first layers are the model's.
        chunk: the most tokens per row in one forward, at most `ROOM`.
        recorder: records short forwards; by default one for the model's device, if it is a GPU.
    """

    def __init__(
        self, model: Target, cache: KVCache, chunk: int = ROOM, recorder: Recorder | None = None
    ) -> None:
        self.model, self.cache, self.chunk = model, cache, chunk
        if recorder is None and can_replay(model.device):
            recorder = CudaGraphs(model.device)
        self._recorded = None if recorder is None else Replays(model.forward, recorder, copies=True)

    def _forward(self, nodes: Nodes, longest: int, keep_logits: Tensor | None) -> Tensor:
        """Return the logits of a forward behind at most `longest` tokens of a row."""
        count = nodes.tokens_BM.shape[1]
        recorded = self._recorded if count <= RECORDED else None
        span = longest + count if recorded is None else min(few_spans(longest + count), self.cache.capacity)
        nodes.columns_S = self.model.backend.columns(lambda: span)
        logits_BUV: Tensor
        logits_BUV, _ = (recorded or self.model.forward)(self.cache, nodes, (), keep_logits)
        return logits_BUV

    def read(self, held: Sequence[int], fresh: Sequence[Sequence[int]], slots_B: Tensor | None = None) -> Tensor:
        """Read `fresh[b]`, at least one token, behind the first `held[b]` tokens of row b.

        Returns the logits after the last token of every row (B, V). The rows before the first one with a whole text to
        read are read separately, so that they do not wait for its length.

        Args:
            slots_B: slot of every row in the cache; None for row b in slot b.
        """
        joined = next((b for b, tokens in enumerate(fresh) if not held[b] and len(tokens) > 1), len(held))
        parts = [list(range(joined)), list(range(joined, len(held)))]
        return torch.cat([self._read_rows(held, fresh, slots_B, rows) for rows in parts if rows])

    def _read_rows(
        self, held: Sequence[int], fresh: Sequence[Sequence[int]], slots_B: Tensor | None, rows: list[int]
    ) -> Tensor:
        last: dict[int, Tensor] = {}
        device = self.model.device
        everybody = len(held)
        for start in range(0, max(len(fresh[b]) for b in rows), self.chunk):
            going = [b for b in rows if start < len(fresh[b])]
            pieces = [fresh[b][start : start + self.chunk] for b in going]
            sizes = [len(piece) for piece in pieces]
            size = max(sizes)
            tokens_BM = torch.tensor([[*piece, *[0] * (size - len(piece))] for piece in pieces], device=device)
            before = [held[b] + start for b in going]
            if len(going) == everybody:
                slots = slots_B
            elif slots_B is None:
                slots = torch.tensor(going, device=device)
            else:
                slots = slots_B[going]
            counts_B = None if min(sizes) == size else torch.tensor(sizes, device=device)
            ends_B1 = torch.tensor([[count - 1] for count in sizes], device=device)
            nodes = Nodes(tokens_BM, torch.tensor(before, device=device), slots, counts_B=counts_B)
            logits_B1V = self._forward(nodes, max(before), ends_B1)
            last |= {b: logits_B1V[i, 0] for i, b in enumerate(going)}
        return torch.stack([last[b] for b in rows])

    def read_paths(
        self, held: Sequence[int], paths_BFD: Tensor, slots_B: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Read F paths per row behind the row's first `held[b]` tokens; no path sees another.

        They are read as one tree, or as several if the cache has too little room.

        Args:
            slots_B: slot of every row in the cache; None for row b in slot b.

        Returns:
            the logits after the last token of every path (R, V), and the index of the path that ends up right behind
            the `held` tokens in the cache, token after token, as if it were text.
        """
        frontier, length = paths_BFD.shape[1:]
        most = max(1, min(self.cache.capacity - max(held), ROOM) // length)
        logits = []
        for start in range(0, frontier, most):
            nodes_BM = paths_BFD[:, start : start + most].flatten(1)
            count = nodes_BM.shape[1] // length
            path_M = torch.arange(count).repeat_interleave(length)
            visible_MM = (path_M.unsqueeze(1) == path_M) & torch.ones((len(path_M),) * 2, dtype=torch.bool).tril()
            columns = list(range(length - 1, count * length, length))
            depths_M = torch.arange(length).repeat(count)
            logits.append(self._read_tree(nodes_BM, depths_M, visible_MM, held, columns, slots_B))
        return torch.cat(logits, dim=1).flatten(0, 1), start

    def _read_tree(
        self, tokens_BM: Tensor, depths_M: Tensor, visible_MM: Tensor, held: Sequence[int], columns: list[int],
        slots_B: Tensor | None,
    ) -> Tensor:
        batch, nodes = tokens_BM.shape
        device = self.model.device
        tree = Nodes(
            tokens_BM,
            torch.tensor(held, device=device),
            slots_B,
            depths_M.to(device).expand(batch, -1),
            visible_MM.to(device).expand(batch, -1, -1),
        )
        every = len(columns) == nodes
        return self._forward(tree, max(held), None if every else torch.tensor(columns, device=device))
