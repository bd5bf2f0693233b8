"""Where a result comes from: command, date, machine, versions. No host names and no absolute paths."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def provenance(**more: Any) -> dict[str, Any]:
    """Return what is needed to repeat a measurement; `more` adds dtype, target, drafter and the like."""
    import torch

    record: dict[str, Any] = {
        "command": command_line(),
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "git_revision": git_revision(),
        "threads": torch.get_num_threads(),
    }
    return record | more


def client_provenance(secret: str | None = None) -> dict[str, Any]:
    """Return the provenance of a process that only sends requests to a server, without importing PyTorch.

    Args:
        secret: a text that may be in the command and must not be recorded.
    """
    command = command_line()
    return {
        "command": command.replace(secret, "…") if secret else command,
        "date": now(),
        "machine": processor_and_memory(),
        "versions": {
            "python": platform.python_version(), "draftsmith": _version("draftsmith"), "httpx2": _version("httpx2")
        },
        "git_revision": git_revision(),
    }


def now() -> str:
    """Return date and time, in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> dict[str, str]:
    """Return the versions of Python, Draftsmith and the libraries that it computes with."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "safetensors": _version("safetensors"),
        "draftsmith": _version("draftsmith"),
    }


def command_line() -> str:
    """Return the command as a shell reads it, with absolute paths cut to their last part."""
    program, *arguments = sys.argv
    path = Path(program)
    name = path.name if path.name != "__main__.py" else f"python -m {path.parent.name}"
    return " ".join([name, *(shlex.quote(without_folders(word)) for word in arguments)])


def without_folders(word: str) -> str:
    """Cut an absolute path, alone or after `option=`, to its last part."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def machine() -> dict[str, Any]:
    """Return the processor, usable cores, memory in GiB and accelerators."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return processor_and_memory() | {"gpus": gpus}


def processor_and_memory() -> dict[str, Any]:
    """Return the processor, usable cores and memory in GiB, without importing PyTorch."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": _memory_gib(),
    }


def git_revision() -> str | None:
    """Return the commit of the source tree, with "+changes" if any are uncommitted; None outside a repository."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(Path(__file__)))
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source tree"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None
