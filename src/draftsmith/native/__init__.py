"""Native code for CPUs: products of few rows with packed weights, and whole forwards of Llama-shaped models."""

from draftsmith.native.library import (
    LIBRARY,
    NativeObject,
    kernels_in_use,
    seconds_short,
    threads_missing,
    use_kernels,
    why_missing,
)

__all__ = [
    "LIBRARY",
    "NativeObject",
    "kernels_in_use",
    "seconds_short",
    "threads_missing",
    "use_kernels",
    "why_missing",
]
