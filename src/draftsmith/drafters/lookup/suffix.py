"""Suffix drafting: what followed the newest tokens earlier, in this request or in earlier outputs, by how often.

Oliaro et al., "SuffixDecoding" (arXiv:2411.04975, section 4). Every row has a trie of the suffixes of its prompt and
output, the drafter one of earlier outputs if it is to remember them. A match of p tokens is worth factor × p guesses;
the tree is grown from the most probable node on, where a node's probability is how often its path followed the match;
of several matches the one with the largest sum of probabilities, the guesses expected to be right, is drafted. The
paper weighs matches of every length; here matches with the same occurrences count as one, and only the longest few
are weighed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from torch import Tensor

from draftsmith.drafters.lookup.python_drafter import DraftTree, LookupDrafter, PythonDrafter
from draftsmith.drafters.lookup.suffix_config import SuffixConfig
from draftsmith.plan import Plan
from draftsmith.types import ROOT, Context

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target

# So many matches with different occurrences are weighed against each other, from the longest on, in either trie.
MOST_MATCHES = 3


class Node:
    """A string of tokens that occurred `count` times.

    It has no children (None) as long as it occurred once, or if it is as long as strings get: what followed is then
    read in `text` from place `end` on.
    """

    __slots__ = ("children", "count", "end", "text")

    def __init__(self, text: list[int], end: int) -> None:
        self.text, self.end, self.count = text, end, 1
        self.children: dict[int, Node] | None = None


@dataclass(frozen=True)
class Match:
    """Newest tokens that occurred earlier: how many, `times` with something behind them; `skip` tokens below `node`."""

    length: int
    node: Node
    skip: int
    times: int


class SuffixTrie:
    """Counts every string of at most `depth` tokens in some texts, and is built as they grow.

    A node gets children only when its string occurs a second time, so that a token costs as many steps as the longest
    match of the text behind it, and memory goes with what repeats.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node([], 0)
        self.root.children = {}

    def extend(self, text: list[int], start: int, repeated: list[Node]) -> list[Node]:
        """Count the strings that end at `text[start]` and later; the list is kept and may grow at its end only.

        Args:
            repeated: nodes of the strings of 0, 1, 2 … tokens that end before `start`, as far as they occur elsewhere.

        Returns:
            the same before the end of the text.
        """
        for place in range(start, len(text)):
            token, after = text[place], [self.root]
            for length, node in enumerate(repeated, 1):
                assert node.children is not None
                child = node.children.get(token)
                if child is None:
                    node.children[token] = Node(text, place + 1)
                    continue
                child.count += 1
                if length < self.depth:
                    if child.children is None:
                        # Its first occurrence had something behind it, unless it was the end of its text.
                        told = child.end < len(child.text)
                        child.children = {child.text[child.end]: Node(child.text, child.end + 1)} if told else {}
                        child.text = self.root.text  # what is forgotten shall not stay alive here
                    after.append(child)
                elif child.text is not text:
                    child.text, child.end = text, place + 1  # the latest text is the last to be forgotten
            repeated = after
        return repeated

    def forget(self, text: list[int]) -> None:
        """Take back a text that was added in one piece and no later than all others."""
        for start in range(len(text)):
            below = self.root.children
            for token in text[start : start + self.depth]:
                assert below is not None
                child = below[token]
                child.count -= 1
                if child.count == 0:
                    del below[token]
                    break
                below = child.children
                if below is None:
                    break

    def find(self, pattern: list[int]) -> Match | None:
        """Return where this string occurred, if it did."""
        node = self.root
        for done, token in enumerate(pattern):
            if node.children is None:
                rest = pattern[done:]
                if node.text[node.end : node.end + len(rest)] != rest:
                    return None
                return Match(len(pattern), node, len(rest), node.count)
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        return Match(len(pattern), node, 0, node.count)

    def matches(self, newest: list[int]) -> Iterator[Match]:
        """Yield the longest ends of `newest` that occurred, longest first, one for each set of occurrences."""
        times = yielded = 0
        for length in range(min(len(newest), self.depth - 1), 0, -1):
            match = self.find(newest[-length:])
            if match is not None and match.times != times:
                times, yielded = match.times, yielded + 1
                yield match
                if yielded == MOST_MATCHES:
                    return


class SuffixRow:
    """A request: its text from the second token on, and the trie of it.

    `reach` bounds how long a match with earlier outputs can be: as long as the last one and what came since.
    """

    def __init__(self, depth: int) -> None:
        self.text: list[int] = []
        self.reach = 0
        self._trie = SuffixTrie(depth)
        self._repeated = [self._trie.root]
        self._counted = 0

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens; they are counted when asked for."""
        self.text += tokens
        self.reach += len(tokens)

    def _count(self) -> None:
        """Count the strings that end in what was added since the last time."""
        self._repeated = self._trie.extend(self.text, self._counted, self._repeated)
        self._counted = len(self.text)

    def matches(self) -> Iterator[Match]:
        """Yield matches as `SuffixTrie.matches` does; the end of the text itself is counted, but nothing follows it."""
        self._count()
        times = yielded = 0
        for length in range(len(self._repeated) - 1, 0, -1):
            node = self._repeated[length]
            if node.count != times:
                times, yielded = node.count, yielded + 1
                yield Match(length, node, 0, times - 1)
                if yielded == MOST_MATCHES:
                    return

    def matches_of(self, newest: list[int]) -> Iterator[Match]:
        """Yield matches of tokens that are not the end of the text."""
        self._count()
        return self._trie.matches(newest)


class Memory:
    """Earlier outputs as one trie, the oldest forgotten when there are more than `most` tokens."""

    def __init__(self, depth: int, most: int) -> None:
        self.trie = SuffixTrie(depth)
        self.tokens = 0
        self._most = most
        self._texts: deque[list[int]] = deque()

    def add(self, text: list[int]) -> None:
        """Remember a text, or its last part if all of it is too long."""
        text = text[-self._most :]
        while self.tokens + len(text) > self._most:
            oldest = self._texts.popleft()
            self.tokens -= len(oldest)
            self.trie.forget(oldest)
        self._texts.append(text)
        self.tokens += len(text)
        self.trie.extend(text, 0, [self.trie.root])


class SuffixDrafter(PythonDrafter[SuffixRow], LookupDrafter[SuffixRow]):
    """Drafts a tree of the likeliest continuations of the longest match, and nothing when there is none."""

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__()
        self.config = config
        self.factors = (config.factor / 2,)
        # One deeper than a match can be, so that the longest match still has counts behind it.
        self._depth = config.max_length + 1
        self.memory = Memory(self._depth, config.memory_tokens)
        # Of every row, how many tokens it was told of its prompt: all but the first.
        self._prompts: dict[int, int] = {}

    def default_plan(self) -> Plan:
        return Plan((self.config.branches,) * self.config.depth, nodes=self.config.nodes)

    def new_row(self) -> SuffixRow:
        return SuffixRow(self._depth)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        super().attach(cache, plan)
        self._prompts.clear()

    def follow_prompts(self, context: Context) -> None:
        super().follow_prompts(context)
        if self.config.remember:
            for number, count in zip(context.rows_B.tolist(), context.counts_B.tolist(), strict=True):
                self._prompts[number] = self._prompts.get(number, 0) + count

    def reset_rows(self, rows: list[int]) -> None:
        self.catch_up()
        for number in rows:
            prompt, row = self._prompts.pop(number, 0), self._rows.get(number)
            if self.config.remember and row is not None:
                # With the end of the prompt in front, so that the first guesses have something to match.
                self.memory.add(row.text[max(0, prompt - self.config.max_length) :])
        super().reset_rows(rows)

    def draft_row(self, row: SuffixRow, plan: Plan, room: int) -> DraftTree:
        """Return the tree with the largest sum of probabilities."""
        sources = [row.matches()]
        if self.memory.tokens:
            sources.append(self._remembered(row))
        return self._best(sources, plan.branching, min(room, self.config.nodes), plan.factor)

    def continue_row(self, row: SuffixRow, ahead: Sequence[int], count: int) -> list[int]:
        newest = [*row.text[-self.config.max_length :], *ahead][-self.config.max_length :]
        sources = [row.matches_of(newest) if ahead else row.matches()]
        if self.memory.tokens:
            sources.append(self.memory.trie.matches(newest))
        count = min(count, self.config.depth)
        return self._best(sources, (1,) * count, min(count, self.config.nodes)).tokens

    def _best(
        self, sources: Sequence[Iterator[Match]], branching: tuple[int, ...], room: int, factor: float | None = None
    ) -> DraftTree:
        """Return the tree of up to `room` nodes behind one of the matches that has the largest sum of probabilities.

        Args:
            factor: guesses for every token of a match, where that is less than the drafter's own.
        """
        best, most = DraftTree((), 0), 0.0
        for source in sources:
            for match in source:
                limit = min(room, max(1, int(self.config.factor * match.length)))
                if factor is not None:
                    limit = int(min(limit, factor * match.length))
                if most >= limit:  # a shorter match is worth fewer guesses still
                    break
                tree, score = self._grow(match, branching, limit)
                if score > most:
                    best, most = tree, score
        return best

    def _remembered(self, row: SuffixRow) -> Iterator[Match]:
        """Yield matches with earlier outputs."""
        newest = row.text[-min(row.reach, self.config.max_length) :]
        row.reach = 0
        for match in self.memory.trie.matches(newest):
            row.reach = max(row.reach, match.length)
            yield match

    def _grow(self, match: Match, branching: tuple[int, ...], limit: int) -> tuple[DraftTree, float]:
        """Return up to `limit` nodes, the most probable first, and the sum of their probabilities."""
        tree, score, serial = DraftTree(branching, limit), 0.0, 0
        least = self.config.min_probability
        # Entries are (-probability, serial, parent, token, trie node, tokens below it); equals go first in, first out.
        heap: list[tuple[float, int, int, int, Node, int]] = []
        parent, node, skip, each = ROOT, match.node, match.skip, 1 / match.times if match.times else 0.0
        while True:
            if node.children is None:
                place = node.end + skip
                if place < len(node.text):
                    serial += 1
                    heappush(heap, (-each * node.count, serial, parent, node.text[place], node, skip + 1))
            else:
                for token, child in node.children.items():
                    if each * child.count >= least:
                        serial += 1
                        heappush(heap, (-each * child.count, serial, parent, token, child, 0))
            below = None
            while heap and below is None:
                minus, _, parent, token, node, skip = heappop(heap)
                below = tree.add(parent, token)
            if below is None:
                return tree, score
            score -= minus
            if len(tree.tokens) == limit:
                return tree, score
            parent, each = below, -minus / node.count


def make_suffix(config: SuffixConfig, target: "Target", draft_tokens: Tensor | None) -> SuffixDrafter:
    """Make a drafter that is ready; it needs neither the target nor a list of tokens."""
    return SuffixDrafter(config)
