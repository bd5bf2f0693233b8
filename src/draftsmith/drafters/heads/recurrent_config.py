"""The options of a recurrent drafter, and how the published config.json stores them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from draftsmith.drafters.config import FREE, Count, Size, TrainedConfig
from draftsmith.drafters.family import of_type, trained_in

MODEL_TYPE = "recurrent_drafting_drafter"


class RecurrentConfig(TrainedConfig):
    """The sizes and options of a recurrent drafter."""

    exit_dim: Size = Field(
        default=0, description="width of the residual blocks; 0 takes twice that of the target's states"
    )
    num_draft_layers: Size = Field(default=1, description="residual blocks before the layer that scores")
    rnn: bool = Field(
        default=True, description="let a recurrent layer read the drafted tokens; false adds up their embeddings"
    )
    beam_width: Annotated[Count, FREE] = Field(
        default=4, description="candidates of the beam search that makes the draft; 1 drafts a chain"
    )
    beam_length: Annotated[Count, FREE] = Field(
        default=5, description="tokens of a candidate, and the depths that are trained"
    )
    own_embeddings: bool = Field(
        default=False,
        description="learn an embedding, begun as the target's; false reads the target's own, which is not saved",
    )

    # The published code includes the root in beam_length; here it is not included.
    layout = (
        "vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "rnn", "beam_width", "beam_length",
        "own_embeddings", "draft_vocab_size",
    )
    only_if_set = ("own_embeddings", "draft_vocab_size")
    needed = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield from super().rules()
        yield not self.vocab_size or self.beam_width <= self.scored, "beam_width", (
            f"between 1 and the {self.scored} tokens that are scored"
        )

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for."""
        return "" if self.own_embeddings else "borrows its target's embedding"

    @property
    def width(self) -> int:
        """E."""
        return self.exit_dim or 2 * self.hidden_size

    def shapes(self) -> dict[str, Any]:
        """Return what has to agree so that weights can be taken over; a width may be given in two ways."""
        return super().shapes() | {"exit_dim": self.width}

    def to_json(self) -> dict[str, Any]:
        """Return the keys of config.json, which cannot have 0 for a width."""
        return super().to_json() | {"exit_dim": self.width}

    def limited_to(self, tokens: int) -> Self:
        """Return a copy that scores `tokens` tokens, with a beam no wider than that."""
        return self.changed(draft_vocab_size=tokens, beam_width=min(self.beam_width, tokens))

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: Path, **told: Any) -> Self:
        """Read a config.json's object; the published class omits `rnn` if it is false."""
        return super().from_json({"rnn": False, **values}, origin, **told)


FAMILY = trained_in(
    "draftsmith.drafters.heads.recurrent:RecurrentDrafter", "recurrent",
    "recurrent drafter (ReDrafter): one small RNN and a beam search (arXiv:2403.09919)", RecurrentConfig,
    of_type(MODEL_TYPE),
)
