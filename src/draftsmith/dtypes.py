"""Which number formats weights are held in, and how they are given one."""

import torch
from torch import nn

from draftsmith.types import DraftsmithError


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters a dtype, in place; buffers, such as rotary frequencies, keep the precision they need."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Turn "auto", "bf16", "fp32" … into a dtype; "auto" is bf16 where the hardware multiplies it, else fp32."""
    if isinstance(name, torch.dtype):
        return name
    table = {
        "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32,
        "fp16": torch.float16, "float16": torch.float16, "fp64": torch.float64, "float64": torch.float64,
    }
    if name == "auto":
        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if name not in table:
        raise DraftsmithError(f"dtype {name!r} is unknown; use one of auto, {', '.join(table)}.")
    return table[name]
