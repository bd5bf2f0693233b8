"""Targets with tokenizers, and constraints of every kind with what tells whether a text keeps to them."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draftsmith.drafters.base import Drafter
from draftsmith.engine.requests.grammars import Grammars
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Constraint, Context, Draft
from tests.helpers.tiny import tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer_of

PADDING = 5
"""Ids that the logits have and no token."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "the house", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
GRAMMAR = 'root ::= sum\nsum ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" sum ")"\n'
CHOICES = ["the house", "the houses", "a light went on", "caf\u00e9 \"1\"\n"]


def fits_schema(text: str) -> bool:
    """A random target also writes bytes that are no UTF-8; the grammar counts up to four of them as one character."""
    found = json.loads(text)
    name = re.sub("\ufffd{1,4}", "?", found["name"])
    return (
        set(found) <= {"name", "age", "tags"} and len(name) <= 4 and 0 <= found["age"] <= 120
        and all(tag in ("a", "the house", "é") for tag in found.get("tags", []))
    )


def fits_grammar(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9+()]+", text)) and eval(re.sub(r"\b0+(?=\d)", "", text)) >= 0


CONSTRAINTS: dict[str, tuple[Constraint, Callable[[str], bool]]] = {
    "json_schema": (Constraint.of_schema(SCHEMA), fits_schema),
    "json_object": (Constraint("json_object"), lambda text: isinstance(json.loads(text), dict)),
    "regex": (Constraint("regex", r"(id|n[ao]me): \d{2,5}(, [^ ,]{1,3})*"), lambda text: bool(
        re.fullmatch(r"(id|n[ao]me): \d{2,5}(, [^ ,]{1,3})*", text)
    )),
    "grammar": (Constraint("grammar", GRAMMAR), fits_grammar),
    "choice": (Constraint.of_choices(CHOICES), lambda text: text in CHOICES),
}


@cache
def target_with(kind: str, *, dtype: torch.dtype = torch.float64, ends: bool = True) -> Target:
    """Return a tiny target with a tokenizer, whose logits are wider than that, shared between tests."""
    tokenizer = tiny_tokenizer_of(kind)
    end = tokenizer.eos_token_id if ends else None
    assert end is None or isinstance(end, int)
    model = tiny_model(dtype=dtype, vocabulary=len(tokenizer) + PADDING, eos_token_id=end)
    return Target(model, tokenizer, name=f"tiny-{kind}")


@cache
def target_of_letters(letters: str) -> Target:
    """Return a tiny target whose tokens are these letters and nothing else, and which has no end token."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    return Target(tiny_model(vocabulary=len(letters)), wrapped, name="tiny-letters")


@cache
def _grammars() -> Grammars:
    return Grammars(target_with("byte-level"))


def fits(schema: dict[str, Any], text: str) -> bool:
    """Return whether a text is one that a schema's constraint lets through whole."""
    from xgrammar import GrammarMatcher

    matcher = GrammarMatcher(_grammars().compiled(Constraint.of_schema(schema)), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and matcher.is_terminated()


class Stubborn(Drafter):
    """Drafts the same chain of tokens at every step, whatever came before."""

    taps = ()

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def default_plan(self) -> Plan:
        return Plan((1,) * len(self.tokens))

    def propose(self, context: Context, plan: Plan) -> Draft:
        rows = len(context.rows_B)
        chain = list(range(-1, len(self.tokens) - 1))
        return Draft(
            torch.tensor([self.tokens] * rows), torch.tensor([chain] * rows), depth=len(self.tokens),
            branching=(1,) * len(self.tokens),
        )
