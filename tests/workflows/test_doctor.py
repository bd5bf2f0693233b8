"""What the doctor advises for machines of many kinds, and that what it measures is there."""

from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.native import seconds_short, threads_missing
from draftsmith.processor import Processor, busy_seconds, usable_cores
from draftsmith.user_cache import Kept
from draftsmith.workflows import doctor
from draftsmith.workflows.doctor import Diagnosis, Measured, measure, memory_gb, processor_lines

INT8 = "--quantize int8 reads half as many bytes as bf16"
WELL = Diagnosis(
    model="some processor",
    features=dict.fromkeys(doctor.FEATURES, True),
    amx_expected=True,
    kernels="amx",
    kernels_missing="",
    auto_dtype="bf16",
    threads=8,
    chosen_by=None,
    machine_cores=8,
    available=Processor(8, 8, None),
    memory_gb=64.0,
    free_gb=32.0,
    packed=Kept("/home/someone/.cache/draftsmith/packed", 2, 600_000_000, 8_000_000_000),
    measured=Measured(40.0, "native kernels", 10, 0.5, 0.0, 0.0),
    provenance={"machine": {"gpus": []}},
)
WITHOUT_AMX = WELL.features | dict.fromkeys(doctor.AMX, False)


def test_where_all_is_well_there_is_only_int8_to_be_named():
    older = replace(WELL, features=WITHOUT_AMX, amx_expected=False, kernels="avx512bf16")
    hyperthreads = replace(WELL, threads=4, available=Processor(8, 4, None))
    for found in (WELL, older, hyperthreads):
        (only,) = found.advice()
        assert only.startswith(INT8)


@pytest.mark.parametrize(
    ("found", "part"),
    [
        (replace(WELL, kernels=None, kernels_missing="no compiler"), "no native kernels (no compiler): install GCC"),
        (replace(WELL, features=WITHOUT_AMX, kernels="avx512bf16"), "virtual machine hides it"),
        (replace(WELL, kernels="avx512bf16"), "has AMX and the kernels do not use it"),
        (replace(WELL, auto_dtype="fp32", kernels="portable"), "--dtype bf16 reads half as many bytes"),
        (replace(WELL, threads=2), "2 of 8 cores are used: try --threads 8."),
        (replace(WELL, threads=2, chosen_by="OMP_NUM_THREADS"), "(OMP_NUM_THREADS is set)"),
        (replace(WELL, threads=16), "16 threads take turns on 8 cores: --threads 8"),
        (replace(WELL, available=Processor(8, 8, 2.5)), "8 threads use up a quota of 2.5 cores"),
        (replace(WELL, threads=2, available=Processor(8, 8, 2.5)), "a quota of 2.5 cores on 8"),
        (replace(WELL, machine_cores=64), "8 of 64 cores"),
        (replace(WELL, measured=replace(WELL.measured, others=1.0)), "Other programs took 1.0 of 8 cores"),
        (replace(WELL, measured=replace(WELL.measured, short_s=0.2)), "For 0.20 of 0.50 s the kernels worked"),
    ],
)
def test_what_would_help_is_said_in_a_sentence(found: Diagnosis, part: str):
    said = [sentence for sentence in found.advice() if part in sentence]
    assert len(said) == 1 and said[0].endswith(".") and "\n" not in said[0]


@pytest.mark.parametrize("found", [
    replace(WELL, threads=2, available=Processor(8, 8, 2.5)),
    replace(WELL, threads=1, available=Processor(2, 2, 0.5)),
])
def test_threads_that_fit_the_quota_are_right(found: Diagnosis):
    assert not any("--threads" in sentence for sentence in found.advice())


def test_bandwidth_bounds_what_plain_decoding_writes():
    assert WELL.measured.tokens_per_second(14) == pytest.approx(40 / 14)
    assert WELL.as_json()["measured"]["plain_tokens_per_second_at_most"]["14 GB"] == pytest.approx(40 / 14)


def test_reading_memory_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "MATRIX_BYTES", 2**20)
    found = measure(None, seconds=0.02)
    assert found.passes >= 1 and found.gb_per_s > 0 and found.short_s >= 0
    assert measure(1e-6, seconds=0.0).passes == 1
    assert seconds_short() >= 0 and threads_missing() >= 0


@pytest.mark.skipif(not doctor.native.LIBRARY, reason="the native kernels are not built")
def test_memory_is_measured_by_pytorch_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "MATRIX_BYTES", 2**20)
    monkeypatch.setattr(doctor.native, "LIBRARY", False)
    assert measure(None, seconds=0.0).by == "PyTorch"


def test_the_systems_files_are_read(tmp_path: Path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 143\nflags\t\t: avx2 amx_tile\n\nprocessor\t: 1\nflags\t\t: none\n"
    )
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000000 kB\nMemAvailable:    500000 kB\n")
    own = min(usable_cores())
    lines = ("cpu  1 1 1 1 1 1 1 1 1 1", f"cpu{own} 100 0 50 999 9 0 0 50 7 7", "cpu99999 5 5 5 5 5 5 5 5", "intr 7")
    (tmp_path / "proc/stat").write_text("\n".join(lines) + "\n")
    flags, said = processor_lines(tmp_path)
    assert flags == {"avx2", "amx_tile"} and (said["cpu family"], said["model"]) == ("6", "143")
    assert memory_gb("MemTotal", tmp_path) == 1.024 and memory_gb("MemAvailable", tmp_path) == 0.512
    assert busy_seconds(tmp_path) == 2.0
    nothing = tmp_path / "nothing"
    assert busy_seconds(nothing) is None and memory_gb("MemTotal", nothing) is None
    assert processor_lines(nothing) == (frozenset(), {})
