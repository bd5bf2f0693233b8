"""docs/new-family.md, done: its package is installed beside Draftsmith, trained, and held to the contract."""

import re
import sys
from pathlib import Path

import pytest
import torch

import training_toy as toy
from contract import check_drafter, check_forward_law
from draftsmith.drafters.registry import families, family_named, load_drafter
from draftsmith.drafters.trainable import TrainableDrafter
from draftsmith.plan import Plan
from tiny import tiny_model, tiny_target

PAGE = Path(__file__).parent.parent / "docs" / "new-family.md"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (project,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    (entry_point,) = re.findall(r'\[project\.entry-points\."draftsmith\.drafters"\]\n(.*?)\n\n', project, flags=re.S)
    place = tmp_path / "site"
    (place / "draftsmith_mixer-0.1.dist-info").mkdir(parents=True)
    info = place / "draftsmith_mixer-0.1.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draftsmith-mixer\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[draftsmith.drafters]\n" + entry_point.replace('"', "") + "\n")
    (place / "mixer.py").write_text(code)
    monkeypatch.syspath_prepend(str(place))
    families.cache_clear()
    yield
    families.cache_clear()
    sys.modules.pop("mixer", None)


def make(**options: int) -> TrainableDrafter:
    family = family_named("mixer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = family.make(family.read_options(options, ""), tiny_target(), None)
    assert isinstance(made, TrainableDrafter)
    return made.double().eval().requires_grad_(False)


def test_the_page_is_short_enough_to_read():
    assert len(PAGE.read_text().splitlines()) < 150


@pytest.mark.usefixtures("package")
def test_it_passes_what_all_families_pass():
    drafter = make(width=16)
    plans = [None, Plan((3, 2, 1)), Plan((4, 3, 2), nodes=9, beam=3), Plan((1, 1), sampled=True)]
    check_drafter(lambda: drafter, tiny_target(), tiny_model(), plans=plans)
    check_forward_law(drafter, tiny_target())


@pytest.mark.usefixtures("package")
def test_it_is_trained_by_a_recipe_and_loaded_again(tmp_path: Path):
    data = toy.write_data(tmp_path)
    options = "drafter={family: mixer, width: 16, depth: 2, draft_vocab_size: 20}"
    result = toy.run(tmp_path / "run", data, options, "stage1.steps=40")
    drafter = load_drafter(result.drafter, toy.target())
    assert isinstance(drafter, TrainableDrafter) and drafter.family_name == "a mixer" and drafter.max_depth == 2
    assert drafter.d2t is not None and len(drafter.d2t) == 20
