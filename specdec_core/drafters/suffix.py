"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975): texts already seen are the draft."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import number, whole
from .base import Drafter, Proposal


@dataclass
class Node:
    """A place in a suffix tree: how often the tokens that lead here occur, and what followed them."""

    count: int = 0
    next: dict[int, Node] = field(default_factory=dict)

    def likeliest(self) -> tuple[int, float]:
        """The most frequent next token (of several the smallest id) and its share."""
        token = max(self.next, key=lambda t: (self.next[t].count, -t))
        return token, self.next[token].count / sum(node.count for node in self.next.values())


# Where a text stands in a tree: the nodes that its last 0, 1, 2, ... tokens lead to, as far as they occur there.
Ends = list[Node]


def advance(ends: Ends, token: int) -> Ends:
    return [ends[0], *(node.next[token] for node in ends if token in node.next)]


def learn(ends: Ends, token: int, depth: int, times: int = 1) -> Ends:
    """Count ``token`` behind a text that stands at ``ends`` (``times=-1``: forget it); where the text stands then."""
    reached = ends[:1]
    for node in ends[:depth]:
        reached.append(node.next.setdefault(token, Node()))
        reached[-1].count += times
        if reached[-1].count == 0:
            del node.next[token]
    return reached


@dataclass
class Row:
    prompt: int
    shared: Ends
    own: Ends = field(default_factory=lambda: [Node()])
    text: list[int] = field(default_factory=list)


class SuffixDrafter(Drafter):
    """Finds the longest suffix of the text that occurred before and proposes what followed it most often.

    Each row has a tree of its own text; one more holds the outputs of earlier calls. Of the two blocks that one is
    taken which promises more accepted tokens (the paper's score: the sum, over its tokens, of the product of shares up
    to there). Outputs enter the shared tree at the next ``start``, so that no row depends on its neighbours; when
    sampling, a call with a drafter that remembers others may draw other tokens, of the same law, than with a fresh one.

    Args:
        depth: longest path in a tree; a match is at most ``depth - 1`` tokens long.
        factor: a block has at most so many tokens for each one of its match (the paper's alpha).
        threshold: the block ends before the token where the product of shares falls below this.
        memory: how many tokens the shared tree is made of; the oldest outputs are forgotten. 0 keeps none.
    """

    name = "suffix"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        depth: int = 16,
        factor: float = 1.0,
        threshold: float = 0.1,
        memory: int = 10_000,
    ):
        number("factor", factor, lambda x: 0 < x < 2**31, "a number above 0")
        number("threshold", threshold, lambda x: 0 <= x <= 1, "a probability")
        whole("memory", memory, 0, 2**62)
        whole("depth", depth, 1, 2**31)
        self.device, self.depth, self.factor, self.threshold = torch.device(device), depth, factor, threshold
        self.memory, self.shared, self.outputs = memory, Node(), deque[list[int]]()
        self.rows: list[Row] = []
        self.left: list[Row] = []

    def start(self) -> None:
        for row in [*self.left, *self.rows]:
            # The last tokens of the prompt come along: the output's first ones are found behind them.
            if output := row.text[max(row.prompt - self.depth + 1, len(row.text) - self.memory, 0) :]:
                self.outputs.append(output)
                self._count(output, 1)
        while sum(map(len, self.outputs)) > self.memory:
            self._count(self.outputs.popleft(), -1)
        self.rows, self.left = [], []

    def join(self, sequences: Sequence[Sequence[int]]) -> None:
        self.rows += [Row(len(s), [self.shared]) for s in sequences]
        for row, sequence in zip(self.rows[-len(sequences) :], sequences, strict=True):
            self._read(row, sequence)

    def keep(self, rows: Sequence[int]) -> None:
        self.left += [row for b, row in enumerate(self.rows) if b not in rows]
        self.rows = [self.rows[b] for b in rows]

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        blocks = []
        for row, sequence, r in zip(self.rows, sequences, room, strict=True):
            self._read(row, sequence)
            blocks.append(max((self._follow(ends, r) for ends in (row.own, row.shared)), key=lambda b: b[1])[0])
        return Proposal.chosen(blocks, self.device, "no earlier match in the text")

    def _read(self, row: Row, sequence: Sequence[int]) -> None:
        for token in sequence[len(row.text) :]:
            row.own, row.shared = learn(row.own, token, self.depth), advance(row.shared, token)
            row.text.append(token)

    def _count(self, text: Sequence[int], times: int) -> None:
        ends = [self.shared]
        for token in text:
            ends = learn(ends, token, self.depth, times)

    def _follow(self, ends: Ends, room: int) -> tuple[list[int], float]:
        """The block behind the longest match, and how many accepted tokens its shares promise."""
        block: list[int] = []
        likely, promise = 1.0, 0.0
        match = max((n for n, node in enumerate(ends) if node.next), default=0)
        most = min(room, int(self.factor * match))
        # Where a path ends at the tree's depth, the next shorter suffix goes on.
        while len(block) < most and (nodes := [node for node in ends[1:] if node.next]):
            token, share = nodes[-1].likeliest()
            likely *= share
            if likely < self.threshold:
                break
            block, promise, ends = [*block, token], promise + likely, advance(ends, token)
        return block, promise
