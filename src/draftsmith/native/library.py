"""Loads the compiled operators, and tells PyTorch their shapes.

The package's build compiles `csrc/` where it finds a C++ compiler and PyTorch. Without the result everything still
runs, by PyTorch's own operators.
"""

from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent


def _load() -> tuple[bool, str]:
    built = FOLDER / "_kernels.so"
    if not built.exists():
        return False, "the native kernels were not built (no C++ compiler, or no PyTorch, at installation)"
    try:
        torch.ops.load_library(str(built))
        version: str = torch.ops.draftsmith.built_for()
    except (AttributeError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return False, f"the native kernels do not fit this PyTorch ({first}); install the package again"
    here = torch.__version__.partition("+")[0]
    if version.partition("+")[0] != here:
        return False, f"the native kernels are for PyTorch {version}, and this is {here}; install the package again"
    return True, ""


LIBRARY, _REASON = _load()
"""Whether the operators `torch.ops.draftsmith.*` are here."""


def why_missing() -> str:
    """Say why there are no native kernels; empty when there are."""
    return _REASON


def kernels_in_use() -> str:
    """Name the instruction set that the kernels use: amx, avx512bf16, avx512, avx2 or portable; needs `LIBRARY`."""
    name: str = torch.ops.draftsmith.kernels_in_use()
    return name


def use_kernels(name: str) -> bool:
    """Make the whole process use one instruction set; False when this processor lacks it. Needs `LIBRARY`."""
    found: bool = torch.ops.draftsmith.use_kernels(name)
    return found


def threads_missing() -> int:
    """Return how many threads fewer than wanted the operators work with now, because of other programs."""
    missing: int = torch.ops.draftsmith.threads_missing() if LIBRARY else 0
    return missing


def seconds_short() -> float:
    """Return the seconds for which operators worked with fewer threads than wanted, since this process began."""
    seconds: float = torch.ops.draftsmith.seconds_short() if LIBRARY else 0.0
    return seconds


if LIBRARY:

    @torch.library.register_fake("draftsmith::pack")
    def _(weight: Tensor) -> Tensor:
        return weight.new_empty(((weight.shape[0] + 15) // 16, (weight.shape[1] + 1) // 2, 16, 2))

    @torch.library.register_fake("draftsmith::pack_all")
    def _(weights: list[Tensor]) -> list[Tensor]:
        return [
            one.new_empty((*one.shape[:-2], (one.shape[-2] + 15) // 16, (one.shape[-1] + 1) // 2, 16, 2))
            for one in weights
        ]

    @torch.library.register_fake("draftsmith::unpack")
    def _(packed: Tensor, outputs: int, inputs: int) -> Tensor:
        return packed.new_empty((outputs, inputs))

    @torch.library.register_fake("draftsmith::linear")
    def _(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    @torch.library.register_fake("draftsmith::embedding")
    def _(tokens: Tensor, packed: Tensor, width: int, entries: int) -> Tensor:
        return packed.new_empty((*tokens.shape, width))

    @torch.library.register_fake("draftsmith::embedding_int8")
    def _(tokens: Tensor, packed: Tensor, scales: Tensor, width: int, entries: int) -> Tensor:
        return scales.new_empty((*tokens.shape, width), dtype=torch.bfloat16)

    @torch.library.register_fake("draftsmith::pack_int8")
    def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        panels, quads = (weight.shape[0] + 15) // 16, (weight.shape[1] + 3) // 4
        return (
            weight.new_empty((panels, quads, 16, 4), dtype=torch.int8),
            weight.new_empty((panels * 16,), dtype=torch.float32),
            weight.new_empty((panels * 16,), dtype=torch.int32),
        )

    @torch.library.register_fake("draftsmith::linear_int8")
    def _(
        x: Tensor, packed: Tensor, scales: Tensor, sums: Tensor, bias: Tensor | None, outputs: int
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    @torch.library.register_fake("draftsmith::experts")
    def _(
        hidden: Tensor, index: Tensor, weights: Tensor, gate_up: list[Tensor], down: list[Tensor], inner: int
    ) -> Tensor:
        return torch.empty_like(hidden)
