"""docs/new-family.md, done: its package is installed beside Draftsmith, trained, and held to the contract."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import draftsmith
import training_toy as toy
from contract import check_drafter, check_forward_law
from draftsmith.drafters.family import Compared
from draftsmith.drafters.registry import families, family_named, load_drafter
from draftsmith.drafters.trainable import TrainableDrafter
from draftsmith.evaluation.bench import Grid
from draftsmith.evaluation.contest import Settings
from draftsmith.evaluation.contest_orderings import pairs
from draftsmith.evaluation.prompts import Prompt
from draftsmith.plan import Plan
from draftsmith.workflows.contenders import Budget
from draftsmith.workflows.models import Loading
from tiny import save_tiny_target, tiny_model, tiny_target

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


@pytest.mark.usefixtures("package")
def test_it_is_compared_checked_and_timed_like_ours(tmp_path: Path):
    save_tiny_target(tmp_path / "target")
    texts = [Prompt("code", "here", f"def f{i}(x):\n    return x + {i}\n" * 12) for i in range(6)]
    name = "mixer:width=16,depth=2"
    found = draftsmith.compare(
        tmp_path / "target", [name, "ngram"],
        budget=Budget(tmp_path / "out", positions=1000, texts=16, text_tokens=24),
        settings=Settings(("code",), prompts=2, sampled_prompts=2, prompt_tokens=16, new_tokens=8, rounds=2),
        prompts=texts, loading=Loading("fp32"),
    )
    facts = found.result.families[0]
    assert (facts.name, facts.trained, facts.summary) == (name, True, "one linear layer a token")
    greedy = [cell for cell in found.result.cells if cell.mode == "greedy"]
    assert {cell.contender for cell in greedy} == {name, "ngram"} and all(cell.identical == 2 for cell in greedy)
    assert any(cell.sampled_chain is not None for cell in found.result.cells if cell.contender == name)

    folder = next((tmp_path / "out" / "runs").glob("mixer*")) / "drafter"
    checked = draftsmith.check(folder, tmp_path / "target", prompts=texts, prompt_count=3, new_tokens=8)
    outcome = {check.name: check.passed for check in checked.report.checks}
    assert outcome["made for this target"] and outcome["parity, depth by depth"]

    grid = Grid((1,), (0, 1), (16,), new_tokens=8, trials=1, warmups=0)
    timed = draftsmith.bench(tmp_path / "target", folder, grid, prompts=texts, loading=Loading("fp32"))
    assert [(cell.candidates, cell.identical_texts) for cell in timed.cells] == [(0, 1), (1, 1)]
    assert timed.cells[1].ms_per_token > 0 and timed.cells[1].nodes == 2


@pytest.mark.usefixtures("package")
def test_it_says_how_the_literature_ranks_it(monkeypatch: pytest.MonkeyPatch):
    import mixer

    ranked = replace(mixer.FAMILY, compared=Compared(better_than=("mlp",), looks_up=False))
    monkeypatch.setattr(mixer, "FAMILY", ranked)
    families.cache_clear()
    tau = {"tokens_per_step": 2.0}
    facts = [{"name": "mixer", "trained": True}, {"name": "mlp", "trained": True}]
    assert pairs("code", {"mixer": tau, "mlp": tau}, facts) == [("between trained", "mixer", "mlp")]
