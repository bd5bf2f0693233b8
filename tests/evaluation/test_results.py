"""What is made of measurements: intervals, tables, and files that are replaced whole or not at all."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from draftsmith.evaluation.measuring.intervals import mean_interval, ratio_interval
from draftsmith.evaluation.reporting.result_files import ensure_writable, markdown_table, write_json
from draftsmith.files import JsonLines, replace_text, replacing
from draftsmith.types import DraftsmithError


def test_intervals_hold_the_truth_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    caught = 0
    for trial in range(200):
        values = (5 + torch.randn(30, generator=generator)).tolist()
        interval = mean_interval(values, seed=trial)
        assert interval.low <= interval.value <= interval.high
        caught += interval.low <= 5 <= interval.high
    assert 178 <= caught <= 199


def test_paired_ratios_ignore_a_drift_that_meets_both():
    drift = [1 + 0.5 * i for i in range(20)]
    interval = ratio_interval([3 * d for d in drift], drift)
    assert interval.value == pytest.approx(3) and interval.low == pytest.approx(3) and interval.high == pytest.approx(3)
    unpaired = mean_interval([3 * d for d in drift])
    assert unpaired.high - unpaired.low > 1


def test_intervals_are_repeatable_and_refuse_nothing_to_measure():
    assert mean_interval([1.0, 2.0, 4.0], seed=3) == mean_interval([1.0, 2.0, 4.0], seed=3)
    assert mean_interval([2.5]).ends == [2.5, 2.5]
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="paired"):
        ratio_interval([1.0, 2.0], [1.0])


def test_results_replace_files_whole_and_unwritable_places_are_named(tmp_path: Path):
    path = tmp_path / "deep" / "r.json"
    ensure_writable(path)
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2} and [p.name for p in path.parent.iterdir()] == ["r.json"]
    with pytest.raises(DraftsmithError, match="is a folder"):
        ensure_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsmithError, match="cannot be written"):
        ensure_writable(tmp_path / "file" / "r.json")


def test_links_are_followed_and_pipes_written_to(tmp_path: Path):
    """What is no file cannot be replaced, and a link's own file is the one that is meant."""
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("{}")
    link.symlink_to(real)
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    for path in (link, pipe):
        ensure_writable(path)
        write_json(path, {"a": 1})
    reader.join(10)
    assert link.is_symlink() and json.loads(real.read_text()) == {"a": 1}
    assert pipe.is_fifo() and json.loads(read[0]) == {"a": 1}
    assert sorted(found.name for found in tmp_path.iterdir()) == ["link.json", "pipe", "real.json"]


def test_tables_align_numbers_to_the_right():
    assert markdown_table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_a_log_drops_what_a_kill_left_and_names_what_is_damaged(tmp_path: Path):
    log = JsonLines(tmp_path / "log.jsonl", "delete it", "go on")
    assert log.read() == []
    for value in (1, {"a": [2]}):
        log.append(value)
    with log.path.open("a") as handle:
        handle.write('{"a": 3')
    assert log.read() == [1, {"a": [2]}]
    log.append(3)
    assert log.read() == [1, {"a": [2]}, 3] and log.path.read_text() == '1\n{"a": [2]}\n3\n'
    log.rewrite([4])
    assert log.read() == [4]
    log.path.write_text("1\nx\n2\n")
    with pytest.raises(DraftsmithError, match=r"line 2 of .*log.jsonl is damaged; delete it\."):
        log.read()
    with pytest.raises(DraftsmithError, match=r"cannot write .*free some space, then go on\."):
        JsonLines(Path("/proc/none/log.jsonl"), "", "go on").append(1)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "a.txt"
    replace_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["a.txt"]
