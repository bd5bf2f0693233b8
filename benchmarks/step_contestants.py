"""The contestants of `step_cost.py`: who reads M tokens behind cached ones, each as a `Step`.

Shapes: M tokens of a step, L tokens in all, S cached entries looked at, V vocabulary, N outputs, K inputs.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gguf_export import LlamaCpp
from torch import Tensor
from transformers import DynamicCache

from draftsmith.engine.steps.runner import Runner
from draftsmith.native.layers import PackedLinear
from draftsmith.targets import Nodes, Target

Logits = Callable[[], Tensor]
Step = Callable[[int, int], tuple[float, Logits]]
"""Reads M tokens behind so many cached ones; returns the seconds, and the logits (M, V) for whoever wants them."""


def native_step(target: Target, tokens_1L: Tensor) -> Step:
    """Read through the target as it is: natively, or by PyTorch where it is not native."""
    return runner_step(Runner(target), target, tokens_1L)


def runner_step(runner: Runner, target: Target, tokens_1L: Tensor) -> Step:
    """Read as an engine's runner does; the cache is filled beforehand, without compiled code."""
    length = tokens_1L.shape[1]
    cache = target.new_cache(1, length)
    depths_1L = torch.arange(length).unsqueeze(0)
    visible_1LL = torch.ones((1, length, length), dtype=torch.bool).tril()
    target.read_chain(cache, tokens_1L, torch.tensor([0]), ())

    def step(context: int, nodes: int) -> tuple[float, Logits]:
        tokens_1M = tokens_1L[:, context : context + nodes].contiguous()
        depths_1M = depths_1L[:, :nodes].contiguous()
        visible_1MM = visible_1LL[:, :nodes, :nodes].contiguous()
        cached_1 = torch.tensor([context])
        columns_S = runner.columns(lambda: min(cache.capacity, runner.span(context + nodes)))
        nodes_1 = Nodes(tokens_1M, cached_1, None, depths_1M, visible_1MM, columns_S=columns_S)
        begun = time.perf_counter()
        logits_1MV, _ = runner.forward(cache, nodes_1, ())
        return time.perf_counter() - begun, lambda: logits_1MV[0].float()

    return step


def eager_step(model: Any, tokens_1L: Tensor) -> Step:
    """Read through the transformers model, with the cache its `generate` would use."""
    cache = DynamicCache(config=model.config)

    def step(context: int, nodes: int) -> tuple[float, Logits]:
        held = cache.get_seq_length()
        if held > context:
            cache.crop(context - held)
        elif held < context:
            model(tokens_1L[:, held:context], past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens_1M = tokens_1L[:, context : context + nodes].contiguous()
        begun = time.perf_counter()
        logits_1MV = model(tokens_1M, past_key_values=cache, use_cache=True).logits
        return time.perf_counter() - begun, lambda: logits_1MV[0].float()

    return step


def llama_cpp_step(opened: LlamaCpp, tokens_1L: Tensor) -> Step:
    """Read through llama.cpp; writing ids and positions into its batch is not timed."""
    ids = tokens_1L[0].tolist()

    def step(context: int, nodes: int) -> tuple[float, Logits]:
        opened.cut(context)
        if opened.held < context:
            opened.logits(ids[opened.held : context])
        opened.stage(ids[context : context + nodes])
        begun = time.perf_counter()
        opened.read_staged()
        return time.perf_counter() - begun, lambda: torch.from_numpy(opened.staged_logits())

    return step


def products_step(layers: Sequence[tuple[Tensor, int, int]]) -> Step:
    """Multiply M rows with every one of some packed layers (weights, N, K), and do nothing else."""
    rows_MK: dict[tuple[int, int], Tensor] = {}

    def step(context: int, nodes: int) -> tuple[float, Logits]:
        for _, _, inputs in layers:
            rows_MK.setdefault((nodes, inputs), torch.randn(nodes, inputs, dtype=torch.bfloat16))
        work = [(rows_MK[nodes, inputs], packed, outputs) for packed, outputs, inputs in layers]
        linear = torch.ops.draftsmith.linear
        begun = time.perf_counter()
        for rows, packed, outputs in work:
            linear(rows, packed, None, outputs)
        return time.perf_counter() - begun, lambda: torch.empty(0)

    return step


def packed_layers(target: Target) -> list[tuple[Tensor, int, int]]:
    """Return weights, N and K of the packed linear layers, head included."""
    layers = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    return [(layer.packed, layer.out_features, layer.in_features) for layer in layers]


def small_layers(count: int) -> list[tuple[Tensor, int, int]]:
    """Return one layer so many times: large enough to wake the threads, small enough to stay in the cache."""
    packed = torch.ops.draftsmith.pack(torch.zeros(128, 256, dtype=torch.bfloat16))
    return [(packed, 128, 256)] * count
