"""Which plan comes of what a user says and of what a drafter is made with."""

from pathlib import Path

from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.workflows.drafts import Drafts
from draftsmith.workflows.fitting import stamp
from draftsmith.workflows.models import name_of

STATIC = Plan(choices=((0,), (1,), (0, 0)))


def test_a_confidence_goes_beside_any_shape():
    def plan_of(default: Plan, **rules: object) -> Plan | None:
        return Drafts(rules=Plan(**rules)).plan(default)  # type: ignore[arg-type]

    assert plan_of(Plan((1, 1)), confidence=0.2) == Plan((1, 1), confidence=0.2)
    assert plan_of(STATIC, confidence=0.2) == Plan((2, 1), beam=2, nodes=3, confidence=0.2), "no more than it has"
    own = Plan((1, 1, 1), factor=0.5, confidence=0.1)
    assert plan_of(own, nodes=2) == Plan((1, 1), factor=0.5, confidence=0.1), "the drafter's own bounds stay"
    assert plan_of(own, confidence=0.3) == Plan((1, 1, 1), factor=0.5, confidence=0.3)
    assert Drafts(Plan((2, 1)), rules=Plan(confidence=0.2)).plan(own) == Plan((2, 1), confidence=0.2)
    assert Drafts().plan(own) is None and NO_DRAFT.confidence is None


def test_drafters_are_called_by_their_folders_or_words(tmp_path: Path):
    assert name_of(tmp_path / "mine") == name_of(str(tmp_path / "mine")) == "mine"
    assert name_of("suffix:factor=2") == "suffix:factor=2"
    assert name_of(f'lookup-first:then="{tmp_path}/mine"') == "lookup-first:mine"
    assert name_of(f"cascade:inner=[ngram,{tmp_path}/mine]") == "cascade:ngram,mine"
    assert name_of(f'lookup-first:then="{tmp_path}/a,b",lookup=suffix') == "lookup-first:a,b,suffix"


def test_a_fit_is_of_the_weights_that_lie_there_now(tmp_path: Path):
    folder = tmp_path / "rate=0.1,more"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    named = tmp_path / "mine"
    named.mkdir()
    (named / "model.safetensors").write_bytes(b"others")
    assert stamp(str(folder))[0] == 7 and stamp(str(tmp_path)) == stamp("ngram") == []
    quoted = f'lookup-first:lookup=ngram,then="{folder}"'
    assert stamp(quoted)[0] == stamp(f"cascade:inner=[ngram,'{quoted}']")[0] == 7
    assert stamp(f"lookup-first:then={named}")[0] == stamp(f"cascade:inner=[ngram,{named}]")[0] == 6
