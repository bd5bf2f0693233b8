"""The words every layer shares. Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), V vocabulary.

A draft is a tree of guessed tokens under the root, the newest committed token, which the target has not read yet.
Nodes are numbered from 0 with parents before children; `ROOT` is the parent of a first guess, and `UNUSED` marks
padding that makes ragged trees fit one tensor and is never accepted.

PyTorch is not imported here, so that mistakes on the command line are reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1
UNUSED = -2

LOSSY = "lossy (typical acceptance)"

CompileLevel = Literal["off", "trace", "full"]
Drawn = Literal["none", "some", "all"]
Quantization = Literal["none", "int8", "int4"]
ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]

MOST_CONSTRAINT = 65_536
"""Characters of a schema, a grammar or a list of choices."""
MOST_PATTERN = 4_096
"""Characters of a regular expression."""


class DraftsmithError(Exception):
    """A mistake in what the user gave: one sentence that names the value and how to fix it."""

    exit_code = 2


@dataclass
class Draft:
    """A tree of guesses for every row.

    Args:
        tokens_BN: guessed token ids.
        parents_BN: index of the parent node, `ROOT` or `UNUSED`; parents come before their children.
        depth: the deepest level any node can have; static, so that walks over the tree have a fixed length.
        q_BMV: the distributions that the guesses were drawn from, fp32 or float64: row 0 for the root's children, row
            n + 1 for node n's children; nodes past the last row have no children. Siblings were drawn in index order
            without replacement. Each row, divided by its sum in float64, is q to the last bit; before that it sums up
            to 1 within 1e-4. None when the guesses are deterministic, which makes q a point mass.
        branching: the most children a node of each depth can have; static, so that walks over siblings have a fixed
            length. None when unknown, which costs a sampled draft time.
        parts: for a drafter with parts: the number of the part that guessed, for every row or one for all rows. Part 0
            is a lookup; the others guess where it finds nothing. Never on a device, since a policy asks at every step.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth: int
    q_BMV: Tensor | None = None
    branching: tuple[int, ...] | None = None
    parts: Sequence[int] | int | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every node n is the child of node n - 1, which `branching` promises if it is all ones."""
        return self.branching is not None and max(self.branching, default=1) == 1


@dataclass
class Context:
    """What a drafter may look at: the newly committed tokens of every row with the states that predicted them.

    Args:
        tokens_BT: committed since the last proposal, the root last; row b holds `counts_B[b]` of them, left-aligned.
        features_BTF: `features_BTF[:, t]` is the target's tapped state that *predicted* `tokens_BT[:, t]`.
        counts_B: valid tokens a row, at least 1.
        lengths_B: all committed tokens a row, prompt and root included.
        rows_B: a stable number for each row, for drafters that keep state between steps.
        temperature_B: sampling temperature of each row, 0 for greedy.
        seeds_B: seed of each row's noise.
        first_B: the very first token of every row. No state predicted it, so `tokens_BT` never contains it. None when
            unknown.
        slots_B: the cache slot of each row, which it keeps as long as it runs; None means that row b is in slot b.
        drawn: whether `temperature_B` is above 0 in "none", "some" or "all" of the rows, known without waiting for the
            device; None when unknown.
        span: no row has more committed tokens, known without waiting for the device. It takes few values, for drafters
            that are to work on few shapes; None where that is of no use.
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    counts_B: Tensor
    lengths_B: Tensor
    rows_B: Tensor
    temperature_B: Tensor
    seeds_B: Tensor
    first_B: Tensor | None = None
    slots_B: Tensor | None = None
    drawn: Drawn | None = None
    span: int | None = None

    def after(self, tokens_BT: Tensor, features_BTF: Tensor, counts_B: Tensor, lengths_B: Tensor) -> Context:
        """Return the context of the same rows after a step that committed these tokens."""
        return Context(
            tokens_BT, features_BTF, counts_B, lengths_B, self.rows_B, self.temperature_B, self.seeds_B, self.first_B,
            self.slots_B, self.drawn,
        )

    def part(self, begin: int, end: int) -> Context:
        """Return the rows `begin` to `end` - 1."""
        if begin == 0 and end == len(self.rows_B):
            return self
        return Context(
            self.tokens_BT[begin:end], self.features_BTF[begin:end], self.counts_B[begin:end],
            self.lengths_B[begin:end], self.rows_B[begin:end], self.temperature_B[begin:end], self.seeds_B[begin:end],
            None if self.first_B is None else self.first_B[begin:end],
            None if self.slots_B is None else self.slots_B[begin:end],
        )

    def some(self, index_R: Tensor) -> Context:
        """Return these rows."""
        return Context(
            self.tokens_BT[index_R], self.features_BTF[index_R], self.counts_B[index_R], self.lengths_B[index_R],
            self.rows_B[index_R], self.temperature_B[index_R], self.seeds_B[index_R],
            None if self.first_B is None else self.first_B[index_R],
            None if self.slots_B is None else self.slots_B[index_R],
        )

    def root(self) -> tuple[Tensor, Tensor]:
        """Return the root's token (B) and the state that predicted it (B, F)."""
        last_B1 = (self.counts_B - 1).unsqueeze(1)
        root_B = self.tokens_BT.gather(1, last_B1).squeeze(1)
        index_B1F = last_B1.unsqueeze(2).expand(-1, -1, self.features_BTF.shape[2])
        return root_B, self.features_BTF.gather(1, index_B1F).squeeze(1)


def empty_draft(context: Context) -> Draft:
    """Return the draft without guesses: plain decoding."""
    none_BN = context.tokens_BT.new_empty((context.tokens_BT.shape[0], 0))
    return Draft(none_BN, none_BN, depth=0, branching=())


@dataclass(frozen=True)
class Constraint:
    """What a text has to be: its tokens are chosen among those from which such a text can still result.

    Args:
        kind: "json_schema", "json_object" (any JSON object), "regex" (which the whole text matches), "grammar" (EBNF,
            from its rule `root` on) or "choice" (one of several strings).
        text: the schema as JSON, the pattern, the grammar, or the strings as a JSON list; empty for "json_object".
        origin: where the constraint came from, such as a field of a request, so that a refusal can name it;
            comparisons ignore it.
    """

    kind: ConstraintKind
    text: str = ""
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise DraftsmithError(
                f"the constraint's kind is {self.kind!r}; use one of {', '.join(get_args(ConstraintKind))}."
            )
        if not isinstance(self.text, str):
            raise DraftsmithError(f"the constraint's text is of type {type(self.text).__name__}; give a string.")
        if (self.kind == "json_object") != (not self.text):
            rule = "takes no text; leave it out" if self.text else "needs a text"
            raise DraftsmithError(f"a constraint of the kind {self.kind} {rule}.")
        most = MOST_PATTERN if self.kind == "regex" else MOST_CONSTRAINT
        if len(self.text) > most:
            raise DraftsmithError(
                f"the constraint's text has {len(self.text)} characters; a {self.kind} may have {most}."
            )

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> Constraint:
        """Return the constraint that a text is JSON and fits a JSON schema; DraftsmithError for infinities and NaN."""
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except ValueError as error:
            raise DraftsmithError(f"the JSON schema is not JSON ({error}); use numbers that are finite.") from error

    @classmethod
    def of_choices(cls, strings: Sequence[str]) -> Constraint:
        """Return the constraint that a text is one of these strings."""
        return cls("choice", json.dumps(list(strings)))


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded; the defaults are greedy.

    Args:
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: subtracted once from the logit of every token already in the output.
        frequency_penalty: subtracted for every occurrence in the output.
        logit_bias: added to the logits of these token ids.
        max_tokens: exactly how many tokens to generate, unless a stop comes first.
        stop: one string or several that end the text; they are cut off. Stored as a tuple.
        stop_token_ids: one token or several that end the text, which keeps the token as its last. Stored as a tuple.
        ignore_eos: go on after the target's own end token.
        seed: of this request's noise; None draws one.
        n: independent continuations.
        logprobs: report the log-probability of each token and of this many best alternatives.
        prompt_logprobs: the same for the prompt's tokens; all of them are then read, even where another request has
            read the same beginning.
        constraint: what the text has to be, such as JSON of a schema; None for any text.
        prediction: a text, or token ids, that the output is expected to follow for the most part, such as a file before
            it is edited. It serves as a draft for this request alone, and changes how soon the text comes, never what
            it is. Ids are stored as a tuple.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    prediction: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise DraftsmithError(f"{name} is {getattr(self, name)!r}; it must be {rule}.")

        def whole(value: object) -> bool:
            return isinstance(value, Integral)

        for name, kind in (("stop", str), ("stop_token_ids", Integral)):
            given = getattr(self, name)
            several = (given,) if isinstance(given, kind) else tuple(given) if isinstance(given, Iterable) else (None,)
            rule = "a string or several" if kind is str else "a token id, which is a whole number, or several"
            need(all(isinstance(one, kind) for one in several), name, rule)
            object.__setattr__(self, name, several)
        if self.prediction is not None and not isinstance(self.prediction, str):
            ids = tuple(self.prediction) if isinstance(self.prediction, Iterable) else (None,)
            need(all(map(whole, ids)), "prediction", "a text, or token ids, which are whole numbers")
            object.__setattr__(self, "prediction", ids)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            need(isinstance(getattr(self, name), Real), name, "a number")
        for name in ("top_k", "max_tokens", "n"):
            need(whole(getattr(self, name)), name, "a whole number")
        need(self.seed is None or whole(self.seed), "seed", "a whole number or None")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            need(asked is None or whole(asked), name, "a whole number or None")
            need(asked is None or asked >= 0, name, "at least 0")
        need(
            isinstance(self.logit_bias, Mapping) and all(map(whole, self.logit_bias))
            and all(isinstance(value, Real) for value in self.logit_bias.values()),
            "logit_bias", "a dictionary from token ids, which are whole numbers, to numbers",
        )
        need(self.temperature == 0 or 1e-4 <= self.temperature <= 1e4, "temperature", "0 (greedy) or 0.0001 to 10000")
        need(self.top_k >= 0, "top_k", "0 (off) or a positive whole number")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(1e-4 <= self.repetition_penalty <= 1e4, "repetition_penalty", "between 0.0001 and 10000 (1 is off)")
        need(abs(self.presence_penalty) <= 1e4, "presence_penalty", "between -10000 and 10000")
        need(abs(self.frequency_penalty) <= 1e4, "frequency_penalty", "between -10000 and 10000")
        need(all(abs(v) <= 1e4 for v in self.logit_bias.values()), "logit_bias", "between -10000 and 10000 each")
        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(all(self.stop), "stop", "made of non-empty strings")
        need(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        need(self.n >= 1, "n", "at least 1")
        need(self.constraint is None or isinstance(self.constraint, Constraint), "constraint", "a Constraint or None")


@dataclass
class Statistics:
    """What one piece of decoding cost and gained; additive over steps and rows.

    `steps` counts verifications (of one row), `drafted` the guesses that were verified, `accepted` those that stayed,
    and `accepted_by_depth[d]` those that stayed at depth d + 1. `new_tokens` includes the token of the prefill. Seconds
    are wall-clock; the rows of a batch share its seconds evenly. `lossless` says whether the text is the target's own
    or distributed as its own; a sum is lossless if all its parts are. `cached_tokens` counts the prompt tokens that
    another request had read before, `waiting_s` the seconds until the request got a slot. For a request with a
    prediction, `accepted_prediction` counts the guesses taken from it that stayed, and `rejected_prediction` those that
    were verified and refused; both are None without one.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    new_tokens: int = 0
    prompt_tokens: int = 0
    target_s: float = 0.0
    drafter_s: float = 0.0
    rest_s: float = 0.0
    prefill_s: float = 0.0
    lossless: bool = True
    cached_tokens: int = 0
    waiting_s: float = 0.0
    accepted_prediction: int | None = None
    rejected_prediction: int | None = None

    @property
    def fidelity(self) -> str:
        """What a report says about the text: "lossless", or what made it lossy."""
        return "lossless" if self.lossless else LOSSY

    @property
    def tokens_per_step(self) -> float:
        """τ = 1 + accepted / steps: the target's own token included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def decode_s(self) -> float:
        """Seconds spent in steps, without the prefill."""
        return self.target_s + self.drafter_s + self.rest_s

    def __iadd__(self, other: Statistics) -> Statistics:
        deeper, shallower = sorted((self.accepted_by_depth, other.accepted_by_depth), key=len, reverse=True)
        summed = list(deeper)
        for d, count in enumerate(shallower):
            summed[d] += count
        self.accepted_by_depth = summed
        for name in (
            "steps", "drafted", "accepted", "new_tokens", "prompt_tokens",
            "target_s", "drafter_s", "rest_s", "prefill_s", "cached_tokens", "waiting_s",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lossless = self.lossless and other.lossless
        for name in ("accepted_prediction", "rejected_prediction"):
            given = [one for one in (getattr(self, name), getattr(other, name)) if one is not None]
            setattr(self, name, sum(given) if given else None)
        return self


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token under the target before any sampling filter, with the best alternatives."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass
class Completion:
    """One finished continuation.

    `finish_reason` is "stop" (end token, stop string or stop id), "length", "deadline", "abort" or "error". After
    "error", `error` is a sentence that says why: for instance, the target had no finite logits for the next token, or a
    step failed. The tokens that were committed before stand in every case.
    `accepted_lengths[i]` says how many tokens of step i were drafted, so that a display can colour them. The prefill's
    token belongs to no step. Where a text is cut inside an accepted path, its last token counts as the target's own, so
    that the number of tokens is 1 + the sum of (1 + accepted).
    `is_unfit` says that the error came from the request's constraint: no token could follow under it, or finding out
    took too long.
    `prompt_logprobs` are those of the prompt's tokens from the second on: nothing predicts the first.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    statistics: Statistics
    accepted_lengths: list[int]
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    is_unfit: bool = False


def require_finished(completions: list[Completion]) -> list[Completion]:
    """Return the completions if none ended with an error, for code that measures; DraftsmithError otherwise."""
    for completion in completions:
        if completion.error is not None:
            raise DraftsmithError(completion.error)
    return completions


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter's checkpoint records of its target: written when it is saved, compared when it is loaded.

    `fingerprint` identifies a target that was changed together with its drafter; None for all others.
    `opening` are the tokens that the tokenizer puts before a text, such as BOS. `text_hash` and `template_hash` are
    fingerprints of how the tokenizer encodes text and of the chat template: a drafter trained on other tokens guesses
    worse. `weights_hash` identifies the weights, because a drafter also guesses worse for a target of the same kind
    with other weights; None for a target that has a `fingerprint`.
    """

    hidden_size: int
    vocab_size: int
    tokenizer_hash: str | None
    name: str
    fingerprint: str | None = None
    opening: tuple[int, ...] | None = None
    text_hash: str | None = None
    template_hash: str | None = None
    weights_hash: str | None = None
