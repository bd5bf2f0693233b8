"""What runs here, how fast memory is, and what would make decoding faster: `draftsmith doctor`, from Python."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith import native
from draftsmith.dtypes import resolve_dtype
from draftsmith.processor import (
    BUSY,
    Processor,
    Watch,
    available_processor,
    chosen_by_user,
    quota_in_words,
    use_threads,
)
from draftsmith.provenance import provenance
from draftsmith.system import ROOT
from draftsmith.user_cache import Kept, packed_kept

FEATURES = {
    "AVX2": "avx2", "AVX512F": "avx512f", "AVX512-VNNI": "avx512_vnni", "AVX512-BF16": "avx512_bf16",
    "AMX": "amx_tile", "AMX-BF16": "amx_bf16", "AMX-INT8": "amx_int8",
}
"""The CPU features that matter to the kernels, under their Linux names."""
AMX = ("AMX", "AMX-BF16", "AMX-INT8")
# Intel's processors of family 6 with AMX: Sapphire Rapids, Emerald Rapids, Granite Rapids (two models).
AMX_MODELS = ("143", "207", "173", "174")
MODEL_SIZES_GB = {"1 B": 2, "7 B": 14}
"""Bytes of models with this many parameters in bf16, for the sentence that explains what bandwidth means."""

# Larger than almost any cache, and quick to fill.
MATRIX_BYTES, ROW = 512 * 2**20, 4096
MEASURE_S = 0.5


@dataclass(frozen=True)
class Measured:
    """How fast the threads in use read memory, and what disturbed them.

    Args:
        gb_per_s: rate of the quickest pass over a matrix too large for any cache.
        by: what read the matrix.
        passes: how often it was read.
        seconds: how long all passes took.
        others: cores' worth of time that other programs, or the host of a virtual machine, took meanwhile; None if
            the system does not say.
        short_s: seconds for which the native kernels worked with fewer threads than they wanted, because of others.
    """

    gb_per_s: float
    by: str
    passes: int
    seconds: float
    others: float | None
    short_s: float

    def tokens_per_second(self, model_gb: float) -> float:
        """Return the limit of plain decoding with `model_gb` GB of weights, each read once per token."""
        return self.gb_per_s / model_gb


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and what should be done.

    Args:
        model: the processor's name.
        features: those of `FEATURES` that it has; empty if the system does not list them.
        amx_expected: whether processors of this model have AMX.
        kernels: the instruction set that the native kernels use; None if there are no kernels.
        kernels_missing: why there are no kernels.
        auto_dtype: the dtype that `--dtype auto` chooses on the CPU.
        threads: number of threads used to compute.
        chosen_by: the environment variable that set the threads, if one did.
        machine_cores: logical cores of the whole machine.
        available: the cores that this process may use.
        memory_gb: memory of the machine, in 10⁹ bytes.
        free_gb: memory that programs can still get; None if the system does not say.
        packed: the packed weights that are kept on disk from one start to the next.
        provenance: command, date, machine, versions.
    """

    model: str
    features: Mapping[str, bool]
    amx_expected: bool
    kernels: str | None
    kernels_missing: str
    auto_dtype: str
    threads: int
    chosen_by: str | None
    machine_cores: int
    available: Processor
    memory_gb: float | None
    free_gb: float | None
    packed: Kept
    measured: Measured
    provenance: Mapping[str, Any]

    @property
    def gpus(self) -> list[str]:
        """The names of the GPUs that PyTorch sees."""
        found: list[str] = self.provenance["machine"]["gpus"]
        return found

    def advice(self) -> list[str]:
        """Sentences that say what would make decoding on this CPU faster, the most important first."""
        return [*self._of_kernels(), *self._of_threads(), *self._of_neighbours(), *self._of_numbers()]

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith doctor --json` writes."""
        found = asdict(self)
        limits = {f"{size} GB": self.measured.tokens_per_second(size) for size in MODEL_SIZES_GB.values()}
        found["measured"]["plain_tokens_per_second_at_most"] = limits
        return {"provenance": found.pop("provenance"), **found, "advice": self.advice()}

    def _of_kernels(self) -> list[str]:
        said = []
        if self.kernels is None:
            said.append(
                f"There are no native kernels ({self.kernels_missing}): install GCC, then this package again by "
                "`pip install --no-build-isolation .`, and bf16 models are read several tokens at a time for little "
                "more than one."
            )
        has_amx = all(self.features.get(name, False) for name in AMX)
        if self.amx_expected and not has_amx:
            said.append(
                "Processors of this model have AMX, and the system or virtual machine hides it: another kind of "
                "machine, or a setting of the hypervisor, may show it."
            )
        elif has_amx and self.kernels not in (None, "amx"):
            said.append(
                "The processor has AMX and the kernels do not use it: that takes Linux 5.16 or later, and GCC 11 or "
                "later where they are built."
            )
        return said

    def _of_threads(self) -> list[str]:
        said = []
        here = self.available
        if self.threads > here.cores:
            said.append(
                f"{self.threads} threads take turns on {here.cores} core{'' if here.cores == 1 else 's'}: "
                f"--threads {here.threads} keeps them from waiting for each other."
            )
        elif here.quota is not None and self.threads > max(1.0, here.quota):
            said.append(
                f"{self.threads} threads use up {quota_in_words(here.quota)} before its period is over, and then stand "
                f"still: try --threads {here.threads}."
            )
        elif self.threads < min(here.physical, here.threads):
            because = f" ({self.chosen_by} is set)" if self.chosen_by is not None else ""
            said.append(
                f"{self.threads} of {here.cores} cores are used{because}: try --threads "
                f"{min(here.physical, here.threads)}."
            )
        if here.quota is not None and here.quota < here.cores:
            said.append(
                f"This process has {quota_in_words(here.quota)} on {here.cores} (a container's --cpus or limit): more "
                "of them, in whole cores, allow more threads."
            )
        if here.cores < self.machine_cores:
            said.append(
                f"This process may run on {here.cores} of {self.machine_cores} cores (its affinity, as taskset or a "
                "scheduler sets it): more of them allow more threads."
            )
        return said

    def _of_neighbours(self) -> list[str]:
        others, said = self.measured.others, []
        if others is not None and others > BUSY * self.available.cores:
            said.append(
                f"Other programs took {others:.1f} of {self.available.cores} cores while this was measured: without "
                "them memory is read, and text written, faster."
            )
        if self.measured.short_s > 0:
            granted = self.available.quota
            limited = " or the quota" if granted is not None and self.threads > granted else ""
            said.append(
                f"For {self.measured.short_s:.2f} of {self.measured.seconds:.2f} s the kernels worked with fewer "
                f"threads, because other programs{limited} wanted the processor: fewer threads, or fewer programs, "
                "make speed steadier."
            )
        return said

    def _of_numbers(self) -> list[str]:
        if self.kernels is None:
            return []
        said = []
        if self.auto_dtype != "bf16":
            said.append(
                f"--dtype auto takes {self.auto_dtype} here, because the {self.kernels} kernels have not been "
                "measured: --dtype bf16 reads half as many bytes by them."
            )
        said.append(
            "--quantize int8 reads half as many bytes as bf16: the text is then that of the quantised model, drafts "
            "included."
        )
        return said


def _chosen_by(threads: int) -> str | None:
    """Name the environment variable that set the number of threads; None if --threads has set another since."""
    name = chosen_by_user()
    return name if name is not None and os.environ[name].split(",")[0].strip() == str(threads) else None


def examine(root: Path = ROOT) -> Diagnosis:
    """Inspect the machine and measure for about a second, with as many threads as decoding uses.

    Args:
        root: the folder below which the system's files are.
    """
    use_threads(root=root)
    record = provenance()
    flags, numbers = processor_lines(root)
    family, model = (numbers.get(name) for name in ("cpu family", "model"))
    return Diagnosis(
        model=record["machine"]["cpu"],
        features={name: flag in flags for name, flag in FEATURES.items()} if flags else {},
        amx_expected=family == "6" and model in AMX_MODELS,
        kernels=native.kernels_in_use() if native.LIBRARY else None,
        kernels_missing=native.why_missing(),
        auto_dtype="bf16" if resolve_dtype("auto", torch.device("cpu")) == torch.bfloat16 else "fp32",
        threads=torch.get_num_threads(),
        chosen_by=_chosen_by(torch.get_num_threads()),
        machine_cores=os.cpu_count() or 1,
        available=available_processor(root),
        memory_gb=memory_gb("MemTotal", root),
        free_gb=memory_gb("MemAvailable", root),
        packed=packed_kept(),
        measured=measure(memory_gb("MemAvailable", root)),
        provenance=record,
    )


def measure(free_gb: float | None, seconds: float = MEASURE_S) -> Measured:
    """Time products of a row with a large matrix, as in decoding; by PyTorch if there are no kernels."""
    room = MATRIX_BYTES if free_gb is None else min(MATRIX_BYTES, int(free_gb * 1e9) // 4)
    outputs = max(16, room // (2 * ROW) // 16 * 16)
    x = torch.ones(1, ROW, dtype=torch.bfloat16)
    if native.LIBRARY:
        # Memory that was never written is mapped to a single page of zeros.
        weight = torch.full((outputs // 16, ROW // 2, 16, 2), 0.01, dtype=torch.bfloat16)

        def read() -> None:
            torch.ops.draftsmith.linear(x, weight, None, outputs)
    else:
        weight = torch.full((outputs, ROW // 2), 0.01)

        def read() -> None:
            weight.amax()

    read()
    short, watch = native.seconds_short(), Watch()
    begun = time.perf_counter()
    took: list[float] = []
    while not took or time.perf_counter() - begun < seconds:
        before = time.perf_counter()
        read()
        took.append(time.perf_counter() - before)
    wall = time.perf_counter() - begun
    return Measured(
        gb_per_s=weight.nbytes / min(took) / 1e9,
        by="native kernels" if native.LIBRARY else "PyTorch",
        passes=len(took),
        seconds=wall,
        others=watch.others(),
        short_s=native.seconds_short() - short,
    )


def processor_lines(root: Path = ROOT) -> tuple[frozenset[str], dict[str, str]]:
    """Return the flags of the first processor in /proc/cpuinfo, and all its entries."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return frozenset((found.get("flags") or found.get("Features") or "").split()), found


def memory_gb(name: str, root: Path = ROOT) -> float | None:
    """Return an entry of /proc/meminfo in 10⁹ bytes; None if it is missing."""
    for line in _lines(root / "proc/meminfo"):
        words = line.split()
        if len(words) >= 2 and words[0] == f"{name}:":
            return int(words[1]) * 1024 / 1e9
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
