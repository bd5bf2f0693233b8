"""The sections of a recipe, each with its keys, their defaults and what they mean."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draftsmith.drafters.config import Divergence, TrainedConfig
from draftsmith.drafters.family import Family
from draftsmith.drafters.registry import DEFAULT_FAMILY, family_named
from draftsmith.training.data.split import HELD_OUT_EVERY
from draftsmith.types import DraftsmithError

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSection(Section):
    """The model to draft for, frozen unless there is a section `joint`.

    `name` is a folder or hub name, null the embedded demo target.
    """

    name: str | None = Field(
        default=None, description="folder or hub name of the model to draft for; null is the embedded one"
    )
    dtype: str = Field(default="auto", description="auto, bf16, fp16, fp32 or fp64")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 and so on")


class DrafterSection(BaseModel):
    """The drafter to train: its `family`, and beside it the options of that family.

    `init_from` is the folder of one to start from (a warm start, not a resume).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    family: str = Field(
        default=DEFAULT_FAMILY,
        description="family of the drafter; `draftsmith families` lists them with their options, which stand here too",
    )
    init_from: str | None = Field(
        default=None, description="folder of a drafter to start from (a warm start, not a resume)"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Check the family's options and write out their defaults, so that the effective recipe names them all."""
        if not isinstance(values, dict):
            return values
        own = {key: values[key] for key in cls.model_fields if key in values}
        rest = {key: value for key, value in values.items() if key not in own}
        family = own.get("family", cls.model_fields["family"].default)
        if not isinstance(family, str):
            return own
        return own | _trainable(family).config.read(rest, "recipe key drafter.").chosen()

    @property
    def config(self) -> TrainedConfig:
        """The options of the family, for no target yet."""
        config = _trainable(self.family).config.read(self.model_extra or {}, "recipe key drafter.")
        assert isinstance(config, TrainedConfig)
        return config


def _trainable(name: str) -> Family:
    family = family_named(name)
    if not family.trainable:
        raise DraftsmithError(f"recipe key drafter.family is {name!r}, which needs no training; use it as it is.")
    return family


class SourceSection(Section):
    """One source: `path` is a file or folder (text, JSONL, JSONL.gz, JSONL.xz, JSON, parquet), `name` a hub data set.

    `configuration` and `split` choose a part of a hub data set. `weight` is the source's share of the tokens, in
    proportion to the other sources' weights; in stage 2, of the prompts.
    """

    path: str | None = Field(default=None, description="file or folder of text")
    name: str | None = Field(default=None, description="hub data set")
    configuration: str | None = Field(default=None, description="of the hub data set")
    split: str = Field(default="train", description="of the hub data set")
    weight: Rate = Field(
        default=1.0,
        description="the source's share of the tokens (in stage 2, of the prompts), relative to the other weights",
    )


class DataSection(Section):
    """Where the text comes from, what of it is learnt, and how far it is shuffled: documents in memory, and windows.

    `learn` is what is learnt of conversations, and of completions of a prompt: what the assistant wrote, or everything.
    Of texts it is always everything.
    """

    sources: tuple[SourceSection, ...] = Field(
        default=(),
        description="what to read: a list of fields of this kind; the first one's path is data.sources.0.path",
    )
    learn: Literal["assistant", "everything"] = Field(
        default="assistant", description="of conversations and completions: what the assistant wrote, or everything"
    )
    held_out_every: Annotated[int, Field(ge=0)] = Field(
        default=HELD_OUT_EVERY,
        description="hold out one document in so many, at least one of every source, to measure on; 0 holds out none",
    )
    shuffle_documents: Count = Field(default=2500, description="documents in memory from which the next one is drawn")
    shuffle_windows: Count = Field(default=128, description="windows in memory from which the next one is drawn")
    piece_characters: Annotated[int, Field(ge=64)] = Field(
        default=30_000, description="longer texts are cut into pieces of so many characters before they are shuffled"
    )

    @field_validator("held_out_every")
    @classmethod
    def _leaves_some(cls, every: int) -> int:
        if every == 1:
            raise ValueError(
                "1 would hold out every document and leave none to learn from; use 0 to hold out none, or at least 2"
            )
        return every


class StageSection(Section):
    """One stage; an optimizer step sees batch × accumulate sequences, and the rate falls from `rate` to `final_rate`.

    `positions_per_sequence` trains on that many random positions of each sequence; null takes all.
    """

    steps: Annotated[int, Field(ge=0)] = Field(default=0, description="optimizer steps; 0 leaves the stage out")
    batch: Count = Field(default=8, description="sequences that are read at once")
    accumulate: Count = Field(default=1, description="batches that make a step")
    rate: Rate = Field(default=1e-3, description="learning rate after the warm-up")
    final_rate: Rate = Field(default=1e-4, description="learning rate at the end of the stage")
    positions_per_sequence: Count | None = Field(
        default=None, description="train on so many random positions of each sequence; null takes all"
    )

    @model_validator(mode="after")
    def _rate_falls(self) -> Self:
        if self.final_rate > self.rate:
            raise ValueError(
                f"final_rate is {self.final_rate:g} and rate {self.rate:g}, so that it would rise; set both of them"
            )
        return self


class GroundTruthSection(StageSection):
    """Stage 1: the data's own text, in windows of at most `length` tokens, each from one document alone."""

    length: Annotated[int, Field(ge=8)] = Field(default=4096, description="most tokens of a window of the data's text")


class OnPolicySection(StageSection):
    """Stage 2: text that the target writes after prompts from the data, read `epochs` times.

    The target writes as it will be used: at `temperature` and `top_k` (0 is greedy; the report samples at 1 and 10).
    It goes on behind the first `prompt_tokens` tokens of a text, or behind a whole conversation up to a turn of the
    assistant's if that has at most `longest_prompt`; it writes up to its end token, at most `new_tokens`. `texts` is a
    file of such texts, generated.jsonl of another run of the same lengths, to be read instead.
    """

    rate: Rate = Field(default=1e-4, description="learning rate after the warm-up")
    final_rate: Rate = Field(default=1e-5, description="learning rate at the end of the stage")
    prompt_tokens: Annotated[int, Field(ge=2)] = Field(
        default=64, description="the target goes on behind so many tokens of a text"
    )
    longest_prompt: Annotated[int, Field(ge=2)] = Field(
        default=2048, description="most tokens of a conversation that the target goes on behind"
    )
    new_tokens: Annotated[int, Field(ge=8)] = Field(
        default=256, description="most tokens that the target writes behind each prompt"
    )
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="at which the target writes; 0 is greedy"
    )
    top_k: Annotated[int, Field(ge=0)] = Field(
        default=10, description="the target writes one of so many likeliest tokens; 0 is any"
    )
    epochs: Count = Field(default=1, description="how often what the target wrote is read")
    generate_batch: Count = Field(default=32, description="prompts that the target goes on behind at once")
    texts: str | None = Field(default=None, description="read generated.jsonl of another run instead of writing")

    @property
    def texts_needed(self) -> int:
        """How many texts the stage reads, each `epochs` times."""
        return -(-self.steps * self.batch * self.accumulate // self.epochs)


class OptimizerSection(Section):
    """AdamW on everything, or Muon on the hidden matrices and AdamW on the rest."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw for everything, or muon for hidden matrices and AdamW for the rest"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="of AdamW: how slowly its two averages move")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="how much weights shrink by themselves"
    )
    clip: Rate = Field(default=1.0, description="gradients with a larger norm are scaled down to it")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto", description="of the arithmetic: bf16 where it is fast, with auto; weights are always fp32"
    )
    compile: bool = Field(default=False, description="compile the loss with torch.compile")


class DistillationSection(Section):
    """How much of the loss is the divergence from the target's own distribution, which one, and at which temperature.

    `divergence` is forward_kl, reverse_kl, js (Jensen-Shannon), tv (total variation) or lk; see docs/training.md.
    """

    weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    temperature: Rate = 1.0
    divergence: Divergence = "forward_kl"


class JointSection(Section):
    """Train the target together with its heads (Medusa-2, arXiv:2401.10774, section 2.2.2); it becomes another model.

    The heads learn at the stage's rate, the target at `heads_rate_factor` times less. The loss is the target's own plus
    `weight` times the heads', head k (from 1) counting `decay` to the power of k. In the first `warmup_steps` of the
    run the target stands still; in the `ramp_steps` after them the weight rises to its full value as a sine does.
    """

    heads_rate_factor: Rate = Field(default=4.0, description="the target learns at so many times less than the heads")
    weight: Rate = Field(default=0.2, description="of the heads' losses beside the target's own")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="head k, from 1, counts this to the power of k"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="steps in which the target stands still")
    ramp_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps after these in which the weight rises"
    )


class OutputSection(Section):
    """Where the run is kept; `keep` checkpoints stay beside the best one, and the drafter is exported in `dtype`."""

    folder: str = Field(default="runs/mlp", description="where the run is kept")
    keep: Count = Field(default=2, description="checkpoints that stay beside the best one")
    save_every: Count = Field(default=200, description="steps from one checkpoint to the next")
    log_every: Count = Field(default=10, description="steps from one record of metrics.jsonl to the next")
    dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="of the exported drafter")
    report_to: Literal["none", "tensorboard"] = Field(
        default="none", description="also write the metrics for this program"
    )


class EvaluationSection(Section):
    """How often τ is measured by decoding, and when that ends a stage early.

    `every` is in steps; 0 measures only at the ends of the stages. With a `patience`, a stage ends after so many
    measurements in a row in which neither τ rose above its highest of the stage nor the loss on held-out text fell
    below its lowest; stage 2 then goes on from the weights of the highest τ. The rate still falls as if the stage had
    all its steps.
    """

    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="steps from one measurement of τ to the next; 0 measures only at the ends of the stages"
    )
    patience: Count | None = Field(
        default=None,
        description="measurements in a row that bring neither a higher τ nor a lower loss on held-out text, after "
        "which a stage ends early; null is never",
    )
