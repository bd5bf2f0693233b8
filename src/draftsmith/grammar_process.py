"""Compiles constraints with xgrammar: in this process, or in one of its own, which can be ended.

How long a grammar takes to compile, and how much memory, cannot be told from its text. Whoever compiles for strangers
does it in a process of its own: `python -m draftsmith.grammar_process FD` answers over a connection, and dies with it.
Text goes over, no objects of Python.
"""

import json
import re
import sys
from typing import TYPE_CHECKING

from draftsmith.constraints import choices_in
from draftsmith.types import Constraint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from xgrammar import CompiledGrammar, GrammarCompiler

WHITESPACE = 24
"""The most characters of white space between two parts of JSON: a model may otherwise write nothing else for ever."""
ANY_OBJECT = '{"type": "object"}'
ROOM = 2 * 2**30
"""Memory that a process of its own may take for what it compiles."""
_LINE_END = re.compile(r"(?<!\\)[\r\n]")
READY = b"ready"


def compile_with(compiler: "GrammarCompiler", constraint: Constraint) -> "CompiledGrammar":
    """Compile a constraint that was checked; any exception of xgrammar may come out."""
    match constraint.kind:
        case "json_schema":
            return compiler.compile_json_schema(constraint.text, max_whitespace_cnt=WHITESPACE)
        case "json_object":
            return compiler.compile_json_schema(ANY_OBJECT, max_whitespace_cnt=WHITESPACE, strict_mode=False)
        case "regex":
            # It does not take line ends as they are.
            return compiler.compile_regex(_LINE_END.sub(lambda end: repr(end[0])[1:-1], constraint.text))
        case "grammar":
            return compiler.compile_grammar(constraint.text)
        case "choice":
            literals = (f'"{_escaped(choice)}"' for choice in choices_in(constraint.text))
            return compiler.compile_grammar(f"root ::= {' | '.join(literals)}\n")


def _escaped(text: str) -> str:
    """Return a text as it stands between quotes in a grammar."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\U{ord(character):08X}" for character in text
    )


def serve(connection: "Connection") -> None:
    """Answer until the other side has gone: first the vocabulary comes, then constraints."""
    from xgrammar import GrammarCompiler, TokenizerInfo

    tokens = TokenizerInfo.deserialize_json(connection.recv_bytes().decode())
    compiler = GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    _bound_memory()
    connection.send_bytes(READY)
    while True:
        kind, text = json.loads(connection.recv_bytes())
        try:
            answer = {"grammar": compile_with(compiler, Constraint(kind, text)).serialize_json()}
        except Exception as error:
            answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
        connection.send_bytes(json.dumps(answer).encode())


def _bound_memory() -> None:
    """Allow `ROOM` more than is taken now, where the system can say and hold that."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as used:
        bound = int(used.read().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


if __name__ == "__main__":
    from multiprocessing.connection import Connection

    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
