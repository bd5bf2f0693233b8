"""Builds the native kernels where a C++ compiler and PyTorch are at hand; without them the package runs on PyTorch.

Everything else about the package stands in pyproject.toml.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

FOLDER = Path("src/draftsmith/native/csrc")
BUILT = FOLDER.parent / "_kernels.so"
# What comes out for a row must not depend on the rows beside it, so nothing may reorder or fuse what it likes.
FLAGS = ["-O3", "-g0", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# Apple's compiler has no OpenMP; one thread then does the work.
THREADS = [] if sys.platform == "darwin" else ["-fopenmp"]


def extensions() -> dict[str, object]:
    """Return what to hand to `setup`, or nothing, with the reason, when the kernels cannot be built."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        _give_up("PyTorch is not installed in the building environment; install it first and build without isolation")
        return {}

    class OptionalBuild(BuildExtension):
        """Goes on without the kernels when they cannot be compiled."""

        def run(self) -> None:
            BUILT.unlink(missing_ok=True)  # an older one would be loaded in the place of one that fails
            try:
                super().run()
            except Exception as error:  # compilers fail in many ways, and none of them may stop an installation
                _give_up((str(error).strip().splitlines() or [type(error).__name__])[-1])
                self.extensions = []

    sources = sorted(str(path) for path in FOLDER.glob("*.cpp"))
    depends = sorted(str(path) for pattern in ("*.h", "*.inl") for path in FOLDER.glob(pattern))
    extension = CppExtension(
        "draftsmith.native._kernels",
        sources,
        depends=depends,
        extra_compile_args=FLAGS + THREADS,
        extra_link_args=THREADS,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": OptionalBuild.with_options(no_python_abi_suffix=True, use_ninja=False)},
    }


def _give_up(reason: str) -> None:
    message = f"draftsmith: native kernels not built ({reason})"
    if os.environ.get("DRAFTSMITH_REQUIRE_NATIVE") == "1":
        raise SystemExit(message)
    print(f"{message}; everything will run on PyTorch, slower.", file=sys.stderr)


setup(**extensions())
