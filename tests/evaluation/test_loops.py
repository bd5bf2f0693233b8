"""What counts as a loop."""

import pytest

from draftsmith.evaluation.measuring.loops import loop_period, repeated_share

START = list(range(100, 140))


@pytest.mark.parametrize("period", [1, 2, 7, 8, 12, 20])
def test_a_loop_is_found_wherever_the_text_ends_in_it(period: int):
    loop = list(range(period)) * 40
    for cut in range(period):
        text = START + loop[: max(24, 3 * period) + cut]
        assert loop_period(text) == period


@pytest.mark.parametrize("period", [1, 8, 12, 20])
def test_one_token_fewer_is_no_loop(period: int):
    loop = list(range(period)) * 40
    assert loop_period(START + loop[: max(24, 3 * period) - 1]) is None


def test_a_loop_that_the_text_left_again_does_not_count():
    assert loop_period([*START, *([1, 2, 3] * 20), 4]) is None


@pytest.mark.parametrize("tokens", [[], [1], [1] * 23, START])
def test_short_and_plain_texts_have_none(tokens: list[int]):
    assert loop_period(tokens) is None


def test_lines_that_count_up_are_repeated_but_no_loop():
    tokens = [token for number in range(20) for token in (1, 2, 3, 4, 5, 100 + number)]
    assert loop_period(tokens) is None
    # Of every six runs of four tokens the two without the number stand again in each line but the first.
    assert repeated_share(tokens) == pytest.approx(2 * 19 / (6 * 20 - 3))
    assert repeated_share(START) == repeated_share([1, 2]) == 0
