"""Finds a model's stack of layers, and copies the modules around the stack while sharing all others."""

import copy
from collections import OrderedDict
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from draftsmith.types import DraftsmithError

M = TypeVar("M", bound=nn.Module)


def layer_stack(model: PreTrainedModel, layers: int, name: str) -> tuple[str, nn.ModuleList]:
    """Find the one list of `layers` modules in the base model; return its path (`layers`, `decoder.layers`) and it."""
    base: nn.Module = model.base_model
    stacks = _stacks(base, layers)
    if len(stacks) > 1:  # multimodal models have other towers beside their decoder, or further down inside it
        inside = set(model.get_decoder().modules())
        stacks = [found for found in stacks if found[1] in inside] or stacks
        depths = [path.count(".") for path, _ in stacks]
        stacks = [stack for stack, depth in zip(stacks, depths, strict=True) if depth == min(depths)]
    if len(stacks) != 1:
        raise DraftsmithError(
            f"{name} has {len(stacks)} stacks of {layers} layers where one is needed to tap states; "
            f"its kind ({model.config.model_type}) is not supported yet."
        )
    return stacks[0]


def _stacks(base: nn.Module, layers: int) -> list[tuple[str, nn.ModuleList]]:
    """Find the lists of `layers` modules that are not inside such a list themselves."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in base.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == layers and not inside:
            found.append((path, module))
    return found


def with_stack(base: M, path: str, stack: nn.ModuleList) -> M:
    """Return a copy of a base model with another list of layers at that path; modules off the path are shared."""
    outer, _, rest = path.partition(".")
    changed = twin(base)
    inner = base._modules[outer]
    assert inner is not None
    changed._modules[outer] = with_stack(inner, rest, stack) if rest else stack
    return changed


def twin(module: M) -> M:
    """Copy one module, without copying its children or its hooks."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._forward_hooks = OrderedDict()
    return twin
