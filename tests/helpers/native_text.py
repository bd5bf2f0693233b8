"""Texts of targets on the native kernels, which drafts and batches must not change."""

from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import VOCABULARY, prompts

NEW_TOKENS = 20
CHAIN = Plan((1, 1, 1, 1))
TREE = Plan((3, 2, 1))


def decode(target: Target, drafter: object, plan: Plan, questions: list[list[int]], **options: object):
    engine = Engine(target, drafter, max_batch=8)  # type: ignore[arg-type]
    return engine.generate(questions, SamplingParams(max_tokens=NEW_TOKENS, **options), plan=plan)  # type: ignore[arg-type]


def tokens_of(completions) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def assert_text_keeps(target: Target, temperature: float = 0.0) -> None:
    """Decode alone and plainly, then in batches of 1, 3 and 8 with chains, ranked trees and sampled drafts."""
    questions = prompts(8, seed=11)
    rules = {"temperature": temperature, "seed": 5}
    alone = [decode(target, None, NO_DRAFT, [question], **rules)[0].tokens for question in questions]
    assert len({tuple(text) for text in alone}) == 8 and max(len(set(text)) for text in alone) > NEW_TOKENS // 3
    texts = [question + answer for question, answer in zip(questions, alone, strict=True)]
    lengths = set()
    for size in (1, 3, 8):
        assert tokens_of(decode(target, None, NO_DRAFT, questions[:size], **rules)) == alone[:size]
        for plan in (CHAIN, TREE, Plan((2, 2), sampled=True)):
            if plan.sampled and temperature:
                continue  # keeps the distribution, not the tokens
            oracle = OracleDrafter(texts, VOCABULARY, error_rate=0.35, ragged=not plan.sampled)
            completions = decode(target, oracle, plan, questions[:size], **rules)
            assert tokens_of(completions) == alone[:size]
            lengths |= {length for completion in completions for length in completion.accepted_lengths}
    assert lengths == set(range(CHAIN.depth + 1))
