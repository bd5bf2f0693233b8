"""Reads rows with equal inputs only once: thousands of draws from one prompt have few different prefixes and drafts.

Shapes: B rows, U different rows, M nodes, V vocabulary, S cached tokens.
"""

import torch
from torch import Tensor

from draftsmith.targets import KVCache, Nodes, Target


class WrappedTarget(Target):
    """A target that reads through another one; subclasses change what `forward` does."""

    def __init__(self, inner: Target) -> None:
        # All attributes are those of the inner target; its hooks and kernels stay there and are called there.
        vars(self).update(vars(inner))
        self.inner = inner

    def encode(
        self,
        tokens_BT: Tensor,
        taps: tuple[int, ...] = (-1,),
        logits: bool = False,
        gradients: bool = False,
        by_model: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Let the inner target read whole sequences."""
        return self.inner.encode(tokens_BT, taps, logits, gradients, by_model)

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Let the inner target read; see `Target.forward`."""
        return self.inner.forward(cache, nodes, taps, keep_logits)


class SharedRows(WrappedTarget):
    """Reads each of several rows with the same inputs, bit for bit, only once, and hands the result to all of them.

    The inputs of a row are its nodes, their depths, the mask and the keys and values it has cached (their bits, by a
    64-bit digest), so a row with a stale cache is not taken for a sound one. A row gets what it would get in a batch
    without its copies, which is the usual result where the kernels do not mix rows.
    """

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the different rows, read them, and copy their results and cache entries; see `Target.forward`."""
        batch, count = nodes.tokens_BM.shape
        device = nodes.tokens_BM.device
        slots_B = torch.arange(batch, device=device) if nodes.slots_B is None else nodes.slots_B
        span = int(nodes.cached_B.max()) + count
        digest_B = self._digest(cache, slots_B, nodes.cached_B)
        parts = [nodes.tokens_BM, nodes.cached_B.unsqueeze(1), digest_B.unsqueeze(1)]
        if nodes.depths_BM is not None and nodes.visible_BMM is not None:
            parts += [nodes.depths_BM, nodes.visible_BMM.reshape(batch, -1).long()]
        if nodes.counts_B is not None:
            parts.append(nodes.counts_B.unsqueeze(1))
        if keep_logits is not None and keep_logits.ndim == 2:
            parts.append(keep_logits)
        _, which_B = torch.unique(torch.cat(parts, dim=1), dim=0, return_inverse=True)
        different = int(which_B.max()) + 1
        if different == batch:
            return self.inner.forward(cache, nodes, taps, keep_logits)
        first_U = torch.full((different,), batch, device=device)
        first_U.scatter_reduce_(0, which_B, torch.arange(batch, device=device), "amin")

        def of_these(tensor_BX: Tensor | None) -> Tensor | None:
            return None if tensor_BX is None else tensor_BX[first_U]

        few = self.inner.new_cache(different, cache.capacity)
        places_UP = torch.arange(span, device=device).expand(different, -1)
        self._copy(cache, cache.entries(slots_B[first_U], places_UP), few, few.entries(None, places_UP))
        some = Nodes(
            nodes.tokens_BM[first_U], nodes.cached_B[first_U], None, of_these(nodes.depths_BM),
            of_these(nodes.visible_BMM), of_these(nodes.counts_B), nodes.columns_S,
        )
        own = keep_logits[first_U] if keep_logits is not None and keep_logits.ndim == 2 else keep_logits
        logits_UMV, features_UMF = self.inner.forward(few, some, taps, own)
        # A row's cached tokens equal those of the row that was read for it; only the entries of its nodes are new.
        number_BM = torch.arange(count, device=device).expand(batch, -1)
        if nodes.counts_B is not None:
            number_BM = torch.minimum(number_BM, nodes.counts_B.unsqueeze(1) - 1)
        places_BM = nodes.cached_B.unsqueeze(1) + number_BM
        self._copy(few, few.entries(which_B, places_BM), cache, cache.entries(slots_B, places_BM))
        return logits_UMV[which_B], features_UMF[which_B]

    @staticmethod
    def _copy(source: KVCache, from_BP: Tensor, destination: KVCache, to_BP: Tensor) -> None:
        for theirs_NEHD, mine_NEHD in zip(source.tensors, destination.tensors, strict=True):
            mine_NEHD.flatten(0, 1)[to_BP.flatten()] = theirs_NEHD.flatten(0, 1)[from_BP.flatten()]

    def _digest(self, cache: KVCache, slots_B: Tensor, cached_B: Tensor) -> Tensor:
        """Return 64 bits (B, int64) of every row's cached keys and values: a sum of their bits with odd weights."""
        longest = int(cached_B.max())
        digest_B = torch.zeros_like(cached_B)
        if longest == 0:
            return digest_B
        held_BS = torch.arange(longest, device=cached_B.device) < cached_B.unsqueeze(1)
        entries_BS = cache.entries(slots_B, torch.arange(longest, device=cached_B.device).expand(len(slots_B), -1))
        entries_BS = entries_BS.masked_fill(~held_BS, 0)
        for number, tensor_NEHD in enumerate(cache.tensors):
            rows_BSX = tensor_NEHD.flatten(0, 1)[entries_BS].flatten(2)
            bits_BSX = rows_BSX.view(torch.int16).long()
            weights_SX = _odd_weights(number, bits_BSX.shape[1], bits_BSX.shape[2]).to(bits_BSX.device)
            digest_B = digest_B * 31 + ((bits_BSX * weights_SX).sum(2) * held_BS).sum(1)
        return digest_B


def _odd_weights(seed: int, positions: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (positions, width), generator=generator) * 2 + 1
