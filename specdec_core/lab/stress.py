"""A draft made to disagree, in steps from faithful to hostile: what becomes of the text, of the time, and who notices.

Whatever a draft proposes, it says which law it drew from, so the text stays the target's. What suffers is time. A
`Disturbed` draft disagrees in a chosen way and, where asked, during a stretch of the text only, so that warning,
fallback and recovery can each be dated in tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters import ModelDrafter
from ..errors import SpecDecError, number
from ..record import StepRecord
from ..sampling import SamplingPolicy

Disturbance = Callable[[Tensor], Tensor]  # [..., K] logits of the tokens that the draft knows -> the same shape


def noise(size: float, seed: int = 0) -> Disturbance:
    """Adds a normal error of ``size`` (in logits), another one at each call."""
    random = torch.Generator().manual_seed(seed)
    number("size", size, lambda s: s >= 0, "a number from 0")
    return lambda x: x + size * torch.randn(x.shape, generator=random).to(x)


def heat(factor: float) -> Disturbance:
    """Divides logits by ``factor``: a draft at another temperature. Its likeliest token stays, so greedy text shows
    nothing of it."""
    number("factor", factor, lambda f: f > 0, "a number above 0")
    return lambda x: x / factor


def shuffled(seed: int = 0) -> Disturbance:
    """Each token's logit goes to another one: a draft of another vocabulary that nobody noticed."""

    def disturb(x: Tensor) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return x[..., torch.randperm(x.shape[-1], generator=random).to(x.device)]

    return disturb


def inverted(x: Tensor) -> Tensor:
    """Prefers what it should like least."""
    return -x


def stale(model: PreTrainedModel, size: float, seed: int = 0) -> PreTrainedModel:
    """A copy whose weights are off by ``size`` of each tensor's spread, as those of another training would be."""
    number("size", size, lambda s: s >= 0, "a number from 0")
    other, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.is_floating_point() and weight.ndim > 1:
                error = torch.randn(weight.shape, generator=random).to(weight)
                weight.add_(error * (size * weight.float().std()).to(weight))
    return other


class Disturbed(ModelDrafter):
    """A :class:`ModelDrafter` whose logits pass through ``disturb`` before its law is made of them.

    Args:
        during: from the which to the which token of the output; by default all of it. What is drafted behind the last
            committed token is disturbed if that token's place is.
    """

    name, synthetic = "disturbed", True

    def __init__(
        self,
        model: PreTrainedModel,
        policy: SamplingPolicy,
        vocab: int,
        disturb: Disturbance,
        during: tuple[int, int] | None = None,
        **kwargs: Any,
    ):
        self.disturb, self.during = disturb, during
        super().__init__(model, policy, vocab, **kwargs)

    def _laws(self, logits: Tensor, sequences: Sequence[Sequence[int]], drafted: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.isfinite(logits[0, -1]).nonzero().squeeze(1)
        rows = [b for b, s in enumerate(sequences) if self._acts(len(s) - self.prompts[b])]
        if rows and len(known):
            logits = logits.clone()
            logits[rows] = logits[rows].index_copy(-1, known, self.disturb(logits[rows][..., known]).to(logits.dtype))
        return super()._laws(logits, sequences, drafted)

    def _acts(self, written: int) -> bool:
        return self.during is None or self.during[0] <= written < self.during[1]


# --- who notices, and when --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precursor:
    """A sign that comes before the damage: ``value`` of the last passes, which warns at ``threshold`` or beyond."""

    name: str
    threshold: float
    below: bool  # it warns below the threshold, else above
    value: Callable[[Sequence[StepRecord]], float | None]
    window: int = 6  # passes that it looks back on, and needs

    def warns(self, recent: Sequence[StepRecord]) -> bool:
        found = self.value(recent)
        return found is not None and (found <= self.threshold if self.below else found >= self.threshold)


def first_position(recent: Sequence[StepRecord]) -> float | None:
    """Share of blocks whose first token was kept."""
    judged = [r for r in recent if r.verified]
    return sum(r.accepted > 0 for r in judged) / len(judged) if judged else None


def entropy_gap(recent: Sequence[StepRecord]) -> float | None:
    """Mean distance of the draft's entropy from the target's at the first position, in nats."""
    gaps = [abs(r.q_entropy[0] - r.p_entropy[0]) for r in recent if r.q_entropy and r.p_entropy]
    return sum(gaps) / len(gaps) if gaps else None


def alpha_bound(recent: Sequence[StepRecord]) -> float | None:
    """α̂ and two standard deviations of a Beta(1 + accepted, 1 + rejected) above it."""
    accepted, rejected = sum(r.accepted for r in recent), sum(r.rejected for r in recent)
    if not accepted + rejected:
        return None
    n = accepted + rejected + 2
    mean = (accepted + 1) / n
    return float(mean + 2 * (mean * (1 - mean) / (n + 1)) ** 0.5)


def precursors(thresholds: Mapping[str, float]) -> list[Precursor]:
    """Those that the suite watches, with thresholds that were written down before."""
    known = {
        "first_position": (True, first_position),
        "entropy_gap": (False, entropy_gap),
        "alpha_bound": (True, alpha_bound),
    }
    if unknown := set(thresholds) - set(known):
        raise SpecDecError(f"There is no precursor {sorted(unknown)[0]!r}: give thresholds of {', '.join(known)}.")
    return [
        Precursor(name, thresholds[name], below, value) for name, (below, value) in known.items() if name in thresholds
    ]


def tokens_until(records: Sequence[StepRecord], sign: Callable[[int], bool], start: int = 0) -> int | None:
    """Output tokens from the ``start``-th until the pass i for which ``sign(i)`` is true, its own included."""
    written = 0
    for i, record in enumerate(records):
        written += len(record.emitted)
        if written > start and sign(i):
            return written - start
    return None


def until_warning(records: Sequence[StepRecord], precursor: Precursor, start: int = 0) -> int | None:
    """Tokens from the ``start``-th until this precursor warns, of passes that began there or later; None: never."""
    passes, places, written = [], [], 0
    for record in records:
        if record.kind != "prefill" and written >= start:
            passes.append(record)
            places.append(written + len(record.emitted) - start)
        written += len(record.emitted)
    for i in range(precursor.window, len(passes) + 1):
        if precursor.warns(passes[i - precursor.window : i]):
            return places[i - 1]
    return None


def until_fallback(records: Sequence[StepRecord], start: int = 0) -> int | None:
    """Tokens from the ``start``-th until the control's first ordinary pass."""
    return tokens_until(records, lambda i: records[i].control == "off" and records[i].kind != "prefill", start)


def until_recovery(records: Sequence[StepRecord], end: int) -> int | None:
    """Tokens from the ``end``-th, where the cause ended, until a block of which something was kept."""
    return tokens_until(records, lambda i: records[i].accepted > 0, end)


def seconds_of(records: Sequence[StepRecord], start: int = 0) -> tuple[float, int]:
    """Seconds and tokens of the passes that began at or behind the ``start``-th token, the prefill not counted."""
    written, seconds, tokens = 0, 0.0, 0
    for record in records:
        if record.kind != "prefill" and written >= start:
            seconds += sum(record.seconds.values())
            tokens += len(record.emitted)
        written += len(record.emitted)
    return seconds, tokens
