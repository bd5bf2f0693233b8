"""The recipe of the demo target: killed at any moment and gone on with, it ends with the same weights, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith import assets
from draftsmith.drafters.trainable import storage
from draftsmith.types import DraftsmithError

RECIPES = Path(__file__).parents[2] / "recipes"
LENGTH, BATCH, STEPS = 16, 4, 7


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the recipe as its own command does, from its folder."""
    monkeypatch.syspath_prepend(str(RECIPES))
    import demo_target

    yield demo_target


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny warm start with the embedded tokenizer, and prepared data of random tokens for every source."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets.demo_target() / name, folder / "model")
    data = folder / "data"

    def fill(aside: Path) -> None:
        for source in ("code", "prose", "dialogue", "problems", "docs", "renames"):
            for name in (source, f"{source}.held-out"):
                ends = torch.tensor([37, 60, 130])
                tokens = torch.randint(0, 8192, (130,)).to(torch.uint16)
                storage.write_tensors(aside / f"{name}.safetensors", {"tokens": tokens, "ends": ends})

    storage.write_folder(data, fill)
    return folder / "model", data


def command(start: tuple[Path, Path] | None, out: Path, *more: str, leave_loops: float = 0.0) -> list[str]:
    """The command that begins a run, or without `start` goes on with it."""
    begin = [] if start is None else [
        "--init", str(start[0]), "--data", str(start[1]), "--no-compile", "--save-minutes", "0",
        "--evaluate-every", "3", "--log-every", "1", "--length", str(LENGTH), "--batch", str(BATCH), "--part", "2",
        "--leave-loops", str(leave_loops),
    ]
    return ["--out", str(out), *begin, *more]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the latest checkpoint, the optimizer's too."""
    latest = run / "latest"
    return load_file(latest / "model.safetensors") | load_file(latest / "optimizer.safetensors")


def assert_same(first: Path, second: Path) -> None:
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)]
    names = ("step", "loss", "held_out", "looping")
    assert [[each.get(name) for name in names] for each in logs[0]] == [
        [each.get(name) for name in names] for each in logs[1]
    ]


def test_a_killed_run_goes_on_to_the_same_bits(recipe: ModuleType, start: tuple[Path, Path], tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    recipe.main(command(start, whole, "--steps", str(STEPS)))

    environment = os.environ | {"PYTHONPATH": str(RECIPES.parent / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [sys.executable, str(RECIPES / "demo_target.py"), *command(start, killed)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        while not (killed / "checkpoints" / "step-00000002").exists():
            assert run.poll() is None
            time.sleep(0.005)
    finally:
        run.kill()
        run.wait()
    reached = max(int(path.name.removeprefix("step-")) for path in (killed / "checkpoints").glob("step-*"))
    assert reached >= 2
    last = max(STEPS, reached)
    if last > STEPS:
        recipe.main(command(None, whole, "--steps", str(last)))
    recipe.main(command(None, killed, "--steps", str(last)))
    assert_same(whole, killed)


def test_with_the_loss_against_loops_it_also_goes_on_to_the_same_bits(
    recipe: ModuleType, start: tuple[Path, Path], tmp_path: Path
):
    whole, cut, plain = tmp_path / "whole", tmp_path / "cut", tmp_path / "plain"
    recipe.main(command(start, whole, "--steps", "3", leave_loops=0.5))
    for last in ("1", "3"):
        recipe.main(command(start if last == "1" else None, cut, "--steps", last, leave_loops=0.5))
    assert_same(whole, cut)
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(record["looping"] > 0.5 for record in records if "loss" in record), "random weights repeat themselves"
    recipe.main(command(start, plain, "--steps", "3"))
    assert any(not torch.equal(weights(plain)[name], tensor) for name, tensor in weights(whole).items())


def test_what_goes_on_in_a_loop_is_marked(recipe: ModuleType):
    from demo_loops import going_on

    once = list(range(30))
    of_three = [*range(50, 60), *[1, 2, 3] * 5]
    of_ten = [*range(50, 55), *list(range(10)) * 2, 0, 1, 99, *range(60, 62)]
    tokens = torch.tensor([once, [*of_three, *range(70, 75)], of_ten])
    marked = [[at for at, one in enumerate(row) if one] for row in going_on(tokens).tolist()]
    assert marked[0] == []
    assert marked[1] == list(range(10 + 3 + 8, 25)), "behind eight tokens that repeat those of a period before"
    assert marked[2] == [25, 26], "behind a second time of ten tokens"


def test_a_marked_token_gives_way_to_what_the_earlier_model_says_instead(recipe: ModuleType):
    from demo_loops import leaving

    torch.manual_seed(0)
    logits, before = torch.randn(2, 4, 6, requires_grad=True), torch.randn(2, 4, 6)
    labels, marked = torch.randint(0, 6, (2, 4)), torch.tensor([[0, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    loss = leaving(logits, before, labels, marked)
    places = marked.nonzero().tolist()
    weights, costs = [], []
    for n, t in places:
        others = before[n, t].softmax(-1).clone()
        weights.append(1 - others[labels[n, t]])
        others[labels[n, t]] = 0
        costs.append(-(others / others.sum() * logits[n, t].log_softmax(-1)).sum())
    expected = sum(w * c for w, c in zip(weights, costs, strict=True)) / sum(weights)
    assert torch.allclose(loss, expected, atol=1e-5)
    loss.backward()
    assert logits.grad is not None
    given = logits.grad.gather(2, labels.unsqueeze(2)).squeeze(2)
    assert bool((given[marked] > 0).all()) and bool((logits.grad[~marked] == 0).all())


def test_where_the_earlier_model_knows_no_other_token_nothing_is_to_learn(recipe: ModuleType):
    from demo_loops import leaving

    sure = torch.zeros(1, 1, 6).index_fill(2, torch.tensor([3]), 90.0)
    logits = sure.clone().requires_grad_()
    loss = leaving(logits, sure, torch.tensor([[3]]), torch.tensor([[True]]))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and bool((logits.grad == 0).all())


def test_it_cools_down_beside_the_flat_run_which_goes_on(recipe: ModuleType, start: tuple[Path, Path], tmp_path: Path):
    run, cooled = tmp_path / "run", tmp_path / "run" / "cooled"
    recipe.main(command(start, run, "--steps", "2"))
    flat = weights(run)
    recipe.main(command(None, run, "--cool", str(3 * LENGTH * BATCH), "--steps", "4"))  # cut off before its last step
    recipe.main(command(None, run, "--cool", str(3 * LENGTH * BATCH), "--leave-loops", "0.25"))
    assert json.loads((cooled / "settings.json").read_text())["leave_loops"] == 0.25, "a run that goes on may change it"
    assert (cooled / "latest").resolve().name == "step-00000005"
    assert all(torch.equal(flat[name], tensor) for name, tensor in weights(run).items())
    assert [recipe.rate_at(step, 1.0, 2, 3) for step in (2, 3, 4)] == pytest.approx([1, 2 / 3, 1 / 3])

    recipe.main(command(None, run, "--steps", "3"))
    assert (run / "latest").resolve().name == "step-00000003"
    recipe.main(command(None, run, "--cool", str(LENGTH * BATCH)))
    assert (cooled / "latest").resolve().name == "step-00000004"  # from step 3; the first cooled run is kept aside
    assert (run / "cooled-00000005" / "latest" / "model.safetensors").exists()


def test_changed_data_and_a_second_beginning_are_refused(recipe: ModuleType, start: tuple[Path, Path], tmp_path: Path):
    data = tmp_path / "data"
    shutil.copytree(start[1], data)
    run = tmp_path / "run"
    recipe.main(command((start[0], data), run, "--steps", "1"))
    with pytest.raises(DraftsmithError, match="already holds a run"):
        recipe.main(command((start[0], data), run))
    (data / "manifest.json").write_text("{}")
    with pytest.raises(DraftsmithError, match="has changed"):
        recipe.main(command(None, run))
    with pytest.raises(DraftsmithError, match="holds no run yet"):
        recipe.main(command(None, tmp_path / "none"))


def test_every_window_is_read_once_an_epoch_by_the_shares(recipe: ModuleType, start: tuple[Path, Path]):
    shares = {"code": 3.0, "prose": 1.0}
    stream = recipe.Stream(start[1], shares, LENGTH, BATCH, seed=1)
    windows = stream.sources["code"].windows
    steps = [stream.next_batch() for _ in range(windows)]
    assert stream.epochs() == {"code": 3.0, "prose": 1.0}  # of the four rows of a step three are code

    again = recipe.Stream(start[1], shares, LENGTH, BATCH, seed=1)
    again.skip(5)
    assert torch.equal(again.next_batch(), steps[5])

    source = stream.sources["code"]
    for epoch in range(2):
        seen = torch.cat([source.window(epoch * windows + place)[:-1] for place in range(windows)])
        kept = source.tokens.long()
        assert len(seen) == windows * LENGTH
        # Up to the last window that does not fit, an epoch has each token as often as the source.
        missing = torch.bincount(kept, minlength=8192) - torch.bincount(seen, minlength=8192)
        assert missing.min() >= 0 and missing.sum() == len(kept) - windows * LENGTH


def test_the_attention_in_blocks_is_attention(recipe: ModuleType):
    from demo_attention import attend

    for length in (300, 64):
        queries, keys, values = (torch.randn(2, heads, length, 16, requires_grad=True) for heads in (6, 2, 2))
        grad = torch.randn(2, length, 6, 16)
        repeated = [each.repeat_interleave(3, 1) for each in (keys, values)]
        whole = torch.nn.functional.scaled_dot_product_attention(queries, *repeated, is_causal=True).transpose(1, 2)
        blocks, _ = attend(None, queries, keys, values, None, 0.25)
        expected = [whole, *torch.autograd.grad(whole, (queries, keys, values), grad)]
        got = [blocks, *torch.autograd.grad(blocks.float(), (queries, keys, values), grad)]
        for one, other in zip(got, expected, strict=True):
            assert (one - other).norm() < 0.02 * other.norm()  # bf16 has eight bits
