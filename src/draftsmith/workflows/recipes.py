"""Recipes of runs: from files, from overrides, from a run or a drafter at hand, or from nothing; and their paths."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith import assets
from draftsmith.drafters.family import read_spec
from draftsmith.drafters.registry import DEFAULT_FAMILY, family_named, family_of
from draftsmith.drafters.trainable import storage
from draftsmith.dtypes import check_dtype
from draftsmith.targets.loading.place import check_place
from draftsmith.training.data.given_texts import check_given
from draftsmith.training.data.sources import Source
from draftsmith.training.recipe import Recipe, build_recipe, check_vocabulary, load_recipe
from draftsmith.training.run_folder import RunFolder
from draftsmith.training.schedule import last_rate

DRAFTER = "drafter"
"""The section whose options may come from a drafter."""


def family_options(family: str) -> list[str]:
    """Return overrides of the options that are named with a family, and of no others."""
    return [f"{DRAFTER}.{key}={json.dumps(value)}" for key, value in read_spec(family)[1].items()]


def final_rates(overrides: Sequence[str]) -> list[str]:
    """Return overrides of the rates at which stages end whose other rate is set alone."""
    given = {key_of(override): override.partition("=")[2] for override in overrides}
    found = []
    for stage in ("stage1", "stage2"):
        rate = given.get(f"{stage}.rate")
        if rate is not None and f"{stage}.final_rate" not in given:
            try:
                found.append(f"{stage}.final_rate={last_rate(float(rate))}")
            except ValueError:  # refused with the other overrides
                continue
    return found


def names_another(overrides: Sequence[str]) -> bool:
    """Whether overrides name a family, a target or data, so that the embedded run would make no sense."""
    return any(key_of(override) in ("drafter.family", "target.name") or names_data(override) for override in overrides)


def names_data(override: str) -> bool:
    """Whether an override says what to read: all sources, or where one of them is."""
    key, _, value = override.partition("=")
    match key.strip().split("."):
        case ["data"]:
            return "sources" in value  # a mapping of the section; any other value is refused
        case ["data", "sources", *below]:
            return not below or below[-1] in ("path", "name") or len(below) == 1
    return False


def family_in(family: str | None, overrides: Sequence[str]) -> str:
    """Return the name of the requested family."""
    if family is not None:
        return read_spec(family)[0]
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "drafter.family":
            return value.strip()
    return DEFAULT_FAMILY


def kept_recipe(planned: Recipe) -> dict[str, Any] | None:
    """Return the recipe of the run to be continued, so that its sizes need not be given again."""
    path = Path(planned.output.folder).expanduser() / "recipe.yaml"
    return load_recipe(path).model_dump(mode="json") if path.is_file() else None


def without_options(start: Mapping[str, Any], chosen: Sequence[str]) -> Recipe:
    """Return the starting recipe with all overrides except those of drafter options, which depend on the others.

    Raises:
        DraftsmithError: a bad override; for drafter options, only one that does not exist.
    """
    own = (f"{DRAFTER}.family", f"{DRAFTER}.init_from")
    options = [word for word in chosen if key_of(word).startswith(f"{DRAFTER}.") and key_of(word) not in own]
    recipe = build_recipe(dict(start), [override for override in chosen if override not in options])
    known = recipe.drafter.config.options()
    for override in options:
        if key_of(override).split(".")[1] not in known:
            build_recipe({DRAFTER: {"family": recipe.drafter.family}}, [override])
    return recipe


def key_of(override: str) -> str:
    """Return the key that an override changes."""
    return override.partition("=")[0].strip()


def check_paths(recipe: Recipe, target: str | None) -> None:
    """Refuse missing paths, and a folder that cannot be written or is read as data, before a model is loaded."""
    out = Path(recipe.output.folder).expanduser()
    for section in recipe.data.sources:
        Source(section, recipe.data.held_out_every, recipe.data.piece_characters)
        if section.path is not None:
            RunFolder.check_apart(out, Path(section.path).expanduser())
    RunFolder.check_place(out)
    check_dtype(recipe.target.dtype)
    if recipe.stage2.steps and recipe.stage2.texts is not None:
        check_given(Path(recipe.stage2.texts).expanduser())
    if target is not None:
        check_place(target)
        tokens = told_vocabulary(Path(target))
        if tokens is not None:
            check_vocabulary(recipe, tokens, target)


def check_data(recipe: Recipe) -> None:
    """Refuse data whose beginnings cannot be trained on, if the recipe trains on any, before a model is loaded."""
    if recipe.stage2.texts is not None and not recipe.stage1.steps:
        return
    for section in recipe.data.sources:
        Source(section, recipe.data.held_out_every, recipe.data.piece_characters).check()


def told_vocabulary(folder: Path) -> int | None:
    """Return how many tokens a target has by its config.json, which need not be loaded; None if that does not say."""
    place = folder / "config.json"
    if not place.is_file():
        return None
    told = storage.read_json(place)
    tokens = told.get("vocab_size", (told.get("text_config") or {}).get("vocab_size"))
    return tokens if isinstance(tokens, int) else None


def reads_embedded(recipe: Recipe) -> bool:
    """Whether all training data are embedded, so that the embedded held-out prompts resemble them."""
    embedded = str(assets.prompt_file("train"))
    return all(section.path == embedded for section in recipe.data.sources)


def read_recipe(recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a file or of values, with the overrides applied."""
    if isinstance(recipe, str | Path):
        return load_recipe(recipe, list(overrides))
    values = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe
    return build_recipe(dict(values), list(overrides))


def embedded_run() -> dict[str, Any]:
    """Return the recipe of a run without a recipe: stage 2 of the embedded speculator, on the embedded training texts.

    The caller has to add the options of the speculator.
    """
    return {
        "data": {"sources": [{"path": str(assets.prompt_file("train"))}], "held_out_every": 0},
        "stage2": {"steps": 100, "batch": 16, "new_tokens": 128, "epochs": 4, "positions_per_sequence": 32},
        "output": {"folder": "runs/demo-mlp"},
    }


def options_in(folder: Path) -> dict[str, Any]:
    """Return the `drafter` section of a recipe that continues the drafter in a folder."""
    import torch

    family = family_of(folder)
    assert family is not None
    told = {} if family.reopen is None else family.reopen(folder, None, torch.float32).config.chosen()
    return {"family": family.name, **told, "init_from": str(folder)}


def starter_recipe(family: str) -> dict[str, Any]:
    """Return the starting values of a run without a recipe; `sizes.choose` adds steps, lengths, batch and vocabulary.

    It has both stages and the embedded training texts, unless `data.sources` says otherwise; half of the loss is the
    divergence from the target's own distribution.
    """
    rate = family_named(family).rate
    rates = {"rate": rate, "final_rate": last_rate(rate), "batch": 16}
    return {
        "drafter": {"family": family},
        "data": {"sources": [{"path": str(assets.prompt_file("train"))}]},
        "stage1": {"length": 256, **rates},
        "stage2": {
            "prompt_tokens": 64, "new_tokens": 128, "temperature": 0, "epochs": 4, "generate_batch": 64,
            "positions_per_sequence": 48, **rates,
        },
        "distillation": {"weight": 0.5},
        "output": {"folder": f"runs/{family}"},
    }
