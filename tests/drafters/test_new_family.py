"""docs/new-family.md, done: its package is installed beside Draftsmith, trained, and held to the contract."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import draftsmith
from draftsmith import assets
from draftsmith.drafters.registry import families, family_named, load_drafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.evaluation.comparison.orderings import pairs
from draftsmith.evaluation.comparison.questions import Settings
from draftsmith.evaluation.grid import Grid
from draftsmith.evaluation.prompts import Prompt
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from draftsmith.workflows.entries import Budget
from draftsmith.workflows.models import Loading
from tests.helpers import training_toy as toy
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.tiny import VOCABULARY, save_tiny_target, tiny_model, tiny_target

OPTIONS = {"mixer": {"width": 16}, "fan": {"width": 16}, "adder": {"intermediate_size": 16, "depth": 3}}
"""The page's families, and sizes to make them in."""
PAGE = Path(__file__).parents[2] / "docs" / "new-family.md"


def install(site: Path, name: str, entry_points: str) -> None:
    """Leave in a folder of packages what pip leaves there of one that brings families."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[draftsmith.drafters]\n{entry_points}\n")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = PAGE.read_text()
    modules = dict(re.findall(r"`(\w+)\.py`:\n\n```python\n(.*?)```", page, flags=re.S))
    assert modules.keys() == OPTIONS.keys()
    (project,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    (entry_point,) = re.findall(r'\[project\.entry-points\."draftsmith\.drafters"\]\n(.*?)\n\n', project, flags=re.S)
    place = tmp_path / "site"
    install(place, "draftsmith-examples", entry_point.replace('"', ""))
    for name, code in modules.items():
        (place / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(place))
    families.cache_clear()
    yield
    families.cache_clear()
    for name in modules:
        sys.modules.pop(name, None)


def make(name: str, **options: int) -> TrainableDrafter:
    family = family_named(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = family.make(family.config.read(options, ""), tiny_target(), None)
    assert isinstance(made, TrainableDrafter)
    return made.double().eval().requires_grad_(False)


def test_the_page_is_short_enough_to_read():
    page = PAGE.read_text()
    prose = re.sub(r"```.*?```", "", page, flags=re.S)
    assert len(page.splitlines()) < 300 and len(prose.splitlines()) < 150


def test_each_of_them_is_a_page_of_code():
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S):
        assert len(code.splitlines()) <= 55


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", OPTIONS)
def test_it_passes_what_all_families_pass(name: str):
    drafter = make(name, **OPTIONS[name])
    plans = [None, Plan((3, 2, 1)), Plan((4, 3, 2), nodes=9, beam=3), Plan((1, 1), sampled=True)]
    check_drafter(lambda: drafter, tiny_target(), tiny_model(), plans=plans)
    check_forward_agreement(drafter, tiny_target())


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_losses_that_its_base_brings_are_the_cross_entropies_of_its_forward(name: str):
    drafter, positions_BP = make(name, **OPTIONS[name]), torch.tensor([[0, 3, 8], [1, 2, 7]])
    tokens_BT = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    features_BTF, _ = tiny_target().encode(tokens_BT, drafter.taps)
    losses_D, accuracy_D = drafter.losses(TrainingBatch(tokens_BT, features_BTF, positions_BP))
    logits = drafter(tokens_BT, features_BTF)
    assert len(losses_D) == len(logits) == drafter.max_depth == 3
    for depth, (loss, accuracy) in enumerate(zip(losses_D, accuracy_D, strict=True)):
        said_BPV = logits[depth][torch.arange(2).unsqueeze(1), positions_BP]
        labels_BP = tokens_BT.gather(1, positions_BP + depth + 1)
        expected = torch.nn.functional.cross_entropy(said_BPV.flatten(0, 1), labels_BP.flatten())
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        assert accuracy == (said_BPV.argmax(-1) == labels_BP).float().mean()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_for_a_native_target_it_keeps_the_text(name: str):
    """Its layers become native int8 products, and whatever they guess, the text is the one without a drafter."""
    target = Target.from_pretrained(assets.demo_target())
    assert target.backend.native
    family = family_named(name)
    torch.manual_seed(0)
    made = family.make(family.config.read(OPTIONS[name], ""), target, None)
    assert isinstance(made, TrainableDrafter)
    decoding, rules, questions = made.for_decoding(target), SamplingParams(max_tokens=12), [[5, 6, 7], [8, 9]]
    assert not list(decoding.head.parameters()), "its head was packed"
    engine = Engine(target, decoding, max_batch=2)
    plain = [found.tokens for found in engine.generate(questions, rules, plan=Plan())]
    for plan in (None, Plan((2, 2))):
        found = engine.generate(questions, rules, plan=plan)
        assert [one.tokens for one in found] == plain and all(one.statistics.drafted > 0 for one in found)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_trained_by_a_recipe_and_loaded_again(tmp_path: Path, name: str):
    data = toy.write_data(tmp_path)
    sizes = {**OPTIONS[name], "depth": 2, "draft_vocab_size": 20}
    options = f"drafter={{family: {name}, " + ", ".join(f"{key}: {value}" for key, value in sizes.items()) + "}"
    result = toy.run(tmp_path / "run", data, options, "stage1.steps=40")
    steps = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [step["loss"] for step in steps if step.get("stage") == "1"]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    drafter = load_drafter(result.drafter, toy.target())
    assert isinstance(drafter, TrainableDrafter) and drafter.max_depth == 2
    assert type(drafter).__module__ == name and drafter.family_name in ("a mixer", "a fan", "an adder")
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
    assert {cell.method for cell in greedy} == {name, "ngram"} and all(cell.identical == 2 for cell in greedy)
    assert any(cell.sampled_chain is not None for cell in found.result.cells if cell.method == name)

    folder = next((tmp_path / "out" / "runs").glob("mixer*")) / "drafter"
    checked = draftsmith.check(folder, tmp_path / "target", prompts=texts, prompt_count=3, new_tokens=8)
    outcome = {check.name: check.passed for check in checked.report.checks}
    assert outcome["made for this target"] and outcome["parity, depth by depth"]

    grid = Grid((1,), (0, 1), (16,), new_tokens=8, trials=1, warmups=0)
    timed = draftsmith.bench(tmp_path / "target", folder, grid, prompts=texts, loading=Loading("fp32"))
    assert [(cell.candidates, cell.identical_texts) for cell in timed.cells] == [(0, 1), (1, 1)]
    assert timed.cells[1].ms_per_token > 0 and timed.cells[1].nodes == 2


RANKED = """
from dataclasses import replace

import mixer
from draftsmith.drafters.family import Compared

FAMILY = replace(mixer.FAMILY, name="ranked", compared=Compared(beats_in_papers=("mlp",), looks_up=False))
"""


@pytest.mark.usefixtures("package")
def test_it_says_how_the_literature_ranks_it(tmp_path: Path):
    site = tmp_path / "site"
    (site / "ranked.py").write_text(RANKED)
    install(site, "ranked", "ranked = ranked:FAMILY")
    families.cache_clear()
    tau = {"tokens_per_step": 2.0}
    facts = [{"name": "ranked", "trained": True}, {"name": "mlp", "trained": True}]
    assert pairs("code", {"ranked": tau, "mlp": tau}, facts) == [("between trained", "ranked", "mlp")]
    sys.modules.pop("ranked")
