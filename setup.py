"""Builds the native kernels where a C++ compiler is at hand; without one the package runs on PyTorch.

They know PyTorch by its stable C interface alone (csrc/pytorch_c.h), and no Python: neither is needed to build them,
and one library serves all versions. Everything else about the package stands in pyproject.toml.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/draftsmith/native/csrc")
BUILT = FOLDER.parent / "_kernels.so"
# What comes out for a row must not depend on the rows beside it, so nothing may reorder or fuse what it likes.
FLAGS = ["-std=c++20", "-O3", "-g0", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wno-psabi"]
# Apple's compiler has no OpenMP; one thread then does the work.
THREADS = [] if sys.platform == "darwin" else ["-fopenmp"]


class Build(build_ext):
    """Builds a library that no Python is part of, and goes on without it when it cannot be compiled."""

    def get_ext_filename(self, fullname: str) -> str:
        """Leave the version of Python out of the name."""
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        """Compile, or say why not."""
        BUILT.unlink(missing_ok=True)  # an older one would be loaded in the place of one that fails
        try:
            super().run()
        except Exception as error:  # compilers fail in many ways, and none of them may stop an installation
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            message = f"draftsmith: native kernels not built ({reason})"
            if os.environ.get("DRAFTSMITH_REQUIRE_NATIVE") == "1":
                raise SystemExit(message) from error
            print(f"{message}; everything will run on PyTorch, slower.", file=sys.stderr)
            self.extensions = []

    def build_extensions(self) -> None:
        """Name PyTorch's library as one that this needs, so that what is missing is found there at loading."""
        for extension in self.extensions:
            if sys.platform == "darwin":
                extension.extra_link_args += ["-undefined", "dynamic_lookup"]
            else:
                extension.extra_link_args += ["-Wl,--no-as-needed", self._stand_in(), "-Wl,-z,now"]
        super().build_extensions()

    def _stand_in(self) -> str:
        """Make an empty library of the same name, and return its path."""
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "stand_in.cpp"
        source.write_text("// In the place of PyTorch's library while the kernels are linked.\n")
        objects = self.compiler.compile([str(source)])
        path = folder / "libtorch_cpu.so"
        named = ["-Wl,-soname,libtorch_cpu.so"]
        self.compiler.link_shared_object(objects, str(path), extra_postargs=named, target_lang="c++")
        return str(path)


class Wheel(bdist_wheel):
    """A wheel for every Python 3 on this kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the platform's tag, without a version of Python."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "draftsmith.native._kernels",
            sorted(str(path) for path in FOLDER.glob("*.cpp")),
            depends=sorted(str(path) for pattern in ("*.h", "*.inl") for path in FOLDER.glob(pattern)),
            extra_compile_args=FLAGS + THREADS,
            extra_link_args=THREADS,
        )
    ],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
