"""Make the embedded prompt sets: held-out ones to measure on, and others to train on.

    python recipes/make_prompts.py --data SOURCES --out src/draftsmith/assets_data/prompts

SOURCES holds `code/NAME-VERSION/**/*.py`, `prose/NAME.txt` (a book with its line breaks) and `licences.json`
(source name -> licence); a source without a permissive or public-domain licence is refused. Nothing in it may be
text that the target was trained on. The shipped sets come from packages of PyPI and from the public-domain novels
that Debian's `r-cran-janeaustenr` carries; the prompts folder names the versions. The dialogues are written by
the templates below, so acceptance on them flatters, as it does on any templated dialogue.

A row of code or prose names its source, a package or a book. A dialogue mixes the templates: its `pieces` are
[template, characters], one after the other, so that `draftsmith compare` can train and measure on different ones.

A document is held out by the hash of its text (`draftsmith.training.data.split`), here one in two.
"""

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.training.data.split import is_held_out

Row = dict[str, Any]

PERMISSIVE = ("MIT", "BSD", "Apache", "PSF", "ISC", "CC0", "public domain")
HELD_OUT_EVERY = 2
DIALOGUE_SOURCE = "templates of this recipe"
CITIES = ("Oakland", "San Jose", "Fresno", "Napa", "Santa Rosa", "Berkeley", "Portland", "Seattle")
PLACES = ("the Harbour Grill", "Casa Luna", "the Green Bowl", "Bistro Nine", "the Old Mill", "Golden Wok")
DISHES = ("a latte", "an iced mocha", "a flat white", "a cappuccino", "a green tea", "an espresso")
NAMES = ("Maria", "Tom", "Amir", "Julia", "Kofi", "Hana", "Peter", "Lena")
THINGS = ("apples", "pencils", "marbles", "stickers", "books", "cookies", "coins", "seashells")


def booking(rng: random.Random) -> str:
    """A table for dinner."""
    city, place, people, hour = rng.choice(CITIES), rng.choice(PLACES), rng.randint(2, 8), rng.randint(5, 9)
    phone = f"415-{rng.randint(200, 999)}-{rng.randint(1000, 9999)}"
    return "\n".join(
        (
            f"<|user|>I would like to book a table for {people} people.",
            "<|assistant|>Which city do you want to dine in, and do you have a restaurant in mind?",
            f"<|user|>In {city}, please. Try {place}, at {hour} pm.",
            f"<|assistant|>Please confirm: a table for {people} people at {place} in {city}, today at {hour} pm.",
            "<|user|>Yes, that is right. What is their phone number?",
            f"<|assistant|>Your reservation has been made. Their phone number is {phone}.",
            "<|user|>Thanks, that is all I need.",
            "<|assistant|>Have a great day!",
        )
    )


def order(rng: random.Random) -> str:
    """A drink at a counter."""
    dish, size, price = rng.choice(DISHES), rng.choice(("small", "medium", "large")), rng.randint(3, 7)
    return "\n".join(
        (
            f"<|user|>Hi, could I get {dish}, please?",
            "<|assistant|>Of course. What size would you like?",
            f"<|user|>A {size} one, with oat milk.",
            f"<|assistant|>So that is {dish}, {size}, with oat milk, for {price} dollars. Is your order correct?",
            "<|user|>Yes, it is. Thank you.",
            "<|assistant|>Great, it will be waiting for you at the bar.",
        )
    )


def arithmetic(rng: random.Random) -> str:
    """A word problem with its working."""
    name, friend = rng.sample(NAMES, 2)
    thing, boxes, each, given = rng.choice(THINGS), rng.randint(3, 12), rng.randint(4, 15), rng.randint(2, 10)
    total = boxes * each
    return "\n".join(
        (
            f"<|user|>{name} has {boxes} boxes with {each} {thing} in each box and gives {given} {thing} to {friend}. "
            f"How many {thing} does {name} have left?",
            f"<|assistant|>{name} starts with {boxes} x {each} = {total} {thing}.",
            f"After giving {given} away, {name} has {total} - {given} = {total - given} {thing} left.",
            f"The answer is {total - given}",
        )
    )


def dialogue_rows(count: int, seed: int, held_out: bool, size: int | None = None) -> Iterator[Row]:
    """Conversations of several exchanges, each of them unlike the others in its details; cut to `size` characters.

    Every exchange is a piece of its own, whose source is its template.
    """
    rng = random.Random(seed)
    while count:
        templates, exchanges = [], []
        for _ in range(12):
            template = rng.choice((booking, order, arithmetic))
            templates.append(template.__name__)
            exchanges.append(template(rng))
        text = "\n".join(exchanges)
        if is_held_out(text, HELD_OUT_EVERY) == held_out:
            count -= 1
            yield {
                "task": "dialogue", "source": DIALOGUE_SOURCE, "text": text[:size],
                "pieces": pieces(templates, exchanges, len(text[:size])),
            }


def pieces(sources: list[str], parts: list[str], size: int) -> list[tuple[str, int]]:
    """Return source and length of each of the parts that make up the first `size` characters, line breaks included."""
    found = []
    for source, part in zip(sources, parts, strict=True):
        length = min(len(part) + 1, size)
        if length:
            found.append((source, length))
        size -= length
    return found


def without_header(text: str) -> str:
    """Drop the comments on top: a licence that every file repeats is too easy to guess."""
    lines = text.splitlines(keepends=True)
    while lines and (lines[0].startswith("#") or not lines[0].strip()):
        lines.pop(0)
    return "".join(lines)


def code_documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Python files of every package, without the tiny ones, generated tables and tests."""
    for path in sorted(folder.glob("*/**/*.py")):
        text = without_header(path.read_text(encoding="utf-8", errors="replace"))
        lines = text.splitlines() or [""]
        wordy = sum(character.isalpha() for character in text) > 0.4 * len(text)
        inside = str(path.relative_to(folder))
        if len(text) > 2500 and wordy and len(text) / len(lines) < 60 and not re.search("test|vendor", inside):
            yield path.relative_to(folder).parts[0], text


def unwrap(text: str) -> str:
    """Join the lines of each paragraph and use typographic quotes, as clean book text has them."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    joined = "\n\n".join(part for part in paragraphs if part)
    joined = re.sub(r'(^|[\s(—])"', r"\1“", joined).replace('"', "”")
    return re.sub(r"(\w)'(\w|\b|\s)", r"\1’\2", joined).replace("--", "—").replace("_", "")


def prose_documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Chapters of every book."""
    for path in sorted(folder.glob("*.txt")):
        for chapter in re.split(r"(?im)^chapter [ivxlc\d]+\s*$", path.read_text(encoding="utf-8"))[1:]:
            yield path.stem, unwrap(chapter)


def sample(documents: list[tuple[str, str]], count: int, size: int, rng: random.Random) -> list[tuple[str, str]]:
    """Take `count` pieces of at most `size` characters, source by source in turn, each from the start of a line."""
    by_source: dict[str, list[str]] = defaultdict(list)
    for source, text in documents:
        by_source[source].append(text)
    for texts in by_source.values():
        rng.shuffle(texts)
    pieces, turn = [], 0
    while len(pieces) < count and by_source:
        for source in sorted(by_source):
            texts = by_source[source]
            text = texts[turn % len(texts)]
            start = 0 if turn < len(texts) else text.find("\n", rng.randrange(max(1, len(text) - size))) + 1
            piece = text[start : start + size]
            piece = piece.rsplit("\n" if "\n" in piece[size // 2 :] else " ", 1)[0]
            piece = piece.strip("\n")
            if len(piece) > size // 3 and (source, piece) not in pieces:
                pieces.append((source, piece))
        turn += 1
    return pieces[:count]


def rows_of(task: str, documents: list[tuple[str, str]]) -> list[Row]:
    """Return the rows of texts that each have one source."""
    return [{"task": task, "source": source, "text": text} for source, text in documents]


def write(path: Path, rows: list[Row]) -> None:
    """One JSON object a line: task, source, text, and of a dialogue its pieces."""
    with path.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{path.name}: {len(rows)} prompts, {path.stat().st_size / 1000:.0f} kB")


def check_licences(data: Path) -> None:
    """Refuse a source that nobody said the licence of."""
    licences = json.loads((data / "licences.json").read_text())
    names = [p.name for p in (data / "code").iterdir()] + [p.stem for p in (data / "prose").glob("*.txt")]
    for name in names:
        if not any(word in licences.get(name, "") for word in PERMISSIVE):
            sys.exit(f"{name} has no permissive licence in licences.json; name it there, or take the source out.")


def main() -> None:
    """Read the sources and write both sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with code/, prose/ and licences.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40, help="held-out prompts a task")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    check_licences(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    corpora = {"code": list(code_documents(args.data / "code")), "prose": list(prose_documents(args.data / "prose"))}
    held_out: list[Row] = []
    training: list[Row] = []
    for task, documents in corpora.items():
        kept = [d for d in documents if is_held_out(d[1], HELD_OUT_EVERY)]
        rest = [d for d in documents if not is_held_out(d[1], HELD_OUT_EVERY)]
        held_out += rows_of(task, sample(kept, args.count, 5400, rng))
        training += rows_of(task, sample(rest, 170 if task == "code" else 90, 1300, rng))
    held_out += dialogue_rows(args.count, args.seed, held_out=True)
    training += dialogue_rows(40, args.seed + 1, held_out=False, size=1300)
    write(args.out / "prompts.jsonl", held_out)
    write(args.out / "train.jsonl", training)


if __name__ == "__main__":
    main()
