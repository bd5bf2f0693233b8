"""The recipe of a training run: one typed YAML file, changed from the command line by `section.field=value`."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftsmith.drafters.config import TrainedConfig, explain
from draftsmith.drafters.family import Family
from draftsmith.drafters.registry import DEFAULT_FAMILY, family_named
from draftsmith.drafters.trainable.divergence import Divergence
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

    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"


class DrafterSection(BaseModel):
    """The drafter to train: its `family`, and beside it the options of that family.

    `init_from` is the folder of one to start from (a warm start, not a resume).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    family: str = DEFAULT_FAMILY
    init_from: str | None = None

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
    proportion to the other sources' weights.
    """

    path: str | None = None
    name: str | None = None
    configuration: str | None = None
    split: str = "train"
    weight: Rate = 1.0


class DataSection(Section):
    """Where the text comes from, what of it is learnt, and how far it is shuffled: documents in memory, and windows.

    `learn` is what is learnt of conversations, and of completions of a prompt: what the assistant wrote, or everything.
    Of texts it is always everything.
    """

    sources: tuple[SourceSection, ...] = ()
    learn: Literal["assistant", "everything"] = "assistant"
    held_out_every: Annotated[int, Field(ge=2)] = HELD_OUT_EVERY
    shuffle_documents: Count = 10_000
    shuffle_windows: Count = 128
    piece_characters: Annotated[int, Field(ge=64)] = 30_000


class StageSection(Section):
    """One stage; an optimizer step sees batch × accumulate sequences, and the rate falls from `rate` to `final_rate`.

    `positions_per_sequence` trains on that many random positions of each sequence; null takes all.
    """

    steps: Annotated[int, Field(ge=0)] = 0
    batch: Count = 8
    accumulate: Count = 1
    rate: Rate = 1e-3
    final_rate: Rate = 1e-4
    positions_per_sequence: Count | None = None


class GroundTruthSection(StageSection):
    """Stage 1: the data's own text, in windows of at most `length` tokens, each from one document alone."""

    length: Annotated[int, Field(ge=8)] = 4096


class OnPolicySection(StageSection):
    """Stage 2: text that the target writes after prompts from the data, read `epochs` times.

    The target writes as it will be used: at `temperature` and `top_k` (0 is greedy; the report samples at 1 and 10).
    It goes on behind the first `prompt_tokens` tokens of a text, or behind a whole conversation up to a turn of the
    assistant's if that has at most `longest_prompt`; it writes up to its end token, at most `new_tokens`. `texts` is a
    file of such texts, generated.jsonl of another run of the same lengths, to be read instead.
    """

    rate: Rate = 1e-4
    final_rate: Rate = 1e-5
    prompt_tokens: Annotated[int, Field(ge=2)] = 64
    longest_prompt: Annotated[int, Field(ge=2)] = 2048
    new_tokens: Annotated[int, Field(ge=8)] = 256
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 10
    epochs: Count = 1
    generate_batch: Count = 32
    texts: str | None = None


class OptimizerSection(Section):
    """AdamW on everything, or Muon on the hidden matrices and AdamW on the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Rate = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False


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

    heads_rate_factor: Rate = 4.0
    weight: Rate = 0.2
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    ramp_steps: Annotated[int, Field(ge=0)] = 0


class OutputSection(Section):
    """Where the run is kept; `keep` checkpoints stay beside the best one, and the drafter is exported in `dtype`."""

    folder: str = "runs/mlp"
    keep: Count = 2
    save_every: Count = 200
    log_every: Count = 10
    dtype: Literal["bf16", "fp32"] = "bf16"
    report_to: Literal["none", "tensorboard"] = "none"


class EvaluationSection(Section):
    """How often τ is measured by decoding, in steps; 0 measures only at the ends of the stages."""

    every: Annotated[int, Field(ge=0)] = 0


class Recipe(Section):
    """A whole run."""

    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection.model_validate({})
    data: DataSection = DataSection()
    stage1: GroundTruthSection = GroundTruthSection()
    stage2: OnPolicySection = OnPolicySection()
    optimizer: OptimizerSection = OptimizerSection()
    distillation: DistillationSection = DistillationSection()
    output: OutputSection = OutputSection()
    evaluation: EvaluationSection = EvaluationSection()
    joint: JointSection | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    def to_yaml(self) -> str:
        """Return the whole recipe, defaults included; it reads back as the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Read a YAML recipe and apply `section.field=value` overrides, values typed as in YAML.

    Raises:
        DraftsmithError: for a missing or broken file, an unknown key (with the nearest right one) or a bad value.
    """
    path = Path(path)
    if not path.is_file():
        names = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = get_close_matches(str(path), names, n=1)
        raise DraftsmithError(f"recipe {path} does not exist; " + (f"did you mean {near[0]}?" if near else "check it."))
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DraftsmithError(f"recipe {path} is no YAML ({' '.join(str(error).split())}); fix it.") from error
    return build_recipe({} if values is None else values, overrides)


def build_recipe(values: Any, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Check plain values, changed by overrides, and return the recipe."""
    if not isinstance(values, dict):
        raise DraftsmithError(f"a recipe is a mapping of sections, not {type(values).__name__}; see recipes/.")
    for override in overrides:
        values = apply_override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise DraftsmithError(_explain(error)) from error


def apply_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    """Return the values with one `section.field=value` applied; a number in the path indexes a list."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise DraftsmithError(f"override {override!r} is not of the form section.field=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DraftsmithError(f"the value of override {override!r} is no YAML; quote it.") from error
    changed: dict[str, Any] = _put(values, keys, value, override)
    return changed


def _put(node: Any, keys: list[str], value: Any, override: str) -> Any:
    if not keys:
        return value
    if isinstance(node, list):
        if not keys[0].isdigit() or int(keys[0]) >= len(node):
            raise DraftsmithError(f"override {override!r} wants item {keys[0]!r} of {len(node)}; count from 0.")
        index = int(keys[0])
        return [*node[:index], _put(node[index], keys[1:], value, override), *node[index + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise DraftsmithError(f"override {override!r} goes below {node!r}, which has no fields.")
    node = node or {}
    return {**node, keys[0]: _put(node.get(keys[0]), keys[1:], value, override)}


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section that an error's location is in."""
    model: Any = Recipe
    for key in location:
        if isinstance(key, str):
            model = model.model_fields[key].annotation
        else:
            model = next(item for item in get_args(model) if item is not Ellipsis)
        # An optional section stands beside None.
        model = next(iter(get_args(model)), model) if type(None) in get_args(model) else model
    return list(model.model_fields)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    known = _fields_at(first["loc"][:-1]) if first["type"] == "extra_forbidden" else []
    return f"recipe key {explain(error, known)}"
