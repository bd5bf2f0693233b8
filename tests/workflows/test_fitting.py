"""What drafts cost here is measured once and kept; what is kept is of this target, this drafter and this machine."""

import io
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.profile import Profile
from draftsmith.evaluation.measuring.profiling import up_to
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from draftsmith.user_cache import CACHE
from draftsmith.workflows import fitting
from draftsmith.workflows.fitting import fit, fit_drafts, in_words, keep, place, read

WORD = "ngram:max_length=3"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(assets.demo_target())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path))
    return tmp_path


def made(gain: float, rows: tuple[int, ...] = (1, 2, 4)) -> Profile:
    plain, chain = Arm(NO_DRAFT, (), (1.0,) * len(rows)), Arm(Plan((1, 1)), (0.5, 0.5), (2.0 / gain,) * len(rows))
    return Profile(rows, (plain, chain))


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=300), out


def test_a_fit_is_measured_and_its_text_is_the_targets_own(target: Target, cache: Path):
    drafter = load_drafter(WORD, target)
    shown, out = console()
    plain = Engine(target, max_batch=2, max_length=200)
    engine = fit_drafts(Engine(target, drafter, max_batch=2, max_length=200), WORD, shown)
    policy = engine.core.policy
    assert isinstance(policy, Fitted) and policy.known[0].profile.arms[0].plan == NO_DRAFT
    assert policy.known[0].profile.rows == (1, 2) and all(min(arm.seconds) > 0 for arm in policy.known[0].profile.arms)
    for arm in policy.known[0].profile.arms[1:]:
        assert arm.found is not None and 0 < arm.found < 1 and len(arm.full) == 2, "it does not find guesses everywhere"
        assert max(arm.survival) <= 1 and 0 < arm.usual_share < arm.found, "steps that find some go further"
        assert arm.guesses == arm.plan.max_nodes if arm.plan.factor is None else 1 <= arm.guesses < 8
    assert {arm.plan.factor for arm in policy.known[0].profile.arms} >= {1.0, 0.5}, "whatever they bring"
    assert engine.plan == (NO_DRAFT if policy.is_fixed else policy.typical.plan)
    assert out.getvalue().startswith("Measuring what drafts cost on this machine … (once for")
    assert "measured in" in out.getvalue() and engine.max_length == 200
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    given = ["def area(width, height):", "It is a truth universally"]
    found, expected = engine.generate(given, params), plain.generate(given, params)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_kept_fit_is_taken_up_and_a_damaged_one_is_not(target: Target, cache: Path):
    drafter, profile = load_drafter(WORD, target), made(1.5)
    path = place(target, drafter, WORD)
    assert cache in path.parents and read(path) is None
    keep(path, fitting.Fit(profile, 3.0).to_json())
    shown, out = console()
    engine = fit_drafts(Engine(target, drafter, max_batch=2, max_length=100), WORD, shown)
    assert "a chain of 2, about 1.50× plain decoding" in out.getvalue() and "measured before" in out.getvalue()
    assert engine.plan == Plan((1, 1)) and fit(target, drafter, WORD, shown, 4).seconds == 0
    shown, out = console()
    again = fit_drafts(Engine(target, drafter, max_batch=2, max_length=100), WORD, shown, says_kept=False)
    assert again.plan == Plan((1, 1)) and not out.getvalue()
    keep(path, fitting.Fit(made(1.5, (1,)), 3.0).to_json())
    assert fit(target, drafter, WORD, shown, 2).profile.rows == (1, 2), "it was measured for fewer"
    assert fit(target, drafter, WORD, shown, 1).profile.rows == (1, 2), "and now is kept for as many"
    keep(path, fitting.Fit(profile, 3.0).to_json())
    assert fit(target, drafter, WORD, shown, 1, anew=True).seconds > 0, "it was asked to measure"
    kept = read(path)
    assert kept is not None and kept.profile.rows == (1,), "and keeps that in its place"
    for damaged in ("", "{", "[]", json.dumps({"rows": [1], "arms": [{}]})):
        path.write_text(damaged)
        assert read(path) is None
    keep(path / "below a file", {})  # costs a measurement the next time, and nothing else


def test_steps_are_timed_with_as_many_rows_as_the_engine_takes():
    assert [up_to(rows) for rows in (1, 2, 4, 5, 16, 64)] == [
        (1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
    ]


@pytest.mark.parametrize(("word", "ready"), [("ngram", True), ("suffix", True), ("lookahead", False)])
def test_only_who_follows_texts_for_next_to_nothing_stays_ready_where_it_does_not_pay(
    word: str, ready: bool, target: Target, cache: Path
):
    drafter = load_drafter(word, target)
    keep(place(target, drafter, word), fitting.Fit(made(0.7), 3.0).to_json())
    engine = fit_drafts(Engine(target, drafter, max_batch=2, max_length=100), word)
    assert engine.core.policy.is_fixed != ready


def test_what_is_measured_is_kept_where_the_user_keeps_such_things(target: Target, monkeypatch: pytest.MonkeyPatch):
    drafter = load_drafter(WORD, target)
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert place(target, drafter, WORD).parent == Path("/elsewhere/draftsmith/fits")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert place(target, drafter, WORD).parent == Path.home() / ".cache/draftsmith/fits"


def test_another_drafter_or_another_target_has_a_place_of_its_own(target: Target, tmp_path: Path):
    drafter = load_drafter(WORD, target)
    other = Target(target.copied(target.dtype).model, target.tokenizer, "other")
    other.model.get_input_embeddings().weight.data[0, 0] += 1.0
    assert place(target, drafter, WORD) == place(target, drafter, WORD)
    assert place(target, drafter, WORD) != place(target, load_drafter("ngram", target), "ngram")
    assert place(target, drafter, WORD) != place(target.copied(target.dtype), load_drafter("suffix", target), "suffix")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = place(target, drafter, str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert place(target, drafter, str(tmp_path)) != before


@pytest.mark.parametrize(
    ("gain", "hope", "said"),
    [
        (1.5, 1.0, "Drafts for this machine: a chain of 2, about 1.50× plain decoding"),
        (0.8, 1.0, "No drafts, because on this machine none of this drafter's pays: the best, a chain of 2, would"),
        (0.8, 2.0, "Drafts only where guesses stay more often than usual"),
    ],
)
def test_what_is_drafted_and_why_is_said_in_a_line(gain: float, hope: float, said: str):
    profile = made(gain)
    assert in_words(fitting.Fit(profile, 0.0), Fitted(Known(profile, hope=hope))).startswith(said)


def test_a_disturbed_measurement_is_said_and_made_again_soon(target: Target, cache: Path):
    drafter, profile = load_drafter(WORD, target), made(1.5)
    path = place(target, drafter, WORD)
    for quiet, minutes, there in ((False, 5, True), (False, 15, False), (True, 120, True)):
        keep(path, fitting.Fit(profile, 3.0, quiet).to_json())
        long_ago = time.time() - 60 * minutes
        os.utime(path, (long_ago, long_ago))
        assert (read(path) is not None) == there
    disturbed = in_words(fitting.Fit(profile, 3.0, quiet=False), Fitted(Known(profile)))
    assert disturbed.startswith("Drafts for this machine: a chain of 2")
    assert "other programs disturbed the measurement; it is made again at a start in 10 minutes or later" in disturbed


def test_without_a_drafter_nothing_is_measured(target: Target, cache: Path):
    engine, (shown, out) = Engine(target), console()
    assert fit_drafts(engine, None, shown) is engine and not out.getvalue() and not list(cache.iterdir())
