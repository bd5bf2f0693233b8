"""Number formats of weights and names of devices: checks, and conversion to a format."""

from typing import TYPE_CHECKING

from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    import torch
    from torch import nn

_NAMES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "fp16": "float16",
    "float16": "float16", "fp64": "float64", "float64": "float64",
}
"""Names that users may write, and PyTorch's names for them."""
_DEVICES = ("auto", "cpu", "cuda", "hpu", "mps", "npu", "xpu")


def check_dtype(name: str) -> None:
    """Raise DraftsmithError for an unknown name of a dtype."""
    if name != "auto" and name not in _NAMES:
        raise DraftsmithError(f"dtype {name!r} is unknown; use one of auto, {', '.join(_NAMES)}.")


def check_device(name: str) -> None:
    """Raise DraftsmithError for a kind of device that is not known; whether this machine has one is checked later."""
    if name.partition(":")[0] not in _DEVICES:
        raise DraftsmithError(f"device {name!r} is unknown; use auto, cpu or cuda.")


def cast_parameters(module: "nn.Module", dtype: "torch.dtype") -> None:
    """Convert all parameters to a dtype in place; buffers, such as rotary frequencies, keep the precision they need."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def multiplies_bf16(device: "torch.device") -> bool:
    """Whether PyTorch has products of its own for bf16 there; without them it takes several times as long as for fp32.

    On CPUs that is what oneDNN says: x86 processors need AVX-512 for it.
    """
    import torch

    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def resolve_dtype(name: "str | torch.dtype", device: "torch.device", native: bool = True) -> "torch.dtype":
    """Turn "auto", "bf16", "fp32" … into a dtype; "auto" is bf16 where it is known to be fast, else fp32.

    It is on GPUs, on CPUs with AVX512-BF16, and by the native kernels for AVX2 and more.

    Args:
        native: whether the native kernels may be used, which multiply bf16 fast on more processors than PyTorch does.
    """
    import torch

    if isinstance(name, torch.dtype):
        return name
    check_dtype(name)
    if name == "auto":
        from draftsmith.native import LIBRARY, kernels_in_use

        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        fast = fast or (native and LIBRARY and kernels_in_use() != "portable")
        return torch.bfloat16 if fast else torch.float32
    found = getattr(torch, _NAMES[name])
    assert isinstance(found, torch.dtype)
    return found
