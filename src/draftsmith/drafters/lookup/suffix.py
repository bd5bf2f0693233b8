"""Suffix drafting: guesses what followed the newest tokens most often, in this request or in earlier outputs.

Oliaro et al., "SuffixDecoding" (arXiv:2411.04975, section 4). Every row has a trie of the suffixes of its prompt and
output; a drafter that remembers earlier outputs also has one of those. A match of p tokens allows factor × p guesses.
Their tree is grown from the most probable node on; a node's probability is how often its path followed the match. Of
several matches, the one with the largest sum of probabilities, i.e. of expected right guesses, is drafted. The paper
weighs matches of every length; here matches with the same occurrences count as one, and only the longest few are
weighed.
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

COUNTED = 256
"""Where earlier outputs wait to be counted, each draft counts so many tokens of them, or one text."""
# At most this many matches with different occurrences are weighed against each other, the longest ones of each trie.
MOST_MATCHES = 3


class Node:
    """A string of tokens that occurred `count` times.

    It has no children (None) while it has occurred only once, or if it has the greatest length of a string. The tokens
    that followed are then read in `text`, from place `end` on.
    """

    __slots__ = ("children", "count", "end", "text")

    def __init__(self, text: list[int], end: int) -> None:
        self.text, self.end, self.count = text, end, 1
        self.children: dict[int, Node] | None = None


@dataclass(frozen=True)
class Match:
    """Newest tokens that occurred earlier: how many, `times` with a next token; `skip` of them lie below `node`."""

    length: int
    node: Node
    skip: int
    times: int


class SuffixTrie:
    """Counts every string of at most `depth` tokens in some texts, while the texts grow.

    A node gets children only when its string occurs a second time. So a token takes as many steps as the longest match
    of the text that ends in it, and memory grows only with repeated text.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node([], 0)
        self.root.children = {}

    def extend(self, text: list[int], start: int, repeated: list[Node]) -> list[Node]:
        """Count the strings that end at `text[start]` or later; the list is kept, and may only grow at its end.

        Args:
            repeated: nodes of the strings of 0, 1, 2 … tokens that end before `start`, as far as they occur elsewhere.

        Returns:
            the same nodes for the end of the text.
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
                        # Something followed its first occurrence, unless that was at the end of its text.
                        told = child.end < len(child.text)
                        child.children = {child.text[child.end]: Node(child.text, child.end + 1)} if told else {}
                        child.text = self.root.text  # drops the reference, so that a forgotten text can be freed
                    after.append(child)
                elif child.text is not text:
                    child.text, child.end = text, place + 1  # the latest text will be forgotten last
            repeated = after
        return repeated

    def forget(self, text: list[int]) -> None:
        """Remove a text that was added in one piece; no remaining text may be older."""
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
        """Return the occurrences of this string, or None if it did not occur."""
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
    """A request: its text from the second token on, and the trie of that text.

    `reach` limits the length of a match with earlier outputs: that of the last match plus the tokens added since.
    """

    def __init__(self, depth: int) -> None:
        self.text: list[int] = []
        self.reach = 0
        self._trie = SuffixTrie(depth)
        self._repeated = [self._trie.root]
        self._counted = 0

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens; they are counted only when matches are requested."""
        self.text += tokens
        self.reach += len(tokens)

    def _count(self) -> None:
        """Count the strings that end in the tokens added since the last call."""
        self._repeated = self._trie.extend(self.text, self._counted, self._repeated)
        self._counted = len(self.text)

    def matches(self) -> Iterator[Match]:
        """Yield matches as `SuffixTrie.matches` does; the text's own end is counted too, but nothing follows it."""
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
    """A trie of earlier outputs; the oldest are forgotten if there are more than `most` tokens.

    Texts wait until they are counted, which takes longest, so that where nothing is drafted nothing is counted.
    """

    def __init__(self, depth: int, most: int) -> None:
        self.trie = SuffixTrie(depth)
        self.tokens = 0
        """Tokens of all texts, counted and waiting."""
        self._most = most
        self._texts: deque[list[int]] = deque()
        self._waiting: deque[list[int]] = deque()

    def add(self, text: list[int]) -> None:
        """Remember a text, or its last part if it is too long as a whole."""
        text = text[-self._most :]
        while self.tokens + len(text) > self._most:
            if self._texts:
                oldest = self._texts.popleft()
                self.trie.forget(oldest)
            else:
                oldest = self._waiting.popleft()
            self.tokens -= len(oldest)
        self._waiting.append(text)
        self.tokens += len(text)

    @property
    def waits(self) -> bool:
        """Whether there are texts that were not counted yet."""
        return bool(self._waiting)

    def count(self, least: int | None = None) -> None:
        """Count waiting texts, the oldest first, until they have `least` tokens together; None counts all."""
        counted = 0
        while self._waiting and (least is None or counted < least):
            text = self._waiting.popleft()
            self._texts.append(text)
            self.trie.extend(text, 0, [self.trie.root])
            counted += len(text)


class SuffixDrafter(PythonDrafter[SuffixRow], LookupDrafter[SuffixRow]):
    """Drafts a tree of the likeliest continuations of the longest match, and nothing when there is none."""

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__()
        self.config = config
        self.factors = (config.factor / 2,)
        # One token deeper than a match can be, so that the longest match still has counts of what follows.
        self._depth = config.max_length + 1
        self.memory = Memory(self._depth, config.memory_tokens)
        # For every row, the number of prompt tokens it received: all but the first.
        self._prompts: dict[int, int] = {}

    def default_plan(self) -> Plan:
        return Plan((self.config.branches,) * self.config.depth, nodes=self.config.nodes)

    def new_row(self) -> SuffixRow:
        return SuffixRow(self._depth)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        self.catch_up()  # rows that have ended are remembered
        super().attach(cache, plan)
        self._prompts.clear()

    def follow_prompts(self, context: Context) -> None:
        super().follow_prompts(context)
        if self.config.remember:
            for number, count in zip(context.rows_B.tolist(), context.counts_B.tolist(), strict=True):
                self._prompts[number] = self._prompts.get(number, 0) + count

    def forget_row(self, number: int, row: SuffixRow) -> None:
        prompt = self._prompts.pop(number, 0)
        if self.config.remember:
            # Includes the end of the prompt, so that the first guesses of an output have something to match.
            self.memory.add(row.text[max(0, prompt - self.config.max_length) :])

    def take_in(self, context: Context) -> list[SuffixRow | None]:
        rows = super().take_in(context)
        self.memory.count(COUNTED)
        return rows

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
        """Return the tree of up to `room` nodes behind the match that has the largest sum of probabilities.

        Args:
            factor: guesses per token of a match, if that is less than the drafter's own number.
        """
        best, most = DraftTree((), 0), 0.0
        for source in sources:
            for match in source:
                limit = min(room, max(1, int(self.config.factor * match.length)))
                if factor is not None:
                    limit = int(min(limit, factor * match.length))
                if most >= limit:  # a shorter match allows even fewer guesses
                    break
                tree, score = self._grow(match, branching, limit)
                if score > most:
                    best, most = tree, score
        return best

    def _remembered(self, row: SuffixRow) -> Iterator[Match]:
        """Yield matches with earlier outputs."""
        newest = row.text[-min(row.reach, self.config.max_length) :]
        if not self.memory.waits:  # what is counted later may match as much
            row.reach = 0
        for match in self.memory.trie.matches(newest):
            row.reach = max(row.reach, match.length)
            yield match

    def _grow(self, match: Match, branching: tuple[int, ...], limit: int) -> tuple[DraftTree, float]:
        """Return up to `limit` nodes, the most probable first, and the sum of their probabilities."""
        tree, score, serial = DraftTree(branching, limit), 0.0, 0
        least = self.config.min_probability
        # Entries: (-probability, serial, parent, token, trie node, tokens below it); equal probabilities: first in,
        # first out.
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
