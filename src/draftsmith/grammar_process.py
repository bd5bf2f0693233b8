"""Compiles constraints with xgrammar: in this process, or in a separate one that can be ended.

How much time and memory a grammar takes to compile cannot be predicted from its text. So servers compile in a separate
process: `python -m draftsmith.grammar_process FD` answers over a connection, and ends when that closes. It forks a
child for every constraint. The child can be killed while the process, which is slow to start, stays. Only text is sent
over the connection, no Python objects.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, NoReturn

from draftsmith.constraints import choices_in
from draftsmith.patterns import of_lines
from draftsmith.types import Constraint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from xgrammar import CompiledGrammar, GrammarCompiler

WHITESPACE = 24
"""The most characters of white space between two parts of JSON: without a limit, a model may write it for ever."""
GAP = f'gap ::= (("") | (" ") | ("\\n" [ \\t]{{0, {WHITESPACE - 1}}}))\n'
"""White space between two parts of JSON: none, a space, or one end of a line with the next line's indentation. A small
model that likes to end lines would otherwise end as many as it may between any two parts."""
ANY_OBJECT = '{"type": "object"}'
ROOM = 2 * 2**30
"""Bytes that a child may take for compiling, in addition to those of the process it was forked from."""
_LINE_END = re.compile(r"(?<!\\)[\r\n]")
_SPACES = re.compile(
    r'(?P<other>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|\bwhitespace(?:_\d+)?\{0, ' + str(WHITESPACE) + r"\}"
)
READY = b"ready"
TIME, MEMORY = "time", "memory"
"""What a compilation ran out of: the values of "failed" in an answer."""


def compile_with(compiler: "GrammarCompiler", constraint: Constraint) -> "CompiledGrammar":
    """Compile a constraint that was checked; may raise any exception of xgrammar."""
    match constraint.kind:
        case "json_schema":
            return compiler.compile_grammar(_json_grammar(constraint.text))
        case "json_object":
            return compiler.compile_grammar(_json_grammar(ANY_OBJECT, strict=False))
        case "regex":
            # xgrammar does not accept literal line ends in a pattern.
            return compiler.compile_regex(_LINE_END.sub(lambda end: repr(end[0])[1:-1], of_lines(constraint.text)))
        case "grammar":
            return compiler.compile_grammar(constraint.text)
        case "choice":
            literals = (f'"{_escaped(choice)}"' for choice in choices_in(constraint.text))
            return compiler.compile_grammar(f"root ::= {' | '.join(literals)}\n")


def _json_grammar(schema: str, strict: bool = True) -> str:
    """Return the grammar of a schema's JSON, with less white space than xgrammar's."""
    from xgrammar import Grammar

    grammar = Grammar.from_json_schema(schema, max_whitespace_cnt=WHITESPACE, strict_mode=strict)
    return GAP + _SPACES.sub(lambda found: found["other"] or "gap", str(grammar))


def _escaped(text: str) -> str:
    """Return a text escaped as for between quotes in a grammar."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\U{ord(character):08X}" for character in text
    )


def serve(connection: "Connection") -> None:
    """Answer until the other side closes: it sends first the vocabulary, then constraints, each with its seconds.

    An answer has "grammar", "error" (xgrammar's message), or "failed" (what ran out). Only this process writes to the
    connection, so that killing a child never cuts a message in two.

    Raises:
        EOFError, BrokenPipeError: the other side has closed.
    """
    from xgrammar import GrammarCompiler, TokenizerInfo

    tokens = TokenizerInfo.deserialize_json(connection.recv_bytes().decode())
    compiler = GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    connection.send_bytes(READY)
    while True:
        kind, text, seconds = json.loads(connection.recv_bytes())
        connection.send_bytes(_answer(connection, compiler, Constraint(kind, text), seconds))


def _answer(connection: "Connection", compiler: "GrammarCompiler", constraint: Constraint, seconds: float) -> bytes:
    """Return a new child's answer about a constraint, or what it failed on; EOFError as in `serve`."""
    until = time.monotonic() + seconds
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _compile_and_exit((connection.fileno(), reading), writing, compiler, constraint)
    os.close(writing)
    said, is_over = bytearray(), False
    try:
        while not is_over and (ready := wait([reading, connection], max(0.0, until - time.monotonic()))):
            # The other side sends nothing before it has its answer, so this means that it has closed.
            if connection in ready:
                raise EOFError
            piece = os.read(reading, 2**20)
            said += piece
            is_over = not piece
    finally:
        os.close(reading)
        if not is_over:
            # It was not waited for yet, so its process id cannot belong to another process.
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not is_over:
        return json.dumps({"failed": TIME}).encode()
    return json.dumps({"failed": MEMORY}).encode() if status else bytes(said)


def _compile_and_exit(
    others: Sequence[int], writing: int, compiler: "GrammarCompiler", constraint: Constraint
) -> NoReturn:
    """Write an answer and end this process, with 0 if the answer is whole; closes `others`, which are the parent's."""
    status = 1
    try:
        for one in others:
            os.close(one)
        _bound_memory()
        try:
            answer = {"grammar": compile_with(compiler, constraint).serialize_json()}
        except MemoryError:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if said == "std::bad_alloc":
                raise
            answer = {"error": said}
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        status = 0
    finally:
        # In any case: the parent's exit handlers must not run in the child.
        os._exit(status)


def _bound_memory() -> None:
    """Limit the memory of this process to `ROOM` more than it takes now; only on Linux."""
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
