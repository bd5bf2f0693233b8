"""A server for clients that other people wrote. They have an environment of their own: nothing of ours is imported.

`make test-clients` makes that environment and runs these tests in it; the server runs in the project's own, whose
Python is named by `DRAFTSMITH_PYTHON`.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

OURS = "DRAFTSMITH_PYTHON"
if OURS in os.environ:  # other tests of the same process are none of these switches' business
    for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_TELEMETRY_OFF"):
        os.environ.setdefault(switch, "1")  # nothing is fetched while tests run

ROOT = Path(__file__).parents[3]
TARGET = ROOT / "src" / "draftsmith" / "assets_data" / "demo-target"
PYTHON = os.environ.get(OURS, sys.executable)
MODEL = "demo"
PROMPTS = ("def main():", "It is a truth universally acknowledged, that", "1 2 3 4", "Once upon a time")


def client(name: str) -> Any:
    """Return a client's package: in its own environment it has to be there, elsewhere its tests are left out."""
    return importlib.import_module(name) if OURS in os.environ else pytest.importorskip(name)


class Server:
    """The server with the embedded models in fp32, so that scores can be held against another program's.

    Args:
        address: where it listens.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask without anybody's package."""
        response = httpx.post(f"{self.address}{path}", json={"model": MODEL, **body}, timeout=60)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def completed(self, prompt: str, tokens: int, **more: Any) -> str:
        """Return the greedy continuation of a prompt, decoded plainly."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "speculation": {"enabled": False}, **more}
        return str(self.post("/v1/completions", body)["choices"][0]["text"])

    def answered(self, text: str, tokens: int, **more: Any) -> str:
        """Return the greedy answer to a message, decoded plainly."""
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "speculation": {"enabled": False}, **more}
        return str(self.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    @cached_property
    def no_white_space(self) -> dict[str, float]:
        """Biases against white space, of which a model that knows nothing of JSON writes more and more."""
        vocabulary = json.loads((TARGET / "tokenizer.json").read_text())["model"]["vocab"]
        return {str(number): -100.0 for text, number in vocabulary.items() if not set(text) - set("ĠĊĉčĀ")}

    def counter(self, name: str) -> float:
        """Return the sum of a metric over all its labels."""
        lines = httpx.get(f"{self.address}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serve the embedded models, and see at the end that the server ends in good order and failed at nothing."""
    words = [
        PYTHON, "-m", "draftsmith", "serve", "--port", "0", "--plan", "own", "--dtype", "fp32", "--threads", "1",
        "--served-model-name", MODEL, "--per-request-spec-decode-metrics", "summary",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))  # type: ignore[arg-type]
        reader.start()
        try:
            address = process.stdout.readline().removeprefix("Listening at ").strip()
            assert address.startswith("http://"), "".join(lines)
            yield Server(address)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            reader.join(10)
    assert not [line for line in lines if '"status": 500' in line or '"level": "error"' in line], "".join(lines)[-5000:]
