"""A lookup where the text repeats itself, a model where it does not (the hybrid of Oliaro et al. 2024, 2411.04975)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import SpecDecError, whole
from .base import Drafter, Proposal


class Parts(Drafter):
    """A drafter made of others, each of which follows every row."""

    parts: Sequence[Drafter] = ()

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def join(self, sequences: Sequence[Sequence[int]]) -> None:
        for part in self.parts:
            part.join(sequences)

    def keep(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.keep(rows)

    def commit(self, lengths: Sequence[int]) -> None:
        for part in self.parts:
            part.commit(lengths)


class CompositeDrafter(Parts):
    """Rows for which ``first`` has a block use it, the others use ``second``, all in one proposal.

    ``second`` does not run where every row has a block of ``first``; what it missed it reads when it runs again. The
    choice rests on the committed text alone, since ``first`` chooses its tokens and draws none.

    Args:
        first: a drafter of chosen tokens, such as a lookup. Its further candidates are left aside.
        second: any drafter, such as a model.
        min_length: a block of ``first`` shorter than this (and than the room there is) gives way to ``second``.
        most: longest block of ``second``, which costs more than a lookup and agrees less often; None: no limit.
    """

    def __init__(self, first: Drafter, second: Drafter, min_length: int = 1, most: int | None = None):
        for part in (first, second):
            if not isinstance(part, Drafter):
                raise SpecDecError(f"{part!r} is no drafter: give two, of which the first chooses its tokens.")
        self.first, self.second, self.parts, self.min_length = first, second, (first, second), min_length
        self.most = 2**31 if most is None else whole("most", most, 1, 2**31)
        self.name, self.candidates = f"{first.name}+{second.name}", second.candidates
        self.synthetic = first.synthetic or second.synthetic

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        found = self.first.propose(sequences, room, u)
        if found.q is not None:
            raise SpecDecError(f"'{self.first.name}' draws its tokens: give one that chooses them, such as a lookup.")
        found.branches = None
        use = [n >= max(1, min(self.min_length, r)) for n, r in zip(found.drafted, room, strict=True)]
        rest = [0 if mine else min(r, self.most) for mine, r in zip(use, room, strict=True)]
        if not any(rest):
            return found
        return _merged(torch.tensor(use, device=u.device), found, self.second.propose(sequences, rest, u))


def _merged(use: Tensor, found: Proposal, other: Proposal) -> Proposal:
    """The rows ``use [B]`` of ``found`` and the others of ``other``."""
    width = max(found.tokens.shape[1], other.tokens.shape[1])
    mine, theirs = (pad(p.tokens, (0, width - p.tokens.shape[1])) for p in (found, other))
    wide = use.view(-1, 1, 1)

    def law(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = pad(x, (0, 0, 0, width - x.shape[1]))
        return torch.where(wide, torch.zeros_like(x).scatter(-1, mine.clamp(max=x.shape[-1] - 1).unsqueeze(-1), 1.0), x)

    branches = None
    if other.branches is not None:  # a chosen token has none: itself once more, which is never kept
        branches = pad(other.branches, (0, 0, 0, width - other.branches.shape[1]))
        branches = torch.where(wide, mine.unsqueeze(-1).expand_as(branches), branches)
    drafted = [a if b else c for a, b, c in zip(found.drafted, use.tolist(), other.drafted, strict=True)]
    lengths = torch.where(use, found.lengths, other.lengths)
    tokens = torch.where(use.unsqueeze(1), mine, theirs)
    note = other.note or (found.note if bool(sum(found.drafted)) else "")
    return Proposal(tokens, lengths, law(other.q), drafted, law(other.belief), branches, note)
