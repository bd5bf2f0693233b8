"""Finds parts of a target to leave out, so that the rest drafts best: "Draft & Verify" (arXiv:2309.08168), section 3.2.

The search minimises the time per token, in plain decoding steps: (γ · share + 1 + overhead) / τ, for γ guesses a step.
`share` is the share of the weights that a drafted token passes through, and τ the tokens per step of greedy decoding on
texts that the target wrote. Both are reproducible, unlike measured times.

Shapes: B rows (texts), V vocabulary.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.drafters.models.path_reader import PathReader
from draftsmith.drafters.models.skip_layers import SkipLayers, save_skip_layers
from draftsmith.targets import Skipped
from draftsmith.targets.sublayers import share_read, whole_layers
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

__all__ = ["Candidate", "LayerSearch", "Replay", "Text", "tokens_per_step"]

PREFIXES = 8
"""The most forms to examine that only read the first layers."""
PATIENCE = 4
"""Parts are left out in the order of their harm, until this many more in a row bring no gain."""
KICK = 3
"""Number of parts to change at once when no single change is a gain any more."""

Text = tuple[int, list[int]]
"""Tokens of a prompt and of the target's text behind it, and how many of them belong to the prompt."""


class Replay:
    """Texts that the target wrote greedily, with its keys and values: they show what a view of it would have guessed.

    As in decoding, a chain of guesses is read behind every token: for the text before it, the view uses the whole
    target's keys and values, and for the root and the guesses its own. Right guesses are the text itself, so nothing is
    approximated: what is accepted here is what greedy decoding accepts, up to the rounding of forwards of other shapes.

    Args:
        texts: with at least `guesses` + 1 tokens behind the prompt in one of them; shorter ones are not counted.
        guesses: G, the longest chain.
    """

    def __init__(self, target: "Target", texts: Sequence[Text], guesses: int) -> None:
        self.target, self.guesses = target, guesses
        self.texts = [(prompt, tokens) for prompt, tokens in texts if len(tokens) - prompt > guesses]
        if not self.texts:
            raise DraftsmithError(
                f"no text that {target.name} wrote is longer than the {guesses} guesses of a step; let it write more "
                "tokens, or lower the guesses."
            )
        read = [tokens[:-1] for _, tokens in self.texts]
        self._cache = target.new_cache(len(read), max(map(len, read)) + guesses)
        PathReader(target, self._cache).read([0] * len(read), read)
        self._written = [tensor.clone() for tensor in self._cache.tensors]

    def runs(self, view: "Target") -> list[list[int]]:
        """Return for every text how many guesses (0 … G) the target accepts at every token that it wrote.

        Only tokens with at least G more behind them count.
        """
        for tensor, written in zip(self._cache.tensors, self._written, strict=True):
            tensor.copy_(written)
        counts = [len(tokens) - prompt - self.guesses for prompt, tokens in self.texts]
        found: list[list[int]] = [[0] * count for count in counts]
        # From the end backwards: a chain overwrites only entries behind everything that is read later.
        for at in reversed(range(max(counts))):
            rows = [b for b, count in enumerate(counts) if at < count]
            for depth in range(self.guesses):
                places = [self.texts[b][0] + at + depth for b in rows]
                expected = [self.texts[b][1][place + 1] for b, place in zip(rows, places, strict=True)]
                guessed = self._guess(view, rows, places)
                rows = [b for b, one, right in zip(rows, guessed, expected, strict=True) if one == right]
                if not rows:
                    break
                for b in rows:
                    found[b][at] += 1
        return found

    def _guess(self, view: "Target", rows: list[int], places: list[int]) -> list[int]:
        """Read one token of each of these texts; return the view's guesses of the next tokens."""
        device = view.device
        tokens = [[self.texts[b][1][place]] for b, place in zip(rows, places, strict=True)]
        logits_B1V, _ = view.read_chain(
            self._cache, torch.tensor(tokens, device=device), torch.tensor(places, device=device), (),
            torch.tensor(rows, device=device), longest=max(places),
        )
        best: list[int] = logits_B1V[:, 0].argmax(-1).tolist()
        return best


def tokens_per_step(runs: Sequence[Sequence[int]], guesses: int) -> float:
    """Return τ of greedy decoding with chains of `guesses` guesses, from the numbers accepted at every token."""
    steps = tokens = 0
    for run in runs:
        at = 0
        while at < len(run):
            step = min(run[at], guesses) + 1
            steps, tokens, at = steps + 1, tokens + step, at + step
    return tokens / steps


@dataclass(frozen=True)
class Candidate:
    """The parts left out, the best chain length, and the result on the tuning texts.

    Args:
        share: share of the weights that a drafted token passes through.
        tau: tokens per step.
        cost: cost of a token, in plain steps.
    """

    skipped: Skipped
    guesses: int
    share: float
    tau: float
    cost: float

    def drafter(self, target: "Target") -> SkipLayers:
        """Return the drafter that it stands for."""
        return SkipLayers(target, self.skipped, self.guesses)

    def save(self, folder: Path, target: "Target", found: Mapping[str, Any]) -> None:
        """Write the folder of that drafter, with how it was found; see `save_skip_layers`."""
        save_skip_layers(folder, self.skipped, self.guesses, target, found)


class LayerSearch:
    """Searches for the parts to leave out; `seen` holds the examined candidates.

    Args:
        replay: judges the candidates.
        whole: leave out whole layers only; otherwise also attention or feed-forward alone.
        overhead: cost of a step besides target and drafted passes, in plain steps.
        seed: of the random changes.
    """

    def __init__(self, replay: Replay, whole: bool, overhead: float = 0.0, seed: int = 0) -> None:
        self.replay, self.overhead = replay, overhead
        layers = range(replay.target.layers)
        self.parts: list[Skipped] = (
            [whole_layers([layer]) for layer in layers] if whole
            else [Skipped(frozenset([layer]), frozenset()) for layer in layers]
            + [Skipped(frozenset(), frozenset([layer])) for layer in layers]
        )
        self.seen: dict[Skipped, Candidate] = {}
        self._random = random.Random(seed)

    @property
    def best(self) -> Candidate:
        """The cheapest candidate; of equals, the one seen first."""
        return min(self.seen.values(), key=lambda candidate: candidate.cost)

    @property
    def best_of_first_layers(self) -> Candidate | None:
        """The cheapest candidate that ends after the first layers, as early exit does; None if none was seen."""
        layers = self.replay.target.layers
        forms = [whole_layers(range(first, layers)) for first in range(1, layers)]
        found = [self.seen[form] for form in forms if form in self.seen]
        return min(found, key=lambda candidate: candidate.cost, default=None)

    def judge(self, skipped: Skipped) -> Candidate:
        """Measure the result of leaving out these parts, with the chain length that suits it best."""
        target = self.replay.target
        share, runs = share_read(target, skipped), self.replay.runs(target.without(skipped))
        lengths = range(1, self.replay.guesses + 1)
        taus = [tokens_per_step(runs, guesses) for guesses in lengths]
        costs = [(guesses * share + 1 + self.overhead) / tau for guesses, tau in zip(lengths, taus, strict=True)]
        cost = min(costs)
        at = costs.index(cost)
        return Candidate(skipped, lengths[at], share, taus[at], cost)

    def candidates(self) -> Iterator[Candidate]:
        """Judge one candidate after another, none twice, until all near ones were tried or the caller stops.

        1. Nothing left out, and the forms that end after the first layers. 2. Every part by itself, then more and more
        parts in the order of the harm that they did alone. 3. From the best so far, single changes and swaps in random
        order, keeping every gain. When no gain is left, a few
           random changes of the best, and on from there.
        """
        layers = self.replay.target.layers
        yield from self._new(Skipped())
        for first in range(1, layers, -(-layers // PREFIXES)):
            yield from self._new(whole_layers(range(first, layers)))
        for part in self.parts:
            yield from self._new(part)
        order = sorted((part for part in self.parts if part in self.seen), key=lambda part: self.seen[part].cost)
        yield from self._growing(order)
        yield from self._local()

    def _new(self, skipped: Skipped) -> Iterator[Candidate]:
        """Judge these parts, unless they were judged before or nothing would be left."""
        everything = whole_layers(range(self.replay.target.layers))
        if skipped not in self.seen and skipped != everything:
            self.seen[skipped] = self.judge(skipped)
            yield self.seen[skipped]

    def _growing(self, order: Sequence[Skipped]) -> Iterator[Candidate]:
        skipped, without_gain = Skipped(), 0
        least = float("inf")
        for part in order:
            skipped |= part
            yield from self._new(skipped)
            if skipped not in self.seen:
                return
            without_gain = 0 if self.seen[skipped].cost < least else without_gain + 1
            least = min(least, self.seen[skipped].cost)
            if without_gain == PATIENCE:
                return

    def _local(self) -> Iterator[Candidate]:
        here = self.best
        changes = [*combinations(self.parts, 1), *combinations(self.parts, 2)]
        exhausted = 0
        while exhausted < len(changes):
            gained = False
            for change in self._random.sample(changes, len(changes)):
                for candidate in self._new(changed(here.skipped, change)):
                    yield candidate
                    exhausted = 0
                    if candidate.cost < here.cost:
                        here, gained = candidate, True
                if gained:
                    break
            if not gained:
                exhausted += 1
                kick = self._random.sample(self.parts, min(KICK, len(self.parts)))
                kicked = changed(self.best.skipped, kick)
                yield from self._new(kicked)
                here = self.seen.get(kicked, self.best)


def changed(skipped: Skipped, parts: Sequence[Skipped]) -> Skipped:
    """Return `skipped` with each of these parts added, or removed if it was in it."""
    attention, mlp = set(skipped.attention), set(skipped.mlp)
    for part in parts:
        attention ^= part.attention
        mlp ^= part.mlp
    return Skipped(frozenset(attention), frozenset(mlp))
