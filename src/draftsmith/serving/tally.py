"""Counts how the drafts of one text did, and explains them for the page."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from draftsmith.engine import Chunk
from draftsmith.plan import Plan
from draftsmith.serving.settings import Detail
from draftsmith.serving.token_texts import TokenTexts

TARGET = "target"


class Tally:
    """Counts, step by step, the guesses of one text that were verified and that stayed."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.reasons: Counter[str] = Counter()
        self.deepest = 0

    def take(self, chunk: Chunk) -> None:
        """Note a piece of the text; steps without a guess count only among the reasons."""
        if chunk.made is not None and chunk.made.why is not None:
            self.reasons[chunk.made.why.label] += 1
        if chunk.made is not None and chunk.made.drafted:
            self.accepted.append(chunk.made.accepted)
            self.drafted.append(chunk.made.drafted)
            self.deepest = max(self.deepest, chunk.made.plan.depth)

    def metrics(self, detail: Detail) -> dict[str, Any]:
        """Return the counts as vLLM reports them.

        The mean length is 1 + accepted / steps, the rate accepted / drafted, both over steps with guesses; entry j of
        the histogram counts the steps that accepted j guesses. `steps_by_reason` counts all steps that have a reason.
        """
        steps, accepted, drafted = len(self.accepted), sum(self.accepted), sum(self.drafted)
        told: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [self.accepted.count(count) for count in range(self.deepest + 1)] if steps else [],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.deepest,
            "steps_by_reason": dict(self.reasons),
        }
        if detail == "detailed":
            told |= {"per_step_accepted": self.accepted, "per_step_drafted": self.drafted}
        return {"speculative_decoding": told}


class Explainer:
    """Says for every token of one text who wrote it: the target, or a drafter whose guess stayed."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._begun = time.monotonic()
        self._count = 0

    def take(self, chunk: Chunk, pieces: Sequence[str]) -> dict[str, Any]:
        """Return what the page shows about a piece; `pieces` are the texts of its tokens."""
        made = chunk.made
        accepted = 0 if made is None else made.accepted
        source = TARGET if made is None else made.part or made.drafter
        tokens = [
            {"id": token, "text": text, "source": source, "depth": at + 1} if at < accepted
            else {"id": token, "text": text, "source": TARGET, "depth": 0}
            for at, (token, text) in enumerate(zip(chunk.tokens, pieces, strict=True))
        ]
        self._count += len(tokens)
        return {"tokens": tokens, "step": self._step(chunk), "tokens_per_second": round(self._speed(), 2)}

    def _speed(self) -> float:
        """Return tokens a second since the request was handed to the engine, the time for its prompt included."""
        passed = time.monotonic() - self._begun
        return self._count / passed if passed > 0 else 0.0

    def _step(self, chunk: Chunk) -> dict[str, Any] | None:
        made = chunk.made
        if made is None:
            return None
        tree = None
        if made.tree is not None:
            tree = {
                "tokens": [self._texts.text(token) for token in made.tree.tokens],
                "parents": made.tree.parents, "accepted": made.tree.accepted,
            }
        return {
            "plan": plan_in_words(made.plan), "drafted": made.drafted, "accepted": made.accepted, "tree": tree,
            "why": None if made.why is None else made.why.sentence(),
        }


def plan_in_words(plan: Plan) -> str:
    """Return a plan as requests write it: "none", "chain 3" or "4,2,1", then its bounds, such as "factor 0.5"."""
    if not plan.depth:
        return "none"
    shape = f"chain {plan.depth}" if plan.is_chain else ",".join(map(str, plan.branching))
    drawn = ["sampled"] if plan.sampled else []
    names = ("paths", "nodes", "beam"), ("factor", "confidence")
    before, behind = (
        [f"{name} {value:g}" for name in some if (value := getattr(plan, name)) is not None] for some in names
    )
    return " ".join([shape, *before, *drawn, *behind])
