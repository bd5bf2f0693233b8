"""The stack of layers of a model: where it is, and a model that ends after some of them."""

import copy
from collections import OrderedDict
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from draftsmith.types import DraftsmithError

M = TypeVar("M", bound=nn.Module)


def layer_stack(model: PreTrainedModel, layers: int, name: str) -> tuple[str, nn.ModuleList]:
    """Find the one list of that many layers inside the base model, with its attribute's name."""
    children = model.base_model.named_children()
    stacks = [(key, m) for key, m in children if isinstance(m, nn.ModuleList) and len(m) == layers]
    if len(stacks) != 1:
        raise DraftsmithError(
            f"{name} has {len(stacks)} stacks of {layers} layers where one is needed to tap states; "
            f"its kind ({model.config.model_type}) is not supported yet."
        )
    return stacks[0]


def shortened(model: PreTrainedModel, layers: int, kept: int) -> PreTrainedModel:
    """Return a model of the first `kept` of a model's `layers` layers that shares every weight with it.

    The two outer modules are copies without hooks; the layers, embeddings, norms and the head are the same objects.
    """
    key, stack = layer_stack(model, layers, type(model).__name__)
    base: nn.Module = model.base_model
    short_base, short = twin(base), twin(model)
    short_base._modules[key] = nn.ModuleList(list(stack)[:kept])
    short._modules[model.base_model_prefix] = short_base
    return short


def twin(module: M) -> M:
    """Copy one module, but neither its children nor its hooks."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._forward_hooks = OrderedDict()
    return twin
