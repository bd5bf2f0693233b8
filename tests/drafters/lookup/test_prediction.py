"""Predicted outputs: a text that is expected is drafted where it fits, and changes nothing but the speed."""

from random import Random

import pytest
import torch

from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.drafters.lookup.prediction import FIRST_GUESSES, MOST_GUESSES, Prediction, PredictionDrafter
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets.token_ids import body_ids, continuation_ids
from draftsmith.types import Completion, Constraint, Context, Draft, DraftsmithError, SamplingParams
from tests.helpers.constrained import target_with
from tests.helpers.contract import NEW_TOKENS, CheckedDrafter, check_drafter, contract_prompts
from tests.helpers.oracle import oracle_for
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target
from tests.helpers.tiny_tokenizers import WITH_BYTES, tiny_tokenizer_of

# ---- where the output stands in its prediction


def after(expected: str, output: str, most: int = 99) -> str:
    """Return what is guessed of a text of letters behind an output of letters."""
    prediction = Prediction([ord(letter) for letter in expected])
    prediction.extend([ord(letter) for letter in output])
    guesses = "".join(map(chr, prediction.guess(most)))
    assert prediction.has_guesses == bool(guesses)
    return guesses


@pytest.mark.parametrize(
    ("expected", "output", "guesses"),
    [
        ("abcdefgh", "", "abcd"),  # from its beginning on, few at first
        ("abcdefgh", "ab", "cdefgh"),
        ("abcdefgh", "abX", ""),  # another token is no place yet
        ("abcdefgh", "abXd", "efgh"),  # one was exchanged
        ("abcdefgh", "abXc", "defgh"),  # one was put in
        ("abcdefgh", "abe", "fgh"),  # two were left out
        ("abcdefghijklmnop", "abn", ""),  # one token far ahead may be there by chance
        ("abcdefghijklmnop", "abmn", "op"),  # two are not
        ("abcdabcxabcy", "abcxabc", "y"),  # the place behind what agreed last, not the first of all
        ("xabcpqrabcstu", "xabcZZbc", "stu"),  # of two equally long ends, the one ahead
        ("xabcpqrabcstu", "xabcpqrabcZrab", "cstu"),  # behind, if there is none ahead
        ("abcdefgh", "abcdefgh", ""),  # it is over
        ("abcdefgh", "abcdefghcde", "fgh"),  # and begins again in the middle
        ("", "abc", ""),
    ],
)
def test_the_place_in_a_prediction_is_found(expected: str, output: str, guesses: str):
    assert after(expected, output) == guesses


def test_the_longer_the_two_agree_the_more_is_guessed():
    expected = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    assert [len(after(expected, expected[:n], MOST_GUESSES)) for n in (0, 1, 5, 12, 15, 30, 36)] == [
        FIRST_GUESSES, FIRST_GUESSES + 1, FIRST_GUESSES + 5, 16, 16, 6, 0
    ]
    assert after(expected, "abc", 2) == "de"


def test_a_place_does_not_depend_on_how_the_output_is_divided():
    random = Random(3)
    expected = [random.randrange(6) for _ in range(200)]
    for _ in range(50):
        output = [t if random.random() < 0.8 else random.randrange(6) for t in expected[: random.randrange(150)]]
        one, other = Prediction(expected), Prediction(expected)
        one.extend(output)
        while output:
            count = random.randrange(1, 9)
            other.extend(output[:count])
            output = output[count:]
        assert one.guess(9) == other.guess(9)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_prediction_has_the_tokens_of_a_continuation(kind: str):
    tokenizer = tiny_tokenizer_of(kind)
    before = body_ids(tokenizer, "Nobody knew:")
    for text in ("there was a house", " there was a house", "\n\nthe road", "é", "  two"):
        ids = continuation_ids(tokenizer, text)
        assert tokenizer.bos_token_id not in ids
        assert tokenizer.decode(before + ids) == tokenizer.decode(before) + text


# ---- through the contract of drafters


class Knowing(PredictionDrafter):
    """Gives every row a prediction with mistakes in it, and tells it its output from what it is handed itself."""

    reads_prompt = True

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.texts, self.known = texts, set[int]()

    def follow(self, context: Context) -> None:
        self.read(context)

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.read(context)
        return super().propose(context, plan)

    def reset_rows(self, rows: list[int]) -> None:
        super().reset_rows(rows)
        self.known.difference_update(rows)

    def read(self, context: Context) -> None:
        for row, length, count, tokens in zip(
            context.rows_B.tolist(), context.lengths_B.tolist(), context.counts_B.tolist(),
            context.tokens_BT.tolist(), strict=True,
        ):
            if row < 0:
                continue
            if row not in self.known:
                self.known.add(row)
                text = next((text for text in self.texts if text[1:length] == tokens[:count]), [])
                random = Random(len(text))
                self.give(row, Prediction([t if random.random() < 0.8 else 0 for t in text[1:]]))
            self._rows[row].extend(tokens[:count])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_contract(architecture: str):
    model = tiny_model(architecture)
    texts = [question + greedy_reference(model, question, NEW_TOKENS) for question in contract_prompts()]
    check_drafter(
        lambda: Knowing(texts), tiny_target(architecture), model, plans=(None, Plan((1, 1)), Plan((2, 1, 1), nodes=3))
    )


# ---- in the engine

QUESTIONS = prompts(5, seed=8)
GREEDY = SamplingParams(max_tokens=40)


def edited(tokens: list[int], random: Random) -> list[int]:
    """Return a text with words exchanged, put in and left out."""
    found: list[int] = []
    for token in tokens:
        chance = random.random()
        found += [token] if chance < 0.85 else [0] if chance < 0.9 else [token, 1] if chance < 0.95 else []
    return found


@pytest.mark.parametrize("with_drafter", [False, True], ids=["alone", "beside a drafter"])
@pytest.mark.parametrize("rules", [GREEDY, SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3)],
                         ids=["greedy", "sampled"])
def test_a_prediction_changes_nothing_but_the_speed(with_drafter: bool, rules: SamplingParams):
    plain = [Engine(tiny_target()).generate([q], rules)[0].tokens for q in QUESTIONS]
    random = Random(1)
    predictions: list[list[int] | None] = [edited(plain[0], random), None, plain[2], [5] * 30, edited(plain[4], random)]
    params = [SamplingParams(**{**rules.__dict__, "prediction": prediction}) for prediction in predictions]
    drafter = None
    if with_drafter:
        drafter = CheckedDrafter(oracle_for(tiny_model(), QUESTIONS, error_rate=0.4), tiny_target())
    found = Engine(tiny_target(), drafter, plan=Plan((2, 1)) if with_drafter else None, max_batch=3).generate(
        QUESTIONS, params
    )
    assert [c.tokens for c in found] == plain
    told = [(c.statistics.accepted_prediction, c.statistics.rejected_prediction) for c in found]
    assert told[1] == (None, None)
    assert told[2][1] == 0 and told[2][0] is not None and told[2][0] >= 34
    assert found[2].statistics.steps <= 5
    for accepted, rejected in (told[0], told[4]):
        assert accepted is not None and rejected is not None and accepted > 15 and rejected > 0
    assert told[3][0] == 0
    if not with_drafter:
        for one, counts in zip(found, told, strict=True):
            accepted, rejected = counts[0] or 0, counts[1] or 0
            assert (one.statistics.accepted, one.statistics.drafted) == (accepted, accepted + rejected)
    else:
        assert found[1].statistics.accepted + found[3].statistics.accepted > 0


def test_what_a_lookup_learns_is_not_lost_meanwhile():
    """A drafter with a memory hears of the tokens that came by a prediction."""
    question = [7, 8, 9, 10] * 3
    (plain,) = Engine(tiny_target()).generate([question], GREEDY)
    checked = CheckedDrafter(NgramDrafter(NgramConfig(min_length=1)), tiny_target())
    engine = Engine(tiny_target(), checked)
    params = SamplingParams(max_tokens=40, prediction=plain.tokens[:20])
    (found,) = engine.generate([question], params)
    assert found.tokens == plain.tokens
    inner = checked.inner
    assert isinstance(inner, NgramDrafter) and checked.drafts  # the second half came by lookups
    inner.catch_up()
    assert not inner._rows


def test_plain_decoding_that_was_asked_for_stays_plain():
    (plain,) = Engine(tiny_target()).generate([QUESTIONS[0]], GREEDY)
    params = SamplingParams(max_tokens=40, prediction=plain.tokens)
    (found,) = Engine(tiny_target()).generate([QUESTIONS[0]], params, plan=NO_DRAFT)
    assert found.tokens == plain.tokens and found.statistics.drafted == 0
    assert (found.statistics.accepted_prediction, found.statistics.rejected_prediction) == (0, 0)


def test_a_policy_does_not_hear_of_predictions():
    from draftsmith.engine.policy import Fixed, Load, RowHistory

    class Listening(Fixed):
        seen: list[RowHistory] = []  # noqa: RUF012

        def choose(self, load: Load, rows: list[RowHistory]) -> list:  # type: ignore[override, type-arg]
            self.seen = list(rows)
            return list(super().choose(load, rows))

    (plain,) = Engine(tiny_target()).generate([QUESTIONS[0]], GREEDY)
    policy = Listening(NO_DRAFT)
    params = SamplingParams(max_tokens=40, prediction=plain.tokens[:20])
    (found,) = Engine(tiny_target(), policy=policy).generate([QUESTIONS[0]], params)
    assert found.statistics.accepted > 12 and sum(policy.seen[0].accepted) == 0
    assert 0 < len(policy.seen[0].accepted) < found.statistics.steps


def test_copies_share_a_prediction():
    rules = SamplingParams(max_tokens=25, temperature=1.0, seed=4, n=3)
    plain = Engine(tiny_target()).generate([QUESTIONS[1]], rules)
    with_it = SamplingParams(max_tokens=25, temperature=1.0, seed=4, n=3, prediction=plain[1].tokens)
    found = Engine(tiny_target()).generate([QUESTIONS[1]], with_it)
    assert [c.tokens for c in found] == [c.tokens for c in plain]
    assert found[1].statistics.rejected_prediction == 0


def test_a_text_that_ends_within_a_right_prediction_rejects_nothing_of_it():
    (plain,) = Engine(tiny_target()).generate([QUESTIONS[0]], SamplingParams(max_tokens=40, ignore_eos=True))
    for end in range(3, 20):
        params = SamplingParams(max_tokens=end, ignore_eos=True, prediction=plain.tokens)
        (found,) = Engine(tiny_target()).generate([QUESTIONS[0]], params)
        told = found.statistics
        assert found.tokens == plain.tokens[:end] and told.rejected_prediction == 0
        assert told.accepted_prediction in (told.accepted, told.accepted + 1), "the last token may be a guess"


def text_of(prediction: str | None, constraint: Constraint | None = None) -> Completion:
    params = SamplingParams(max_tokens=60, prediction=prediction, constraint=constraint)
    return Engine(target_with("byte-level")).generate(["Once upon a time"], params)[0]


def test_text_is_taken_and_constraints_hold():
    for constraint in (None, Constraint("regex", r"[a-z ,]{10,40}\.")):
        plain = text_of(None, constraint)
        found = text_of(plain.text, constraint)
        assert found.tokens == plain.tokens
        wrong = text_of("1234567890" + plain.text, constraint)
        assert wrong.tokens == plain.tokens
        if constraint is not None:
            assert wrong.statistics.rejected_prediction is not None
            assert wrong.statistics.drafted == (
                wrong.statistics.accepted_prediction or 0
            ) + wrong.statistics.rejected_prediction


def test_a_compiled_engine_takes_predictions():
    target = target_with("byte-level", dtype=torch.float32)
    params = SamplingParams(max_tokens=14)
    (plain,) = Engine(target).generate([[5, 6, 7]], params)
    with_it = SamplingParams(max_tokens=14, prediction=plain.tokens)
    (found,) = Engine(target, compile="trace").generate([[5, 6, 7]], with_it)
    assert found.tokens == plain.tokens and found.statistics.steps < 5


@pytest.mark.parametrize(
    ("prediction", "said"), [([3, VOCABULARY], f"token {VOCABULARY}"), ([-1], "token -1"), ("text", "has no tokenizer")]
)
def test_what_the_target_does_not_have_is_refused(prediction: str | list[int], said: str):
    with pytest.raises(DraftsmithError, match=said):
        Engine(tiny_target()).generate([[1]], SamplingParams(max_tokens=5, prediction=prediction))


def test_what_is_no_prediction_is_refused():
    for wrong in (3, [1.5], ["a"]):
        with pytest.raises(DraftsmithError, match="a text, or token ids"):
            SamplingParams(prediction=wrong)  # type: ignore[arg-type]
