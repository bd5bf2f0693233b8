"""One continuation on its way: what came in, what went out, and when it ends."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from draftsmith.engine.text import TextStream
from draftsmith.types import Completion, SamplingParams, Statistics, TokenLogprob


@dataclass
class Request:
    """The state of one continuation; `index` is its place in the caller's order."""

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    finish_reason: str | None = None
    error: str | None = None

    @classmethod
    def make(
        cls,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        eos: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> "Request":
        """Start a request; the end tokens are the target's own unless ignored, and the caller's."""
        ends = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        request = cls(index, prompt, params, seed, ends, TextStream(tokenizer, params.stop))
        request.statistics.prompt_tokens = len(prompt)
        return request

    @property
    def length(self) -> int:
        """All committed tokens, prompt and root included."""
        return len(self.prompt) + len(self.tokens)

    def commit(self, tokens: list[int]) -> int:
        """Append tokens up to the first that ends the request; return how many were taken."""
        for taken, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            stopped = self.text.push(token)
            if stopped or token in self.end_tokens:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.params.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.text.finish()
                self.statistics.new_tokens += taken
                return taken
        self.statistics.new_tokens += len(tokens)
        return len(tokens)

    def fail(self, error: str) -> None:
        """End the request with a sentence that says why; what was committed before stands."""
        self.finish_reason, self.error = "error", error
        self.text.finish()

    def completion(self) -> Completion:
        """Return the finished result."""
        assert self.finish_reason is not None
        return Completion(
            prompt_tokens=self.prompt,
            tokens=self.tokens,
            text=self.text.text,
            finish_reason=self.finish_reason,
            statistics=self.statistics,
            accepted_lengths=self.accepted_lengths,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            error=self.error,
        )
