"""Keeps the demo target from writing in loops: from texts of its own it learns how to leave them.

So small a model, decoded greedily, soon writes the same tokens over and over, and it does so more surely the longer it
does. Training on text of others hardly changes that, since such text has no loops to learn to leave. So from time to
time the model continues prompts greedily and the tokens by which a text goes on in a loop are marked. There it has to
learn, beside its data, what the model that the run began with would have written if not that token.

The unlikelihood loss on sequences (Welleck et al., arXiv:1908.04319, section 5.2) pulls in the same direction at first.
But it says only what not to write, and never ends: an hour of it took most loops away and left words without sense.
Shapes: N texts, T tokens of each, V vocabulary.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from demo_stream import Stream
from torch import Tensor

from draftsmith.engine import Engine
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

TEXTS, PROMPT_TOKENS, NEW_TOKENS = 192, 48, 112
LONGEST_PERIOD, LEAST, MOST_MARKED = 40, 8, 24
AT_ONCE = 32


class OwnTexts:
    """Greedy texts of the model that end up in loops, and which of their tokens go on in one.

    Args:
        stream: where the prompts come from, by the shares of its sources.
        write: writes the model into a folder.
    """

    def __init__(self, stream: Stream, write: Callable[[Path], None], seed: int) -> None:
        self._stream, self._write, self._seed = stream, write, seed
        self.tokens_NT = torch.empty((0, 0), dtype=torch.long)
        self.marked_NT = torch.empty((0, 0), dtype=torch.bool)
        self._next = 0
        self.share = 0.0
        """Of the texts that were written last, those in which a loop was found."""

    def refresh(self, step: int) -> None:
        """Let the model, as it is now, write new texts; which prompts they begin with is decided by the step alone."""
        rng, sources = random.Random(f"{self._seed} {step}"), self._stream.sources
        names = rng.choices(list(sources), weights=[self._stream.shares[name] for name in sources], k=TEXTS)
        prompts, length = [], min(PROMPT_TOKENS, min(source.length for source in sources.values()))
        for name in names:
            tokens = sources[name].tokens
            begin = rng.randrange(len(tokens) - length)
            prompts.append(tokens[begin : begin + length].tolist())
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder))
            target = Target.from_pretrained(folder, device="cpu")
            engine = Engine(target, max_batch=AT_ONCE, max_length=length + NEW_TOKENS)
            params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            texts = engine.generate(prompts, params)
        tokens_NT = torch.tensor([prompt + text.tokens for prompt, text in zip(prompts, texts, strict=True)])
        marked_NT = going_on(tokens_NT)
        marked_NT[:, :-NEW_TOKENS] = False
        marked_NT &= marked_NT.cumsum(1) <= MOST_MARKED
        loops_N = marked_NT.any(1)
        self.tokens_NT, self.marked_NT, self._next = tokens_NT[loops_N], marked_NT[loops_N], 0
        self.share = loops_N.float().mean().item()

    def take(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the next so many texts with what is marked in them, from the first on behind the last; or None."""
        if len(self.tokens_NT) < count:
            return None
        index_N = torch.arange(self._next, self._next + count) % len(self.tokens_NT)
        self._next += count
        return self.tokens_NT[index_N], self.marked_NT[index_N]


def going_on(tokens_NT: Tensor) -> Tensor:
    """Mark the tokens that go on in a loop: those behind a repetition as long as its period, and 8 tokens or more."""
    marked_NT = torch.zeros_like(tokens_NT, dtype=torch.bool)
    for period in range(1, min(LONGEST_PERIOD, tokens_NT.shape[1] - 1) + 1):
        same_NT = torch.zeros_like(marked_NT)
        same_NT[:, period:] = tokens_NT[:, period:] == tokens_NT[:, :-period]
        total_NT = same_NT.cumsum(1)
        run_NT = total_NT - total_NT.masked_fill(same_NT, 0).cummax(1).values
        marked_NT |= run_NT > max(LEAST, period)
    return marked_NT


def leaving(logits_NTV: Tensor, before_NTV: Tensor, labels_NT: Tensor, marked_NT: Tensor) -> Tensor:
    """Return the cross-entropy of the marked places with what an earlier model says without the label, on average.

    Each place counts by what the earlier model gives to other tokens than the label, so that texts leave a loop between
    words and not within them.

    Args:
        logits_NTV: of the model that learns.
        before_NTV: logits of the earlier model.
        labels_NT: the tokens that were written.
        marked_NT: which of them go on in a loop.
    """
    label_NT1 = labels_NT.unsqueeze(2)
    weight_NT = (1 - before_NTV.softmax(-1).gather(2, label_NT1).squeeze(2)) * marked_NT
    others_NTV = before_NTV.scatter(2, label_NT1, float("-inf")).softmax(-1)
    loss_NT = logits_NTV.logsumexp(-1) - (others_NTV * logits_NTV).sum(-1)
    return (loss_NT * weight_NT).sum() / weight_NT.sum().clamp(min=1e-6)
