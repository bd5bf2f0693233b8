"""What a policy has learnt of rows that decode together."""

from draftsmith.engine.evidence import NOBODY
from draftsmith.engine.expected import Expected
from draftsmith.engine.known import Known
from draftsmith.engine.learnt import Learnt
from draftsmith.engine.policy import RowHistory
from draftsmith.plan import NO_DRAFT
from tests.helpers.profiles import profile


def test_a_row_hears_of_drafters_that_only_others_have_tried():
    known = [Known(profile(cost=0.15), name, rows=None) for name in "ab"]
    guessers = [guesser for one in known for guesser in one.guessers]
    first, second = (guesser.arms for guesser in guessers)
    whose = [NOBODY, *[0] * len(first), *[1] * len(second)]
    learnt = Learnt(guessers, whose, Expected([known[0].profile.arms[0], *first, *second], whose))
    rows = [RowHistory(False, 5), RowHistory(False, 5)]
    stays = (1, 0)  # guesses of the first drafter in the first row, and none of the second one's in the second
    for _ in range(60):
        for row, history, arm, stayed in zip(learnt.of_all(rows), rows, (1, 1 + len(first)), stays, strict=True):
            row.arm = arm
            history.note(stayed, 1, NO_DRAFT)
    one, other, new = learnt.of_all([*rows, RowHistory(False, 5)])
    assert one.evidence[1].stand == new.evidence[1].stand, "the second drafter fails, as was seen in the other row"
    assert other.evidence[0].stand == new.evidence[0].stand
    assert one.evidence[0].odds > new.evidence[1].odds == one.evidence[1].odds
