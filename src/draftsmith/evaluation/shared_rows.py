"""Reads rows with equal inputs once: thousands of draws from one prompt meet few different prefixes and drafts.

Shapes: B rows, U different rows, M nodes, V vocabulary, S cached tokens.
"""

import torch
from torch import Tensor

from draftsmith.target import KVCache, Target


class WrappedTarget(Target):
    """A target that reads through another one; subclasses change what `forward` does."""

    def __init__(self, inner: Target) -> None:
        # Everything a target knows is as in the inner one; hooks and kernels stay there and are called there.
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
        self,
        cache: KVCache,
        tokens_BM: Tensor,
        depths_BM: Tensor | None,
        visible_BMM: Tensor | None,
        cached_B: Tensor,
        columns_S: Tensor | None,
        taps: tuple[int, ...] = (-1,),
        first_row: int = 0,
        keep_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Let the inner target read; see `Target.forward`."""
        return self.inner.forward(
            cache, tokens_BM, depths_BM, visible_BMM, cached_B, columns_S, taps, first_row, keep_logits
        )


class SharedRows(WrappedTarget):
    """Reads each of several rows with the same inputs, bit for bit, only once, and hands the result to all of them.

    The inputs of a row are its nodes, their depths, the mask and the keys and values it has cached (their bits, by a
    64-bit digest), so a row with a stale cache is not taken for a sound one. What a row gets is what it would get
    alone in the batch: the same as always where the kernels do not mix rows.
    """

    def forward(
        self,
        cache: KVCache,
        tokens_BM: Tensor,
        depths_BM: Tensor | None,
        visible_BMM: Tensor | None,
        cached_B: Tensor,
        columns_S: Tensor | None,
        taps: tuple[int, ...] = (-1,),
        first_row: int = 0,
        keep_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Find the different rows, read them, and copy what they got and stored; see `Target.forward`."""
        batch, nodes = tokens_BM.shape
        slots_B = torch.arange(first_row, first_row + batch, device=tokens_BM.device)
        span = int(cached_B.max()) + nodes
        tree = [] if depths_BM is None or visible_BMM is None else [depths_BM, visible_BMM.reshape(batch, -1).long()]
        digest_B = self._digest(cache, slots_B, cached_B)
        keys_BX = torch.cat([tokens_BM, *tree, cached_B.unsqueeze(1), digest_B.unsqueeze(1)], dim=1)
        _, which_B = torch.unique(keys_BX, dim=0, return_inverse=True)
        count = int(which_B.max()) + 1
        first_U = torch.full((count,), batch, device=which_B.device)
        first_U.scatter_reduce_(0, which_B, torch.arange(batch, device=which_B.device), "amin")
        if count == batch:
            return self.inner.forward(
                cache, tokens_BM, depths_BM, visible_BMM, cached_B, columns_S, taps, first_row, keep_logits
            )
        few = self.inner.new_cache(count, cache.capacity)
        few.rows = count
        for mine_RCHD, theirs_RCHD in zip(few.tensors, cache.tensors, strict=True):
            mine_RCHD[:, :span] = theirs_RCHD[slots_B[first_U], :span]
        logits_UMV, features_UMF = self.inner.forward(
            few,
            tokens_BM[first_U],
            None if depths_BM is None else depths_BM[first_U],
            None if visible_BMM is None else visible_BMM[first_U],
            cached_B[first_U], columns_S, taps, 0, keep_logits,
        )
        for mine_RCHD, theirs_RCHD in zip(few.tensors, cache.tensors, strict=True):
            theirs_RCHD[slots_B, :span] = mine_RCHD[which_B, :span]
        return logits_UMV[which_B], features_UMF[which_B]

    def _digest(self, cache: KVCache, slots_B: Tensor, cached_B: Tensor) -> Tensor:
        """Return 64 bits (B, int64) of every row's cached keys and values: a sum of their bits with odd weights."""
        longest = int(cached_B.max())
        digest_B = torch.zeros_like(cached_B)
        if longest == 0:
            return digest_B
        held_BS = torch.arange(longest, device=cached_B.device) < cached_B.unsqueeze(1)
        for number, tensor_RCHD in enumerate(cache.tensors):
            rows_BSX = tensor_RCHD[slots_B, :longest].flatten(2)
            bits_BSX = rows_BSX.view(torch.int16).long()
            weights_SX = _odd_weights(number, bits_BSX.shape[1], bits_BSX.shape[2]).to(bits_BSX.device)
            digest_B = digest_B * 31 + ((bits_BSX * weights_SX).sum(2) * held_BS).sum(1)
        return digest_B


def _odd_weights(seed: int, positions: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (positions, width), generator=generator) * 2 + 1
