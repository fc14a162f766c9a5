"""StepRecord, one for each target pass of a request, and every metric derived from it. No number has another source."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Records = Sequence["StepRecord"]
LastToken = Literal["prefill", "ordinary", "bonus", "resampled", "accepted"]
STAGES = ("draft", "score", "accept", "resample", "repeat")


@dataclass(frozen=True)
class StepRecord:
    """What one target pass did for one request. Tokens after a stop are not counted anywhere but in ``drafted``.

    Attributes:
        kind: ``prefill`` (the pass over the prompt, gives the first token), ``ordinary`` (nothing was verified) or
            ``speculative``.
        gamma: block length asked for, after budget and context limits.
        drafted: tokens the draft computed; verified: of those, put before the target and not beyond a stop;
            accepted: of those, kept. ``drafted >= verified >= accepted``.
        emitted: token ids committed by this pass; last: what the final one of them is.
        draft_tokens: the block put before the target, all of it.
        p, q: probability that target and draft gave each of ``draft_tokens``, under the sampling policy. At
            temperature 0, where every law is one-hot, both are the models' own at temperature 1.
        p_entropy, q_entropy: entropy in nats of the same laws; ``p_entropy`` has one more, for the bonus position.
        preferred: the target's likeliest token at each position: where a token was turned down, the alternative.
        seconds: wall time by stage; shared by the ``batch`` rows of the pass.
        started: seconds since the epoch. context: committed tokens before this pass.
        control: ``speculate``, ``probe`` or ``off`` (a control's doing), ``idle`` (the draft had nothing or no room),
            ``degraded`` (the draft failed) or ``baseline``; reason: why, in words.
        branch: the further candidate that was kept where the first was turned down (counted in ``accepted``), or None.
        synthetic: the draft comes from no model of the text, so acceptance says nothing of a real one.
    """

    request: int
    step: int
    kind: Literal["prefill", "ordinary", "speculative"]
    gamma: int
    drafted: int
    verified: int
    accepted: int
    emitted: tuple[int, ...]
    last: LastToken
    stop: str | None
    draft_tokens: tuple[int, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]
    p_entropy: tuple[float, ...]
    q_entropy: tuple[float, ...]
    preferred: tuple[int, ...]
    seconds: dict[str, float]
    started: float
    control: str
    reason: str
    context: int
    batch: int
    branch: int | None = None
    synthetic: bool = False

    @property
    def rejected(self) -> int:
        """1 when a position was turned down, else 0. A block cut short by a stop was not, nor one that went on with
        another candidate."""
        return int(self.accepted < self.verified and self.branch is None)


@dataclass
class Clock:
    """Wall time of each stage. On a GPU it places events and reads them after the step's one host read."""

    device: torch.device
    started: float = 0.0
    _marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if not self._marks:
            self.started = time.time()
        begin = self._now()
        yield
        self._marks.append((stage, begin, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def seconds(self) -> dict[str, float]:
        """Seconds by stage since the last call; starts the next step."""
        if self.device.type == "cuda" and self._marks:
            self._marks[-1][2].synchronize()
        spent = dict.fromkeys(STAGES, 0.0)
        for stage, begin, end in self._marks:
            spent[stage] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        self._marks.clear()
        return spent


# --- metrics: each a named function of records, None where nothing was observed ---------------------------


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


def _decode(records: Records) -> list[StepRecord]:
    return [r for r in records if r.kind != "prefill"]


def _speculative(records: Records) -> list[StepRecord]:
    return [r for r in records if r.kind == "speculative"]


def tokens_emitted(records: Records) -> int:
    """Output tokens, the one from the prefill included."""
    return sum(len(r.emitted) for r in records)


def target_passes(records: Records) -> int:
    """Target passes after the prefill."""
    return len(_decode(records))


def block_efficiency(records: Records) -> float | None:
    """Tokens per target pass after the prefill, pooled over requests, *with* the bonus or resampled token and with
    passes where nothing was drafted (Leviathan et al. 2023, section 3.1). Ordinary decoding has 1."""
    steps = _decode(records)
    return _ratio(tokens_emitted(steps), len(steps))


def acceptance_length_pooled(records: Records) -> float | None:
    """Tokens per *speculative* pass, *with* the bonus or resampled token, pooled: long requests weigh more."""
    return block_efficiency(_speculative(records))


def acceptance_length_per_request(records: Records) -> float | None:
    """Mean over requests of :func:`acceptance_length_pooled`: every request weighs the same."""
    steps = _speculative(records)
    passes = Counter(r.request for r in steps)
    return _ratio(sum(len(r.emitted) / passes[r.request] for r in steps), len(passes))


def accepted_per_pass(records: Records) -> float | None:
    """Accepted draft tokens per speculative pass, *without* the bonus or resampled token."""
    steps = _speculative(records)
    return _ratio(sum(r.accepted for r in steps), len(steps))


def alpha_hat(records: Records) -> float | None:
    """Acceptance rate α̂ = accepted / (accepted + rejections), the maximum-likelihood estimate of a constant α when
    blocks end at γ: tokens behind a rejection were never judged and do not count (censoring)."""
    accepted = sum(r.accepted for r in records)
    return _ratio(accepted, accepted + sum(r.rejected for r in records))


def accepted_over_drafted(records: Records) -> float | None:
    """Share of drafted tokens that were kept: how much draft work was useful. **Not** α: it falls with γ at fixed α."""
    return _ratio(sum(r.accepted for r in records), sum(r.drafted for r in records))


def acceptance_by_position(records: Records, kind: Literal["conditional", "joint"]) -> list[float | None]:
    """Acceptance at block position 1, 2, ...: given that the position was judged (``conditional``), or that the block
    reached so far at all (``joint``: accepted at least i, of the blocks with at least i tokens). A block that a stop
    cut inside its accepted prefix says nothing of the positions behind the stop, and is left out there."""
    steps = _speculative(records)
    reach = [max(r.verified, len(r.draft_tokens) if r.rejected else 0) for r in steps]
    result = []
    for i in range(1, max(reach, default=0) + 1):
        kept = sum(r.accepted >= i for r in steps)
        judged = kept + sum(r.rejected and r.accepted == i - 1 for r in steps)
        result.append(_ratio(kept, judged if kind == "conditional" else sum(n >= i for n in reach)))
    return result


def seconds_by_stage(records: Records) -> dict[str, float]:
    """Wall seconds by stage after the prefill. A pass that served several of the rows is counted once (its records
    share ``started``), so one row of a batch has its own whole wall time."""
    passes = {r.started: r.seconds for r in _decode(records)}
    return {stage: sum(seconds[stage] for seconds in passes.values()) for stage in STAGES}


def tokens_per_second(records: Records) -> float | None:
    """Output tokens after the prefill over wall seconds after the prefill."""
    return _ratio(tokens_emitted(_decode(records)), sum(seconds_by_stage(records).values()))


_METRICS: tuple[Callable[[Records], float | None], ...]
_METRICS = (tokens_emitted, target_passes, block_efficiency, acceptance_length_pooled, acceptance_length_per_request)
_METRICS += (accepted_per_pass, alpha_hat, accepted_over_drafted, tokens_per_second)


def summary(records: Records) -> dict[str, float | None]:
    """Every metric by name."""
    counts = {name: sum(getattr(r, name) for r in records) for name in ("drafted", "verified", "accepted")}
    degraded = sum(r.control == "degraded" for r in records)
    return {f.__name__: f(records) for f in _METRICS} | counts | {"degraded_passes": degraded}
