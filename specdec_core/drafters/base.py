"""What every drafter promises the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Proposal:
    """A drafted block for each row.

    Attributes:
        tokens: ``[B, g]`` int64; columns past a row's length are padding.
        lengths: ``[B]`` int64, how many tokens of each row are put before the target.
        q: ``[B, g, V]``, **the law that each token was drawn from** given the tokens before it. None says
            one-hot: the token was not drawn but chosen (a lookup, or an argmax). A q that is not the truth makes
            the output law wrong (conditions A1, A2), and no loop can notice.
        drafted: per row, how many tokens were computed. Larger than ``lengths`` after a confidence stop.
        belief: ``[B, g, V]`` the draft's law at temperature 1, for the record only; no rule reads it.
        branches: ``[B, g, k-1]`` int64, further candidates for each position. With q each was drawn from q without
            those before it (renormalised); without q, chosen. One that repeats another is never kept.
        note: why a block is empty or short, in words.
    """

    tokens: Tensor
    lengths: Tensor
    q: Tensor | None
    drafted: list[int]
    belief: Tensor | None = None
    branches: Tensor | None = None
    note: str = ""

    @staticmethod
    def nothing(batch: int, device: torch.device, note: str) -> Proposal:
        empty = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return Proposal(empty, torch.zeros(batch, dtype=torch.int64, device=device), None, [0] * batch, note=note)

    @staticmethod
    def chosen(blocks: Sequence[Sequence[int]], device: torch.device, note: str) -> Proposal:
        """A proposal of tokens that were chosen, not drawn; ``note`` says why, where no row has any."""
        counts = [len(block) for block in blocks]
        if max(counts) == 0:
            return Proposal.nothing(len(blocks), device, note)
        padded = [[*block] + [0] * (max(counts) - len(block)) for block in blocks]
        return Proposal(torch.tensor(padded, device=device), torch.tensor(counts, device=device), None, counts)


class Drafter:
    """Proposes tokens; a drafter that keeps nothing between passes needs ``propose`` alone.

    Exactness asks one thing of it: whether it stops or goes on may depend on the text so far and on its own laws,
    never on a drawn token that is then withheld from verification.
    """

    name = "drafter"
    synthetic = False  # True marks every record and run: its proposals come from no model of the text
    candidates = 1  # tokens proposed for each position

    def start(self) -> None:
        """Forget everything: no row is held."""

    def join(self, sequences: Sequence[Sequence[int]]) -> None:
        """New rows, behind those that are held; each with its prompt."""

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order; the others have left."""

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        """Draft up to ``room[b]`` tokens after each row's committed ``sequences[b]``; ``u [B, gamma * candidates]``
        float64 holds its coins, those of the first position first."""
        raise NotImplementedError

    def commit(self, lengths: Sequence[int]) -> None:
        """The rows now hold ``lengths[b]`` committed tokens: forget drafted ones that were not kept."""
