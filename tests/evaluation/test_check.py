"""`check` passes a healthy drafter and fails planted faults, naming the depth and the cause."""

import re
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.base import NoDrafter
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.models.small_lm import SmallLM
from draftsmith.drafters.registry import family_named
from draftsmith.engine import Engine
from draftsmith.evaluation.checking.check import check_drafter, check_packing
from draftsmith.evaluation.checking.parity import measure_parity, own_texts
from draftsmith.evaluation.measuring.measure import Measurement
from draftsmith.evaluation.prompts import Prompt, cut
from draftsmith.evaluation.proof.shared_rows import WrappedTarget
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.types import Context, SamplingParams
from draftsmith.workflows.bridge import EngineBridge
from tests.helpers.taught import taught
from tests.helpers.tiny import TOKENIZER_SIZE, prompts, tiny_model, tiny_target, tiny_tokenizer

NEW_TOKENS = 24
PROMPTS = prompts(9, shortest=3, longest=40, seed=6)


def fitted(target: Target, starts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> MLPSpeculator:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drafter = MLPSpeculator(MLPConfig(inner_dim=64, n_predict=3).for_target(target))
    return taught(target, drafter, starts, new_tokens)


def fitted_small_lm(target: Target, starts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> SmallLM:
    family = family_named("small-lm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        trained_model = family.make(family.config.read({}, ""), target, None)
    assert isinstance(trained_model, SmallLM)
    return taught(target, trained_model, starts, new_tokens)


class LaggingFeatures(MLPSpeculator):
    """Drafts from the state that predicted the token before the root."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        self.memory: dict[int, torch.Tensor] = {}

    def begin(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        root_B, _ = context.root()
        states = []
        for b, row in enumerate(context.rows_B.tolist()):
            count = int(context.counts_B[b])
            last_F = context.features_BTF[b, count - 1]
            before_F = context.features_BTF[b, count - 2] if count > 1 else self.memory.get(row, last_F)
            self.memory[row] = last_F
            states.append(before_F)
        return root_B, self.start(torch.stack(states))

    def reset_rows(self, rows: list[int]) -> None:
        for row in rows:
            self.memory.pop(row, None)


class LostState(MLPSpeculator):
    """Hands the second stage the state of the first unchanged depth after depth."""

    def top_k(self, depth, state, tokens_R, k, scores):  # type: ignore[no-untyped-def]
        best, tokens, after = super().top_k(depth, state, tokens_R, k, scores)
        return best, tokens, after if depth == 0 else state


class SeesOtherRows(MLPSpeculator):
    """Takes the first row's state for every row: right at batch 1."""

    def begin(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        root_B, state_BF = super().begin(context)
        return root_B, state_BF[:1].expand_as(state_BF)


class TurnsAtATie(MLPSpeculator):
    """Of two guesses with the same score, makes one in a batch and the other alone."""

    tied = (0, 0)

    def top_k(self, depth, state, tokens_R, k, scores):  # type: ignore[no-untyped-def]
        best, tokens_Rk, after = super().top_k(depth, state, tokens_R, k, scores)
        alone, together = self.tied
        either = (tokens_Rk == alone) | (tokens_Rk == together)
        return best, tokens_Rk.masked_fill(either, together if len(tokens_R) > 1 else alone), after


class TargetTurnsAtATie(WrappedTarget):
    """Of two tokens with the same logit, prefers one in a batch and the other alone."""

    def __init__(self, inner: Target, tied: tuple[int, int]) -> None:
        super().__init__(inner)
        self.tied = tied

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, features_BMF = super().forward(cache, nodes, taps, keep_logits)
        preferred = self.tied[len(nodes.tokens_BM) > 1]
        logits = logits.clone()
        logits[..., preferred] *= 1 + 4 * torch.finfo(logits.dtype).eps * logits[..., preferred].sign()
        return logits, features_BMF


class LosesTheFirstToken(DraftModel):
    """Reads a prompt from its second token on."""

    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        return super().take_in(replace(context, first_B=None))


def test_a_healthy_drafter_passes_and_its_guesses_are_worth_comparing():
    target = tiny_target()
    drafter = fitted(target)
    report = check_drafter(target, drafter, drafter, PROMPTS, NEW_TOKENS)
    assert report.passed, report.sentence()
    assert report.parity is not None and not report.parity.gaps and report.parity.roots > 50
    assert report.parity.measured == report.parity.predicted and report.parity.measured[2] > 0.2
    assert {check.name for check in report.checks} >= {"alignment of features", "positions, long prompts"}


@pytest.mark.parametrize(
    ("kind", "failing", "words"),
    [
        (LaggingFeatures, "parity, depth by depth", "depth 1 first .*features off by one.*token before"),
        (LostState, "parity, depth by depth", "depth 3 first .*what one stage hands to the next"),
        (SeesOtherRows, "masks, ragged batch of 8 against 1", "in the batch .*mask or an index"),
    ],
)
def test_a_planted_fault_fails_with_depth_and_cause(kind: type[MLPSpeculator], failing: str, words: str):
    target = tiny_target()
    healthy = fitted(target)
    faulty = kind(healthy.config).to(target.dtype).eval().requires_grad_(False)
    faulty.load_state_dict(healthy.state_dict())
    report = check_drafter(target, faulty, faulty, PROMPTS, NEW_TOKENS)
    failed = {check.name: check.detail for check in report.checks if not check.passed}
    assert not report.passed and failing in failed
    assert re.search(words, failed[failing]), failed[failing]


def tied_tokens(target: Target) -> tuple[int, int]:
    """Return the most frequent token of the target's texts, and one that they do not have."""
    counts = Counter(token for text in own_texts(target, NoDrafter(), 0, PROMPTS, NEW_TOKENS) for token in text.tokens)
    return counts.most_common(1)[0][0], next(token for token in range(target.vocab_size) if not counts[token])


def test_a_batch_that_turns_at_a_tie_of_the_drafters_has_no_fault():
    target = tiny_target()
    healthy = fitted(target)
    drafter = TurnsAtATie(healthy.config).to(target.dtype).eval().requires_grad_(False)
    drafter.load_state_dict(healthy.state_dict())
    drafter.tied = tied_tokens(target)
    for head in drafter.head:
        head.weight[drafter.tied[1]] = head.weight[drafter.tied[0]]
    report = check_drafter(target, drafter, drafter, PROMPTS, NEW_TOKENS)
    assert report.passed, report.sentence()
    assert re.search("make the same drafts, [1-9] of them up to a tie", report.checks[-1].detail)


def test_a_batch_that_turns_at_a_tie_of_the_targets_has_no_fault():
    healthy = tiny_target()
    drafter, tied = fitted(healthy), tied_tokens(healthy)
    model = deepcopy(tiny_model())
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[tied[1]] = head[tied[0]]
    target = TargetTurnsAtATie(Target(model, native=False), tied)
    report = check_drafter(target, drafter, drafter, PROMPTS, NEW_TOKENS)
    assert re.search("make the same drafts, [1-9] of them up to a tie", report.checks[-1].detail), report.checks[-1]


def test_a_small_lm_is_held_against_its_forward_and_a_token_that_it_loses_is_seen():
    target = tiny_target()
    trained_model = fitted_small_lm(target)
    drafter = trained_model.for_decoding(target)
    assert isinstance(drafter, DraftModel)
    report = check_drafter(target, trained_model, drafter, PROMPTS, NEW_TOKENS)
    assert report.passed, report.sentence()
    assert report.parity is not None and not report.parity.gaps and report.parity.roots > 50
    assert report.parity.measured[3] > 0.2 and "alignment of guesses" in {check.name for check in report.checks}
    faulty = LosesTheFirstToken(drafter.model, target.vocab_size, drafter.guesses)
    assert check_drafter(target, trained_model, faulty, PROMPTS, NEW_TOKENS).sentence().startswith("FAILED: parity")


def test_what_is_measured_ends_where_serving_ends():
    """A text ends at the target's end token, and what would come after it is in no figure."""
    healthy = Target(tiny_model(vocabulary=TOKENIZER_SIZE), tiny_tokenizer(), native=False)
    drafter = fitted(healthy)
    text = own_texts(healthy, drafter, 3, PROMPTS[:1], NEW_TOKENS)[0].tokens
    end = next(token for token in text[4:] if token not in text[:4])
    target = Target(tiny_model(vocabulary=TOKENIZER_SIZE, eos_token_id=end), tiny_tokenizer(), native=False)
    served = Engine(target, drafter, plan=Plan((1, 1, 1))).generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert served[0].tokens == text[: text.index(end) + 1]
    _, packed, _ = check_packing(target, drafter, drafter, 3, PROMPTS, NEW_TOKENS)
    assert packed == Measurement(served, 1.0).accepted_by_depth()

    questions = [Prompt("text", "x", "draft verify"), Prompt("text", "y", "token root")]
    found = EngineBridge(target, questions, 2, NEW_TOKENS, 12, {}).evaluate(drafter)
    asked = cut(target, questions, 12, 2, exact=False)
    answers = Engine(target, drafter).generate(asked, SamplingParams(max_tokens=NEW_TOKENS))
    assert found["tokens_per_step"] == Measurement(answers, 1.0).tokens_per_step


def test_a_small_lm_that_hits_nothing_leaves_nothing_to_compare():
    target = tiny_target()
    trained_model = fitted_small_lm(target, PROMPTS[:1], 2)
    with torch.no_grad():
        trained_model.lm.lm_head.weight.zero_()  # guesses token 0 for ever
    report = check_drafter(target, trained_model, trained_model.for_decoding(target), PROMPTS[:3], NEW_TOKENS)
    assert report.sentence().startswith("FAILED: alignment of guesses") and "nothing to compare" in report.sentence()


def test_a_tie_is_not_a_fault_and_is_counted():
    target = tiny_target()
    drafter = fitted(target)
    texts = own_texts(target, drafter, 3, PROMPTS[:2], NEW_TOKENS)
    step = next(i for i, length in enumerate(texts[0].accepted_lengths) if length)
    texts[0].accepted_lengths[step] -= 1  # as if the guess had gone the other way
    with torch.no_grad():
        for head in drafter.head:
            head.weight.zero_()  # every score equal
    parity = measure_parity(target, drafter, texts)
    assert parity.gaps and all(gap.tie for gap in parity.gaps) and parity.holds


def test_a_drafter_that_hits_nothing_leaves_nothing_to_compare_and_does_not_pass():
    target = tiny_target()
    drafter = fitted(target, PROMPTS[:1], 2)
    with torch.no_grad():
        for head in drafter.head:
            head.weight.zero_()  # guesses token 0 for ever
    report = check_drafter(target, drafter, drafter, PROMPTS[:3], NEW_TOKENS)
    assert not report.passed and "nothing to compare" in report.sentence()
