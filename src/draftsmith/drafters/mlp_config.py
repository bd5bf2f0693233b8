"""The sizes and options of an MLP speculator, as its config.json holds them, and the target they are made for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from draftsmith.drafters.family import TrainedOptions
from draftsmith.types import DraftsmithError

MODEL_TYPE = "mlp_speculator"


Count = Annotated[int, Field(ge=1)]


class MLPOptions(TrainedOptions):
    """What a recipe may set of a new MLP speculator; see `MLPSpeculatorConfig` and `initialise_from_target`."""

    inner_dim: Annotated[int, Field(ge=0)] = 0
    n_predict: Count = 3
    tie_weights: bool = False
    scale_input: bool = False
    top_k_tokens_per_head: tuple[Count, ...] = ()
    n_candidates: Count = 5
    default_branching: tuple[Count, ...] = ()
    condition_on_tokens: bool = True
    tie_to_target: bool = False
    init_from_target: Literal["none", "embeddings", "embeddings+head"] = "none"


@dataclass(frozen=True)
class MLPSpeculatorConfig:
    """The sizes and options of an MLP speculator; the first eight names are those of the published config.json.

    Args:
        emb_dim: width F of the target's states.
        vocab_size: width V of the target's logits.
        inner_dim: width D of the stages; 0 means emb_dim.
        n_predict: number of stages, and so the deepest draft.
        tie_weights: share emb, head and ln between the stages; proj_0 stays separate and the other proj are shared.
        scale_input: RMS-normalise the target's state without parameters and divide it by sqrt(2).
        top_k_tokens_per_head: children a node, depth by depth; missing depths have one.
        n_candidates: how many root-to-leaf paths are verified.
        condition_on_tokens: read the drafted tokens; False leaves the embedding term out (state-only heads).
        tie_to_target: use the target's own frozen embedding and head, which are then not saved (section 5).
        draft_vocab_size: score only this many tokens, listed in the tensor d2t; 0 scores all.
        default_branching: children a node of the draft to make when nobody chose a plan, as measured to pay best; ()
            takes top_k_tokens_per_head at all depths.
    """

    emb_dim: int
    vocab_size: int
    inner_dim: int = 0
    n_predict: int = 3
    tie_weights: bool = False
    scale_input: bool = False
    top_k_tokens_per_head: tuple[int, ...] = ()
    n_candidates: int = 5
    condition_on_tokens: bool = True
    tie_to_target: bool = False
    draft_vocab_size: int = 0
    default_branching: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise DraftsmithError(f"{name} is {getattr(self, name)!r}; it must be {rule}.")

        need(self.emb_dim >= 1, "emb_dim", "the target's hidden size")
        need(self.vocab_size >= 2, "vocab_size", "the width of the target's logits")
        need(self.inner_dim >= 0, "inner_dim", "0 (the target's hidden size) or a positive number")
        need(self.n_predict >= 1, "n_predict", "at least 1")
        need(not self.tie_weights or self.n_predict > 1, "n_predict", "at least 2 when tie_weights is set")
        need(
            len(self.top_k_tokens_per_head) <= self.n_predict and all(k >= 1 for k in self.top_k_tokens_per_head),
            "top_k_tokens_per_head", f"at most n_predict = {self.n_predict} positive numbers",
        )
        need(
            len(self.default_branching) <= self.n_predict and all(k >= 1 for k in self.default_branching),
            "default_branching", f"at most n_predict = {self.n_predict} positive numbers",
        )
        need(self.n_candidates >= 1, "n_candidates", "at least 1")
        need(0 <= self.draft_vocab_size <= self.vocab_size, "draft_vocab_size", "between 0 (all) and vocab_size")

    @property
    def width(self) -> int:
        """D."""
        return self.inner_dim or self.emb_dim

    @property
    def scored(self) -> int:
        """W."""
        return self.draft_vocab_size or self.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Return the published keys, and ours only where they differ from their defaults."""
        values = asdict(self) | {"top_k_tokens_per_head": list(self.branching)}
        for name in ("condition_on_tokens", "tie_to_target", "draft_vocab_size", "default_branching"):
            if values[name] == getattr(type(self), name):
                del values[name]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: Path) -> "MLPSpeculatorConfig":
        """Read a config.json's object, published or ours; keys of other programs are passed over."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for name in ("top_k_tokens_per_head", "default_branching"):
            if name in known:
                known[name] = tuple(known[name])
        missing = {"emb_dim", "vocab_size", "n_predict"} - known.keys()
        if missing:
            raise DraftsmithError(f"{origin} lacks {', '.join(sorted(missing))}; use a whole mlp_speculator config.")
        return cls(**known)

    @property
    def branching(self) -> tuple[int, ...]:
        """Children a node for all depths."""
        given = self.top_k_tokens_per_head
        return given + (1,) * (self.n_predict - len(given))
