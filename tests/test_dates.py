"""Dates in a schema are days that there are."""

import datetime
from itertools import product

import pytest

from tests.helpers.constrained import fits

pytest.importorskip("xgrammar", reason="constraints need xgrammar, of the extra `serve`")

DATE, MOMENT = ({"type": "string", "format": form} for form in ("date", "date-time"))
YEARS = (1, 4, 100, 400, 1900, 1904, 1910, 1996, 1998, 2000, 2001, 2024, 2100, 9996, 9999)


def is_day(year: int, month: int, day: int) -> bool:
    try:
        datetime.date(year, month, day)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("year", YEARS)
def test_months_are_as_long_as_they_are(year: int):
    for month, day in product(range(14), range(33)):
        assert fits(DATE, f'"{year:04d}-{month:02d}-{day:02d}"') == is_day(year, month, day), (year, month, day)
    for day in (28, 29, 30):
        assert fits(MOMENT, f'"{year:04d}-02-{day}T01:02:03Z"') == is_day(year, 2, day)


@pytest.mark.parametrize(("time", "is_time"), [
    ("00:00:00Z", True), ("23:59:60+23:59", True), ("19:30:05.25-01:00", True), ("24:00:00Z", False),
    ("00:60:00Z", False), ("00:00:61Z", False), ("00:00:00", False), ("00:00:00.Z", False), ("00:00:00Zx", False),
    ("00:00:00+24:00", False),
])
def test_a_moment_has_a_time_and_a_zone(time: str, is_time: bool):
    assert fits(MOMENT, f'"2024-02-29T{time}"') == is_time


def test_a_format_holds_strings_alone():
    either = {"type": ["string", "null", "integer"], "format": "date"}
    assert fits(either, "null") and fits(either, "20210230") and fits(either, '"2024-02-29"')
    assert not fits(either, '"2023-02-29"') and not fits(DATE, '"x2024-02-29"') and not fits(DATE, '"2024-02-29x"')
    assert fits({"type": "integer", "format": "date"}, "3")
