"""What a server is made of: drafters by name, and the policy that drafts where a request does not say."""

from pathlib import Path

import pytest

from draftsmith.engine import Fixed, OffAbove
from draftsmith.engine.fitted import Fitted
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.workflows.models import Loading, quiet
from draftsmith.workflows.serving import DraftRules, Sizes, make_engine, named, root_of, serve
from tests.helpers.tiny import CONTEXT, save_tiny_target

FP32 = Loading(dtype="fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def test_drafters_are_named_by_their_folders_and_words():
    given = ["runs/first/mlp", "ngram:max_length=4", "ngram", Path("other/mlp")]
    assert list(named(given)) == ["mlp", "ngram", "ngram-2", "mlp-2"]


def test_where_a_target_lies_on_the_disk_is_not_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    assert root_of(folder) == root_of(str(folder)) == root_of(".") == folder.name
    assert root_of("someone/a-model") == "someone/a-model" and "/" not in root_of(None)


def test_all_drafters_are_there_and_the_first_one_drafts(folder: Path):
    rules, sizes = DraftRules(plan=Plan((1, 1))), Sizes(max_batch=3, max_length=64)
    engine, found = make_engine(folder, ["ngram", "suffix"], True, rules, sizes, FP32, quiet())
    assert list(found) == list(engine.core.drafters) == ["ngram", "suffix"]
    assert isinstance(engine.core.policy, Fixed) and engine.max_batch == 3 and engine.max_length == 64
    prompt = [65, 66, 67] * 6
    plain, _ = make_engine(folder, [], True, DraftRules(), sizes, FP32, quiet())
    params = SamplingParams(max_tokens=12)
    assert engine.generate([prompt], params)[0].tokens == plain.generate([prompt], params)[0].tokens


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        (DraftRules(own=True), Fixed), (DraftRules(plan=Plan((1,)), rows=2), OffAbove), (DraftRules(), Fitted),
    ],
)
def test_what_drafts_where_a_request_does_not_say(folder: Path, rules: DraftRules, kind: type):
    engine, _ = make_engine(folder, ["ngram"], True, rules, Sizes(2, 100), FP32, quiet())
    assert isinstance(engine.core.policy, kind)


def test_an_address_that_cannot_be_used_is_told_before_anything_is_loaded():
    with pytest.raises(DraftsmithError, match=r"203\.0\.113\.1:80 cannot be listened at"):
        serve("./absent", host="203.0.113.1", port=80)


def test_a_length_beyond_the_context_is_refused(folder: Path):
    told = f"--max-length is {CONTEXT + 1}, but the context of .* is {CONTEXT} tokens"
    with pytest.raises(DraftsmithError, match=told):
        make_engine(folder, [], True, DraftRules(), Sizes(2, CONTEXT + 1), FP32, quiet())
