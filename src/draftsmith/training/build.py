"""Builds an untrained, or warmly started, drafter from a recipe and a target."""

from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.data.loader import Loader, Windowing, noise
from draftsmith.training.data.reader import Reader, Unusable
from draftsmith.training.data.sources import Source, names_of
from draftsmith.training.data.windows import Window, cut
from draftsmith.training.recipe import Recipe, check_vocabulary
from draftsmith.types import DraftsmithError

COUNTED_TOKENS, MOST_COUNTED = 400_000, 20_000
"""The most tokens that are counted, and the most documents that are read to find them."""
HELD_OUT_WINDOWS, HELD_OUT_WINDOWS_EACH, HELD_OUT_LENGTH = 32, 8, 256
"""Number of windows on which the loss is measured, the fewest per source, and their greatest length in tokens."""


def build_loader(recipe: Recipe, target: Target, windowing: Windowing, purpose: str) -> Loader:
    """Return a loader of windows over the recipe's data; each purpose has its own order."""
    return Loader(recipe.data, Reader.of(target, recipe.data.learn), windowing, seed=noise(recipe.seed, purpose))


def build_prompts(recipe: Recipe, target: Target) -> Loader:
    """Return a loader of the prompts of stage 2."""
    section = recipe.stage2
    longest = min(section.longest_prompt, target.max_length - section.new_tokens)
    return build_loader(recipe, target, Windowing(section.prompt_tokens, longest), "prompts")


def held_out_windows(recipe: Recipe, target: Target, shortest: int) -> dict[str, list[Window]]:
    """Return some windows of every source's held-out text, on which the loss is measured; empty if there are none."""
    if target.tokenizer is None:
        return {}
    data, reader = recipe.data, Reader.of(target, recipe.data.learn)
    length = max(shortest, min(HELD_OUT_LENGTH, recipe.stage1.length, target.max_length))
    most = max(HELD_OUT_WINDOWS_EACH, HELD_OUT_WINDOWS // max(1, len(data.sources)))
    found: dict[str, list[Window]] = {}
    for name, section in zip(names_of(data.sources), data.sources, strict=True):
        own: list[Window] = []
        for piece in Source(section, data.held_out_every, data.piece_characters, held_out=True).pieces():
            try:
                own += cut(reader.text(piece), reader.opening, length)
            except Unusable:
                continue
            if len(own) >= most:
                break
        if own:
            found[name] = own[:most]
    return found


def frequent_tokens(recipe: Recipe, target: Target, size: int, documents: Loader | None = None) -> Tensor:
    """Return the ids (W) of the most frequent learnt tokens, in rising order.

    Args:
        documents: a loader that already has documents in memory, which are then counted.
    """
    if documents is None:
        documents = build_loader(recipe, target, Windowing(256), "count")
    counts: Counter[int] = Counter()
    for piece in islice(documents.waiting(), MOST_COUNTED):
        try:
            window = documents.reader.text(piece)
        except Unusable:
            continue
        for begin, end in window.spans:
            counts.update(window.tokens[begin:end])
        if counts.total() >= COUNTED_TOKENS:
            break
    if not counts:
        raise DraftsmithError(
            "no document in data.sources has tokens to learn, so that none can be chosen for drafter.draft_vocab_size; "
            "add others, or set data.learn=everything."
        )
    ranked = sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def build_drafter(
    recipe: Recipe, target: Target, documents: Loader | None = None, warm: bool = True
) -> TrainableModel:
    """Return a drafter in fp32 on the target's device; its weights depend on the recipe alone.

    Args:
        documents: see `frequent_tokens`.
        warm: start from the weights of `drafter.init_from`. Who loads others anyway need not have that folder.

    Raises:
        DraftsmithError: sizes that do not fit the target, or a warm start of another shape.
    """
    section = recipe.drafter
    family = family_named(section.family)
    config = section.config
    check_vocabulary(recipe, target.vocab_size, target.name)
    tokens = None
    if config.draft_vocab_size:
        tokens = frequent_tokens(recipe, target, config.draft_vocab_size, documents)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(noise(recipe.seed, "weights"))
        drafter = family.make(config, target, tokens)
    assert isinstance(drafter, TrainableModel)
    if warm and section.init_from is not None:
        drafter.start_from(Path(section.init_from).expanduser(), target)
    drafter.to(target.device)
    drafter.bind(target)
    return drafter
