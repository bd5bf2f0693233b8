"""What the kernels compute in vectors, compilers compute in vectors too: GCC tells where it goes value by value."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.test_sanitized import COMPILER

SOURCES = Path(__file__).parents[2] / "src" / "draftsmith" / "native" / "csrc"
SLOW = "-Wvector-operation-performance"


WIDE = """#pragma GCC target("avx2")
using Wide = float __attribute__((vector_size(64)));
Wide product(Wide a, Wide b) { return a < b ? a : a * b; }
"""


def compiled(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile to assembly; the compiler tells of what it takes apart."""
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-trapping-math", "-Wno-psabi", SLOW]
    command = [COMPILER, *flags, "-S", str(source), "-o", str(folder / "kernels.s")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets are those of x86-64")
@pytest.mark.parametrize("instructions", ["avx2", "avx512", "avx512bf16"])
def test_no_vector_is_computed_value_by_value(instructions: str, tmp_path: Path):
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not here")
    (tmp_path / "wide.cpp").write_text(WIDE)
    if SLOW not in compiled(tmp_path / "wide.cpp", tmp_path).stderr:
        pytest.skip(f"{COMPILER} does not tell")
    ended = compiled(SOURCES / f"kernels_{instructions}.cpp", tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert SLOW not in ended.stderr
