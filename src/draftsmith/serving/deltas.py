"""What every endpoint builds its answer from: pieces of texts, with everything the request wants to know about them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from draftsmith.serving.delta import Delta
from draftsmith.serving.service import Call, Service
from draftsmith.serving.smoothing import smooth
from draftsmith.serving.tally import Explainer, Tally
from draftsmith.serving.token_texts import Pieces, TokenTexts


class _Choice:
    """What is remembered about one text from piece to piece."""

    def __init__(self, pieces: Pieces | None, explainer: Explainer | None) -> None:
        self.tally = Tally()
        self.pieces, self.explainer = pieces, explainer

    @classmethod
    def of(cls, call: Call, choice: int, texts: TokenTexts) -> "_Choice":
        pieces = None
        if call.explain or call.smooth:
            pieces = texts.pieces(call.prompts[choice // call.params.n])
        return cls(pieces, Explainer(texts) if call.explain else None)


def deltas(service: Service, call: Call) -> AsyncGenerator[Delta, None]:
    """Return a stream of the pieces of all texts of a call; see `Service.run`."""
    return smooth(_told(service, call)) if call.smooth else _told(service, call)


async def _told(service: Service, call: Call) -> AsyncGenerator[Delta, None]:
    choices = [_Choice.of(call, choice, service.texts) for choice in range(call.texts)]
    async with aclosing(service.run(call)) as pieces:
        async for number, chunk in pieces:
            choice = choices[number]
            choice.tally.take(chunk)
            texts: list[str] = []
            if choice.pieces is not None:
                texts = choice.pieces.read(chunk.tokens, chunk.completion is not None)
            explained = None if choice.explainer is None else choice.explainer.take(chunk, texts)
            yield Delta(
                number, chunk.tokens, chunk.text, texts, chunk.logprobs, explained, chunk.prompt_logprobs,
                chunk.completion, choice.tally,
            )
