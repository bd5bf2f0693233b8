"""Measuring: prompts of exact length, cells of the benchmark, ties told from faults."""

import json
import random
import shlex
import sys
from collections.abc import Callable
from copy import copy
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.profile import Profile
from draftsmith.evaluation.bench import run_grid
from draftsmith.evaluation.grid import Grid, plan_for
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.losslessness import (
    Divergence,
    compare_texts,
    first_divergence,
    is_targets_own,
    rounding_step,
    tie_or_fault,
)
from draftsmith.evaluation.measuring.peers import transformers_peer
from draftsmith.evaluation.measuring.speedup import measure_speedups
from draftsmith.evaluation.prompts import Prompt, cut, distinct, embedded_prompts, load_prompts, whole
from draftsmith.evaluation.proof.shared_rows import WrappedTarget
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.provenance import command_line, provenance, without_folders
from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.targets.token_ids import Conversation
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.tiny import prompts as token_prompts
from tests.helpers.tiny import save_tiny_target, tiny_target, tiny_tokenizer

NEW_TOKENS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.from_pretrained(folder, dtype="fp32")


@pytest.fixture(scope="module")
def engine(target: Target) -> Engine:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = MLPConfig(n_predict=3, top_k_tokens_per_head=(3, 2, 1)).for_target(target)
        drafter = MLPSpeculator(config).eval()
    return Engine(target, drafter, max_batch=4)


def test_embedded_prompts_of_every_task_are_held_out_from_the_training_ones():
    tasks = {prompt.task for prompt in embedded_prompts()}
    assert tasks == {"code", "prose", "dialogue"}
    training = {prompt.text for prompt in embedded_prompts(split="train")}
    held_out = {prompt.text for prompt in embedded_prompts()}
    assert len(held_out) == 120 and len(training) == 300 and not held_out & training
    assert {prompt.task for prompt in embedded_prompts("prose")} == {"prose"}


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(DraftsmithError, match="'poetry'.*code, dialogue, prose"):
        embedded_prompts("poetry")


def test_prompts_are_cut_to_exact_lengths_and_repeat_when_used_up(target: Target):
    texts = [Prompt("a", "s", "x" * 25), Prompt("a", "s", "y" * 12), Prompt("a", "s", "z" * 5)]
    pieces = cut(target, texts, 10, 5)
    assert [len(piece) for piece in pieces] == [10] * 5
    decoded = [str(target.tokenizer.decode(piece))[0] for piece in pieces]  # type: ignore[union-attr]
    assert decoded == ["x", "y", "x", "x", "y"]


def test_prompts_that_are_too_short_are_refused(target: Target):
    with pytest.raises(DraftsmithError, match="no prompt has 10 tokens .the longest has 4."):
        cut(target, [Prompt("a", "s", "abcd")], 10, 1)


def test_short_texts_are_taken_whole_where_lengths_may_differ(target: Target):
    texts = [Prompt("a", "s", "x" * 25), Prompt("a", "s", "yyyy"), Prompt("a", "s", "")]
    pieces = cut(target, texts, 10, 4, exact=False)
    assert [len(piece) for piece in pieces] == [10, 4, 10, 10], "beginnings first, then windows, then over again"
    assert pieces[3] == pieces[0] and pieces[2] != pieces[1]
    assert distinct(pieces) == [pieces[0], pieces[1]], "the second window of x is as the first"


def test_a_target_without_tokenizer_says_which_file_it_lacks():
    with pytest.raises(DraftsmithError, match="tiny-llama has no tokenizer, .* put its tokenizer.json"):
        cut(tiny_target(), [Prompt("a", "s", "abcd")], 2, 1)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{% for x in messages %}", ["template of tiny-llama is broken", "correct it"]),
        ("{{ nothing.at.all }}", ["template of tiny-llama is broken", "'nothing' is undefined", "correct it"]),
        ("{{ raise_exception('no') }}", ["template of tiny-llama refuses a prompt (no)", "fix its messages"]),
    ],
)
def test_a_broken_template_is_told_from_messages_that_it_refuses(template: str, parts: list[str]):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    target = copy(tiny_target())
    target.tokenizer = tokenizer
    with pytest.raises(DraftsmithError) as error:
        whole(target, [Prompt("a", "s", "b", Conversation([{"role": "user", "content": "b"}]))])
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_own_prompts_come_from_jsonl_or_text(tmp_path: Path):
    (tmp_path / "p.jsonl").write_text('{"text": "one", "task": "t"}\n\n{"prompt": "two"}\n')
    (tmp_path / "p.txt").write_text("three")
    assert [(p.task, p.text) for p in load_prompts(tmp_path / "p.jsonl")] == [("t", "one"), ("text", "two")]
    assert [p.text for p in load_prompts(tmp_path / "p.txt")] == ["three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"text": "one"}\n{"txt": 1}\n', "line 2 of"),
        ("p.jsonl", b"[1]\n", "line 1 of"),
        ("p.txt", b"  \n", "holds no text"),
        ("p.txt", b"\xff\xff", "not UTF-8"),
    ],
)
def test_broken_prompt_files_are_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DraftsmithError, match=message):
        load_prompts(tmp_path / name)


def test_a_missing_prompt_file_is_named(tmp_path: Path):
    with pytest.raises(DraftsmithError, match="cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")


def test_candidates_prune_the_drafters_tree_and_widen_it_where_it_has_too_few_paths():
    default = Plan((3, 2, 1), paths=5)
    assert plan_for(default, 0) == NO_DRAFT
    assert plan_for(default, 4) == Plan((3, 2, 1), paths=4)
    assert plan_for(default, 32) == Plan((16, 2, 1), paths=32)
    assert plan_for(default, 2, (6, 3, 2)) == Plan((6, 3, 2), paths=2)
    with pytest.raises(DraftsmithError, match="--drafter"):
        plan_for(NO_DRAFT, 1)


def test_candidates_keep_to_the_rules_and_of_sampled_guesses_are_chains():
    default = Plan((3, 2, 1), paths=5)
    typical = Plan(nodes=7, acceptance="typical", epsilon=0.2)
    assert plan_for(default, 4, None, typical) == Plan((3, 2, 1), paths=4, nodes=7, acceptance="typical", epsilon=0.2)
    assert plan_for(default, 3, None, Plan(sampled=True)) == Plan((3, 1, 1), sampled=True)
    block = Plan(sampled=True, acceptance="block")
    assert plan_for(default, 1, (6, 2), block) == Plan((1, 1), sampled=True, acceptance="block")
    with pytest.raises(DraftsmithError, match="one child"):
        plan_for(default, 2, None, block)


def test_a_cell_has_every_figure_and_both_sides_counted_exactly(engine: Engine, folder: Path):
    grid = Grid(batches=(1, 2), candidates=(0, 1, 4), prompt_tokens=(12,), new_tokens=NEW_TOKENS, trials=3, warmups=1)
    seen: list[tuple[int, int]] = []
    peer = transformers_peer(folder, engine.target)
    texts = embedded_prompts("prose")
    cells = run_grid(engine, engine.plan, texts, grid, peer, lambda _, done, every: seen.append((done, every)))
    assert [(c["batch"], c["engine"], c["candidates"]) for c in cells] == [
        (1, "draftsmith", 0),
        (1, "draftsmith", 1),
        (1, "draftsmith", 4),
        (1, "transformers", None),
        (2, "draftsmith", 0),
        (2, "draftsmith", 1),
        (2, "draftsmith", 4),
    ]
    every = 2 * (3 + 1) * 3 + 4
    assert seen == [(done, every) for done in range(1, every + 1)]
    needed = {
        "batch",
        "candidates",
        "prompt_tokens",
        "new_tokens",
        "trials",
        "ms_per_token",
        "ms_per_token_ci",
        "tokens_per_step",
        "accepted_by_depth",
        "step_ms",
        "share",
    }
    for cell in cells:
        assert cell["generated_tokens"] == cell["trials"] * cell["batch"] * NEW_TOKENS
        assert cell["identical_texts"] == cell["texts"] == cell["trials"] * cell["batch"]
        low, high = cell["ms_per_token_ci"]
        assert 0 < low <= cell["ms_per_token"] <= high
        if cell["engine"] == "draftsmith":
            assert needed <= cell.keys()
            assert sum(cell["share"].values()) == pytest.approx(1)
            assert cell["tokens_per_step"] == pytest.approx(1 + sum(cell["accepted_by_depth"]))
            assert cell["prefill_ms"] > 0 and cell["step_ms"] > 0
        if cell["candidates"] == 0:
            assert cell["speedup"] == 1 and cell["tokens_per_step"] == 1 and cell["nodes"] == 0
    json.dumps(cells, allow_nan=False)


class Garbling(WrappedTarget):
    """Decodes another text than the model's own."""

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, features_BMF = super().forward(cache, nodes, taps, keep_logits)
        return -logits, features_BMF


def test_a_baseline_that_is_not_the_targets_own_text_is_refused(engine: Engine, target: Target):
    grid = Grid(batches=(2,), candidates=(0,), prompt_tokens=(12,), new_tokens=NEW_TOKENS, trials=1, warmups=0)
    wrong = Engine(Garbling(target), engine.drafter, max_batch=2)
    with pytest.raises(DraftsmithError, match="2 of 2 baseline texts are not .* run draftsmith prove"):
        run_grid(wrong, engine.plan, embedded_prompts("prose"), grid)


def test_the_engine_that_drafts_what_pays_is_one_more_setting(engine: Engine):
    profile = Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), Arm(Plan((1, 1)), (0.9, 0.8), (1.1,))))
    fitted = Engine(engine.target, engine.drafter, policy=Fitted(Known(profile)), max_batch=2)
    grid = Grid((1, 2), None, (12,), new_tokens=NEW_TOKENS, trials=2, warmups=0, branching=(1, 1, 1))
    cells = run_grid(engine, engine.plan, embedded_prompts("prose"), grid, fitted={1: fitted, 2: fitted})
    assert [(c["batch"], c["candidates"], c["fitted"]) for c in cells] == [
        (batch, *which) for batch in (1, 2) for which in ((0, False), (1, False), (None, True))
    ]
    assert all(cell["identical_texts"] == cell["texts"] for cell in cells)
    assert all(cell["tokens_per_step"] == pytest.approx(1 + sum(cell["accepted_by_depth"])) for cell in cells)


@pytest.mark.parametrize(
    ("default", "plans"),
    [
        (Plan((1,) * 10), {1: Plan((1,) * 10)}),
        (Plan((4, 2, 1), nodes=7, beam=4), {8: Plan((4, 2, 1), nodes=7, beam=4)}),
        (Plan((4, 2, 1), paths=3), {count: Plan((4, 2, 1), paths=count) for count in (1, 2, 3, 4, 8)}),
        (Plan(choices=((0,), (1,), (0, 0))), {2: Plan(choices=((0,), (1,), (0, 0)))}),
        (NO_DRAFT, {}),
    ],
)
def test_without_candidates_a_drafters_own_plan_is_measured(default: Plan, plans: dict[int, Plan]):
    assert Grid().plans(default) == {0: NO_DRAFT, **plans}


def test_a_plan_that_is_given_is_measured_whole():
    default = Plan((4, 2, 1), paths=3)
    assert Grid(branching=(3, 2)).plans(default) == {0: NO_DRAFT, 6: Plan((3, 2))}
    sampled = {count: Plan((count, 1, 1), sampled=True) for count in (1, 3)}
    assert Grid(rules=Plan(sampled=True)).plans(default) == {0: NO_DRAFT, **sampled}


@pytest.mark.parametrize("wrong", [{"batches": ()}, {"candidates": (-1,)}, {"new_tokens": 1}, {"trials": 0}])
def test_impossible_grids_are_refused(wrong: dict[str, object]):
    with pytest.raises(DraftsmithError, match=next(iter(wrong))):
        Grid(**wrong)  # type: ignore[arg-type]


def test_a_race_counts_both_sides_and_finds_the_texts_identical(engine: Engine):
    outcome = measure_speedups(engine, {"own": (engine, None)}, token_prompts(3, shortest=8), NEW_TOKENS)["own"]
    assert outcome.drafted_speed.value / outcome.plain_speed.value == pytest.approx(outcome.speedup.value)
    summary = outcome.summary()
    assert summary["new_tokens_plain"] == summary["new_tokens_drafted"] == 3 * NEW_TOKENS
    assert outcome.comparison.lossless and outcome.comparison.sentence().startswith("yes (3 of 3")
    assert outcome.own_texts == 3


def test_a_text_that_is_not_the_targets_is_noticed(engine: Engine):
    completion = engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=8), plan=NO_DRAFT)[0]
    assert is_targets_own(engine.target, completion)
    completion.tokens[4] = (completion.tokens[4] + 1) % 96
    assert not is_targets_own(engine.target, completion)


def test_divergences_are_found_where_they_begin():
    assert first_divergence(0, [1, 2, 3], [1, 2, 3]) is None
    assert first_divergence(7, [1, 2, 3], [1, 5, 3]) == Divergence(7, 1, 2, 5)
    assert first_divergence(0, [1, 2], [1]) == Divergence(0, 1, 2, None)


def test_a_tie_needs_both_tokens_on_top_in_both_precisions_and_a_gap_within_the_rounding():
    item = Divergence(0, 0, 1, 2)
    close, wide = torch.tensor([0.0, 9.0, 9.0625]), torch.tensor([0.0, 9.02, 9.0])
    assert tie_or_fault(item, close, wide, torch.bfloat16).tie
    assert not tie_or_fault(item, close, wide, torch.float32).tie
    assert not tie_or_fault(item, torch.tensor([0.0, 9.0, 9.5]), wide, torch.bfloat16).tie
    assert not tie_or_fault(item, torch.tensor([9.5, 9.0, 9.0]), wide, torch.bfloat16).tie
    assert not tie_or_fault(Divergence(0, 0, 1, None), close, wide, torch.bfloat16).tie
    assert rounding_step(9.0, torch.bfloat16) == 0.0625
    large = torch.tensor([0.0, 300.0, 301.0])
    assert not tie_or_fault(item, large, large, torch.bfloat16).tie  # a step is 2 there, and a tie at most 0.125


def test_a_real_divergence_is_explained_as_a_fault(engine: Engine):
    expected = engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=8), plan=NO_DRAFT)
    got = engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=8), plan=NO_DRAFT)
    got[0].tokens[3] = (got[0].tokens[3] + 1) % 96
    comparison = compare_texts(expected, got, engine.target)
    assert comparison.identical == 0 and comparison.ties == 0 and not comparison.lossless
    assert comparison.sentence().startswith("no (0 of 1")
    json.dumps(comparison.summary())


def test_provenance_names_no_folder_and_no_host():
    import platform

    record = json.dumps(provenance(dtype="float32"))
    assert platform.node() not in record or platform.node() in ("", "localhost")
    assert all(str(folder) not in record for folder in (Path.cwd(), Path(__file__).parent))
    assert without_folders("--json=/a/b/c.json") == "--json=c.json" and without_folders("/a/b") == "b"
    assert without_folders("data/x.json") == "data/x.json"


def test_a_command_is_told_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch):
    typed = ["/usr/bin/draftsmith", "train", "--data", "/a/b/my texts.jsonl", "stage1.steps=2", "a;b"]
    monkeypatch.setattr(sys, "argv", typed)
    assert shlex.split(command_line()) == ["draftsmith", "train", "--data", "my texts.jsonl", "stage1.steps=2", "a;b"]


def stopped(after: int) -> Callable[[str, int, int], None]:
    """Interrupt as Ctrl-C does, once so many runs are done."""
    def note(_: str, done: int, every: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    return note


@pytest.mark.parametrize(("after", "trials"), [(3, []), (7, [2, 2]), (9, [3, 3]), (12, [4, 4]), (15, [4, 4, 1, 1])])
def test_an_interrupted_grid_hands_over_whole_rounds(engine: Engine, after: int, trials: list[int]):
    """Two settings; one warm-up and four trials a batch size: 10 runs make the first."""
    grid = Grid((1, 2), (0, 1), (8,), new_tokens=4, trials=4, warmups=1)
    found: list[list[int]] = [[]]
    with pytest.raises(KeyboardInterrupt):
        run_grid(
            engine, engine.plan, embedded_prompts("prose"), grid, None, stopped(after),
            lambda cells: found.append([cell["trials"] for cell in cells]),
        )
    assert found[-1] == trials


def test_all_ways_take_turns_in_every_round():
    seen = list(interleaved(("a", "b", "c"), 20, random.Random(0), warmups=2))
    assert [turn.number for turn in seen] == [number for number in range(22) for _ in range(3)]
    rounds = [[turn.way for turn in seen if turn.number == number] for number in range(22)]
    assert all(sorted(ways) == ["a", "b", "c"] for ways in rounds) and len(set(map(tuple, rounds))) == 6
    assert [turn.timed for turn in seen] == [False] * 6 + [True] * 60
