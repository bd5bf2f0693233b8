"""The kernels read and write nothing beside their buffers, on every instruction set: a C++ driver with sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")


def has_sanitizers(folder: Path) -> bool:
    """Whether the compiler is there and brings the libraries that sanitized programs need."""
    if shutil.which(COMPILER) is None or shutil.which("sh") is None:
        return False
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    flags = ["-fsanitize=address,undefined", "-o", str(folder / "empty"), str(folder / "empty.cpp")]
    built = subprocess.run([COMPILER, *flags], capture_output=True, check=False).returncode == 0
    return built and subprocess.run([folder / "empty"], capture_output=True, check=False).returncode == 0


def test_kernels_touch_only_their_buffers_and_compute_what_they_say(tmp_path: Path):
    """On every instruction set that is here and with tiles that C++ computes; teams have the threads they should."""
    if not has_sanitizers(tmp_path):
        pytest.skip(f"{COMPILER} with address and undefined-behaviour sanitizers is not here")
    command = ["sh", str(FOLDER / "sanitize.sh"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    crew, lookups, *pieces, own, emulated = ended.stdout.splitlines()
    assert lookups.endswith(" 0 failures")
    assert crew == "the crew does as it should"
    assert set(pieces) == {"pieces are taken once"}
    assert own.endswith(" instruction sets, 0 failures") and emulated == "1 instruction sets, 0 failures"
