"""`draftsmith train`: a speculator from a recipe, with τ measured by decoding."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftsmith import assets
from draftsmith.cli.common import JsonOption, check_outputs, gather_prompts, load_target
from draftsmith.plan import NO_DRAFT
from draftsmith.types import DraftsmithError, SamplingParams, unbroken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from draftsmith.drafters.base import Drafter
    from draftsmith.drafters.learner import Learner
    from draftsmith.evaluation.prompts import Prompt
    from draftsmith.target import Target
    from draftsmith.training.recipe import Recipe
    from draftsmith.training.trainer import TrainingResult

ROWS = 64
EVALUATION_ROWS = 8
MOST_DRAFTED_ROWS = 8


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE.yaml] [section.field=value]...",
            help="The recipe, and what to change in it; without a recipe, the second stage of the embedded speculator.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in output.folder.")] = False,
    init_from: Annotated[
        str | None, typer.Option(help="Start a new run from this drafter (a warm start, not a resume).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write an untrained drafter.")] = False,
    eval_data: Annotated[
        Path | None, typer.Option(help="Prompts to measure τ on, JSONL or text; the embedded held-out ones by default.")
    ] = None,
    eval_prompts: Annotated[int, typer.Option(help="Prompts a task in each evaluation.")] = 4,
    eval_tokens: Annotated[int, typer.Option(help="New tokens of each of them.")] = 64,
    eval_prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the target's own code.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Train a speculator for a frozen target: on text, then on what the target itself writes.

    A recipe with a section `joint` trains the target as well, which makes another model of it.

    Example: `draftsmith train recipes/demo-mlp.yaml stage1.steps=500 output.folder=runs/mine`
    """
    check_outputs(json_path)
    console = Console(stderr=True)
    recipe = read_recipe(words or [], init_from)
    prompts = gather_prompts(eval_data, None)
    frozen, dtype = recipe.joint is None, recipe.target.dtype
    if not frozen and dtype == "auto":
        dtype = "fp32"
    target = load_target(
        recipe.target.name, dtype, recipe.target.device, trust_remote_code, console, native=frozen,
        dtype_option="target.dtype=",
    )
    from draftsmith.training.train import train as run

    bridge = EngineBridge(target, prompts, eval_prompts, eval_tokens, eval_prompt_tokens)
    bridge.sampling = {"temperature": recipe.stage2.temperature, "top_k": recipe.stage2.top_k, "ignore_eos": True}
    result = run(
        recipe,
        target=target,
        generate=bridge.generate,
        evaluate=bridge.evaluate,
        resume=resume,
        dry_run=dry_run,
        console=console,
        on_drafter=bridge.use,
    )
    if not dry_run:
        tell(result)
    if json_path is not None:
        from draftsmith.evaluation.provenance import provenance
        from draftsmith.evaluation.report import write_json

        paths = {name: str(path) for name, path in vars(result).items() if isinstance(path, Path)}
        record = asdict(result) | paths
        write_json(json_path, {"provenance": provenance(target=target.name), "result": record})


def read_recipe(words: list[str], init_from: str | None) -> "Recipe":
    """Read the recipe with its overrides; the first word is a file unless it has the form of an override."""
    from draftsmith.training.recipe import build_recipe, load_recipe

    overrides = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise DraftsmithError(f"{files[1]!r} is no override; write section.field=value behind the one recipe.")
    if init_from is not None:
        overrides.append(f"drafter.init_from={json.dumps(init_from)}")
    return load_recipe(files[0], overrides) if files else build_recipe(embedded_recipe(), overrides)


def embedded_recipe() -> dict[str, Any]:
    """Return the run to do without a recipe: stage 2 of the embedded speculator, on the embedded training texts."""
    folder = assets.demo_first_stage()
    config = json.loads((folder / "config.json").read_text())
    from draftsmith.drafters.mlp_config import MLPOptions

    known = {name: config[name] for name in MLPOptions.model_fields if name in config}
    return {
        "drafter": {**known, "init_from": str(folder)},
        "data": {"sources": [{"path": str(assets.prompt_file("train"))}], "held_out_every": 1_000_000},
        "stage2": {"steps": 100, "batch": 16, "new_tokens": 128, "epochs": 4, "positions_per_sequence": 32},
        "output": {"folder": "runs/demo-mlp"},
    }


class EngineBridge:
    """Lends an engine to the trainer: text written by the target, and τ measured by decoding."""

    def __init__(
        self, target: "Target", prompts: "list[Prompt]", prompts_a_task: int, new_tokens: int, prompt_tokens: int
    ) -> None:
        from draftsmith.evaluation.prompts import cut

        self.target, self.new_tokens = target, new_tokens
        self.sampling: dict[str, Any] = {}
        self.drafter: Drafter | None = None
        tasks = sorted({prompt.task for prompt in prompts})
        self.prompts = {
            task: cut(target, [p for p in prompts if p.task == task], prompt_tokens, prompts_a_task) for task in tasks
        }

    def use(self, drafter: "Learner") -> None:
        """Write the coming text with this drafter, for speed; the text's law does not depend on it."""
        self.drafter = drafter.for_decoding(self.target)

    def generate(self, prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """Let the target write exactly `max_tokens` behind every prompt."""
        from draftsmith.engine import Engine

        longest = max(map(len, prompts)) + max_tokens
        engine = Engine(self.target, self.drafter, max_batch=ROWS, max_length=longest)
        rules = [
            SamplingParams(max_tokens=max_tokens, seed=(seed + 7919 * i) % 2**63, **self.sampling)
            for i in range(len(prompts))
        ]
        # Many rows fill a CPU's arithmetic by themselves; guesses would only be more work.
        crowded = self.target.device.type == "cpu" and len(prompts) > MOST_DRAFTED_ROWS
        done = unbroken(engine.generate(prompts, rules, NO_DRAFT if crowded else None))
        return [completion.tokens for completion in done]

    def evaluate(self, drafter: "Learner") -> "Mapping[str, float]":
        """Measure τ, greedy, over all tasks and for each."""
        from draftsmith.engine import Engine
        from draftsmith.evaluation.measure import measure
        from draftsmith.types import Statistics

        longest = max(len(prompt) for prompts in self.prompts.values() for prompt in prompts) + self.new_tokens
        engine = Engine(self.target, drafter.for_decoding(self.target), max_batch=EVALUATION_ROWS, max_length=longest)
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        total, scores = Statistics(), {}
        for task, prompts in self.prompts.items():
            result = measure(engine, prompts, params)
            scores[f"tokens_per_step_{task}"] = result.tokens_per_step
            total += result.statistics
        return {"tokens_per_step": total.tokens_per_step, **scores}


def tell(result: "TrainingResult") -> None:
    """Say what came out and how to use it."""
    best = f", τ = {result.best:.3f}" if result.best is not None else ""
    typer.echo(f"Trained {result.step} steps{best}. The drafter is in {result.drafter}; use it with --drafter.")
    if result.target is not None:
        typer.echo(f"The target was changed and is in {result.target}: use both together, with --target too.")
