"""The jobs of the commands, called from Python on tiny models: typed results, nothing printed, the command's JSON."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import draftsmith
from draftsmith import DraftsmithError, Plan, Target, load_drafter
from draftsmith.evaluation.comparison.questions import Settings, gather
from draftsmith.evaluation.grid import Grid
from draftsmith.evaluation.prompts import Prompt, cut
from draftsmith.evaluation.proof.prove import Workload
from draftsmith.native import LIBRARY
from draftsmith.targets.token_ids import Conversation
from draftsmith.workflows.demonstration import demonstrate
from draftsmith.workflows.entries import Budget
from draftsmith.workflows.live import LiveSettings
from draftsmith.workflows.models import Loading
from draftsmith.workflows.proving import ragged
from draftsmith.workflows.training import Evaluation, TrainResult
from tests.helpers.tiny import save_tiny_target, tiny_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * 12 for i in range(6)]
FP32 = Loading("fp32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workflows")
    save_tiny_target(folder / "target")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> TrainResult:
    return draftsmith.train(
        {
            "drafter": {"n_predict": 2},
            "target": {"dtype": "fp32"},
            "stage2": {"batch": 2, "prompt_tokens": 8, "new_tokens": 12, "generate_batch": 2},
            "optimizer": {"precision": "fp32"},
        },
        "stage2.steps=3",
        f"output.folder={place / 'run'}",
        target=place / "target",
        data=place / "text.txt",
        evaluation=Evaluation(prompts_a_task=1, new_tokens=8, prompt_tokens=16),
    )


def test_train_returns_the_folder_that_decodes(trained: TrainResult, place: Path):
    assert trained.training.step == 3 and trained.best is not None and trained.best >= 1
    assert trained.drafter == place / "run" / "drafter"
    assert load_drafter(trained.drafter, Target.from_pretrained(place / "target", dtype="fp32")).can_sample
    record = json.loads(json.dumps(trained.as_json()))
    assert record["provenance"]["target"] == "target" and record["result"]["drafter"] == str(trained.drafter)
    assert record["result"]["step"] == 3 and record["result"]["evaluations"][-1]["step"] == 3


def test_conversations_are_proved_on_whole_and_bench_takes_their_ends(place: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}|answer:"
    target = Target.from_pretrained(place / "target", dtype="fp32")
    target = Target(target.model, tokenizer, native=False)
    sizes = (20, 90, target.max_length)
    chats = [
        Prompt("text", "x", "a" * size, Conversation([{"role": "user", "content": "a" * size}])) for size in sizes
    ]
    told = Console(file=io.StringIO(), width=400)
    found = ragged(target, [*chats, Prompt("text", "y", TEXTS[0])], 6, 8, told)
    assert [tokenizer.decode(tokens) for tokens in found[:2]] == [f"{'a' * size}|answer:" for size in sizes[:2]]
    assert len(found) > 2 and all(len(tokens) <= 64 for tokens in found[2:])
    assert "1 of 3 conversations are passed over" in told.file.getvalue()
    windows = cut(target, chats[:2], 40, 2)
    assert [tokenizer.decode(tokens) for tokens in windows] == ["a" * 32 + "|answer:"] * 2
    with pytest.raises(DraftsmithError, match="no prompt has 40 tokens .the longest has 28"):
        cut(target, chats[:1], 40, 2)
    grid = Grid(batches=(1,), candidates=(0,), prompt_tokens=(16,), new_tokens=4, trials=1, warmups=0)
    (cell,) = draftsmith.bench(target, None, grid, prompts=chats[:1]).cells
    assert cell.generated_tokens == 4 and cell.prompt_tokens == 16


def test_a_prompt_without_room_is_found_before_anything_is_trained(place: Path):
    target = Target.from_pretrained(place / "target", dtype="fp32")
    texts = [Prompt("prose", "x", text) for text in TEXTS]
    settings = Settings(tasks=("prose",), prompts=1, sampled_prompts=1, prompt_tokens=120, new_tokens=32)
    with pytest.raises(DraftsmithError, match=r"prompt 1 of task 'prose' has 120 tokens, .* room for 96 before"):
        gather(target, texts, texts, settings)


def test_train_refuses_an_override_that_it_does_not_know():
    with pytest.raises(DraftsmithError, match="stage1.step is unknown; did you mean stage1.steps"):
        draftsmith.train({}, "stage1.step=4")


def test_bench_gives_cells_and_hands_them_over_as_they_come(
    trained: TrainResult, place: Path, capfd: pytest.CaptureFixture[str]
):
    target = Target.from_pretrained(place / "target", dtype="fp32")
    so_far: list[int] = []
    result = draftsmith.bench(
        target, load_drafter(trained.drafter, target),
        Grid(batches=(1, 2), candidates=(0, 1), prompt_tokens=(16,), new_tokens=8, trials=1, warmups=0),
        prompts=TEXTS, on_cells=lambda found: so_far.append(len(found.cells)),
    )
    assert [(cell.batch, cell.candidates) for cell in result.cells] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert so_far == [2, 4], "after each batch size"
    for cell in result.cells:
        assert cell.generated_tokens == 8 * cell.batch and cell.identical_texts == cell.texts == cell.batch
        assert cell.ms_per_token_ci[0] <= cell.ms_per_token <= cell.ms_per_token_ci[1]
        assert cell.nodes == 2 * (cell.candidates or 0) and cell.tokens_per_step is not None
        assert cell.tokens_per_step == 1.0 or cell.candidates == 1
    baseline = result.as_json()["cells"][0]
    assert baseline["lossless"] is True and "choices" not in baseline
    assert result.provenance["data"] == "6 texts" and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "ways"),
    [
        (64, 100, "give --new-tokens 64 or fewer, or --prompt-tokens 28 or fewer"),
        (128, 100, "give --prompt-tokens 28 or fewer"), (100, 200, "give --new-tokens 28 or fewer"),
        (200, 200, "give fewer of both, by --prompt-tokens and --new-tokens"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_the_options_that_fit(
    place: Path, prompt_tokens: int, new_tokens: int, ways: str
):
    sizes = f"{prompt_tokens} prompt tokens and {new_tokens} new ones do not fit the context of 128; {ways}."
    grid = Grid((1,), (0,), (8, prompt_tokens), new_tokens, trials=1, warmups=0)
    with pytest.raises(DraftsmithError, match=f"^{re.escape(sizes)}$"):
        draftsmith.bench(place / "target", grid=grid, prompts=TEXTS, loading=FP32)
    settings = LiveSettings(prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    with pytest.raises(DraftsmithError, match=f"^{re.escape(sizes)}$"):
        demonstrate(place / "none", settings, place / "target", loading=FP32)


def test_what_fits_the_context_to_the_last_token_is_measured(place: Path):
    grid = Grid((1,), (0,), (28,), 100, trials=1, warmups=0)
    (cell,) = draftsmith.bench(place / "target", grid=grid, prompts=TEXTS, loading=FP32).cells
    assert cell.generated_tokens == 100


def test_prove_takes_objects_and_a_plan(trained: TrainResult, place: Path):
    target = Target.from_pretrained(place / "target", dtype="fp32")
    result = draftsmith.prove(
        target, load_drafter(trained.drafter, target), Plan((2, 1)), prompts=TEXTS, prompt_count=3,
        work=Workload(new_tokens=8, batch=2, draws=1_000, small_draws=1_000, rows=500),
    )
    assert result.verdict in ("lossless", "lossless up to ties"), result.sentence()
    assert result.greedy.prompts == 3 and result.greedy.compared == 9
    assert {cell.where for cell in result.sampling.cells} == {"this target", "small alphabet"}
    assert result.as_json()["verdict"] == result.verdict
    assert result.as_json()["provenance"]["plan"] == str(Plan((2, 1)))


def test_check_says_what_it_found(trained: TrainResult, place: Path):
    said: list[str] = []
    result = draftsmith.check(
        trained.drafter, place / "target", prompts=TEXTS, prompt_count=3, new_tokens=8, on_progress=said.append
    )
    names = [check.name for check in result.report.checks]
    assert names[:3] == ["files", "weights and dtype", "made for this target"]
    assert result.passed == all(check["passed"] for check in result.as_json()["checks"])
    assert said[0] == "decoding the target's own text" and said[-1] == "measuring the copy that decodes"


def test_compare_gives_a_verdict_and_goes_on_from_its_folder(place: Path):
    prompts = [Prompt("code", "here", text) for text in TEXTS]
    budget = Budget(place / "out", positions=1000, texts=16, text_tokens=24)
    settings = Settings(("code",), prompts=2, sampled_prompts=2, prompt_tokens=16, new_tokens=8, rounds=2)
    families = ["mlp:inner_dim=16", "ngram"]
    found = draftsmith.compare(
        place / "target", families, budget=budget, settings=settings, prompts=prompts, loading=FP32
    )
    assert [facts.name for facts in found.result.families] == families
    assert [facts.trained for facts in found.result.families] == [True, False]
    assert {(cell.method, cell.mode) for cell in found.result.cells} == {
        (name, mode) for name in families for mode in ("greedy", "T=1")
    }
    assert all(cell.tree.tokens_by_prompt == [7, 7] for cell in found.result.cells)
    assert found.report.read_text().startswith("# Draft families compared") and found.verdict
    again = draftsmith.compare(
        place / "target", families, budget=budget, settings=settings, prompts=prompts, loading=FP32
    )
    assert again.result.cells == found.result.cells, "everything was measured already"
    with pytest.raises(DraftsmithError, match="on other terms"):
        draftsmith.compare(
            place / "target", families, budget=budget, settings=settings, prompts=prompts[:3], loading=FP32
        )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_demo_tells_when_it_is_done_and_leaves_what_it_timed(
    trained: TrainResult, place: Path, capfd: pytest.CaptureFixture[str], dtype: str
):
    told: list[tuple[str, str]] = []
    result = demonstrate(
        place / f"demo-{dtype}", LiveSettings(minutes=0.02, prompt_tokens=16, new_tokens=8), place / "target",
        trained.drafter, prompts=2, loading=Loading(dtype), show=lambda *said: told.append(said),
    )
    assert told[0][0] == "The target writes" and told[-2][0] == "The speculator learns" and told[-1] == ("", "")
    assert result.drafter == place / f"demo-{dtype}" / "drafter" and (result.drafter / "config.json").exists()
    assert result.live.steps == len(result.live.curve) >= 1 and capfd.readouterr() == ("", "")
    for task in ("code", "prose"):
        assert result.before[task].new_tokens == result.after[task].new_tokens == 16
        assert result.trained[task].own_texts == 2 and result.trained[task].comparison.total == 2
    [speeds] = result.as_json()["speeds"]
    assert speeds["tasks"]["code"]["trained live"]["new_tokens_drafted"] == 16
    copies = {"lookup, then live", "4-bit copy", "4-bit cascade"} if dtype == "bf16" and LIBRARY else set()
    assert set(result.speeds[0].tasks["prose"]) == {"trained live"} | copies == set(result.speeds[0].plans)
    for found in result.speeds[0].tasks.values():
        assert all(one.comparison.identical == 2 for one in found.values())
