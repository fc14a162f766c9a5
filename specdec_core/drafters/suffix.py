"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975): texts already seen are the draft."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import number, whole
from .base import Drafter, Proposal

END = -1  # stands before each text that is read, and behind it where it is over


def followers(read: np.ndarray, end: Sequence[int]) -> tuple[int, list[int]]:
    """How many of the last tokens of ``end`` occur in ``read`` with something behind them, and all that stood there."""
    at = np.flatnonzero(read[:-1] == end[-1])  # where matches end
    at, length = at[read[at + 1] != END], 1
    while length < len(end) and len(longer := at[read[at - length] == end[-1 - length]]):
        at, length = longer, length + 1
    return length, read[at + 1].tolist()


@dataclass
class Row:
    prompt: int
    text: np.ndarray


class SuffixDrafter(Drafter):
    """Finds the longest suffix of the text that occurred before and proposes what followed it most often.

    It looks in the row's own text and in the outputs of earlier calls, and takes of the two blocks that which promises
    more accepted tokens (the paper's score: the sum, over its tokens, of the product of shares up to there). Outputs
    are remembered from the next ``start`` on, so that no row depends on its neighbours; when sampling, a call with a
    drafter that remembers others may draw other tokens, of the same law, than with a fresh one.

    Args:
        depth: a match is at most ``depth - 1`` tokens long.
        factor: a block has at most so many tokens for each one of its match (the paper's alpha).
        threshold: the block ends before the token where the product of shares falls below this.
        memory: how many tokens of outputs are kept; the oldest are forgotten. 0 keeps none.
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
        whole("depth", depth, 2, 2**31)
        self.device, self.depth, self.factor, self.threshold = torch.device(device), depth, factor, threshold
        self.memory, self.outputs = memory, deque[np.ndarray]()
        self.rows: list[Row] = []
        self.left: list[Row] = []
        self.start()

    def start(self) -> None:
        for row in [*self.left, *self.rows]:
            # The last tokens of the prompt come along: the output's first ones are found behind them.
            output = row.text[max(row.prompt - self.depth + 2, len(row.text) - self.memory, 1) :]
            self.outputs += [output] if len(output) else []
        while sum(map(len, self.outputs)) > self.memory:
            self.outputs.popleft()
        self.shared = np.concatenate([[END], *(np.append(output, END) for output in self.outputs)])
        self.rows, self.left = [], []

    def join(self, sequences: Sequence[Sequence[int]]) -> None:
        self.rows += [Row(len(s), np.array([END, *s])) for s in sequences]

    def keep(self, rows: Sequence[int]) -> None:
        self.left += [row for b, row in enumerate(self.rows) if b not in rows]
        self.rows = [self.rows[b] for b in rows]

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        blocks = []
        for row, sequence, r in zip(self.rows, sequences, room, strict=True):
            row.text = np.array([END, *sequence])
            found = [self._follow(read, sequence[1 - self.depth :], r) for read in (row.text, self.shared)]
            blocks.append(max(found, key=lambda block: block[1])[0])
        return Proposal.chosen(blocks, self.device, "no earlier match in the text")

    def _follow(self, read: np.ndarray, text: Sequence[int], room: int) -> tuple[list[int], float]:
        """The block behind the longest match, and how many accepted tokens its shares promise."""
        block: list[int] = []
        likely, promise = 1.0, 0.0
        match, behind = followers(read, text)
        while behind and len(block) < min(room, int(self.factor * match)):
            counts = Counter(behind)
            token = max(counts, key=lambda t: (counts[t], -t))  # of several the smallest id
            likely *= counts[token] / len(behind)
            if likely < self.threshold:
                break
            block.append(token)
            promise += likely
            _, behind = followers(read, [*text, *block][1 - self.depth :])  # past the depth a shorter match goes on
        return block, promise
