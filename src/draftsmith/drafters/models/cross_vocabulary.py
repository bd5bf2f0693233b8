"""Drafting with a model that has another tokenizer, lossless at any temperature.

"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(arXiv:2502.05202), the token-level intersection: the draft's distribution is restricted to the tokens that both
vocabularies have, and renormalised. The drafted tokens are tokens of the target with that distribution as their q, so
acceptance works as usual. The text that the draft model reads is encoded again in its own tokens.

Shapes: R rows of logits, V the target's vocabulary, W the draft's, I shared tokens.
"""

import json
import logging
import re
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.drafters.models.model_drafter import DraftModel, RowText
from draftsmith.targets import KVCache, Target
from draftsmith.targets.token_ids import body_ids, opening_ids
from draftsmith.types import DraftsmithError

WINDOW = 16
"""Number of the target's newest tokens whose encoding may still change when text follows; earlier text is settled."""
LONGER = 2
"""A text gets no more guesses if it has more than this many times as many tokens of the draft as of the target."""
SPACE = "\u2581"
# Bytes that are not UTF-8, as Python's "surrogateescape" writes them.
NOT_TEXT = re.compile("([\udc80-\udcff]+)")
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
# A token that never merges with others, for tokenizers that put a space before every text.
MARK = "\n"

log = logging.getLogger(__name__)


class TokenTable:
    """What every id of a tokenizer stands for, whatever marks the tokenizer uses.

    Attributes:
        text: the bytes of every ordinary token; a byte-fallback token is included only if no other has its byte.
        special: the ids of tokens that stand for no text, by their content.
        marks_spaces: whether the tokenizer writes spaces as a mark (sentencepiece), and may put one before a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self.tokenizer = tokenizer
        vocabulary = {token: number for token, number in tokenizer.get_vocab().items() if number < size}
        added = tokenizer.added_tokens_decoder
        special = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
        self.special = {token: number for token, number in vocabulary.items() if number in special}
        byte_level = _is_byte_level(tokenizer)
        self.marks_spaces = not byte_level and any(token.startswith(SPACE) for token in vocabulary)
        self.text: dict[int, bytes] = {}
        for token, number in vocabulary.items():
            if number in special:
                continue
            if number in added:
                self.text[number] = str(added[number].content).encode()
            elif byte_level and all(symbol in BYTE_OF for symbol in token):
                self.text[number] = bytes(BYTE_OF[symbol] for symbol in token)
            elif self.marks_spaces and (byte := BYTE_TOKEN.fullmatch(token)):
                self.text[number] = bytes([int(byte[1], 16)])
            elif self.marks_spaces or byte_level:
                self.text[number] = token.replace(SPACE, " ").encode()
            else:
                self.text[number] = str(tokenizer.decode([number], clean_up_tokenization_spaces=False)).encode()
        # Ids by text: of tokens with the same text, one that is no byte-fallback token, then the first.
        ranked = sorted(self.text, key=lambda n: (BYTE_TOKEN.fullmatch(self._name(n)) is not None, n), reverse=True)
        self.of_text = {self.text[number]: number for number in ranked if self.text[number]}

    def _name(self, number: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(number))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens around it."""
        return body_ids(self.tokenizer, text)

    def encode_run(self, run: bytes, at_start: bool) -> list[int]:
        """Return the ids of any bytes, at the start of a text or inside it.

        Bytes that are not UTF-8 are encoded one by one, or left out if there are no tokens for bytes.
        """
        ids: list[int] = []
        for piece in NOT_TEXT.split(run.decode("utf-8", "surrogateescape")):
            if NOT_TEXT.fullmatch(piece):
                tokens = [self.of_text.get(bytes([byte])) for byte in piece.encode("utf-8", "surrogateescape")]
                ids += [token for token in tokens if token is not None]
            elif piece:
                ids += self.encode(piece) if at_start and not ids else self._encode_inside(piece)
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        if self.marks_spaces:
            mark = self.encode(MARK)
            marked = self.encode(MARK + text)
            if marked[: len(mark)] == mark:
                return marked[len(mark) :]
        return self.encode(text)

    def opening(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text."""
        return opening_ids(self.tokenizer)


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    if not tokenizer.is_fast:
        return False
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return '"ByteLevel"' in json.dumps([state["decoder"], state["pre_tokenizer"]])


class SharedTokens:
    """The tokens that two vocabularies share, one to one: same text, same special token, or same role of one.

    Attributes:
        of_target: ids of the target (I), ascending.
        of_draft: the ids of the same tokens in the draft (I).
        coverage: the share of the target's tokens that are shared.
    """

    def __init__(
        self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_size: int, draft_size: int
    ) -> None:
        self.target, self.draft = TokenTable(target, target_size), TokenTable(draft, draft_size)
        pairs = {n: self.draft.of_text[text] for text, n in self.target.of_text.items() if text in self.draft.of_text}
        roles = [(target.eos_token, draft.eos_token), (target.bos_token, draft.bos_token)]
        names = [(name, name) for name in self.target.special] + roles
        for left, right in names:
            ours, theirs = self.target.special.get(str(left)), self.draft.special.get(str(right))
            if ours is not None and theirs is not None and ours not in pairs and theirs not in pairs.values():
                pairs[ours] = theirs
        if not pairs:
            raise DraftsmithError("the draft model's tokenizer shares no token with the target's; choose another one.")
        self.pairs = dict(sorted(pairs.items()))
        self.of_target, self.of_draft = torch.tensor(list(self.pairs)), torch.tensor(list(self.pairs.values()))
        self.known = len(self.target.text) + len(self.target.special)
        self.coverage = len(self.pairs) / self.known

    def coverage_of(self, texts: Sequence[str]) -> float:
        """Return the share of the tokens of these texts, as the target encodes them, that are shared."""
        tokens = [token for text in texts for token in self.target.encode(text)]
        return sum(token in self.pairs for token in tokens) / max(1, len(tokens))


class TranslatedText(RowText):
    """A row's text in the draft's tokens; its end is encoded again as it grows.

    The window holds the target's tokens since the last settled place.
    """

    def __init__(self, shared: SharedTokens) -> None:
        super().__init__()
        self._shared = shared
        self.tokens = shared.draft.opening()
        self._settled = len(self.tokens)
        self._window: list[int] = []
        self._at_start = True

    def extend(self, tokens: Sequence[int]) -> int:
        """Append committed tokens of the target; settled tokens stay, the draft's tokens for the window may change."""
        stay = self._settled
        self._window += tokens
        own = self._encode()
        # A text without any token that the draft can read still needs one token to continue from.
        self.tokens[self._settled :] = own if own or self._settled else [0]
        if len(self._window) > 2 * WINDOW:
            self._settle(own)
        return stay

    def _encode(self) -> list[int]:
        """Encode the window, with special tokens encoded separately."""
        target, draft = self._shared.target, self._shared.draft
        own: list[int] = []
        run = b""
        for index, token in enumerate(self._window):
            if token in target.text:
                run += target.text[token]
                continue
            own += draft.encode_run(run, self._at_start and not own)
            run = b""
            opened = self._settled and self._at_start and index == 0 and token == target.tokenizer.bos_token_id
            if not opened and token in self._shared.pairs:
                own.append(self._shared.pairs[token])
        return own + draft.encode_run(run, self._at_start and not own)

    def _settle(self, own: list[int]) -> None:
        """Move the window's start to the last place, `WINDOW` tokens before its end, where both sides' tokens end."""
        sizes, own_sizes = self._shared.target.text, self._shared.draft.text
        ends = list(accumulate(len(sizes.get(token, b"")) for token in self._window))
        own_ends = list(accumulate(len(own_sizes.get(token, b"")) for token in own))
        # A space that the draft's tokenizer put before the text shifts the ends of its tokens by one.
        shift = own_ends[-1] - ends[-1] if own_ends else 0
        places = {end: index + 1 for index, end in enumerate(own_ends)}
        for index in reversed(range(len(self._window) - WINDOW)):
            if ends[index] + shift in places and ends[index] < ends[-1]:
                self._cut(index + 1, places[ends[index] + shift])
                return
        if len(self._window) > 4 * WINDOW:
            self._cut(len(self._window), len(own))

    def _cut(self, tokens: int, own: int) -> None:
        self._window = self._window[tokens:]
        self._settled += own
        self._at_start = False


class CrossVocabularyDraftModel(DraftModel):
    """A draft model with another tokenizer than the target's."""

    def __init__(self, model: Target, target: Target, shared: SharedTokens, guesses: int) -> None:
        super().__init__(model, target.vocab_size, guesses)
        self.shared = shared
        self._of_target, self._of_draft = shared.of_target.to(model.device), shared.of_draft.to(model.device)
        self._own_V = torch.zeros(target.vocab_size, dtype=torch.long, device=model.device)
        self._own_V[self._of_target] = self._of_draft
        self._names = model.name, target.name
        log.info("%s", self.sharing())

    @property
    def coverage(self) -> float:
        """The share of the target's tokens that can be drafted."""
        return self.shared.coverage

    def sharing(self, texts: Sequence[str] = ()) -> str:
        """Say how much of the target's vocabulary is shared, and how many of its tokens in these texts."""
        (model, target), shared = self._names, self.shared
        all_told = f"{len(shared.pairs)} of {shared.known} tokens ({shared.coverage:.0%}) are shared"
        by_use = f", and {shared.coverage_of(texts):.1%} of those in the texts" if texts else ""
        return f"{model} drafts for {target} across vocabularies: {all_told}{by_use}"

    def note_for_user(self, texts: Sequence[str]) -> str:
        """Say how much is shared."""
        return self.sharing(texts)

    def new_text(self) -> RowText:
        """Return an empty text that is translated as it grows."""
        return TranslatedText(self.shared)

    def longest_text(self, cache: KVCache) -> int:
        """Leave room for a tokenizer that needs more tokens for the same text."""
        return LONGER * cache.capacity

    def to_own(self, tokens: Tensor) -> Tensor:
        """Translate drafted tokens, all of which are shared."""
        return self._own_V[tokens]

    def to_target(self, logits_RW: Tensor) -> Tensor:
        """Keep only the logits of the shared tokens; the step that turns them into probabilities renormalises them."""
        whole_RV = logits_RW.new_full((logits_RW.shape[0], self.vocab_size), -torch.inf)
        return whole_RV.index_copy(1, self._of_target, logits_RW.index_select(1, self._of_draft))


