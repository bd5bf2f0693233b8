"""What every test has: one thread (tiny models gain nothing from more), no network, plain pictures without a window."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("MATPLOTLIBRC", str(Path(__file__).parent / "helpers" / "matplotlibrc"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Commands that tests start run beside other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "DRAFTSMITH_CACHE" not in os.environ:
    # What drafts cost is measured anew, once for all tests of a process and the commands that they start.
    os.environ["DRAFTSMITH_CACHE"] = tempfile.mkdtemp(prefix="draftsmith-tests-")
    atexit.register(shutil.rmtree, os.environ["DRAFTSMITH_CACHE"], ignore_errors=True)

import matplotlib
import pytest
import torch

from draftsmith.native import kernels_in_use, use_kernels

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512bf16", "amx")


@pytest.fixture(params=INSTRUCTION_SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with one instruction set, and give the process its own back. Needs the native kernels."""
    before = kernels_in_use()
    if not use_kernels(request.param):
        pytest.skip(f"this processor has no {request.param}")
    assert kernels_in_use() == request.param
    yield request.param
    assert use_kernels(before)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Make what a test draws the same, whatever ran before it and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture
def drawn_in_full() -> Iterator[None]:
    """Draw pictures as users see them, with the numbers that other tests leave out."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Make `torch.empty` hand out NaN, so that reading what nobody wrote fails every time and not by chance."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
