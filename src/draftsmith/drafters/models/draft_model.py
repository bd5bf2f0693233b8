"""The family of separate draft models: any causal language model that can be a target can also draft for one.

If its tokenizer is the target's, ids pass through; otherwise they are translated, see `cross_vocabulary`.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.drafters.models.cross_vocabulary import CrossVocabularyDraftModel, SharedTokens
from draftsmith.drafters.models.draft_model_config import DraftModelConfig
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError


def draft_with(model: Target, target: Target, guesses: int = 4) -> DraftModel:
    """Make a drafter from a loaded model, translating between vocabularies if they differ.

    Raises:
        DraftsmithError: vocabularies that cannot be compared, or have no token in common.
    """
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            without = model if model.tokenizer is None else target
            raise DraftsmithError(
                f"{model.name} has {model.vocab_size} tokens and {target.name} has {target.vocab_size}, and "
                f"{without.name} has no tokenizer to translate with; add its files."
            )
        return DraftModel(model, target.vocab_size, guesses)
    if same_vocabulary(model.tokenizer, target.tokenizer):
        return DraftModel(model, target.vocab_size, guesses)
    shared = SharedTokens(target.tokenizer, model.tokenizer, target.vocab_size, model.vocab_size)
    return CrossVocabularyDraftModel(model, target, shared, guesses)


def same_vocabulary(left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase) -> bool:
    """Whether both give every token the same id; tokens added to the trained ones may differ."""
    return _trained_tokens(left) == _trained_tokens(right)


def _trained_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    added = tokenizer.added_tokens_decoder
    return {token: number for token, number in tokenizer.get_vocab().items() if number not in added}


def make_draft_model(config: DraftModelConfig, target: Target, draft_tokens: Tensor | None) -> DraftModel:
    """Load the model at `path`, on the target's device, in its dtype or quantised."""
    try:
        model = Target.from_pretrained(
            config.path,
            dtype=target.dtype if config.quantize == "none" else torch.bfloat16,
            device=str(target.device),
            native=target.backend.native or config.quantize != "none",
            quantize=config.quantize,
        )
    except DraftsmithError as error:
        raise DraftsmithError(f"no draft model from {config.path!r}: {error}") from error
    return draft_with(model, target, config.guesses)


def load_draft_model(folder: Path, target: Target) -> DraftModel:
    """Load the causal language model in a folder as a draft model."""
    return make_draft_model(DraftModelConfig(path=str(folder)), target, None)
