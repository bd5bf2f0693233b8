"""Every way to draft and to accept drafts, with a family that goes stage by stage and with an oracle."""

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.engine import Engine
from draftsmith.evaluation.reporting.plan_names import plan_name
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context, Draft, SamplingParams
from tests.helpers.contract import check_drafter, contract_prompts
from tests.helpers.oracle import StagewiseOracle, oracle_for
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target
from tests.helpers.toy import chi_square_p_value

PLANS = {
    "top-k tree": Plan((3, 2, 1)),
    "best paths": Plan((3, 2, 2), paths=4),
    "confidence tree": Plan((4, 3, 3), nodes=9, beam=3),
    "sampled chain": Plan((1, 1, 1), sampled=True),
    "sampled tree": Plan((3, 2), sampled=True),
    "block": Plan((1, 1, 1), sampled=True, acceptance="block"),
    "typical": Plan((3, 2, 1), acceptance="typical"),
}
ALPHA = 1e-6


def mlp_speculator() -> Drafter:
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16, top_k_tokens_per_head=(3, 2, 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MLPSpeculator(config).eval()


def oracle() -> Drafter:
    return oracle_for(tiny_model(), contract_prompts(), kind=StagewiseOracle, error_rate=0.3)


DRAFTERS = {"mlp": mlp_speculator, "oracle": oracle}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("family", DRAFTERS)
def test_every_plan_keeps_the_contract(family: str, plan: Plan) -> None:
    drafter = DRAFTERS[family]()
    check_drafter(lambda: drafter, tiny_target(), tiny_model(), plans=[plan])


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_every_plan_accepts_at_every_depth(plan: Plan) -> None:
    """Else the test above would prove little; and when sampling, at depth 1 at least."""
    engine = Engine(tiny_target(), oracle())
    lengths: set[int] = set()
    for temperature in (0.0, 0.4):
        params = [SamplingParams(max_tokens=30, temperature=temperature, seed=seed) for seed in range(8)]
        found = engine.generate(contract_prompts(), params, plan)
        now = {length for completion in found for length in completion.accepted_lengths}
        assert {0, 1} <= now
        lengths |= now
        assert all(c.statistics.lossless == (plan.lossless or temperature == 0) for c in found)
    assert lengths == set(range(plan.depth + 1))


class KnowingDrafter(StagewiseDrafter):
    """Drafts from a distorted copy of the distribution of everything that can follow one prompt; its state is a node of
    that.

    Shapes: X nodes of the tree of possible texts, node 0 the empty one; R = B × frontier.
    """

    taps = ()

    def __init__(self, log_q_XV: Tensor, children_XV: Tensor) -> None:
        self.log_q_XV, self.children_XV = log_q_XV, children_XV
        self.node_of_row = torch.zeros(DRAWS, dtype=torch.int64)

    @property
    def max_depth(self) -> int:
        return 3

    def default_plan(self) -> Plan:
        return PLANS["block"]

    def begin(self, context: Context) -> tuple[Tensor, Tensor]:
        node_B = self.node_of_row[context.rows_B]
        for t, tokens_B in enumerate(context.tokens_BT.unbind(1)):
            node_B = torch.where(t < context.counts_B, self.children_XV[node_B, tokens_B], node_B)
        self.node_of_row[context.rows_B] = node_B
        return context.root()[0], node_B

    def step(self, depth: int, state: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        node_R = self.children_XV[state, tokens_R] if depth else state
        return self.log_q_XV[node_R], node_R

    def propose(self, context: Context, plan: Plan) -> Draft:
        return grow(self, context, plan)


DRAWS, TOP_K, LENGTH = 10_000, 3, 4


def distribution_after(target: Target, prompt: list[int]) -> tuple[dict[tuple[int, ...], float], Tensor, Tensor]:
    """Return the distribution of LENGTH tokens at temperature 1 and top-k, and for every prefix log p and its children
    (X, V).

    Prefixes as long as the text have no distribution any more; their children are themselves.
    """
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    nodes, log_p = {(): 0}, []
    for _ in range(LENGTH):
        prefixes = list(exact)
        _, logits_XTV = target.encode(torch.tensor([prompt + list(prefix) for prefix in prefixes]), logits=True)
        assert logits_XTV is not None
        kept_XV = logits_XTV[:, -1] >= logits_XTV[:, -1].topk(TOP_K).values[:, -1:]
        p_XV = logits_XTV[:, -1].masked_fill(~kept_XV, -torch.inf).softmax(-1)
        log_p.append(p_XV.log())
        exact = {
            (*prefix, token): exact[prefix] * float(p_V[token])
            for prefix, p_V in zip(prefixes, p_XV, strict=True)
            for token in p_V.nonzero().flatten().tolist()
        }
        nodes |= {text: len(nodes) + i for i, text in enumerate(exact)}
    log_p.append(torch.zeros((len(exact), VOCABULARY), dtype=torch.float64))
    children_XV = torch.arange(len(nodes)).unsqueeze(1).repeat(1, VOCABULARY)
    for text, node in nodes.items():
        if text:
            children_XV[nodes[text[:-1]], text[-1]] = node
    return exact, torch.cat(log_p), children_XV


def test_the_engine_samples_the_targets_distribution_in_blocks() -> None:
    """The joint distribution of four tokens behind one prompt, prefill included, in as many steps as each row needs."""
    [question] = contract_prompts()[:1]
    target = tiny_target()
    exact, log_p_XV, children_XV = distribution_after(target, question)
    errors_XV = torch.randn(log_p_XV.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafter = KnowingDrafter((log_p_XV.clamp(min=-6.0) + errors_XV).log_softmax(-1).float(), children_XV)
    rules = SamplingParams(max_tokens=LENGTH, temperature=1.0, top_k=TOP_K, seed=5, n=DRAWS)
    engine = Engine(target, drafter, max_batch=2_500, max_length=40)
    found = engine.generate([question], rules, PLANS["block"])
    cells = {text: i for i, text in enumerate(exact)}
    counts = torch.bincount(torch.tensor([cells[tuple(c.tokens)] for c in found]), minlength=len(cells))
    assert {c.statistics.steps for c in found} == {1, 2, 3}
    assert chi_square_p_value(counts, torch.tensor(list(exact.values())) * DRAWS) > ALPHA


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(), "none"),
        (Plan((1, 1)), "chain 2"),
        (Plan((2,) * 5, nodes=9, beam=4), "tree 2^5 nodes 9 beam 4"),
        (Plan(choices=((0,), (1,), (0, 0))), "static tree of 3 nodes"),
        (Plan((2, 1), paths=2, acceptance="typical"), "tree 2,1 paths 2 typical"),
        (Plan((1, 1), sampled=True, acceptance="block"), "chain 2 sampled block"),
    ],
)
def test_every_report_names_a_plan_alike(plan: Plan, name: str):
    assert plan_name(plan) == name
