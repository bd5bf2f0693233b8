"""Greedy text with drafts against greedy text without, token for token, and both against the model itself."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.losslessness import Divergence, Explained, first_divergence, is_targets_own
from draftsmith.evaluation.proof.rounding import Movement, measure_movement, tie_or_fault_by_movement
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, SamplingParams, Statistics, require_finished

MakeEngine = Callable[..., Engine]
OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is in all."""

MEASURED_PREFIXES = 8


@dataclass(frozen=True)
class DivergentText:
    """A text that differs from plain decoding: with which batch and plan, where, and why.

    `moved` is how far leading logits move between shapes of the forward, on that prefix or on others, in nats.
    """

    batch: int
    drafted: bool
    explained: Explained
    moved: float
    expected_text: str
    got_text: str

    @property
    def tie(self) -> bool:
        """Whether the rounding explains it."""
        return self.explained.tie

    def sentence(self) -> str:
        """Say where the text differs, in which tokens, and how far apart their logits are."""
        item, gap = self.explained.divergence, self.explained.gap
        how = "with drafts" if self.drafted else "without drafts"
        apart = "" if gap is None else f", logits {gap:.3g} apart (rounding moves such by {self.moved:.3g})"
        return (
            f"prompt {item.index}, batch {self.batch}, {how}: token {item.position} is {item.got} {self.got_text!r} "
            f"instead of {item.expected} {self.expected_text!r}{apart}: {'a tie' if self.tie else 'a DEFECT'}"
        )


@dataclass
class GreedyProof:
    """What the greedy part found.

    Args:
        prompts: the number of prompts.
        tokens: tokens of their plain texts.
        compared: texts compared with plain decoding at batch 1, over all batch sizes.
        divergent_texts: those that differ.
        foreign: numbers of the prompts whose plain text a plain forward of the model does not confirm.
        movement: how far logits move between shapes of the forward.
        tokens_per_step: τ of the drafted runs.
    """

    prompts: int
    tokens: int
    compared: int
    divergent_texts: list[DivergentText]
    foreign: list[int]
    movement: Movement
    tokens_per_step: float
    batches: tuple[int, ...] = field(default=(1, 8))

    @property
    def ties(self) -> int:
        """Differing texts that the rounding explains."""
        return sum(divergent.tie for divergent in self.divergent_texts)

    @property
    def defects(self) -> int:
        """Texts that differ without a tie, texts not the model's own, and one if logits move too far for rounding."""
        return len(self.divergent_texts) - self.ties + len(self.foreign) + (not self.movement.plausible)

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "batches": list(self.batches),
            "compared": self.compared,
            "identical": self.compared - len(self.divergent_texts),
            "ties": self.ties,
            "defects": self.defects,
            "not_the_models_own": self.foreign,
            "tokens_per_step": self.tokens_per_step,
            "logits_move_between_shapes": asdict(self.movement) | {"bit_identical": self.movement.bit_identical},
            "divergences": [asdict(divergent) for divergent in self.divergent_texts],
        }


def prove_greedy(
    target: Target,
    drafter: Drafter,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int = 8,
    make_engine: MakeEngine = Engine,
    on_progress: OnProgress = lambda what, done, total: None,
) -> GreedyProof:
    """Decode every prompt plainly and with drafts, alone and in a ragged batch, and explain every difference."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    length = max(len(prompt) for prompt in prompts) + new_tokens
    sizes = (1, batch) if batch > 1 else (1,)
    runs = [(size, shape) for size in sizes for shape in (NO_DRAFT, plan)]
    total = len(runs) * len(prompts) * new_tokens
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        on_progress("greedy text", done, total)

    plain: list[Completion] = []
    different: list[tuple[int, bool, Divergence]] = []
    statistics = Statistics()
    for size, shape in runs:
        engine = make_engine(target, drafter, max_batch=size, max_length=length)
        texts = require_finished(engine.generate(prompts, params, shape, on_progress=advance))
        if not plain:
            plain = texts
            continue
        if shape is plan:
            for completion in texts:
                statistics += completion.statistics
        for index, (ours, theirs) in enumerate(zip(plain, texts, strict=True)):
            item = first_divergence(index, ours.tokens, theirs.tokens)
            if item is not None:
                different.append((size, shape is plan, item))
    foreign = []
    for index, completion in enumerate(plain):
        if not is_targets_own(target, completion):
            foreign.append(index)
        on_progress("plain text against the model's own forward", index + 1, len(plain))
    prefixes = [completion.prompt_tokens + completion.tokens for completion in plain[:MEASURED_PREFIXES]]
    movement = measure_movement(target, prefixes)
    return GreedyProof(
        len(prompts), sum(len(c.tokens) for c in plain), (len(runs) - 1) * len(prompts),
        explain_all(target, plain, different, movement), foreign, movement, statistics.tokens_per_step, sizes,
    )


def explain_all(
    target: Target, plain: Sequence[Completion], different: Sequence[tuple[int, bool, Divergence]], movement: Movement
) -> list[DivergentText]:
    """Explain every difference from a plain text, given as (batch, whether it was drafted, where it differs)."""
    if not different:
        return []
    wide = target if target.dtype in (torch.float32, torch.float64) else target.widened()
    divergent_texts = []
    for size, drafted, item in different:
        prefix = plain[item.index].prompt_tokens + plain[item.index].tokens[: item.position]
        explained, moved = tie_or_fault_by_movement(target, wide, prefix, item, movement.leading)
        divergent_texts.append(
            DivergentText(size, drafted, explained, moved, _text(target, item.expected), _text(target, item.got))
        )
    return divergent_texts


def _text(target: Target, token: int | None) -> str:
    if token is None:
        return "(end)"
    return str(target.tokenizer.decode([token])) if target.tokenizer is not None else ""
