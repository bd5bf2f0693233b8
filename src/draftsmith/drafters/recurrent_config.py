"""The sizes and options of a recurrent drafter, as its config.json holds them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from draftsmith.drafters.family import TrainedOptions
from draftsmith.types import DraftsmithError

MODEL_TYPE = "recurrent_drafting_drafter"
PUBLISHED = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn")

Count = Annotated[int, Field(ge=1)]


class RecurrentOptions(TrainedOptions):
    """What a recipe may set of a new recurrent drafter; see `RecurrentConfig`."""

    exit_dim: Annotated[int, Field(ge=0)] = 0
    num_draft_layers: Annotated[int, Field(ge=0)] = 1
    rnn: bool = True
    beam_width: Count = 4
    beam_length: Count = 5
    own_embeddings: bool = False


@dataclass(frozen=True)
class RecurrentConfig:
    """The sizes and options of a recurrent drafter; the first five names are those of the published config.json.

    Args:
        vocab_size: width V of the target's logits.
        hidden_size: width F of the target's states, and of the recurrent one.
        exit_dim: width E of the residual blocks; 0 means 2 F, which needs no projection before them.
        num_draft_layers: residual blocks before the output projection.
        rnn: s' = SiLU(U s + W e + b); False only adds up the embeddings.
        beam_width: candidates of the beam search that makes the default draft.
        beam_length: tokens drafted, without the root (the published code counts it), and the depths trained.
        own_embeddings: learn a table of token embeddings; False reads the target's, which is then not saved.
        draft_vocab_size: score only this many tokens, listed in the tensor d2t; 0 scores all.
    """

    vocab_size: int
    hidden_size: int
    exit_dim: int = 0
    num_draft_layers: int = 1
    rnn: bool = True
    beam_width: int = 4
    beam_length: int = 5
    own_embeddings: bool = False
    draft_vocab_size: int = 0

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise DraftsmithError(f"{name} is {getattr(self, name)!r}; it must be {rule}.")

        need(self.vocab_size >= 2, "vocab_size", "the width of the target's logits")
        need(self.hidden_size >= 1, "hidden_size", "the target's hidden size")
        need(self.exit_dim >= 0, "exit_dim", "0 (twice the hidden size) or a positive number")
        need(self.num_draft_layers >= 0, "num_draft_layers", "0 or a positive number")
        need(self.beam_length >= 1, "beam_length", "at least 1")
        need(0 <= self.draft_vocab_size <= self.vocab_size, "draft_vocab_size", "between 0 (all) and vocab_size")
        need(
            1 <= self.beam_width <= self.scored, "beam_width",
            f"between 1 and the {self.scored} tokens that are scored",
        )

    @property
    def width(self) -> int:
        """E."""
        return self.exit_dim or 2 * self.hidden_size

    @property
    def scored(self) -> int:
        """W."""
        return self.draft_vocab_size or self.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Return the published keys and the beam; the rest of ours only where it differs from its default."""
        values = asdict(self) | {"exit_dim": self.width}
        for name in ("own_embeddings", "draft_vocab_size"):
            if values[name] == getattr(type(self), name):
                del values[name]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: Path) -> "RecurrentConfig":
        """Read a config.json's object, published or ours; keys of other programs are passed over."""
        missing = set(PUBLISHED) - {"rnn"} - values.keys()
        if missing:
            raise DraftsmithError(f"{origin} lacks {', '.join(sorted(missing))}; use a whole {MODEL_TYPE} config.")
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        # The published class leaves out what equals its own defaults.
        return cls(**{"rnn": False, **known})
