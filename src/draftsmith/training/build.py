"""From a recipe and a target to an untrained, or warmly started, speculator."""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.mlp import MLPSpeculator, initialise_from_target
from draftsmith.drafters.mlp_config import MLPSpeculatorConfig
from draftsmith.target import Target
from draftsmith.training.data import Loader, Packing, noise
from draftsmith.training.recipe import Recipe
from draftsmith.types import DraftsmithError

COUNTED_TOKENS = 400_000


def build_loader(recipe: Recipe, target: Target, packing: Packing, purpose: str) -> Loader:
    """Return a loader of windows over the recipe's data; each purpose has its own order."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise DraftsmithError(f"the target {target.name!r} has no tokenizer, so it cannot read the data; give one.")
    if not target.eos_token_ids:
        raise DraftsmithError(f"the target {target.name!r} has no end token to put between documents; set one.")

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return Loader(recipe.data, tokenize, min(target.eos_token_ids), packing, seed=noise(recipe.seed, purpose))


def frequent_tokens(recipe: Recipe, target: Target, size: int) -> Tensor:
    """Return the ids (W) of the most frequent tokens of the training data, in rising order."""
    loader = build_loader(recipe, target, Packing(256), "count")
    counts: Counter[int] = Counter()
    for _ in range(COUNTED_TOKENS // 256):
        counts.update(loader.next_window())
    ranked = sorted(range(target.vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def build_speculator(recipe: Recipe, target: Target) -> MLPSpeculator:
    """Return a speculator in fp32 on the target's device, its weights a function of the recipe alone.

    Raises:
        DraftsmithError: sizes that do not fit the target, or a warm start of another shape.
    """
    section = recipe.drafter
    config = MLPSpeculatorConfig(
        emb_dim=target.hidden_size, vocab_size=target.vocab_size, inner_dim=section.inner_dim,
        n_predict=section.n_predict, tie_weights=section.tie_weights, scale_input=section.scale_input,
        top_k_tokens_per_head=section.top_k_tokens_per_head, n_candidates=section.n_candidates,
        condition_on_tokens=section.condition_on_tokens, tie_to_target=section.tie_to_target,
        draft_vocab_size=section.draft_vocab_size, default_branching=section.default_branching,
    )
    if section.init_from is not None:
        return _warm_start(Path(section.init_from), config, target, recipe)
    tokens = frequent_tokens(recipe, target, config.draft_vocab_size) if config.draft_vocab_size else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(noise(recipe.seed, "weights"))
        speculator = MLPSpeculator(config, tokens)
        initialise_from_target(speculator, target, section.init_from_target)
    speculator.to(target.device)
    speculator.bind(target)
    return speculator


def _warm_start(folder: Path, config: MLPSpeculatorConfig, target: Target, recipe: Recipe) -> MLPSpeculator:
    speculator = MLPSpeculator.from_pretrained(folder, target, dtype=torch.float32)
    if config.draft_vocab_size and not speculator.config.draft_vocab_size:
        speculator = speculator.restricted(frequent_tokens(recipe, target, config.draft_vocab_size))
    free = ("top_k_tokens_per_head", "n_candidates", "default_branching")
    for name in MLPSpeculatorConfig.__dataclass_fields__:
        have, want = getattr(speculator.config, name), getattr(config, name)
        if name == "inner_dim":
            have, want = speculator.config.width, config.width
        if name not in free and have != want:
            raise DraftsmithError(
                f"drafter.{name} is {want!r}, but drafter.init_from {folder} has {have!r}; set drafter.{name} to that."
            )
    speculator.config = config
    return speculator
