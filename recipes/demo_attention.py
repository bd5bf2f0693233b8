"""Causal attention for training on a CPU, forward and backward in blocks of queries.

    python recipes/demo_attention.py --threads 1

times it against PyTorch's own at the sizes of the demo target. It multiplies whole blocks in bf16, gives the query
heads that share keys one product, leaves out the keys behind a block, and keeps the probabilities for the backward
pass. `register` makes it known to transformers by the name `causal_blocks`.
Shapes: B batch, H query heads, K heads of keys and values, T positions, D head width; rows are the queries of a block,
those of all H / K heads one after the other.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "causal_blocks"
BLOCK = 128


def _rows(values_BHTD: Tensor, heads: int, begin: int, end: int) -> Tensor:
    batch, _, _, width = values_BHTD.shape
    return values_BHTD.unflatten(1, (heads, -1))[:, :, :, begin:end].reshape(batch * heads, -1, width)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK)]


@torch.library.custom_op("draftsmith_recipes::causal_attention", mutates_args=())
def causal_attention(queries_BHTD: Tensor, keys_BKTD: Tensor, values_BKTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, T, D) and, flat, the probabilities of all blocks; the queries are scaled already."""
    batch, heads, length, width = queries_BHTD.shape
    groups = keys_BKTD.shape[1]
    keys, values = keys_BKTD.flatten(0, 1), values_BKTD.flatten(0, 1)
    out = torch.empty_like(queries_BHTD, memory_format=torch.contiguous_format)
    grouped = out.unflatten(1, (groups, -1))
    hidden = torch.full((BLOCK, BLOCK), float("-inf"), dtype=keys.dtype).triu(1)
    kept = []
    for begin, end in _blocks(length):
        scores = torch.bmm(_rows(queries_BHTD, groups, begin, end), keys[:, :end].transpose(1, 2))
        scores.unflatten(1, (-1, end - begin))[..., begin:] += hidden[: end - begin, : end - begin]
        probabilities = torch.softmax(scores, -1)
        mixed = torch.bmm(probabilities, values[:, :end])
        grouped[:, :, :, begin:end] = mixed.view(batch, groups, heads // groups, end - begin, width)
        kept.append(probabilities.flatten())
    return out, torch.cat(kept)


@causal_attention.register_fake
def _(queries_BHTD: Tensor, keys_BKTD: Tensor, values_BKTD: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = queries_BHTD.shape
    kept = sum((end - begin) * end for begin, end in _blocks(length))
    return queries_BHTD.new_empty(queries_BHTD.shape), queries_BHTD.new_empty(batch * heads * kept)


@torch.library.custom_op("draftsmith_recipes::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad_BHTD: Tensor, queries_BHTD: Tensor, keys_BKTD: Tensor, values_BKTD: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    batch, heads, length, width = queries_BHTD.shape
    groups = keys_BKTD.shape[1]
    keys, values = keys_BKTD.flatten(0, 1), values_BKTD.flatten(0, 1)
    to_queries = torch.empty_like(queries_BHTD, memory_format=torch.contiguous_format)
    grouped = to_queries.unflatten(1, (groups, -1))
    to_keys, to_values = (torch.zeros(keys.shape, dtype=torch.float32) for _ in range(2))
    taken = 0
    for begin, end in _blocks(length):
        queries, grad = (_rows(each, groups, begin, end) for each in (queries_BHTD, grad_BHTD))
        shape = (batch * groups, queries.shape[1], end)
        probabilities = kept[taken : taken + shape[0] * shape[1] * shape[2]].view(shape)
        taken += probabilities.numel()
        to_values[:, :end] += torch.bmm(probabilities.transpose(1, 2), grad)
        to_probabilities = torch.bmm(grad, values[:, :end].transpose(1, 2))
        to_scores = torch.ops.aten._softmax_backward_data(to_probabilities, probabilities, -1, probabilities.dtype)
        mixed = torch.bmm(to_scores, keys[:, :end])
        grouped[:, :, :, begin:end] = mixed.view(batch, groups, heads // groups, end - begin, width)
        to_keys[:, :end] += torch.bmm(to_scores.transpose(1, 2), queries)
    return to_queries, to_keys.to(keys.dtype).view(keys_BKTD.shape), to_values.to(keys.dtype).view(keys_BKTD.shape)


@causal_attention_backward.register_fake
def _(
    grad_BHTD: Tensor, queries_BHTD: Tensor, keys_BKTD: Tensor, values_BKTD: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = queries_BHTD.new_empty
    return new(queries_BHTD.shape), new(keys_BKTD.shape), new(values_BKTD.shape)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx, grad_BHTD: Tensor, _grad_kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return causal_attention_backward(grad_BHTD.contiguous(), *ctx.saved_tensors)


causal_attention.register_autograd(_backward, setup_context=_keep)


def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **options):
    """What transformers calls: (B, H, T, D) in, (B, T, H, D) out; always causal, never masked otherwise."""
    narrow = [each.to(torch.bfloat16).contiguous() for each in (query * scaling, key, value)]
    return causal_attention(*narrow)[0].transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the attention known to transformers and return its name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *arguments, **options: None)
    return NAME


def _by_pytorch(queries_BHTD: Tensor, keys_BKTD: Tensor, values_BKTD: Tensor) -> Tensor:
    repeated = [each.repeat_interleave(queries_BHTD.shape[1] // each.shape[1], 1) for each in (keys_BKTD, values_BKTD)]
    return F.scaled_dot_product_attention(queries_BHTD, *repeated, is_causal=True).transpose(1, 2)


def main() -> None:
    """Time both, taking turns; processor seconds, which other work on the machine changes less than the clock's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    inputs = [torch.randn(8, heads, 512, 64).bfloat16().requires_grad_() for heads in (6, 2, 2)]
    grad = torch.randn(8, 512, 6, 64).bfloat16()
    ways = {"PyTorch": _by_pytorch, "blocks": lambda *each: attend(None, *each, None, 64**-0.5)[0]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            begun = time.process_time()
            torch.autograd.grad(way(*inputs), inputs, grad)
            seconds[name].append(time.process_time() - begun)
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {1000 * median:.0f} ms of the processor, forward and backward of 8 windows of 512")
    print(f"ratio {medians['PyTorch'] / medians['blocks']:.2f}")


if __name__ == "__main__":
    main()
