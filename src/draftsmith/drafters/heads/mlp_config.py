"""The options of an MLP speculator, and how the published config.json stores them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from draftsmith.drafters.config import FREE, Count, Counts, Size, TrainedConfig
from draftsmith.drafters.family import Compared, of_type, trained_in

MODEL_TYPE = "mlp_speculator"


class MLPConfig(TrainedConfig):
    """The sizes and options of an MLP speculator."""

    inner_dim: Size = Field(default=0, description="width of the stages; 0 takes that of the target's states")
    n_predict: Count = Field(default=3, description="number of stages, one a drafted token, and so the deepest draft")
    tie_weights: bool = Field(
        default=False,
        description="let all stages share one embedding, head, norm and, but for the first, one projection",
    )
    scale_input: bool = Field(default=False, description="normalise the target's state before the first stage reads it")
    top_k_tokens_per_head: Annotated[Counts, FREE] = Field(
        default=(),
        description="children of a node in the drafted tree, depth by depth; depths that are left out have one",
    )
    n_candidates: Annotated[Count, FREE] = Field(
        default=5, description="paths of that tree that are kept, the likeliest ones"
    )
    default_branching: Annotated[Counts, FREE] = Field(
        default=(),
        description="the same as top_k_tokens_per_head, for decoding where no plan is given; [] takes that one",
    )
    condition_on_tokens: bool = Field(
        default=True,
        description="read the drafted tokens; false leaves their embedding out, so that stages read states only",
    )
    tie_to_target: bool = Field(
        default=False, description="use the target's own embedding and head, which are then neither trained nor saved"
    )
    init_from_target: Annotated[Literal["none", "embeddings", "embeddings+head"], FREE] = Field(
        default="none", description="which tables begin as copies of the target's: none, embeddings or embeddings+head"
    )
    init_width: Annotated[float, Field(gt=0, allow_inf_nan=False), FREE] = Field(
        default=1.0, description="what is drawn begins with this times the standard deviation 1/sqrt(inner_dim)"
    )

    layout = (
        "hidden_size", "vocab_size", "inner_dim", "n_predict", "tie_weights", "scale_input", "top_k_tokens_per_head",
        "n_candidates", "condition_on_tokens", "tie_to_target", "draft_vocab_size", "default_branching",
    )
    only_if_set = ("condition_on_tokens", "tie_to_target", "draft_vocab_size", "default_branching")
    renamed: ClassVar[Mapping[str, str]] = {"hidden_size": "emb_dim"}
    needed = ("hidden_size", "vocab_size", "n_predict")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield from super().rules()
        yield self.n_predict > 1 or not self.tie_weights, "n_predict", "at least 2 where tie_weights is set"
        for name in ("top_k_tokens_per_head", "default_branching"):
            yield len(getattr(self, name)) <= self.n_predict, name, f"at most n_predict = {self.n_predict} numbers"

    @property
    def width(self) -> int:
        """D."""
        return self.inner_dim or self.hidden_size

    @property
    def branching(self) -> tuple[int, ...]:
        """Children per node, for all depths."""
        given = self.top_k_tokens_per_head
        return given + (1,) * (self.n_predict - len(given))

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for."""
        return "borrows its target's embedding and head" if self.tie_to_target else ""

    def shapes(self) -> dict[str, Any]:
        """Return what has to agree so that weights can be taken over; a width may be given in two ways."""
        return super().shapes() | {"inner_dim": self.width}

    def to_json(self) -> dict[str, Any]:
        """Return the keys of config.json, with a number of children for every depth."""
        return super().to_json() | {"top_k_tokens_per_head": list(self.branching)}


FAMILY = trained_in(
    "draftsmith.drafters.heads.mlp:MLPSpeculator", "mlp",
    "MLP speculator: one small stage a token, fed the target's state and each guess (arXiv:2404.19124)", MLPConfig,
    of_type(MODEL_TYPE), rate=3e-3,
    compared=Compared(
        options={"n_predict": 4, "tie_weights": True, "init_from_target": "embeddings+head"},
        starts={"init_from_target": ("embeddings+head", "embeddings", "none"), "init_width": (1.0, 0.5, 2.0)},
        beats_in_papers=("medusa",),
    ),
)
