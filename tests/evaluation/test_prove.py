"""`prove` has teeth: a healthy pair is lossless, and every planted fault is a defect, in the part that must find it."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.registry import families
from draftsmith.evaluation.measuring.losslessness import Divergence, last_logits
from draftsmith.evaluation.proof.chi_square import detectable, fit, variation_of_perfect
from draftsmith.evaluation.proof.draws import draw
from draftsmith.evaluation.proof.exact_distribution import (
    ROOMS,
    enumerate_distribution,
    read_by_decoding,
    read_over_cache,
    read_plainly,
    rounding_between,
)
from draftsmith.evaluation.proof.prove import Proof, SmallPair, Workload, prove
from draftsmith.evaluation.proof.rounding import logits_by_shape, measure_movement, tie_or_fault_by_movement
from draftsmith.evaluation.proof.sampling import ALPHA, prove_sampling_here
from draftsmith.evaluation.proof.shared_rows import SharedRows
from draftsmith.evaluation.proof.small_target import PROMPT, STAND_IN, TableDrafter, small_drafter, small_target
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Nodes, Target
from draftsmith.types import DraftsmithError, SamplingParams
from tests.evaluation.planted import PLANTED, FlatOverCache, LeakyMask, Planted
from tests.helpers.tiny import prompts, save_tiny_target, tiny_model, tiny_target

PLAN = Plan((2, 1, 1))
HEALTHY = Planted("nowhere", plan=Plan((2, 1), sampled=True))


def proof_of(fault: Planted, plan: Plan = PLAN) -> Proof:
    """Prove a pair with a fault; of one that the greedy texts must show, few and short texts are drawn."""
    few = fault.found_in == "greedy"
    target, toy = fault.wrap(tiny_target()), small_target(fault.alphabet)
    return prove(
        target,
        fault.make_drafter(target),
        plan,
        prompts(5, seed=4),
        SmallPair(toy, fault.make_drafter(toy), STAND_IN),
        Workload(
            new_tokens=16, batch=4, draws=1_000, small_draws=1_000 if few else fault.draws, small_plans=(fault.plan,),
            joint_tokens=2 if few else fault.tokens, rows=1_000,
        ),
        sampling_prompts=prompts(2, shortest=4, longest=4),
        make_stepper=fault.make_stepper,
    )


def test_a_healthy_pair_is_lossless_and_the_report_says_how_sure_that_is():
    proof = proof_of(HEALTHY)
    assert proof.verdict == "lossless", proof.sentence()
    summary = proof.summary()
    assert summary["greedy"]["identical"] == summary["greedy"]["compared"] == 15
    assert summary["sampling"]["p_value"] > ALPHA and summary["sampling"]["defects"] == 0
    assert {cell["where"] for cell in summary["sampling"]["cells"]} == {"this target", "small alphabet"}
    assert all(0 < cell["smallest_shift"] < 0.4 for cell in summary["sampling"]["cells"])
    assert "nine times out of ten" in proof.sentence()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_a_defect(name: str):
    proof = proof_of(PLANTED[name])
    assert proof.verdict == "defect", proof.summary()
    parts = {"greedy": proof.greedy.defects, "sampling": proof.sampling.defects}
    assert parts[PLANTED[name].found_in] > 0
    assert proof.sentence().startswith("DEFECT: ")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_plain_reads_over_a_cache_that_are_wrong_are_a_defect_and_no_rounding(dtype: torch.dtype):
    """The best tokens stay the best, so no greedy text shows it; in 16 bits a total variation of 0.1 is let pass."""
    sound = Target(copy.deepcopy(tiny_model()).to(dtype), name="sound")
    draws = {
        name: prove_sampling_here(
            target, TableDrafter(target), PLAN, prompts(2, shortest=4, longest=4), 1_000, length=2, top_k=8,
            rows=1_000, exact_shapes=False,
        )
        for name, target in {"sound": sound, "flat": FlatOverCache(sound)}.items()
    }
    assert draws["sound"].apart <= draws["sound"].most_apart
    assert draws["flat"].apart > 0.1 >= draws["flat"].most_apart and draws["flat"].defects > 0
    assert chosen_over_cache(sound) == chosen_over_cache(FlatOverCache(sound))


def chosen_over_cache(target: Target) -> list[int]:
    asked = prompts(4, shortest=4, longest=4)
    return [int(read_over_cache(target, 0)(torch.tensor([prompt])).argmax()) for prompt in asked]


def test_typical_acceptance_is_lossy_by_choice_and_hides_no_defect():
    typical = Plan((2, 1), acceptance="typical", epsilon=0.02)
    proof = proof_of(HEALTHY, typical)
    assert proof.verdict == "lossy by choice" and proof.sampling.defects == 0
    assert [cell.plan for cell in proof.sampling.cells if not cell.lossless] == ["tree 2,1 typical"]
    assert proof_of(PLANTED["off-by-one acceptance"], typical).verdict == "defect"


def test_rows_with_equal_inputs_are_read_once_and_get_the_same_texts():
    toy = small_target()
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    for plan in (NO_DRAFT, Plan((2, 1)), Plan((2, 1), sampled=True)):
        mine, all_rows = (
            draw(one, TableDrafter(toy), PROMPT, params, plan, 500, batch=256, seed=5) for one in (SharedRows(toy), toy)
        )
        assert mine == all_rows and len(mine.texts) == 500 and {len(text) for text in mine.texts} == {3}


def test_a_row_with_a_stale_cache_is_not_taken_for_a_sound_one():
    toy = small_target()
    cache = toy.new_cache(2, 8)
    for target in (toy, SharedRows(toy)):
        cache.keys_NEHD[0][1, 0] = 1.0
        nodes = Nodes(torch.full((2, 1), 3), torch.ones(2, dtype=torch.long))
        logits_BMV, _ = target.forward(cache, nodes, ())
        assert not torch.equal(logits_BMV[0], logits_BMV[1])


def test_both_readers_give_one_distribution_and_the_penalties_of_the_text_matter():
    target, prompt = tiny_target(), [3, 9, 9, 4]
    params = SamplingParams(
        temperature=0.8, top_k=4, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.2
    )
    plain = enumerate_distribution(read_plainly(target), target, prompt, params, 2)
    for room in ROOMS:
        assert plain.distance(enumerate_distribution(read_over_cache(target, room), target, prompt, params, 2)) < 1e-9
    assert rounding_between(target, plain, prompt, params, 2) < 1e-9
    assert plain.p_C.sum() == pytest.approx(1) and len(plain.p_C) == 16
    assert plain.distance(enumerate_distribution(read_by_decoding(target), target, prompt, params, 2)) < 1e-9
    toy = small_target()
    exact = [
        enumerate_distribution(read_plainly(toy), toy, PROMPT, params, 2, remembers=flag) for flag in (True, False)
    ]
    assert exact[0].distance(exact[1]) > 0.05


def test_the_distribution_is_refused_where_it_cannot_be_enumerated():
    with pytest.raises(ValueError, match="top-k and penalties alone"):
        enumerate_distribution(
            read_plainly(small_target()), small_target(), PROMPT, SamplingParams(temperature=1, top_p=0.9), 2
        )


def test_shapes_of_the_forward_agree_in_float64_and_a_leaking_mask_is_no_rounding():
    target = tiny_target()
    sequences = prompts(2, shortest=6, seed=8)
    healthy = measure_movement(target, sequences)
    assert 0 <= healthy.largest < 1e-10 and healthy.plausible and healthy.prefixes == 2
    assert len(logits_by_shape(target, sequences[0])) == 7
    assert not measure_movement(LeakyMask(target), sequences).plausible


def test_a_divergence_is_a_tie_only_within_what_the_rounding_moves():
    target, prefix = tiny_target(), prompts(1, shortest=6, seed=8)[0]
    best = last_logits(target, prefix).topk(2).indices.tolist()
    explained, moved = tie_or_fault_by_movement(target, target, prefix, Divergence(0, 0, *best))
    assert not explained.tie and explained.gap is not None and explained.gap > 1e-6 > moved
    ended, _ = tie_or_fault_by_movement(target, target, prefix, Divergence(0, 0, best[0], None))
    assert not ended.tie


def test_how_far_rounding_moves_logits_elsewhere_decides_what_is_a_tie():
    """Twice as far, and never more than an eighth of a nat; a third token may lie between the two."""
    model = tiny_model("gpt2")
    target, wide = (Target(copy.deepcopy(model).to(dtype), name="x") for dtype in (torch.bfloat16, torch.float32))
    assert not target.backend.reads_apart
    for prefix in prompts(40, shortest=6, seed=8)[20:]:
        logits_V, wide_V = last_logits(target, prefix), last_logits(wide, prefix)
        for other in logits_V.topk(4).indices[1:].tolist():
            best = int(logits_V.argmax())
            own, in_fp32 = (float(some.max() - some[[best, other]].min()) for some in (logits_V, wide_V))
            behind = max(own, in_fp32 / 2)
            for elsewhere in (0.4 * behind, 0.7 * behind, 10.0):
                item = Divergence(0, 0, best, other)
                explained, moved = tie_or_fault_by_movement(target, wide, prefix, item, elsewhere)
                assert moved >= elsewhere
                if max(own, in_fp32) > 0.14 or (elsewhere < 0.5 * behind and behind > 0.04):
                    assert not explained.tie
                elif elsewhere > 0.5 * behind and max(own, in_fp32) < 0.11:
                    assert explained.tie


def test_the_chi_square_test_sees_what_it_says_and_no_more():
    rng = np.random.default_rng(3)
    p_C = rng.dirichlet(np.ones(100))
    count = 20_000
    shift = detectable(p_C, count, ALPHA, seed=0)
    sign_C = np.where(np.arange(100) % 2 == 0, 1.0, -1.0)
    for size, seen in ((0.0, False), (2.0 * shift, True)):
        shifted_C = p_C * (1 + 2 * size * sign_C)
        counts_C = rng.multinomial(count, shifted_C / shifted_C.sum())
        assert (fit(counts_C, 0, p_C).p_value < ALPHA) == seen
    mean, most = variation_of_perfect(p_C, count, seed=0)
    assert 0 < mean < most < shift
    assert fit(rng.multinomial(count, p_C), 1, p_C).p_value == 0.0


def test_continuations_that_are_all_rare_are_tested_by_several_together():
    p_C, count = np.full(219, 1 / 219), 200  # each is expected less than once
    rng = np.random.default_rng(4)
    found = [fit(rng.multinomial(count, p_C), 0, p_C) for _ in range(300)]
    assert found[0].freedom == 35
    assert 0.02 < np.mean([one.p_value < 0.1 for one in found]) < 0.2
    half_C = np.where(np.arange(219) < 110, 2 / 219, 0.0)
    assert fit(rng.multinomial(count, half_C / half_C.sum()), 0, p_C).p_value < ALPHA
    with pytest.raises(DraftsmithError, match="9 draws are too few for 219 continuations"):
        fit(rng.multinomial(9, p_C), 0, p_C)


def test_the_small_drafter_is_of_the_users_family_or_a_stand_in_and_says_so():
    toy = small_target()
    drafter, name = small_drafter(toy, families()["mlp"])
    assert "family mlp" in name and drafter.can_sample
    assert small_drafter(toy, None)[1] == STAND_IN
    assert small_drafter(toy, families()["mlp"], least_depth=99)[1] == STAND_IN


def test_nothing_to_prove_is_refused():
    with pytest.raises(DraftsmithError, match="drafts nothing"):
        prove(tiny_target(), TableDrafter(tiny_target()), NO_DRAFT, [[1]], None, Workload())  # type: ignore[arg-type]
    with pytest.raises(DraftsmithError, match="top_k is 1"):
        Workload(top_k=1)
    with pytest.raises(DraftsmithError, match="--draws is 500; .* at least 1000"):
        Workload(draws=500)
    with pytest.raises(DraftsmithError, match="make 8,000 continuations, too many to enumerate"):
        Workload(top_k=20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_target(folder / "target")
    facts = Target.from_pretrained(folder / "target", dtype="fp32").facts()
    torch.manual_seed(1)
    config = MLPConfig(
        hidden_size=facts.hidden_size, vocab_size=facts.vocab_size, n_predict=2, top_k_tokens_per_head=(2, 1)
    )
    MLPSpeculator(config).save_pretrained(folder / "drafter", facts)
    return folder


def run(models: Path, *words: str) -> tuple[int, str]:
    pair = ("--target", str(models / "target"), "--drafter", str(models / "drafter"), "--dtype", "fp32")
    together = () if "--serving" in words else ("--batch", "3", "--rows", "1000")
    size = ("--prompts", "4", "--new-tokens", "6", *together)
    found = CliRunner().invoke(app, ["prove", *pair, *size, *words])
    return found.exit_code, found.output


def test_the_command_proves_a_pair_and_writes_json(models: Path):
    code, output = run(models, "--draws", "1000", "--quick", "--json", str(models / "proof.json"))
    assert code == 0, output
    assert "Lossless" in output and "untrained drafter of the family mlp" in " ".join(output.split())
    written = json.loads((models / "proof.json").read_text())
    assert written["verdict"] == "lossless" and written["greedy"]["identical"] == written["greedy"]["compared"] == 24
    assert {"draws", "p_value", "tv", "tv_noise", "smallest_shift", "cells"} <= written["sampling"].keys()


def test_short_prompts_do_and_each_counts_once(models: Path):
    lines = [json.dumps({"text": text}) for text in ("a = 1", "a = 1", "b = 22", "c")]
    (models / "short.jsonl").write_text("\n".join(lines))
    more = ("--data", str(models / "short.jsonl"), "--draws", "1000", "--quick")
    code, output = run(models, *more, "--json", str(models / "short.json"))
    assert code == 0, output
    assert json.loads((models / "short.json").read_text())["greedy"]["prompts"] == 3
    said = " ".join(output.split())
    assert "The texts give 3 different prompts, so it is these and not 8." in said and "…" not in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--draws", "10"), "--draws is 10"),
        (("--quick", "--draws", "0"), "--draws is 0"),
        (("--serving", "--top-k", "50"), "make 125,000 continuations, too many to enumerate"),
        (("--serving", "--batch", "4"), "--serving runs with 1, 4 and 16 rows; leave out --batch 4."),
        (("--serving", "--rows", "64"), "leave out --rows 64."),
        (("--prompts", "0"), "--prompts is 0"),
        (("--top-k", "40"), "too many to enumerate"),
    ],
)
def test_what_cannot_be_proven_is_refused(models: Path, words: tuple[str, ...], sentence: str):
    code, output = run(models, *words)
    assert code == 2 and sentence in " ".join(output.split())


@pytest.mark.parametrize(("context", "new_tokens"), [(16, 8), (8, 4)])
def test_texts_are_as_long_as_a_short_context_allows(tmp_path: Path, context: int, new_tokens: int):
    folder = short_of_context(tmp_path, context)
    pair = ("--target", str(folder), "--drafter", "ngram", "--dtype", "fp32")
    size = ("--prompts", "8", "--draws", "1000", "--rows", "1000", "--quick")
    found = CliRunner().invoke(app, ["prove", *pair, *size, "--json", str(tmp_path / "proof.json")])
    said = " ".join(found.output.split())
    assert found.exit_code == 0, found.output
    assert f"takes {context} tokens, so greedy texts have {new_tokens} new ones and not 48." in said
    greedy = json.loads((tmp_path / "proof.json").read_text())["greedy"]
    assert greedy["tokens"] == new_tokens * greedy["prompts"]


def test_a_context_too_short_for_the_draws_says_what_to_set(tmp_path: Path):
    target = str(short_of_context(tmp_path, 8))
    words = ("--target", target, "--drafter", "ngram", "--joint-tokens", "5", "--top-k", "4")
    found = CliRunner().invoke(app, ["prove", *words])
    said = " ".join(found.output.split())
    assert found.exit_code == 2
    assert "--joint-tokens is 5, but short takes 8 tokens, 4 of them for a prompt; lower it" in said


def short_of_context(place: Path, context: int) -> Path:
    """Save a target that reads so few tokens."""
    folder = save_tiny_target(place / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder
