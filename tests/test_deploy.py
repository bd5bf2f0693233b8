"""What is in deploy/ fits the server: its options exist, its metrics are exported, and nothing runs as root."""

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith.cli import app

DEPLOY = Path(__file__).parent.parent / "deploy"
METRICS = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success_total",
    "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "iteration_tokens_total",
}
"""The names, behind `vllm:`, that vLLM's dashboards read."""


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def read_metrics(expression: str) -> set[str]:
    names = re.findall(r"\bvllm:(\w+)", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_the_dashboard_reads_known_metrics_only():
    read = [read_metrics(expression) for expression in expressions()]
    assert len(read) >= 20 and all(read) and set().union(*read) <= METRICS
    assert "spec_decode_num_accepted_tokens_per_pos_total" in set().union(*read)


def test_the_dashboards_panels_stand_beside_each_other():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], f"{panel['title']} says what it shows"


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_is_closed(expression: str):
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "draftsmith.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def entry_point() -> list[str]:
    (line,) = re.findall(r"^ENTRYPOINT (.+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    words: list[str] = json.loads(line)
    return words


def commands() -> dict[str, list[str]]:
    """Every `draftsmith serve …` of the folder, as words."""
    readme = (DEPLOY / "README.md").read_text()
    options = re.findall(r"DRAFTSMITH_OPTIONS=(.+)$", (DEPLOY / "draftsmith.service").read_text(), flags=re.M)
    after_image = re.findall(r"`draftsmith\s+(--[^`]+)`", readme)
    assert options and after_image
    return {
        "unit": shlex.split(unit()["ExecStart"][0]),
        "image": entry_point(),
        "options of the unit": ["draftsmith", "serve", *shlex.split(options[0])],
        "behind the image": [*entry_point(), *shlex.split(after_image[0])],
    }


@pytest.mark.parametrize("name", ["unit", "image", "options of the unit", "behind the image"])
def test_the_server_has_the_options(name: str):
    program, command, *words = commands()[name]
    assert Path(program).name == "draftsmith"
    group = typer.main.get_command(app)
    serve = group.commands.get(command)  # type: ignore[attr-defined]
    assert serve is not None, f"there is no command {command}"
    with serve.make_context(command, [word for word in words if not word.startswith("$")]) as context:
        assert context.params


def test_the_unit_is_one_that_systemd_can_read():
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "draftsmith.service")
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert unit()["DynamicUser"] == unit()["NoNewPrivileges"] == ["yes"] and unit()["ProtectSystem"] == ["strict"]


def test_the_image_has_all_that_the_server_needs():
    pyproject = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    needed = {re.split(r"[<>=]", one)[0] for one in pyproject["project"]["optional-dependencies"]["serve"]}
    locked = (DEPLOY.parent / "requirements-serve.lock").read_text()
    apart = {name for name in needed if re.search(rf"^{name}==", locked, flags=re.M)}
    (listed,) = re.findall(r"requirements\.lock /source \\\n +(.+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    assert set(listed.split()) == needed - apart and apart


def test_the_image_runs_as_nobody_special_and_has_no_compiler():
    stages = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")
    assert len(stages) == 3, "one to build, one to run"
    assert "g++" in stages[1] and "g++" not in stages[2] and "apt-get" not in stages[2]
    user = re.findall(r"^USER (\d+)$", stages[2], flags=re.M)
    assert user and int(user[0]) > 0 and stages[2].index("USER") < stages[2].index("ENTRYPOINT")
    assert "HEALTHCHECK" in stages[2]


def test_what_the_image_copies_is_let_through():
    let = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
        for word in line.split()[:-1]
    ]
    assert copied and set(copied) == let
    assert all((DEPLOY.parent / name).exists() for name in copied)
