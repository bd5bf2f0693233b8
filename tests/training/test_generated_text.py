"""The texts that a target writes for stage 2: made once, read in turns, and taken from another run."""

import json
from pathlib import Path

import pytest

from draftsmith.targets import Target
from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.data.windows import Window
from draftsmith.training.sections import OnPolicySection
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy


def test_generated_text_is_made_once(tmp_path: Path):
    section = OnPolicySection(steps=5, batch=2, epochs=2, prompt_tokens=3, new_tokens=8, generate_batch=2)
    asked: list[int] = []

    class Prompts:
        def __init__(self) -> None:
            self.given = 0

        def next_window(self) -> Window:
            self.given += 1
            return Window([self.given] * 3, [])

    def generate(prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        asked.append(seed)
        return [[prompt[0]] * max_tokens for prompt in prompts]

    path = tmp_path / "generated.jsonl"
    whole = GeneratedText(path, section, 1)
    list(whole.make(Prompts(), generate))
    assert len(whole.sequences) == 5 and len(set(asked)) == 3
    content = path.read_bytes()
    for cut in (len(content) - 3, content.index(b"\n") + 4, 0):
        path.write_bytes(content[:cut])
        again = GeneratedText(path, section, 1)
        list(again.make(Prompts(), generate))
        assert path.read_bytes() == content and again.sequences == whole.sequences
    asked.clear()
    again = GeneratedText(path, section, 1)
    assert not list(again.make(Prompts(), generate)) and not asked
    read = [again.batch(i).tokens_BL[:, 0].tolist() for i in range(5)]
    assert sorted(number for batch in read for number in batch) == sorted([1, 2, 3, 4, 5] * 2)
    with pytest.raises(DraftsmithError, match="did not write 8 tokens, or up to its end token, after each of 2"):
        list(GeneratedText(tmp_path / "x", section, 1).make(Prompts(), lambda p, n, s: [[1]] * len(p)))


def test_fresh_texts_are_read_twice_before_more_are_written(tmp_path: Path):
    section = OnPolicySection(steps=49, batch=2, epochs=4, prompt_tokens=3, new_tokens=8, generate_batch=8)
    texts = GeneratedText(tmp_path / "x", section, 1)
    numbers = iter(range(99))

    class Prompts:
        def next_window(self) -> Window:
            return Window([next(numbers)] * 3, [])

    makes = texts.make(Prompts(), lambda prompts, n, s: [[1] * n for _ in prompts])
    read: list[list[int]] = []
    for step in range(49):
        assert texts.needed(step) == (16 if step < 16 else 25)
        while len(texts.sequences) < texts.needed(step):
            next(makes)
        read.append(texts.batch(step).tokens_BL[:, 0].tolist())
    assert not texts.missing and texts.count == 25
    flat = [number for batch in read for number in batch]
    first, second = list(range(16)), list(range(16, 25))
    for begin, expected in ((0, first), (16, first), (32, second), (41, second), (50, first + second)):
        assert sorted(flat[begin : begin + len(expected)]) == expected
    assert flat[:16] != flat[16:32], "another order every time"
    assert sorted(flat[75:] + [n for n in range(25) if n not in flat[75:]]) == list(range(25))


def test_a_text_ends_at_its_end_token(tmp_path: Path):
    section = OnPolicySection(steps=1, batch=2, prompt_tokens=3, new_tokens=8, generate_batch=2)
    prompts = iter([Window([1, 2, 3], []), Window([4, 5, 6, 7, 8], [])])

    class Prompts:
        def next_window(self) -> Window:
            return next(prompts)

    texts = GeneratedText(tmp_path / "x", section, 1)
    list(texts.make(Prompts(), lambda p, n, s: [[9, 9, 99], [9] * 8], {99}))
    again = GeneratedText(tmp_path / "x", section, 1)
    assert again.sequences == texts.sequences == [[1, 2, 3, 9, 9, 99], [4, 5, 6, 7, 8] + [9] * 8]
    batch = again.batch(0)
    rows = sorted(zip(batch.tokens_BL.tolist(), batch.learnt_BL.tolist(), strict=True))
    assert rows[0] == ([1, 2, 3, 9, 9, 99] + [0] * 7, [False] * 3 + [True] * 3 + [False] * 7)
    assert rows[1] == (again.sequences[1], [False] * 5 + [True] * 8)


def test_a_target_without_a_tokenizer_learns_from_sequences_of_another_run(tmp_path: Path, data: Path):
    written = toy.run(tmp_path / "one", data).folder / "generated.jsonl"
    bare = Target(toy.target().model, None, name="bare")
    recipe = toy.recipe(tmp_path / "two", data, "stage1.steps=0", f"stage2.texts={written}")
    assert train(recipe, target=bare, generate=toy.generate, evaluate=toy.evaluate).step == 4


@pytest.mark.parametrize(
    ("vocabulary", "context", "words"),
    [(99, 16, "has token 99, but the target's tokens end at 98; give"), (100, 15, "has a text of 16 tokens, but the")],
)
def test_texts_of_another_targets_run_are_refused(tmp_path: Path, vocabulary: int, context: int, words: str):
    path, section = tmp_path / "generated.jsonl", OnPolicySection(steps=1, batch=1, prompt_tokens=6, new_tokens=10)
    path.write_text(json.dumps({"sequences": [[99, *range(15)]], "prompts": [6]}) + "\n")
    assert not GeneratedText.of(path, section, 1, vocabulary=100, context=16).missing
    with pytest.raises(DraftsmithError, match=words):
        GeneratedText.of(path, section, 1, vocabulary=vocabulary, context=context)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "one"}\n', r"line 1, has the fields text instead of token ids as a run writes them; give the gener"),
        ("[1]\n", r"line 1, has a list instead of token ids .*, or name a file of texts in data\.sources"),
        ("plain words\n", "is not what a run writes; give the generated.jsonl of a run, or name a file of"),
        ('{"sequences": [[1, 2]], "prompts": [1]}\n{"sequences": ["a"], "prompts": [1]}\n', "line 2, has the fields s"),
        ('{"sequences": [[1, 2]]}\n', "was written by an earlier version; give that of a new run"),
        ("", "is not what a run writes"),
    ],
)  # fmt: skip
def test_texts_that_no_run_wrote_are_refused_for_what_they_are(tmp_path: Path, data: Path, content: str, words: str):
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(DraftsmithError, match=words) as raised:
        toy.run(tmp_path / "run", data, f"stage2.texts={path}")
    assert ("earlier" in str(raised.value)) == ("earlier" in words)


def test_a_folder_named_for_texts_is_refused_with_the_file_in_it(tmp_path: Path, data: Path):
    folder = toy.run(tmp_path / "one", data).folder
    with pytest.raises(DraftsmithError, match=rf"{folder} is a folder; give {folder}/generated\.jsonl"):
        toy.run(tmp_path / "two", data, f"stage2.texts={folder}")


def test_a_run_refuses_texts_that_its_target_cannot_read(tmp_path: Path, data: Path):
    written = tmp_path / "generated.jsonl"
    record = {"sequences": [[toy.target().vocab_size, *range(15)]] * 4, "prompts": [6] * 4}
    written.write_text(json.dumps(record) + "\n")
    with pytest.raises(DraftsmithError, match="generated.jsonl has token .* give the generated.jsonl of a run of this"):
        toy.run(tmp_path / "run", data, "stage1.steps=0", f"stage2.texts={written}")
