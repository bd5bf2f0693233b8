"""Compiles clients' grammars in a separate process, which survives a grammar that takes too much."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from draftsmith import grammar_process
from draftsmith.constraints import NAMES, TooHardError
from draftsmith.types import Constraint, DraftsmithError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

STARTING = 120.0
"""Seconds that the process may take to begin; it imports PyTorch."""
PATIENCE = 10.0
"""Seconds, beyond those that a grammar may take, after which a process that gives no answer is taken to hang."""


class GuardedCompiler:
    """Holds the process, which is started at once, and again whenever it has died; for one caller at a time.

    Args:
        tokens: of the target.
        seconds: how long a grammar may take.
    """

    def __init__(self, tokens: "TokenizerInfo", seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_told = self._is_ready = self._is_closed = False
        self._start()
        self._tell()

    def compile(self, constraint: Constraint) -> "CompiledGrammar":
        """Return the grammar of a constraint that was checked.

        Raises:
            TooHardError: it takes more time or memory than it may.
            ValueError: it cannot be compiled, with xgrammar's message.
        """
        from xgrammar import CompiledGrammar

        answer, name = self._ask(constraint), NAMES[constraint.kind]
        if answer.get("failed") == grammar_process.TIME:
            raise TooHardError(f"{name} takes more than {self._seconds:g} seconds to compile; make it simpler.")
        if "failed" in answer:
            raise TooHardError(f"{name} takes more memory to compile than there is for it; make it simpler.")
        if "error" in answer:
            raise ValueError(answer["error"])
        return CompiledGrammar.deserialize_json(answer["grammar"], self._tokens)

    def _ask(self, constraint: Constraint) -> dict[str, Any]:
        """Return the process's answer about a constraint; a process that dies or hangs over it is replaced."""
        connection = self._ready()
        try:
            connection.send_bytes(json.dumps([constraint.kind, constraint.text, self._seconds]).encode())
            if connection.poll(self._seconds + PATIENCE):
                answer: dict[str, Any] = json.loads(connection.recv_bytes())
                return answer
            failed = grammar_process.TIME
        except (EOFError, OSError):
            failed = grammar_process.MEMORY
        self._end()
        if not self._is_closed:
            self._start()
        return {"failed": failed}

    def _ready(self) -> Connection:
        """Return the connection to a process that waits for a grammar; starts another one if the last has ended."""
        if self._is_closed:
            raise DraftsmithError("the process that compiles constraints was ended; begin another one.")
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        connection = self._connection
        assert connection is not None
        if not self._is_ready:
            try:
                self._tell()
                self._is_ready = connection.poll(STARTING) and connection.recv_bytes() == grammar_process.READY
            except (EOFError, OSError):
                self._is_ready = False
            if not self._is_ready:
                self._end()
                raise DraftsmithError("the process that compiles constraints could not begin; try again.")
        return connection

    def close(self) -> None:
        """End the process for good, together with what it is compiling."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._is_told = self._is_ready = False
        if process is not None:
            # Its child too. But once a process was waited for, its number may belong to another one.
            if process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if connection is not None:
            connection.close()

    def _start(self) -> None:
        place = os.path.dirname(os.path.dirname(grammar_process.__file__))
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", grammar_process.__name__, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                # A process group of its own, so that it and its child can be ended in one go.
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )

    def _tell(self) -> None:
        """Send the vocabulary, once; this blocks until the process reads it."""
        if not self._is_told and self._connection is not None:
            self._connection.send_bytes(self._tokens.serialize_json().encode())
            self._is_told = True
