"""Stands in for vLLM in another process: the few names that our worker uses, over our own engine.

It loads an exported folder by what is written in it. `MISREADS` in the environment makes its guesses useless, as those
of an engine that takes a layout for another.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.types import Completion

__version__ = "0.0.0-stand-in"
MISREADS = "STAND_IN_MISREADS"


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool


@dataclass
class Metric:
    name: str
    value: int = 0


@dataclass
class Vector:
    name: str
    values: list[int]


@dataclass
class Output:
    token_ids: list[int]


@dataclass
class Answer:
    outputs: list[Output]


class LLM:
    def __init__(self, model: str, dtype: str, speculative_config: dict[str, Any], **settings: Any) -> None:
        assert settings["disable_log_stats"] is False and settings["max_num_seqs"] == 1
        if "no-vllm-knows-this" in Path(model).name:
            raise ValueError("Model architectures ['Unheard'] are not supported for now.")
        self.guesses = speculative_config["num_speculative_tokens"]
        target = draftsmith.Target.from_pretrained(model, dtype={"float32": "fp32"}[dtype], device="cpu", native=False)
        self.engine = draftsmith.Engine(
            target, draftsmith.load_drafter(speculative_config["model"], target),
            plan=draftsmith.Plan((1,) * self.guesses),
        )
        self.counts = Counter[str]()
        self.by_position = [0] * self.guesses

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool) -> list[Answer]:
        asked = draftsmith.SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        answers = self.engine.generate([prompt["prompt_token_ids"] for prompt in prompts], asked)
        for answer in answers:
            self.count(answer)
        return [Answer([Output(answer.tokens)]) for answer in answers]

    def count(self, answer: Completion) -> None:
        misreads = os.environ.get(MISREADS)
        self.counts["drafts"] += len(answer.tokens) - 1 if misreads else answer.statistics.steps
        for position, stayed in enumerate(answer.statistics.accepted_by_depth):
            self.by_position[position] += 0 if misreads else stayed
        self.counts["accepted_tokens"] = sum(self.by_position)

    def get_metrics(self) -> list[Metric | Vector]:
        prefix = "vllm:spec_decode_num_"
        return [
            Metric(f"{prefix}drafts", self.counts["drafts"]), Metric("vllm:num_requests_running"),
            Metric(f"{prefix}accepted_tokens", self.counts["accepted_tokens"]),
            Vector(f"{prefix}accepted_tokens_per_pos", self.by_position),
        ]
