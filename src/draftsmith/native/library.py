"""Loads the compiled operators, and tells PyTorch their shapes.

The package's build compiles `csrc/` where it finds a C++ compiler. The result serves every Python, and every PyTorch
from `OLDEST` on. Without it everything still runs, by PyTorch's own operators.
"""

import ctypes
import re
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

BUILT = Path(__file__).resolve().parent / "_kernels.so"
OLDEST = (2, 11)
"""The first PyTorch that has all functions of the stable interface that the operators use."""


def _load() -> str:
    """Register the operators, and return why that cannot be; empty when it was done."""
    if not BUILT.exists():
        return "the native kernels were not built, for want of a C++ compiler at installation"
    if too_old(torch.__version__):
        oldest = ".".join(map(str, OLDEST))
        return f"the native kernels need PyTorch {oldest} or later, and this is {torch.__version__}"
    try:
        register = ctypes.CDLL(str(BUILT)).draftsmith_register
    except (AttributeError, OSError) as error:
        return f"the native kernels cannot be loaded ({error})"
    register.restype = ctypes.c_char_p
    wrong: bytes | None = register()
    if wrong is not None:
        return f"PyTorch does not take the native kernels ({wrong.decode()})"
    # How many sums PyTorch adds up side by side bounds how far ours may lie from them. It is no part of the interface.
    torch.ops.draftsmith.set_lanes(16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 4)
    return ""


def too_old(version: str) -> bool:
    """Whether the operators lack something in a PyTorch of this version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST


_REASON = _load()
LIBRARY = not _REASON
"""Whether the operators `torch.ops.draftsmith.*` are here."""


class NativeObject:
    """What native code keeps from one call to the next, and frees with this object.

    Args:
        make: the operator of `torch.ops.draftsmith` that makes it of `parts`, and returns its number.
        use: the operator that works with it, whose first argument is that number.
    """

    def __init__(self, make: str, use: str, *parts: Any) -> None:
        operators = torch.ops.draftsmith
        self._use = getattr(operators, use).default
        self._number: int = getattr(operators, make)(*parts)
        finalize(self, operators.forget, self._number).atexit = False

    def __call__(self, *arguments: Any) -> Any:
        """Work with it."""
        return self._use(self._number, *arguments)

    def by(self, use: str, *arguments: Any) -> Any:
        """Work with it by another operator than the usual one."""
        return getattr(torch.ops.draftsmith, use).default(self._number, *arguments)

    def __deepcopy__(self, _: Any) -> "NativeObject":
        """Share it: a copy of the number alone would outlive it. Whoever keeps what changes makes a new one."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be stored: the number means nothing to another process."""
        raise TypeError("native objects cannot be pickled; save what they were made of")


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


def _int4_sizes(weight: Tensor) -> tuple[int, ...]:
    """Return the sizes of packed int4 weights: panels of 16 outputs, lines of 64 bytes (`Int4Panel` in kernels.h)."""
    groups = (weight.shape[1] + 31) // 32
    return (weight.shape[0] + 15) // 16, 4 * groups + (groups + 1) // 2 + 1, 64


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

    @torch.library.register_fake("draftsmith::pack_int4")
    def _(weight: Tensor) -> Tensor:
        return weight.new_empty(_int4_sizes(weight), dtype=torch.uint8)

    @torch.library.register_fake("draftsmith::pack_all_int4")
    def _(weights: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
        return [one.new_empty(_int4_sizes(one), dtype=torch.uint8) for one in weights]

    @torch.library.register_fake("draftsmith::unpack_int4")
    def _(packed: Tensor, outputs: int, inputs: int) -> Tensor:
        return packed.new_empty((outputs, inputs), dtype=torch.bfloat16)

    @torch.library.register_fake("draftsmith::linear_int4")
    def _(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    @torch.library.register_fake("draftsmith::embedding_int4")
    def _(tokens: Tensor, packed: Tensor, width: int, entries: int) -> Tensor:
        return packed.new_empty((*tokens.shape, width), dtype=torch.bfloat16)

    @torch.library.register_fake("draftsmith::experts")
    def _(
        hidden: Tensor, index: Tensor, weights: Tensor, gate_up: list[Tensor], down: list[Tensor], inner: int
    ) -> Tensor:
        return torch.empty_like(hidden)
