"""What is known of one request: times of its chunks, tokens as the server counts them, and what went wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """One request, filled while its answer arrives. Times are seconds of `time.perf_counter`.

    Args:
        sent: when the request was handed to the connection.
        first, last: when the first and the last chunk with text arrived.
        ended: when the last chunk with a choice arrived; it may carry no text but only the reason for the end.
        gaps: seconds between consecutive chunks with text.
        input_tokens, output_tokens: as the usage chunk says; None until it came. Chunks are never counted as tokens.
        finish_reason: None until a chunk gives one.
        acceptance_length: the mean of this request, where a chunk of the server reports it.
        again: whether it was sent a second time, because the server had closed a kept connection.
    """

    sent: float
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    acceptance_length: float | None = None
    error: str = ""
    again: bool = False

    @property
    def ok(self) -> bool:
        """Whether the whole answer came, with its token counts."""
        return not self.error

    @property
    def ttft(self) -> float | None:
        """Seconds to the first chunk with text; None where no chunk had any."""
        return None if self.first is None else self.first - self.sent

    @property
    def done(self) -> float:
        """When the answer was complete."""
        return self.ended if self.ended is not None else self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.done - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, (E2E - TTFT) / (n - 1); None of fewer than two tokens or without TTFT."""
        tokens, ttft = self.output_tokens or 0, self.ttft
        return (self.e2el - ttft) / (tokens - 1) if tokens > 1 and ttft is not None else None

    def take(self, chunk: Any, now: float) -> None:
        """Take in one chunk that arrived at `now`; ValueError for something that is no chunk."""
        if not isinstance(chunk, Mapping):
            raise ValueError("a chunk is no object")
        if chunk.get("error"):
            self.error = f"the server gave up in mid-stream: {message_of(chunk)}"
            return
        for choice in chunk.get("choices") or ():
            self.ended = now
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = text_of(choice)
            if text:
                if self.last is None:
                    self.first = now
                else:
                    self.gaps.append(now - self.last)
                self.last = now
                self.text.append(text)
        usage = chunk.get("usage")
        if usage:
            self.input_tokens = int(usage.get("prompt_tokens") or 0)
            self.output_tokens = int(usage.get("completion_tokens") or 0)
        told = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        length = told.get("mean_acceptance_length")
        if isinstance(length, int | float):
            self.acceptance_length = float(length)

    def close(self, finished: bool) -> None:
        """Note what is wrong with an answer that has ended, if anything; `finished` says whether `[DONE]` came."""
        if self.error:
            return
        if not finished and self.finish_reason is None:
            self.error = "the stream broke off before its end"
        elif self.output_tokens is None:
            self.error = "the server sent no usage chunk, so its tokens cannot be counted"


def text_of(choice: Mapping[str, Any]) -> str:
    """Return what a choice of a chunk adds to the answer: text, reasoning, or the arguments of a tool call."""
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def message_of(answer: Any) -> str:
    """Return the first line of an error in any of the forms that servers send, without the full stop at its end.

    It becomes the end of a sentence of ours, which has its own.
    """
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("detail") or error
    lines = str(error).strip().splitlines()
    return lines[0][:300].removesuffix(".") if lines else "no reason given"
