"""The recipe: typed, overridable, and strict about its keys."""

from pathlib import Path

import pytest

from draftsmith.training.recipe import Recipe, build_recipe, load_recipe
from draftsmith.training.schedule import learning_rate
from draftsmith.types import DraftsmithError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_read(path: Path):
    assert load_recipe(path).stage1.steps + load_recipe(path).stage2.steps > 0


def test_effective_recipe_reads_back(tmp_path: Path):
    recipe = build_recipe({"data": {"sources": [{"path": "a.txt", "weight": 2}]}}, ["stage1.rate=3e-4", "seed=7"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe.stage1.rate == 3e-4 and recipe.seed == 7


def test_overrides_are_typed_as_yaml():
    recipe = build_recipe(
        {"data": {"sources": [{"path": "a"}, {"path": "b"}]}},
        ["drafter.condition_on_tokens=false", "data.sources.1.weight=0.5", "drafter.top_k_tokens_per_head=[4, 2]",
         "stage1.positions_per_sequence=null", "target.name=x=y"],
    )
    assert recipe.drafter.condition_on_tokens is False
    assert recipe.data.sources[1].weight == 0.5 and recipe.data.sources[0].weight == 1
    assert recipe.drafter.top_k_tokens_per_head == (4, 2)
    assert recipe.stage1.positions_per_sequence is None
    assert recipe.target.name == "x=y"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stage1.lenght=3"], r"recipe key stage1\.lenght is unknown; did you mean stage1\.length\?"),
        (["stge1.steps=3"], r"recipe key stge1 is unknown; did you mean stage1\?"),
        (["data.sources=[{pth: x}]"], r"recipe key data\.sources\.0\.pth .*did you mean data\.sources\.0\.path"),
        (["zzz=3"], r"recipe key zzz is unknown; known here are target, drafter"),
        (["stage1.steps=-1"], r"recipe key stage1\.steps is -1; use at least 0"),
        (["stage1.batch=many"], r"recipe key stage1\.batch is 'many'"),
        (["stage1.rate=.nan"], r"recipe key stage1\.rate is nan"),
        (["optimizer.name=sgd"], r"recipe key optimizer\.name is 'sgd'.*'adamw' or 'muon'"),
        (["stage1.steps"], r"override 'stage1\.steps' is not of the form section\.field=value"),
        (["seed.x=1"], r"goes below 3"),
        (["data.sources.4.weight=1"], r"wants item '4' of 0"),
    ],
)
def test_mistakes_are_named_with_the_fix(overrides: list[str], message: str):
    with pytest.raises(DraftsmithError, match=message):
        build_recipe({"seed": 3, "data": {"sources": []}}, overrides)


def test_missing_and_broken_files(tmp_path: Path):
    (tmp_path / "demo.yaml").write_text("a: [")
    with pytest.raises(DraftsmithError, match=r"dmo\.yaml does not exist; did you mean .*demo\.yaml"):
        load_recipe(tmp_path / "dmo.yaml")
    with pytest.raises(DraftsmithError, match="is no YAML"):
        load_recipe(tmp_path / "demo.yaml")
    with pytest.raises(DraftsmithError, match="a mapping of sections, not list"):
        build_recipe([])
    (tmp_path / "empty.yaml").write_text("")
    assert load_recipe(tmp_path / "empty.yaml") == Recipe()


def test_schedule_is_parabola_then_cosine():
    """Stage 1 of the report: 15,000 steps, w = 5 % = 750, 1e-3 to 1e-4."""

    def rate(step: int) -> float:
        return learning_rate(step - 1, 15_000, 1e-3, 1e-4)

    assert rate(375) == pytest.approx(1e-3 * (1 - 0.5**2))
    assert rate(750) == pytest.approx(1e-3)
    assert rate(750 + (15_000 - 750) // 2) == pytest.approx(5.5e-4)
    assert rate(15_000) == pytest.approx(1e-4)
    assert learning_rate(1999, 100_000, 1.0, 0.1) == pytest.approx(1.0), "the warm-up is at most 2,000 steps"
    assert learning_rate(0, 1, 1.0, 0.1) > 0
