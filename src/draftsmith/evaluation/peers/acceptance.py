"""Whether a drafter is accepted as often in vLLM as here: the same prompts, greedily, a chain of guesses a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import Interval, ratio_interval
from draftsmith.evaluation.peers.vllm_process import Vllm
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams, require_finished

ENOUGH = 0.95
"""So many times as many tokens a step as here may be the most that vLLM brings, by the interval. With a drafter that it
reads wrongly, it brings hardly more than one."""
ROOM = 16
"""Tokens that vLLM gets beyond a text, for guesses."""
HERE, STARTING, THERE = "decoding here", "starting vLLM", "decoding in vLLM"


@dataclass(frozen=True)
class SideBySide:
    """How often guesses stayed here and in vLLM.

    Args:
        version: of vLLM.
        new_tokens: of each text.
        steps, steps_there: of every text.
        stayed, stayed_there: in how many of all steps the first, the second, … guess stayed. vLLM counts what was right
            behind the end of a text too.
        same_texts: how many texts were the same; both round differently, so greedy texts part where two tokens are
            nearly alike.
    """

    version: str
    new_tokens: int
    steps: Sequence[int]
    steps_there: Sequence[int]
    stayed: Sequence[int]
    stayed_there: Sequence[int]
    same_texts: int

    @property
    def tau(self) -> float:
        """Tokens a step here; the first token of a text comes with the prompt."""
        return (self.new_tokens - 1) * len(self.steps) / sum(self.steps)

    @property
    def tau_there(self) -> float:
        """The same in vLLM."""
        return (self.new_tokens - 1) * len(self.steps_there) / sum(self.steps_there)

    @property
    def ratio(self) -> Interval:
        """vLLM's tokens a step, relative to those here, with a 95 % interval over the prompts."""
        return ratio_interval(self.steps, self.steps_there)

    @property
    def tells(self) -> bool:
        """Whether it is certain that guesses stay there at all: with none, vLLM brings a token a step."""
        return self.ratio.low > 1 / self.tau

    @property
    def passed(self) -> bool:
        """Whether vLLM brings as many tokens a step, as far as these texts tell."""
        return self.tells and self.ratio.high >= ENOUGH

    def sentence(self) -> str:
        """Return the result in words."""
        ratio = self.ratio
        said = (
            f"{self.tau_there:.2f} tokens a step in vLLM {self.version}, {self.tau:.2f} here: {ratio.value:.2f} times "
            f"as many (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
        )
        if self.passed:
            return f"{said}. No fewer guesses stay there, as far as {len(self.steps)} texts tell."
        if self.ratio.high >= ENOUGH:
            return (
                f"{said}. So few guesses stay that it cannot be told whether vLLM reads the drafter rightly; train it "
                "for longer, or give more prompts (--prompts, --new-tokens)."
            )
        return f"{said}; vLLM reads the drafter wrongly, or the target differently. Do not serve with it."

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        return {
            "vllm": self.version, "new_tokens": self.new_tokens, "steps": list(self.steps),
            "steps_vllm": list(self.steps_there), "stayed": list(self.stayed), "stayed_vllm": list(self.stayed_there),
            "same_texts": self.same_texts, "tau": self.tau, "tau_vllm": self.tau_there, "ratio": self.ratio.value,
            "interval": self.ratio.ends, "tells": self.tells, "passed": self.passed,
        }


def side_by_side(
    target: Target, drafter: Path, name: str, settings: Mapping[str, Any], python: Path,
    prompts: Sequence[Sequence[int]], new_tokens: int, trust_remote_code: bool,
    on_progress: Callable[[str, int, int], None],
) -> SideBySide:
    """Decode with a drafter here, and in vLLM with what was exported from it.

    Args:
        name: folder or hub name of the target.
        settings: vLLM's `speculative_config`.
        python: of an environment with vLLM.
    """
    guesses = int(settings["num_speculative_tokens"])
    on_progress(HERE, 0, 1)
    engine = Engine(target, load_drafter(str(drafter), target), plan=Plan((1,) * guesses), max_batch=8)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    found = require_finished(engine.generate([list(prompt) for prompt in prompts], params))
    on_progress(HERE, 1, 1)
    on_progress(STARTING, 0, 1)
    arguments = {
        "model": name, "dtype": str(target.dtype).removeprefix("torch."), "skip_tokenizer_init": True,
        "max_model_len": min(target.max_length, max(map(len, prompts)) + new_tokens + ROOM), "max_num_seqs": 1,
        "enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False,
        "speculative_config": dict(settings), "trust_remote_code": trust_remote_code,
    }
    if target.device.type == "cuda":
        arguments["gpu_memory_utilization"] = 0.5  # the rest is in use here
    steps, texts, stayed = list[int](), list[list[int]](), [0] * guesses
    with Vllm(python, arguments) as vllm:
        on_progress(STARTING, 1, 1)
        before = 0, 0
        for number, prompt in enumerate(prompts):
            on_progress(THERE, number, len(prompts))
            decoded = vllm.generate([prompt], new_tokens)
            drafts, accepted = (int(decoded.counters.get(name, 0)) for name in ("drafts", "accepted_tokens"))
            # Of a step without a guess, nothing is counted; but its token is there.
            steps.append(max(drafts - before[0], new_tokens - 1 - (accepted - before[1])))
            texts += decoded.tokens
            before, stayed = (drafts, accepted), list(decoded.counters.get("accepted_tokens_per_pos", stayed))
        version = vllm.version
    depths = [[*one.statistics.accepted_by_depth, *[0] * guesses][:guesses] for one in found]
    return SideBySide(
        version, new_tokens, [one.statistics.steps for one in found], steps,
        [sum(column) for column in zip(*depths, strict=True)], stayed,
        sum(one.tokens == text for one, text in zip(found, texts, strict=True)),
    )
