"""Compiles the grammars of strangers in a process of its own, which is ended when one of them takes too long."""

import json
import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import TYPE_CHECKING

from draftsmith import grammar_process
from draftsmith.constraints import NAMES, TooHardError
from draftsmith.types import Constraint, DraftsmithError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

STARTING = 120.0
"""Seconds that the process may take to begin; it imports PyTorch."""


class GuardedCompiler:
    """Holds a process, made at once and again after one had to be ended; for one caller at a time.

    Args:
        tokens: the target's.
        seconds: that a grammar may take.
    """

    def __init__(self, tokens: "TokenizerInfo", seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = False
        # Another process comes up beside what is answered meanwhile.
        self._starting: Thread | None = None
        self._start()

    def compile(self, constraint: Constraint) -> "CompiledGrammar":
        """Return the grammar of a constraint that was checked.

        Raises:
            TooHardError: it takes more time or memory than it may.
            ValueError: it is no grammar, with what xgrammar says.
        """
        from xgrammar import CompiledGrammar

        connection = self._ready()
        try:
            connection.send_bytes(json.dumps([constraint.kind, constraint.text]).encode())
            if not connection.poll(self._seconds):
                raise TooHardError(
                    f"{NAMES[constraint.kind]} takes more than {self._seconds:g} seconds to compile; make it simpler."
                )
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._restart()
            raise TooHardError(
                f"{NAMES[constraint.kind]} takes more memory to compile than there is for it; make it simpler."
            ) from error
        except TooHardError:
            self._restart()
            raise
        if "error" in answer:
            raise ValueError(answer["error"])
        return CompiledGrammar.deserialize_json(answer["grammar"], self._tokens)

    def _ready(self) -> Connection:
        """Return the connection to a process that waits for a grammar; another one where the last has ended."""
        if self._starting is not None:
            self._starting.join()
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        connection = self._connection
        assert connection is not None
        if not self._is_ready:
            try:
                self._is_ready = connection.poll(STARTING) and connection.recv_bytes() == grammar_process.READY
            except (EOFError, OSError):
                self._is_ready = False
            if not self._is_ready:
                self.close()
                raise DraftsmithError("the process that compiles constraints could not begin; try again.")
        return connection

    def _restart(self) -> None:
        """End the process, and begin another one for whoever comes next."""
        self.close()
        self._starting = Thread(target=self._start, daemon=True)
        self._starting.start()

    def close(self) -> None:
        """End the process."""
        if self._starting is not None:
            self._starting.join()
            self._starting = None
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None
        self._is_ready = False

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        place = os.path.dirname(os.path.dirname(grammar_process.__file__))
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", grammar_process.__name__, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._connection.send_bytes(self._tokens.serialize_json().encode())
