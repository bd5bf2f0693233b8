"""Reads regular expressions before they are compiled, for what the compiler silently takes for something else.

It ignores anchors in the middle, takes unknown escapes for letters, and lets a dot stand for the end of a line. Inside
a JSON string it leaves out what has to be escaped there, but writes it as it is where a pattern cannot do without.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from draftsmith.types import DraftsmithError

_TOKEN = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}|\\c[a-zA-Z]|\\."
    r"|\[\^?(?:\\.|[^\]\\])*\]|\(\?(?::|P?<\w+>|<?[=!]|.)?|\{[0-9, ]*\}|.", re.DOTALL
)
"""An escape, a class, the beginning of a group, a count, or any other character."""
_GROUP = re.compile(r"\((\?(:|P?<\w+>))?")
"""The beginnings of groups that are kept: `(`, `(?:`, and those with a name."""
_NOT_ASCII = re.compile(r"\\?[^\x00-\x7f]")
"""A character that is not ASCII, with the backslash before it if there is one, which means nothing."""
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("dDwWsStnrfvaexucb")
"""Letters that mean something behind a backslash, in a class and outside."""
_REFUSED_ESCAPES = frozenset("BkpP")
"""Letters that the compiler itself refuses outside of a class, in words of its own."""
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_REPEATING = ("*", "+", "{")
_OPTIONAL = ("?", "*", "{0,", "{0}")
_COUNTING = (*_REPEATING, "?")
LINE = r"[^\n\r]"
"""What a dot stands for, as in Python and JavaScript: any character but the end of a line."""


def read_pattern(pattern: str, name: str) -> list[str]:
    """Return the tokens of a pattern.

    Args:
        name: what to call the pattern in messages.

    Raises:
        DraftsmithError: for an escape that nobody knows, for a group that is none of those that are kept, and for an
            anchor that has something before or behind it.
    """
    tokens: list[str] = []
    for found in _TOKEN.finditer(pattern):
        token = found[0]
        if token == "[":
            raise DraftsmithError(f"{name} has a [ without its ]; fix it.")
        if token == "\\":
            raise DraftsmithError(f"{name} ends in a single backslash; fix it.")
        if token[0] == "(" and not _GROUP.fullmatch(token):
            raise DraftsmithError(f"{name} has {token}, which cannot be kept; write it in another way.")
        known = _KNOWN_ESCAPES if token[0] == "[" else _KNOWN_ESCAPES | _REFUSED_ESCAPES
        for letter in _ESCAPED.findall(token):
            if letter.isascii() and letter.isalpha() and letter not in known:
                raise DraftsmithError(f"{name} has \\{letter}, which has no meaning here; write it in another way.")
        tokens.append(token)
    if _is_misplaced(tokens, "^", "(") or _is_misplaced(reversed(tokens), "$", ")") or _repeats_anchors(tokens):
        raise DraftsmithError(
            f"{name} has ^ not at the beginning, or $ not at the end; leave it out, since the whole text has to match."
        )
    return tokens


def of_lines(pattern: str) -> str:
    """Return the pattern with dots that do not stand for the end of a line."""
    return "".join(LINE if token == "." else token for token in _TOKEN.findall(pattern))


def in_json(tokens: Sequence[str]) -> str:
    """Return the pattern as the compiler has to be given it for a string in JSON.

    What is not ASCII it reads by rules that know nothing of JSON, unless it is written as an escape. And of a group
    that may be left out, it would accept a beginning, if the group begins with a repetition.
    """
    return "".join(
        "{0,1}" if token == "?" and before == ")" else _NOT_ASCII.sub(_escape, token)
        for before, token in pairwise(["", *tokens])
    )


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0][-1])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"


def check_in_json(tokens: Sequence[str], name: str) -> None:
    """Raise DraftsmithError if all that a pattern matches has characters that a JSON string has to escape."""
    groups = [_Branches()]
    for token, behind in pairwise([*tokens, ""]):
        if token[0] == "(":
            groups.append(_Branches())
        elif token == "|":
            groups[-1].next()
        elif token[0] not in _COUNTING:
            does_without = not _has_to_be_escaped(token)
            if token == ")" and len(groups) > 1:
                does_without = groups.pop().do_without
            if not (does_without or behind.startswith(_OPTIONAL)):
                groups[-1].this = False
    if not groups[0].do_without:
        raise DraftsmithError(
            f"{name} needs a quotation mark, a backslash or a control character, which cannot be kept in JSON here; "
            "leave it out."
        )


@dataclass
class _Branches:
    """Whether the alternatives of a group, the present one and any before it, do without such characters."""

    this: bool = True
    earlier: bool = False

    def next(self) -> None:
        self.earlier, self.this = self.do_without, True

    @property
    def do_without(self) -> bool:
        return self.this or self.earlier


def _has_to_be_escaped(token: str) -> bool:
    """Say whether a token stands only for characters that a JSON string has to escape."""
    if token[0] == "[" and len(token) > 1:
        inside = _TOKEN.findall(token[1:-1])
        # A class that leaves out characters, or a range's own dash.
        ends = [one for at, one in enumerate(inside) if one != "-" or at in (0, len(inside) - 1)]
        return bool(ends) and ends[0] != "^" and all(map(_has_to_be_escaped, ends))
    character = _character(token)
    return character is not None and (character in '"\\' or character < " ")


def _character(token: str) -> str | None:
    """Return the only character that a token stands for, if there is only one."""
    if token[0] != "\\":
        return token if len(token) == 1 else None
    if token[1] in "xu" and len(token) > 2:
        return chr(min(int(token[2:].strip("{}"), 16), sys.maxunicode))
    if token[1] == "c" and len(token) > 2:
        return chr(ord(token[2]) % 32)
    return _CONTROLS.get(token[1], None if token[1].isalnum() else token[1])


def _is_misplaced(tokens: Iterable[str], anchor: str, opening: str) -> bool:
    """Say whether something may come before an anchor; for the end of the text, the tokens come from behind."""
    closing = {"(": ")", ")": "("}[opening]
    first, outer = True, list[bool]()
    for token in tokens:
        if token[0] == opening:
            outer.append(first)
        elif token == "|":
            first = outer[-1] if outer else True
        elif token == anchor:
            if not first:
                return True
        elif token[0] == closing:
            if outer:
                outer.pop()
            first = False
        elif token[0] not in (*_COUNTING, "^", "$"):
            first = False
    return False


def _repeats_anchors(tokens: list[str]) -> bool:
    """Say whether a group with an anchor in it may come more than once."""
    groups = [False]
    for token, behind in pairwise([*tokens, ""]):
        if token[0] == "(":
            groups.append(False)
        elif token in ("^", "$"):
            groups[-1] = True
        elif token == ")" and len(groups) > 1:
            anchored = groups.pop()
            if anchored and behind.startswith(_REPEATING):
                return True
            groups[-1] = groups[-1] or anchored
    return False
