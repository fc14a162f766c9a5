"""What passes cost on this machine, measured: the target's by the tokens it is fed, the draft's by those it drafts.

On a CPU the cost of a target pass is no straight line in its tokens (small products take other kernels), so block
lengths are chosen and speedups predicted from these numbers, not from γ·c + 1 (Leviathan et al. 2023, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import pandas as pd
import torch

from ..api import Pair, Prompt, prepare
from ..control import BlockLength, Costs, Kind, Observation, Plan
from ..drafters import Drafter, ModelDrafter, Proposal
from ..sampling import SamplingPolicy

Key = tuple[Kind, int, int]  # of what, rows, tokens a row


@dataclass
class Cycle(BlockLength):
    """Block lengths 0, 1, ... ``most`` in turn, so that every size meets the same moods of the machine."""

    most: int
    seen: dict[Key, list[float]] = field(default_factory=dict)
    asked: int = 0
    name = "cycle"

    def __post_init__(self) -> None:
        self.widest = self.most

    def plan(self, batch: int) -> Plan:
        self.asked += 1
        return Plan((self.asked - 1) % (self.most + 1))

    def observe(self, seen: Observation) -> None:
        rest = sum(seen.seconds.values()) - seen.seconds["draft"]
        self.seen.setdefault(("target", seen.batch, seen.columns), []).append(rest)
        if seen.drafted:
            self.seen.setdefault(("draft", seen.batch, seen.drafted), []).append(seen.seconds["draft"])


class Filler(Drafter):
    """Fills every block, at no cost, with the token the text ends with: for pairs without a draft of their own."""

    name, synthetic = "filler", True

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: torch.Tensor) -> Proposal:
        return Proposal.chosen([[s[-1]] * r for s, r in zip(sequences, room, strict=True)], u.device, "no room")


def calibrate(pair: Pair, prompts: Sequence[Prompt], most: int = 8, rounds: int = 7) -> dict[Key, float]:
    """Median seconds over ``rounds`` passes of every size up to ``most`` drafted tokens, with ``prompts`` as the rows.

    ``("target", rows, n)`` is a target pass over n tokens a row with all that goes with it, ``("draft", rows, n)`` the
    drafting of n tokens; just what `Costs` takes. The first pass of every size is a warm-up.
    """
    cycle, passes = Cycle(most), (rounds + 1) * (most + 1) + 1
    filled: Drafter = Filler() if pair.draft is None else ModelDrafter(pair.draft, SamplingPolicy(), pair.vocab)
    room = passes * (most + 1)
    prepared = prepare(pair, prompts, drafter=filled, control=cycle, eos=[], max_new_tokens=room, diagnostics=False)
    for _ in islice(prepared.steps, passes):
        pass
    return {key: median(seconds[1:]) for key, seconds in sorted(cycle.seen.items()) if len(seconds) > 1}


def frame(costs: Mapping[Key, float]) -> pd.DataFrame:
    """The table as it is logged: ``what``, ``rows``, ``tokens``, ``seconds``."""
    return pd.DataFrame(
        [(*key, seconds) for key, seconds in costs.items()], columns=["what", "rows", "tokens", "seconds"]
    )


def costs_of(table: pd.DataFrame) -> Costs:
    """`Costs` of such a table, as it may be read back from an earlier run."""
    rows = table[["what", "rows", "tokens", "seconds"]].itertuples(index=False, name=None)
    return Costs({(what, int(batch), int(n)): float(seconds) for what, batch, n, seconds in rows})
