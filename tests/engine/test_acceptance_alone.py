"""What a request accepts does not depend on its neighbours: the same guesses, the same of them stay, alone or not."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.drafters.registry import family_named
from draftsmith.engine import Engine, Policy
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.evaluation.proof.small_target import TableDrafter
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import SamplingParams
from tests.helpers.oracle import oracle_for
from tests.helpers.profiles import CHAINS, profile
from tests.helpers.tiny import VOCABULARY, WIDTH, prompts, tiny_model, tiny_target

TREE = Plan((2, 2, 1))
NEW = 24
QUESTIONS = prompts(6, seed=9)
"""The first three are asked alone and in a crowd; the others are the crowd."""
KINDS = {
    "greedy": SamplingParams(max_tokens=NEW, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, seed=5),
}


def oracle() -> Drafter:
    return oracle_for(tiny_model(), QUESTIONS, NEW, error_rate=0.3)


def speculator() -> Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MLPSpeculator(MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16, n_predict=3)).eval()


def eagle() -> Drafter:
    """Remembers keys and values of every row, which must not be those of a neighbour."""
    family = family_named("eagle")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return family.make(family.config.read({}, "eagle"), tiny_target(), None).make_ready(tiny_target())


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "oracle": oracle, "table": lambda: TableDrafter(tiny_target()), "ngram": lambda: NgramDrafter(NgramConfig()),
    "mlp": speculator, "eagle": eagle,
}


@dataclass
class Told:
    """A text, and of every step its guesses and those that stayed."""

    tokens: list[int]
    guesses: list[tuple[list[int], list[int], list[int]]]

    @property
    def accepted(self) -> list[int]:
        return [len(stayed) for *_, stayed in self.guesses]


def ask(
    drafter: Drafter, params: SamplingParams, number: int, crowd: bool, plan: Plan | None = TREE,
    policy: Policy | None = None,
) -> Told:
    """Ask one question; in a crowd others join before, beside and after it, by plans of their own, and one leaves."""
    engine = Engine(tiny_target(), drafter, policy=policy, plan=None if policy else TREE, max_batch=4 if crowd else 1)
    core = engine.core

    def admit(which: int, own: Plan | None, how: SamplingParams) -> int:
        (request,) = engine.admit_call([QUESTIONS[which]], how, own, shows_drafts=True)
        return core.add(request)

    others = []
    if crowd:
        others = [admit(3, Plan((1, 1)), KINDS["sampled"]), admit(4, NO_DRAFT, KINDS["greedy"])]
        core.step()
    (mine,) = engine.admit_call([QUESTIONS[number]], params, plan, shows_drafts=True)
    core.add(mine)
    guesses, steps = [], 0
    while mine.finish_reason is None:
        for one in core.step():
            if one.request is mine and one.made is not None:
                tree = one.made.tree
                guesses.append(([], [], []) if tree is None else (tree.tokens, tree.parents, tree.accepted))
        steps += 1
        if crowd and steps == 2:
            core.abort(others[0])
            admit(5, TREE, KINDS["greedy"])
            admit((number + 1) % 3, None, KINDS["sampled"])
    return Told(mine.tokens, guesses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_by_a_fixed_plan_a_request_has_the_same_guesses_alone_and_in_a_crowd(name: str, kind: str):
    accepted = 0
    for number in range(2):
        alone, beside = (ask(DRAFTERS[name](), KINDS[kind], number, crowd) for crowd in (False, True))
        assert beside == alone
        accepted += sum(alone.accepted)
    if name in ("oracle", "table") and kind == "greedy":
        assert accepted, "the comparison is of something"


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_policy_that_learns_the_text_is_the_same_and_own_plans_accept_the_same(kind: str):
    def fitted() -> Policy:
        return Fitted(Known(profile(cost=0.15)))

    params = KINDS[kind]
    free = [ask(oracle(), params, 0, crowd, None, fitted()) for crowd in (False, True)]
    assert free[0].tokens == free[1].tokens
    own = [ask(oracle(), params, 1, crowd, CHAINS[2], fitted()) for crowd in (False, True)]
    assert own[0] == own[1]
