"""Names of targets: what is refused by its name, and what may stand for a model on the hub."""

from pathlib import Path

import pytest

from draftsmith.targets.loading.place import check_place
from draftsmith.types import DraftsmithError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, one of them in a folder that is called like an owner on the hub; work is done beside them."""
    for name in ("my-model", "Qwen/Qwen3-1.7B"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["my-model", "./my-model", "gpt2", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.7B", "owner/name"])
def test_what_is_there_or_may_be_on_the_hub_is_taken(name: str, here: Path):
    check_place(name)
    check_place(str(here / "my-model"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("my-modle", "did you mean my-model?"), ("Qwen/Qwn3-1.7B", "did you mean Qwen/Qwen3-1.7B?"),
        ("./mymod", "did you mean my-model?"), ("./absent", "folder ./absent does not exist; check the path."),
        ("a/b/c", "folder a/b/c does not exist; check the path."), ("~/absent", "does not exist; check the path."),
        ("empty", "has no config.json"), ("notes", "notes is a file"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_can_be_no_target_is_refused_with_what_may_be_meant(name: str, what: str):
    with pytest.raises(DraftsmithError) as refused:
        check_place(name)
    assert what in str(refused.value)
