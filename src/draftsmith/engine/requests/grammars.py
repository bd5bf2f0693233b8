"""From a constraint to a grammar over the target's tokens: compiled when a request comes in, and kept for the next one.

xgrammar does the work; it is imported for the first constraint. What clients send is limited before it is compiled
(length, depth, number of repetitions), after that (memory of the result), and with `guard` also while it is compiled
(time and memory). So a constraint that asks for too much fails only its own request.
"""

import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.constraints import NAMES, TooHardError, UnmetError, check_constraint
from draftsmith.engine.requests.guide import SLOW, Guide
from draftsmith.grammar_process import compile_with
from draftsmith.targets import Target
from draftsmith.targets.loading.pieces import token_pieces
from draftsmith.targets.loading.tokens import first_line
from draftsmith.types import Constraint, DraftsmithError, SamplingParams

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

    from draftsmith.engine.requests.guarded import GuardedCompiler

MOST_GRAMMARS = 64
"""How many compiled grammars are kept; the one that was used longest ago is dropped first."""
MOST_BYTES = 256 * 2**20
"""How many bytes they may take together."""
LARGEST = 64 * 2**20
"""How many bytes one of them may take."""
REMEMBERED = 60.0
"""Seconds for which a constraint that takes too much is remembered, so that the same one is refused at once."""
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""What xgrammar puts before its messages: when, and where in its own code."""


@dataclass(frozen=True)
class _Here:
    """A target's tokens in xgrammar's form, and this process's compiler for them."""

    tokens: "TokenizerInfo"
    compiler: "GrammarCompiler"


@dataclass(frozen=True)
class _Refusal:
    """Why a constraint was refused, and until when (`time.monotonic`) that holds."""

    why: str
    until: float


class Grammars:
    """Compiles and keeps the grammars of one target; thread-safe.

    One is compiled at a time, so that clients cannot take all processors with hard ones.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._kept: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._refused: OrderedDict[Constraint, _Refusal] = OrderedDict()
        self._keeping = threading.Lock()
        self._compiling = threading.Lock()
        self._here: _Here | None = None
        self._guarded: GuardedCompiler | None = None
        self._silent: frozenset[int] = frozenset()

    def guide(self, params: SamplingParams) -> Guide | None:
        """Return a new guide for one continuation; None without a constraint.

        Raises:
            DraftsmithError: the constraint is not valid, is too complex, or allows no token at all; the target's
                tokenizer does not work with constraints; xgrammar is not installed.
        """
        if params.constraint is None:
            return None
        grammar = self.compiled(params.constraint)
        silent_stops = self._silent.intersection(params.stop_token_ids)
        ends = (frozenset() if params.ignore_eos else self._target.eos_token_ids) | silent_stops
        guide = Guide(grammar, ends, self._silent, self._target.vocab_size)
        if guide.error == SLOW:
            raise DraftsmithError(f"a request was refused, because {SLOW}")
        if guide.is_over:
            raise UnmetError(
                f"{NAMES[params.constraint.kind]} allows none of the tokens of {self._target.name} to begin with; "
                "change it."
            )
        return guide

    def compiled(self, constraint: Constraint) -> "CompiledGrammar":
        """Return the grammar of a constraint, compiled now or earlier; raises DraftsmithError like `guide`."""
        found = self._find(constraint)
        if found is not None:
            return found
        checked = check_constraint(constraint)
        with self._compiling:
            found = self._find(constraint)
            if found is None:
                try:
                    found = self._compile(checked)
                except TooHardError as error:
                    self._refuse(constraint, str(error))
                    raise
                self._keep(constraint, found)
        return found

    def is_ready(self, constraint: Constraint) -> bool:
        """Return whether `compiled` need not compile this constraint; TooHardError if it was refused lately."""
        return self._find(constraint) is not None

    def guard(self, seconds: float) -> None:
        """Compile in a separate process from now on, and refuse what takes more than `seconds` or too much memory.

        For servers: what clients send can neither hold up nor crash this process. The other process is started now.
        """
        if not seconds > 0:
            raise DraftsmithError(f"a grammar may take {seconds} seconds to compile; give more than 0.")
        with self._compiling:
            # Not there on every system.
            from draftsmith.engine.requests.guarded import GuardedCompiler

            tokens = self._ready().tokens
            self.close()
            self._guarded = GuardedCompiler(tokens, seconds)

    def close(self) -> None:
        """End the process that compiles, if there is one."""
        if self._guarded is not None:
            self._guarded.close()
            self._guarded = None

    def _find(self, constraint: Constraint) -> "CompiledGrammar | None":
        with self._keeping:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
                return found
            refused = self._refused.get(constraint)
            if refused is not None and time.monotonic() < refused.until:
                raise TooHardError(refused.why)
        return None

    def _keep(self, constraint: Constraint, grammar: "CompiledGrammar") -> None:
        with self._keeping:
            self._kept[constraint] = grammar
            self._bytes += grammar.memory_size_bytes
            while len(self._kept) > MOST_GRAMMARS or (self._bytes > MOST_BYTES and len(self._kept) > 1):
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.memory_size_bytes

    def _refuse(self, constraint: Constraint, why: str) -> None:
        with self._keeping:
            self._refused[constraint] = _Refusal(why, time.monotonic() + REMEMBERED)
            self._refused.move_to_end(constraint)
            if len(self._refused) > MOST_GRAMMARS:
                self._refused.popitem(last=False)

    def _compile(self, constraint: Constraint) -> "CompiledGrammar":
        here, name = self._ready(), NAMES[constraint.kind]
        try:
            if self._guarded is not None:
                grammar = self._guarded.compile(constraint)
            else:
                grammar = compile_with(here.compiler, constraint)
        except DraftsmithError:
            raise
        except Exception as error:  # the library has exception types of its own
            said = _PLACE.sub("", first_line(error))
            raise DraftsmithError(f"{name} cannot be compiled ({said}); fix it.") from error
        if grammar.memory_size_bytes > LARGEST:
            raise TooHardError(
                f"{name} takes {grammar.memory_size_bytes / 2**20:.0f} MiB; the most is {LARGEST / 2**20:.0f}. "
                "Make it simpler."
            )
        return grammar

    def _ready(self) -> "_Here":
        """Return the target's tokens and their compiler, made when they are first needed."""
        if self._here is not None:
            return self._here
        target = self._target
        try:
            from xgrammar import GrammarCompiler, TokenizerInfo
        except ImportError as error:
            raise DraftsmithError(
                "constraints need xgrammar, which is not installed; pip install draftsmith[serve]."
            ) from error
        if target.tokenizer is None:
            raise DraftsmithError(f"constraints need a tokenizer, and {target.name} has none; leave them out.")
        pieces = token_pieces(target.tokenizer, target.vocab_size, target.eos_token_ids, target.name)
        self._silent = frozenset(token for token, piece in enumerate(pieces) if not piece)
        # Every request names its own end tokens; without the empty list, xgrammar would guess them from tokens' names.
        tokens = TokenizerInfo(pieces, vocab_size=target.vocab_size, stop_token_ids=[])
        self._here = _Here(tokens, GrammarCompiler(tokens, max_threads=1, cache_enabled=False))
        return self._here
