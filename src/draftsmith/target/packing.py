"""Without native kernels: linear layers of a bf16 target on a CPU, weights in the layout that oneDNN likes best.

PyTorch's eager bf16 product rearranges the weights at every call; for one row that costs as much as the product.
Packed once, the same library gives the same bits in about half the time. Generated code packs for itself, so a
switch turns it off while that is traced.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed products exist here: bf16 on a CPU whose oneDNN multiplies it."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def prepack_linears(model: nn.Module, wanted: Callable[[], bool]) -> None:
    """Give every linear layer of the model a packed product, used while `wanted()`.

    The weights and the state_dict stay where they are, so this costs the memory of the linear layers once more.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            _prepack(module, wanted)


def _prepack(linear: nn.Linear, wanted: Callable[[], bool]) -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(x: Tensor) -> Tensor:
        if not wanted():
            return F.linear(x, linear.weight, linear.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, linear.bias, "none", [], "")
        return product

    linear.forward = forward  # type: ignore[method-assign, assignment]
