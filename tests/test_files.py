"""Files that several processes meet at: logs that are read while they are written, rights, and locks."""

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from draftsmith.drafters.trainable import storage
from draftsmith.files import JsonLines, locked, replace_text
from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.sections import OnPolicySection
from tests.helpers.training_toy import dies, together


def test_reading_a_log_changes_nothing(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    for text in ("1\n2\n", '1\n2\n{"half'):
        path.write_text(text)
        os.utime(path, (0, 0))
        assert JsonLines(path, "", "").read() == [1, 2]
        assert path.read_text() == text and path.stat().st_mtime == 0


def test_texts_of_a_run_that_is_still_writing_lose_nothing_to_another_run(tmp_path: Path):
    path = tmp_path / "generated.jsonl"
    line = json.dumps({"sequences": [[1, 2, 3, 4]], "prompts": [2]}) + "\n"
    with path.open("w") as writer:
        writer.write(line + line[:9])
        writer.flush()
        section = OnPolicySection(steps=1, batch=1, epochs=1, prompt_tokens=2, new_tokens=8)
        found = GeneratedText.of(path, section, 0, vocabulary=5, context=4)
        assert found.sequences == [[1, 2, 3, 4]]
        writer.write(line[9:])
    assert path.read_text() == line + line


@pytest.mark.parametrize("left", ["", "1\n", "1\n2", "2", "1\n" + "2" * 100_000])
def test_who_appends_cuts_off_what_a_kill_left(left: str, tmp_path: Path):
    log = JsonLines(tmp_path / "log.jsonl", "", "")
    log.path.write_text(left)
    log.append(3)
    assert log.path.read_text() == left[: left.rfind("\n") + 1] + "3\n"


@pytest.mark.parametrize(("umask", "rights"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_new_files_and_folders_have_the_rights_that_the_user_gives(umask: int, rights: int, tmp_path: Path):
    def write() -> None:
        os.umask(umask)
        replace_text(tmp_path / "text", "new")
        storage.write_folder(tmp_path / "folder", lambda aside: storage.write_json(aside / "config.json", {}))

    assert not dies(write)  # in a process of its own, as the umask is the whole process's
    for name in ("text", "folder/config.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == rights
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o777 & ~umask


def test_a_lock_has_one_holder_and_dies_with_it(tmp_path: Path):
    lock, count = tmp_path / "lock", tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        for _ in range(200):
            with locked(lock) as held:
                assert held
                count.write_text(str(int(count.read_text()) + 1))

    together(*[add] * 4)
    assert count.read_text() == "800" and not lock.exists()

    def die_with_it() -> None:
        with locked(lock), locked(lock, wait=False) as again:
            assert not again
            os.kill(os.getpid(), signal.SIGKILL)

    assert dies(die_with_it)
    assert lock.exists(), "the file stays, but is no lock"
    with locked(lock, wait=False) as held:
        assert held
    assert not lock.exists()
