"""What a server asks of the engine beside texts: scored prompts, who guessed what, and failures that stay apart."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draftsmith.engine import AsyncEngine, Engine, Fixed, Progress
from draftsmith.engine.guarded import Guarded
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft, DraftsmithError, SamplingParams
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

TREE, CHAIN = Plan((2, 1, 1)), Plan((1, 1))


def reference(prompt: list[int]) -> list[float]:
    """Return the log-probabilities of a prompt's tokens from the second on, as transformers has them."""
    logits_TV = tiny_model()(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    return [logits_TV[at, token].item() for at, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("piece", [None, 3])
@pytest.mark.parametrize("drafts", [False, True])
def test_prompts_are_scored_by_the_target(piece: int | None, drafts: bool):
    """In pieces or at once, beside others that are not scored, and with drafters that listen to prompts."""
    asked = prompts(6)
    drafter = oracle_for(tiny_model(), asked) if drafts else None
    engine = Engine(tiny_target(), drafter, max_batch=6, piece_tokens=piece)
    rules = [
        SamplingParams(max_tokens=5, prompt_logprobs=2 if number % 2 else None, logprobs=1) for number in range(6)
    ]
    for number, (prompt, found) in enumerate(zip(asked, engine.generate(asked, rules), strict=True)):
        assert found.tokens == greedy_reference(tiny_model(), prompt, 5)
        if number % 2 == 0:
            assert found.prompt_logprobs is None
            continue
        assert found.prompt_logprobs is not None
        assert [entry.token for entry in found.prompt_logprobs] == prompt[1:]
        assert [entry.logprob for entry in found.prompt_logprobs] == pytest.approx(reference(prompt))
        assert all(len(entry.top) == 2 and max(entry.top.values()) >= entry.logprob for entry in found.prompt_logprobs)


def test_a_scored_prompt_is_read_though_others_have_read_it():
    engine = Engine(tiny_target(), max_batch=2)
    prompt = prompts(1, shortest=100, longest=100)[0]
    plain, scored = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, prompt_logprobs=0)
    for rules, cached in ((plain, 0), (scored, 0), (plain, 64)):
        (found,) = engine.generate([prompt], rules)
        assert found.statistics.cached_tokens == cached
        if rules is scored:
            assert found.prompt_logprobs is not None
            assert [entry.logprob for entry in found.prompt_logprobs] == pytest.approx(reference(prompt))


def test_a_prompt_of_one_token_has_nothing_to_score():
    (found,) = Engine(tiny_target()).generate([[5]], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert found.prompt_logprobs == []


@pytest.mark.parametrize("plan", [TREE, CHAIN, NO_DRAFT])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_step_says_who_guessed_what(plan: Plan, temperature: float):
    asked = prompts(5)
    rules = SamplingParams(max_tokens=20, temperature=temperature, seed=3, presence_penalty=0.1, logprobs=0)
    drafter = oracle_for(tiny_model(), asked, error_rate=0.3, ragged=True)
    engine = Engine(tiny_target(), {"knows": drafter}, plan=plan, max_batch=3)
    requests = engine.admit_call(asked, [rules, SamplingParams(max_tokens=20)] * 2 + [rules], shows_drafts=True)
    for request in requests:
        engine.core.add(request)
    made: dict[int, list[Progress]] = {}
    while engine.core.has_work:
        for progress in engine.core.step():
            made.setdefault(progress.request.index, []).append(progress)
    for request in requests:
        first, *steps = made[request.index]
        assert first.made is None and len(first.tokens) == 1
        assert [token for one in made[request.index] for token in one.tokens] == request.tokens
        for one in steps:
            assert one.made is not None and one.made.drafter == "knows" and one.made.plan == plan
            assert one.made.accepted == len(one.tokens) - 1
            tree = one.made.tree
            assert (tree is not None) == (one.made.drafted > 0)
            if tree is None:
                continue
            assert len(tree.tokens) == len(tree.parents) == one.made.drafted
            assert [tree.tokens[node] for node in tree.accepted] == one.tokens[:-1]
            path = [-1, *tree.accepted]
            assert [tree.parents[node] for node in tree.accepted] == path[:-1]
        assert request.history.accepted == [one.made.accepted for one in steps if one.made is not None]


def test_trees_are_told_only_to_those_who_ask():
    asked = prompts(2)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), asked), plan=TREE)
    for request in engine.admit_call(asked, SamplingParams(max_tokens=8)):
        engine.core.add(request)
    while engine.core.has_work:
        assert all(one.made is None or one.made.tree is None for one in engine.core.step())


def test_a_request_may_name_its_drafter():
    asked = prompts(3)
    drafters = {name: oracle_for(tiny_model(), asked, error_rate=rate) for name, rate in (("good", 0.0), ("bad", 1.0))}
    engine = Engine(tiny_target(), drafters, policy=Fixed(NO_DRAFT), max_batch=3)
    requests = [
        engine.admit_call([prompt], SamplingParams(max_tokens=16), plan, drafter=name)[0]
        for prompt, plan, name in zip(asked, (CHAIN, CHAIN, None), ("good", "bad", None), strict=True)
    ]
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    rates = [request.completion().statistics for request in requests]
    assert [request.tokens for request in requests] == [greedy_reference(tiny_model(), one, 16) for one in asked]
    assert rates[0].accepted == rates[0].drafted > 0 and rates[1].accepted == 0 < rates[1].drafted
    assert rates[2].drafted == 0
    with pytest.raises(DraftsmithError, match="no drafter 'worse'; there is good, bad"):
        engine.admit_call([[1]], SamplingParams(max_tokens=4), CHAIN, drafter="worse")
    with pytest.raises(DraftsmithError, match="names the drafter 'good' without a plan"):
        engine.admit_call([[1]], SamplingParams(max_tokens=4), drafter="good")


def test_prompts_are_shared_within_a_namespace():
    prompt = prompts(1, shortest=100, longest=100)[0]

    async def main() -> list[int]:
        async with AsyncEngine(Engine(tiny_target(), max_batch=2)) as served:
            params, found = SamplingParams(max_tokens=1), []
            for namespace in (b"one", b"one", b"other", 0, 0):
                (done,) = await served.generate(prompt, params, namespace=namespace)
                found.append(done.statistics.cached_tokens)
            return found

    assert asyncio.run(main()) == [0, 64, 0, 0, 64]


class Wild(OracleDrafter):
    """Guesses what is no token at every other step; at others, hangs guesses on one that is absent or comes later."""

    calls = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.calls += 1
        draft = super().propose(context, plan)
        if self.calls % 2:
            draft.tokens_BN[:, -1] = (VOCABULARY, -1)[self.calls % 4 // 2]
        elif self.calls % 3 == 0:
            last = draft.parents_BN.shape[1] - 1
            draft.parents_BN[:, 0] = (last + 1, last)[self.calls % 4 // 2]
        return draft


class Failing(OracleDrafter):
    """Raises as often as it is told to."""

    left = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        if self.left:
            self.left -= 1
            raise RuntimeError("the device is gone")
        return super().propose(context, plan)


def test_failures_that_are_spared_stop_nobody_else():
    async def main() -> None:
        drafter, ends = oracle_for(tiny_model(), prompts(3), kind=Failing), list[str | None]()

        def note(progress: Sequence[Progress]) -> None:
            ends.extend(one.request.finish_reason for one in progress if one.finished)

        params = SamplingParams(max_tokens=6)
        own = Engine(tiny_target(), drafter, plan=CHAIN)
        async with AsyncEngine(own, spare_failures=2, on_step=note) as served:
            for _ in range(3):
                for _ in range(2):
                    drafter.left = 1
                    with pytest.raises(RuntimeError, match="the device is gone"):
                        await asyncio.wait_for(served.generate(prompts(1)[0], params), 10)
                    assert served.failure is None
                (found,) = await asyncio.wait_for(served.generate(prompts(1)[0], params), 10)
                assert found.tokens == greedy_reference(tiny_model(), prompts(1)[0], 6)
            drafter.left = 10
            for _ in range(3):
                with pytest.raises(RuntimeError, match="the device is gone"):
                    await asyncio.wait_for(served.generate(prompts(1)[0], params), 10)
            with pytest.raises(DraftsmithError, match="the engine has stopped"):
                await served.generate(prompts(1)[0], params)
            assert served.failure is not None
            assert ends[:9] == ["error", "error", "length"] * 3

    asyncio.run(main())


def test_guesses_that_are_no_tokens_cost_themselves_and_nothing_else():
    asked = prompts(3)
    guarded = Guarded(oracle_for(tiny_model(), asked, kind=Wild), "wild", VOCABULARY)
    engine = Engine(tiny_target(), guarded, plan=TREE)
    for prompt, found in zip(asked, engine.generate(asked, SamplingParams(max_tokens=20)), strict=True):
        assert found.tokens == greedy_reference(tiny_model(), prompt, 20) and found.error is None
    assert guarded.failures >= 3


class NoChain(OracleDrafter):
    """Says that its trees are chains."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        return replace(draft, branching=(1,) * draft.depth)


def test_a_tree_that_is_told_as_a_chain_costs_itself_and_nothing_else():
    asked = prompts(3)
    guarded = Guarded(oracle_for(tiny_model(), asked, kind=NoChain), "no chain", VOCABULARY)
    engine = Engine(tiny_target(), guarded, plan=TREE)
    for prompt, found in zip(asked, engine.generate(asked, SamplingParams(max_tokens=20)), strict=True):
        assert found.tokens == greedy_reference(tiny_model(), prompt, 20)
    assert guarded.failures >= 3


def test_a_guarded_drafter_costs_its_guesses_and_nothing_else():
    asked = prompts(3)
    inner = oracle_for(tiny_model(), asked, kind=Failing)
    guarded = Guarded(inner, "shaky", VOCABULARY)
    engine = Engine(tiny_target(), guarded, plan=TREE)
    inner.left = 4
    params = SamplingParams(max_tokens=20)
    texts = engine.generate(asked, params) + engine.generate(asked, params)
    for prompt, found in zip(asked * 2, texts, strict=True):
        assert found.tokens == greedy_reference(tiny_model(), prompt, 20)
    assert all(found.statistics.accepted > 0 for found in texts[3:])
    assert guarded.failures >= 4 and inner.left == 0
