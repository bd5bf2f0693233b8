"""Choose and tokenise the text that the demo target is trained on.

    python recipes/demo_data.py --data DATA --tokenizer src/draftsmith/assets_data/demo-target --out runs/demo-data

DATA holds {code,prose,docs,dialogue}.jsonl.xz, one record a line. A model of 15.7 M parameters does a narrow world
better than a wide one, and writes in loops what it has read in loops. So of everything only what is plain is kept:

- of all sources: text of common words (many characters a token), that repeats no lines of its own and few paragraphs
  of a document before it;
- code: whole small files of documented functions, without their licence; no tests, no tables of data;
- prose: novels and stories with short sentences; no textbooks, diaries or treatises;
- docs: guides in English that talk to the reader; no reference pages and no tables;
- dialogue and problems: bookings and orders, and word problems with short instructions;
- renames: a function in a user's turn, with the wish to rename one of its names, and the new function as the answer.

Every document ends with the end token, so that the model learns to stop. One in fifty is held out by the SHA-256 of its
text (`draftsmith.training.data.split`). Written are SOURCE.safetensors (`tokens` of all documents in a row and the
`ends` of each) for training and SOURCE.held-out.safetensors, held-out.jsonl with some held-out texts as prompts to
measure on, and counts.json.
"""

import argparse
import ast
import json
import lzma
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.drafters.trainable import storage
from draftsmith.training.data.split import is_held_out, place_of

FILES = ("code", "prose", "docs", "dialogue")
TREATISES = ("textbooks", "pepys", "adam-smith", "darwin", "moby-dick", "heart-of-darkness")
GUIDES = (
    "rust-lang/book", "rust-by-example", "d2l-en", "fastapi", "textual", "opensource.guide", "scrapy", "pytest-dev",
    "18f.gsa.gov", "django-rest-framework", "dask", "celery", "pydantic",
)
CHARACTERS_A_TOKEN = {"code": 2.9, "prose": 3.3, "docs": 3.2, "dialogue": 2.5, "problems": 2.5, "renames": 2.5}
LONGEST = {"code": 40_000, "docs": 40_000}
BATCH = 256
PROMPTS = 100


def conversation(messages: list[dict[str, str]]) -> str:
    """Write a conversation in the tokenizer's own turn markers."""
    return "\n".join(f"<|{turn['role']}|>{turn['content']}" for turn in messages)


def repeats_itself(text: str) -> bool:
    """Say whether a text repeats many of its own lines, or packs as only lists and tables do."""
    lines = [line.strip() for line in text.split("\n") if len(line.strip()) > 12]
    packed = len(zlib.compress(text.encode(), 6)) / max(1, len(text.encode()))
    return len(lines) - len(set(lines)) > 0.2 * len(lines) or (len(text) > 2000 and packed < 0.18)


def plain_code(text: str) -> str | None:
    """Return a file of documented functions without the comments on top, or None for any other file."""
    text = re.sub(r"\A(?:\s*#[^\n]*\n|\s*\n)+", "", text.replace("\r\n", "\n"))
    if not 200 <= len(text) <= LONGEST["code"] or sum(ord(character) > 127 for character in text) > 20:
        return None
    lines = [line for line in text.split("\n") if line.strip()]
    letters = sum(character.isalpha() or character.isspace() for character in text)
    imports = sum(line.startswith(("import ", "from ")) for line in lines)
    too_long = sum(len(line) > 100 for line in lines)
    if letters < 0.72 * len(text) or imports > 0.25 * len(lines) or too_long > 0.02 * len(lines):
        return None
    if re.search(r"^\s*def test_|unittest|import pytest|[Ll]icen[cs]e[sd]? under|DO NOT EDIT", text, re.MULTILINE):
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    documented = sum(ast.get_docstring(node, clean=False) is not None for node in functions)
    return text if functions and documented >= 0.25 * len(functions) else None


def plain_prose(text: str) -> str | None:
    """Return a chapter whose sentences are short on the whole, else None."""
    words = len(text.split())
    sentences = len(re.findall(r"[.!?][”’\"]?(?:\s|$)", text))
    return text if words > 150 and sentences and words / sentences < 21 else None


def plain_docs(text: str) -> str | None:
    """Return a guide that is made of sentences, else None."""
    lines = [line for line in text.split("\n") if line.strip()]
    tables = sum(line.lstrip().startswith("|") for line in lines)
    if not 400 <= len(text) <= LONGEST["docs"] or tables > 0.03 * len(lines):
        return None
    return text if len(re.findall(r"\b(?:you|your|we|let's)\b", text, re.IGNORECASE)) > len(text) / 1500 else None


def choose(name: str, record: dict) -> tuple[str, str] | None:
    """Return the source that a record belongs to and what of it is kept, or None."""
    where = record["source"]
    if name == "dialogue":
        return ("dialogue" if where.startswith("chat_dialogue") else "problems"), conversation(record["messages"])
    if name == "prose" and not any(word in where for word in TREATISES):
        kept = plain_prose(record["text"])
    elif name == "docs" and any(word in where for word in GUIDES):
        kept = plain_docs(record["text"])
    elif name == "code":
        kept = plain_code(record["text"])
    else:
        return None
    return None if kept is None else (name, kept)


def renames(code: str) -> Iterator[str]:
    """Yield what a user wants renamed in each small function of a file, with the answer."""
    lines = code.split("\n")
    for node in ast.parse(code).body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        function = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not 120 <= len(function) <= 700 or ">>>" in function:
            continue
        rng = random.Random(place_of(function))
        old = rng.choice([node.name, *(argument.arg for argument in node.args.args)])
        if len(old) < 2 or old in ("self", "cls"):
            continue
        new = rng.choice((f"new_{old}", f"{old}_value", f"my_{old}", f"{old}_2", f"the_{old}"))
        wish = rng.choice(("Rename {} to {}.", "Please rename {} to {} in this function.", "Call {} {} instead."))
        changed = re.sub(rf"\b{re.escape(old)}\b", new, function)
        yield conversation([
            {"role": "user", "content": f"{wish.format(old, new)}\n{function}"},
            {"role": "assistant", "content": changed},
        ])


class Seen:
    """Paragraphs met so far, by their hash; tells a document that is mostly made of them."""

    def __init__(self) -> None:
        self.paragraphs: set[int] = set()

    def mostly(self, text: str) -> bool:
        """Say whether two paragraphs in five were met before, and remember them all."""
        found = [place_of(" ".join(part.split())) for part in re.split(r"\n\s*\n", text) if len(part) > 80]
        again = sum(place in self.paragraphs for place in found)
        self.paragraphs.update(found)
        return again > 0.4 * len(found)


def documents(folder: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield (source, held out, text) of everything that is kept, in the order of the files."""
    for name in FILES:
        seen = Seen()
        with lzma.open(folder / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                whole = record["text"] if "text" in record else conversation(record["messages"])
                chosen = choose(name, record)
                if chosen is None or repeats_itself(chosen[1]) or seen.mostly(chosen[1]):
                    continue
                held_out = is_held_out(whole)
                yield chosen[0], held_out, chosen[1]
                if name == "code":
                    for text in renames(chosen[1]):
                        yield "renames", held_out, text


class Shelf:
    """The documents of one source and split, as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, least: float) -> None:
        self.tokenizer, self.least = tokenizer, least
        self.waiting: list[str] = []
        self.pieces: list[torch.Tensor] = []

    def add(self, text: str) -> None:
        """Take a document."""
        self.waiting.append(text)
        if len(self.waiting) == BATCH:
            self.encode()

    def encode(self) -> None:
        """Turn what waits into tokens; a text of rare words is left out here."""
        if self.waiting:
            for text, ids in zip(
                self.waiting, self.tokenizer(self.waiting, add_special_tokens=False)["input_ids"], strict=True
            ):
                if len(text) >= self.least * len(ids):
                    self.pieces.append(torch.tensor([*ids, self.tokenizer.eos_token_id], dtype=torch.int32))
        self.waiting = []

    def write(self, path: Path) -> dict[str, int]:
        """Write all documents in a row, and where each ends; return the counts."""
        self.encode()
        ends = torch.tensor([len(piece) for piece in self.pieces]).cumsum(0)
        storage.write_tensors(path, {"tokens": torch.cat(self.pieces).to(torch.uint16), "ends": ends})
        return {"documents": len(ends), "tokens": int(ends[-1])}


def main(say: Callable[[str], None] = print) -> None:
    """Read, choose, tokenise, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with {code,prose,docs,dialogue}.jsonl.xz")
    parser.add_argument("--tokenizer", required=True, help="the model folder that has it")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    shelves: dict[str, Shelf] = {}
    prompts: dict[str, list[str]] = {}
    for source, held_out, text in documents(args.data):
        name = f"{source}.held-out" if held_out else source
        shelves.setdefault(name, Shelf(tokenizer, CHARACTERS_A_TOKEN[source])).add(text)
        if held_out and len(kept := prompts.setdefault(source, [])) < PROMPTS:
            kept.append(json.dumps({"task": source, "text": text[:4000]}))

    def fill(folder: Path) -> None:
        counts = {name: shelf.write(folder / f"{name}.safetensors") for name, shelf in sorted(shelves.items())}
        storage.write_json(folder / "counts.json", counts)
        lines = [f"{line}\n" for kept in prompts.values() for line in kept]
        storage.write_bytes(folder / "held-out.jsonl", "".join(lines).encode())
        say(json.dumps(counts, indent=2))

    args.out.parent.mkdir(parents=True, exist_ok=True)
    storage.write_folder(args.out, fill)


if __name__ == "__main__":
    main()
