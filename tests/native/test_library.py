"""The built library serves every Python and every PyTorch from 2.11 on: it asks for the stable C interface alone."""

import copy
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from draftsmith.native import LIBRARY, NativeObject, why_missing
from draftsmith.native.layers import PackedEmbedding, PackedLinear
from draftsmith.native.library import BUILT, OLDEST, too_old

ROOT = Path(__file__).resolve().parents[2]
DECLARED = ROOT / "src/draftsmith/native/csrc/pytorch_c.h"
# As the names of the Itanium C++ ABI have them: length, then name.
UNSTABLE = re.compile(r"^_ZN?[A-Z]*(2at|3c10|5torch|6caffe2)|^_?Py|^THP")

built_only = pytest.mark.skipif(not BUILT.exists(), reason=why_missing())
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="libraries have another format here")


def elf_sections(data: bytes) -> list[tuple[int, bytes, int]]:
    """Return type, content and linked section of every section of a library (ELF, 64 bits, little-endian)."""
    assert data[:6] == b"\x7fELF\x02\x01"
    (start,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    return [(kind, data[offset : offset + length], link) for _, kind, _, _, offset, length, link, *_ in headers]


def asked_of_others(library: Path) -> tuple[set[str], list[str]]:
    """Return the names that a library leaves undefined, and the libraries that it is linked with."""
    sections = elf_sections(library.read_bytes())
    dynamic_symbols, dynamic, undefined, needed = 11, 6, 0, 1

    def text(link: int, place: int) -> str:
        names = sections[link][1]
        return names[place : names.index(b"\0", place)].decode()

    asked, libraries = set(), []
    for kind, content, link in sections:
        if kind == dynamic_symbols:
            symbols = list(struct.iter_unpack("<IBBHQQ", content))[1:]
            asked |= {text(link, name) for name, _, _, section, _, _ in symbols if section == undefined}
        if kind == dynamic:
            libraries += [text(link, value) for tag, value in struct.iter_unpack("<qQ", content) if tag == needed]
    return asked, libraries


@built_only
@linux_only
def test_the_library_asks_for_pytorch_s_stable_interface_alone():
    asked, _ = asked_of_others(BUILT)
    assert "torch_library_impl" in asked  # or the names were not found
    assert not {name for name in asked if UNSTABLE.search(name)}
    declared = set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", DECLARED.read_text()))
    assert {name for name in asked if name.startswith(("torch_", "aoti_"))} == declared


@built_only
@linux_only
def test_the_library_is_linked_with_no_python():
    _, needed = asked_of_others(BUILT)
    ours = [name for name in needed if not re.match(r"lib(stdc\+\+|m|c|gcc_s|gomp)\.so|ld-linux", name)]
    assert ours == ["libtorch_cpu.so"]
    assert BUILT.name == "_kernels.so"  # without the version of a Python, which would not find it then


@linux_only
def test_unstable_names_are_known_as_such():
    own = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    if not own.exists():
        pytest.skip("this PyTorch lies elsewhere")
    names = {name for name in asked_of_others(own)[0] if UNSTABLE.search(name)}
    for part in ("2at", "3c10", "5torch", "Py"):
        assert any(part in name for name in names), part


def test_what_is_declared_is_what_pytorch_declares(tmp_path: Path):
    """Both declarations in one file: a compiler refuses what differs in a function of the C interface."""
    compiler, headers = shutil.which("g++"), Path(torch.__file__).parent / "include"
    if compiler is None or not (headers / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip("no compiler, or no headers of PyTorch")

    def compiles(declared: str) -> bool:
        (tmp_path / "ours.h").write_text(declared)
        (tmp_path / "both.cpp").write_text("#include <torch/csrc/stable/c/shim.h>\n#include \"ours.h\"\n")
        command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{headers}", f"-I{tmp_path}"]
        command.append(str(tmp_path / "both.cpp"))
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    text = DECLARED.read_text()
    assert compiles(text)
    assert not compiles(text.replace("int64_t* numel", "int32_t* numel"))


def test_a_pytorch_that_is_too_old_is_known():
    assert too_old("2.10.0+cpu") and too_old("1.13.1")
    assert not too_old("2.11.0") and not too_old("2.13.0+cpu") and not too_old("3.0.0a0+git1234567")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=" + ".".join(map(str, OLDEST)) in project["dependencies"]


def test_a_wheel_is_for_any_python_and_this_platform():
    told = (
        "from distutils.core import run_setup\n"
        "wheel = run_setup('setup.py', stop_after='init').get_command_obj('bdist_wheel')\n"
        "wheel.ensure_finalized()\n"
        "print(*wheel.get_tag(), wheel.root_is_pure)\n"
    )
    command = [sys.executable, "-c", f"import setuptools\n{told}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    python, interface, platform, is_pure = ran.stdout.split()
    assert (python, interface, is_pure) == ("py3", "none", "False")
    assert platform.startswith(("linux", "macosx"))


# ---- what Python holds of native code

needs_library = pytest.mark.skipif(not LIBRARY, reason=why_missing())


def small_layer() -> PackedLinear:
    return PackedLinear(torch.eye(4, dtype=torch.bfloat16), None)


@needs_library
def test_a_native_object_goes_with_its_owner():
    empty, weights = torch.empty(0), small_layer().packed
    held = NativeObject(
        "make_heads", "draft_by_heads", [weights], [empty], [empty], [empty], [4, 4], [[]], 0, empty,
        torch.empty(0, dtype=torch.long), 4,
    )
    number, ones = held._number, torch.ones(1, 1, dtype=torch.long)
    asked = (ones, torch.ones(1, 1, 4).bfloat16(), ones[0], [1], 0, 0, 1, 0.0, [])
    assert held(*asked)[0].shape == (1, 1)
    with pytest.raises(RuntimeError, match="draftsmith: object .* is of another kind"):
        torch.ops.draftsmith.draft_by_stages(number, *asked)
    shared = copy.deepcopy(held)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(held)
    del held
    assert shared(*asked)[0].shape == (1, 1)
    del shared
    with pytest.raises(RuntimeError, match=f"draftsmith: there is no object {number}$"):
        torch.ops.draftsmith.draft_by_heads(number, *asked)


@needs_library
def test_asking_for_a_gradient_is_an_error_and_not_silence():
    rows = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="native layers have no gradient"):
        small_layer()(rows).sum().backward()
    with torch.no_grad():
        assert not small_layer()(rows).requires_grad
    assert not PackedEmbedding(small_layer())(torch.tensor([1])).requires_grad
