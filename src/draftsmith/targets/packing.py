"""Without native kernels: packs linear layers of a bf16 target on a CPU in the layout that oneDNN likes best.

PyTorch's eager bf16 product rearranges the weights at every call, which for one row costs as much as the product
itself. With weights packed once, the same library gives the same bits in about half the time. Generated code packs for
itself, and gradients need the weights, so both use a copy of the modules without packed products.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed products exist here: bf16 on a CPU whose oneDNN multiplies it."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack_linears(module: nn.Module) -> None:
    """Give every linear layer of a module a packed product, in place.

    The weights and the state_dict stay where they are, so this needs the memory of the linear layers a second time.
    """
    for linear in module.modules():
        if type(linear) is nn.Linear:
            _prepack(linear)


def _prepack(linear: nn.Linear) -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, linear.bias, "none", [], "")
        return product

    linear.forward = forward  # type: ignore[method-assign, assignment]


def without_prepacking(module: M) -> M:
    """Return a copy of a module whose products are its own again, with the same weights and hooks.

    A module that was never prepacked is returned itself.
    """
    copies: dict[nn.Module, nn.Module] = {}
    if not any(_is_prepacked(part) for part in module.modules()):
        return module

    def plain(part: nn.Module) -> nn.Module:
        if part not in copies:
            copies[part] = twin = copy.copy(part)
            if _is_prepacked(part):
                del twin.forward
            twin._modules = {name: child and plain(child) for name, child in part._modules.items()}
        return copies[part]

    plain(module)
    return copies[module]  # type: ignore[return-value]


def _is_prepacked(module: nn.Module) -> bool:
    return type(module) is nn.Linear and "forward" in vars(module)
