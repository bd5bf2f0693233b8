"""The contract between engine and drafters: what every drafter must hold, and what it may rely on."""

import pytest
import torch

from draftsmith.drafters.base import NoDrafter
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.types import Context, Draft, SamplingParams
from tests.helpers.contract import check_drafter, contract_prompts
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import VOCABULARY, WIDTH, greedy_reference, prompts, tiny_model, tiny_target

TREE = Plan((3, 2, 1))


@pytest.mark.parametrize(("error_rate", "place"), [(0.0, "first"), (0.25, "last"), (0.5, "any"), (1.0, "any")])
def test_the_oracle_at_every_error_rate(error_rate: float, place):
    questions = contract_prompts()
    oracle = oracle_for(tiny_model(), questions, error_rate=error_rate, place=place, ragged=place == "any")
    check_drafter(lambda: oracle, tiny_target(), tiny_model(), plans=[None, TREE])


def test_the_oracle_with_sampled_drafts():
    oracle = oracle_for(tiny_model("mistral"), contract_prompts(), error_rate=0.3)
    plans = [Plan((1, 1, 1), sampled=True), Plan((3, 2), sampled=True)]
    check_drafter(lambda: oracle, tiny_target("mistral"), tiny_model("mistral"), plans=plans)


def test_no_drafter():
    check_drafter(NoDrafter, tiny_target("gemma3"), tiny_model("gemma3"))


@pytest.mark.parametrize("options", [{}, {"tie_weights": True, "scale_input": True}])
def test_the_mlp_speculator(options: dict):
    config = MLPConfig(
        hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16, top_k_tokens_per_head=(3, 2, 2), n_candidates=4,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = MLPSpeculator(config).eval()
    plans = [None, TREE, Plan((1, 1)), Plan((4, 3, 2), nodes=9, beam=3), Plan((2, 2), sampled=True)]
    plans += [Plan((1, 1, 1), confidence=0.02), Plan((3, 2), nodes=5, confidence=0.02)]
    check_drafter(lambda: drafter, tiny_target(), tiny_model(), plans=plans)


class FeatureAuditor(OracleDrafter):
    """Compares every state that the engine hands over with transformers' hidden states of the known text."""

    taps = (-1, 0)
    audited = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        for b, row in enumerate(context.rows_B.tolist()):
            count, length = int(context.counts_B[b]), int(context.lengths_B[b])
            text = self.text_of_row[row] if self.reads_prompt else self.texts[row]
            assert context.tokens_BT[b, :count].tolist() == text[length - count : length]
            with torch.no_grad():
                states = tiny_model("mistral")(torch.tensor([text]), output_hidden_states=True).hidden_states
            expected_TF = torch.cat([states[-1][0], states[1][0]], dim=1)[length - count - 1 : length - 1]
            torch.testing.assert_close(context.features_BTF[b, :count], expected_TF, rtol=0, atol=1e-9)
            self.audited += count
        return draft


class BlindAuditor(FeatureAuditor):
    """The same for drafters that are not shown the prompt: row numbers count the prompts of a call."""

    reads_prompt = False

    def _recognise(self, read: list[int], length: int) -> list[int]:
        return next((text for text in self.texts if text[length - len(read) : length] == read), [])


@pytest.mark.parametrize("kind", [FeatureAuditor, BlindAuditor])
def test_a_drafter_sees_the_states_that_predicted_the_tokens(kind: type[FeatureAuditor]):
    model, questions = tiny_model("mistral"), prompts(5)
    texts = [question + greedy_reference(model, question, 30) for question in questions]
    auditor = kind(texts, VOCABULARY, error_rate=0.3)
    params = [SamplingParams(max_tokens=n) for n in (20, 5, 12, 9, 20)]
    Engine(tiny_target("mistral"), auditor, plan=TREE, max_batch=2).generate(questions, params)
    first_contexts = sum(len(q) - 1 for q in questions) if kind is FeatureAuditor else 0
    assert auditor.audited >= first_contexts + 40
