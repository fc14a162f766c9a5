"""Controls that act before the cost is paid: how long a block may be, and whether to speculate at all.

A block-length policy is asked before each pass (``plan``) and told what came of it (``observe``). The speed it
predicts is E(gamma) * T(1) / (D(gamma) + T(gamma + 1)): tokens per pass over the cost of a pass, against ordinary
decoding (Leviathan et al. 2023, theorem 3.8, with measured costs in place of gamma * c + 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Kind = Literal["target", "draft"]


@dataclass(frozen=True)
class Plan:
    """What the next pass may do: block length (0: ordinary), the control in force, and why, where it changed."""

    gamma: int
    control: str = "speculate"
    reason: str = ""


@dataclass(frozen=True)
class Observation:
    """What came of a pass: rows, columns a row in the target's pass, tokens drafted a row, for each row (verified,
    accepted, emitted, whether it stopped), and the seconds by stage."""

    batch: int
    columns: int
    drafted: int
    rows: Sequence[tuple[int, int, int, bool]]
    seconds: Mapping[str, float]


class BlockLength:
    """Chooses the block length of each pass. It sees acceptance and costs, never a token."""

    name = "block length"

    def plan(self, batch: int) -> Plan:
        raise NotImplementedError

    def observe(self, seen: Observation) -> None:
        pass


@dataclass
class Fixed(BlockLength):
    """Always gamma."""

    gamma: int
    name = "fixed"

    def plan(self, batch: int) -> Plan:
        return Plan(self.gamma)


@dataclass
class Heuristic(BlockLength):
    """Two more after a block that every row kept whole, else one less: the schedule of Hugging Face's assisted
    generation (Gante 2023)."""

    gamma: int = 5
    most: int = 16
    name = "heuristic"

    def plan(self, batch: int) -> Plan:
        return Plan(self.gamma)

    def observe(self, seen: Observation) -> None:
        judged = [(v, a) for v, a, _, stopped in seen.rows if v and not stopped]
        if judged:
            whole = all(a >= v for v, a in judged)
            self.gamma = min(self.gamma + 2, self.most) if whole else max(self.gamma - 1, 1)


class Costs:
    """Seconds of a pass, learned while decoding or given.

    ``target``: a target pass over n tokens a row with all that goes with it; ``draft``: drafting n tokens a row. Keys
    are (kind, batch, n). A table that is given is not changed, so that with it the same seed gives the same text;
    costs that are learned depend on the machine's mood, and so does where blocks end.
    """

    def __init__(self, table: Mapping[tuple[Kind, int, int], float] | None = None):
        self.given = table is not None
        self.seen: dict[tuple[Kind, int, int], deque[float]] = {}
        for key, seconds in (table or {}).items():
            self.seen[key] = deque([seconds], maxlen=9)

    def add(self, kind: Kind, batch: int, n: int, seconds: float) -> None:
        if not self.given and seconds > 0:
            self.seen.setdefault((kind, batch, n), deque(maxlen=9)).append(seconds)

    def get(self, kind: Kind, batch: int, n: int) -> float | None:
        """The median of the last ones at this size, else on the line between its measured neighbours; None where
        nothing is known at this batch size and no other size tells the shape of the curve."""
        curve = {m: median(x) for (k, b, m), x in self.seen.items() if k == kind and b == batch}
        others = sorted({b for k, b, _ in self.seen if k == kind} - {batch}, key=lambda b: abs(b - batch))
        if not curve and (kind == "target" or not others):
            return None
        if n in curve or len(curve) > 1 or not others:
            return _on_line(curve, n)
        shape = {m: median(x) for (k, b, m), x in self.seen.items() if k == kind and b == others[0]}
        if not curve:
            return _on_line(shape, n)
        ((known, seconds),) = curve.items()
        return seconds * _on_line(shape, n) / _on_line(shape, known)


def _on_line(curve: Mapping[int, float], n: int) -> float:
    """Piecewise linear through the known points; beyond them the last piece goes on, never falling below it."""
    if n in curve:
        return curve[n]
    known = sorted(curve)
    if len(known) == 1:
        return curve[known[0]]
    right = next((i for i, m in enumerate(known) if m > n), len(known) - 1)
    a, b = known[max(right - 1, 0)], known[max(right, 1)]
    value = curve[a] + (curve[b] - curve[a]) * (n - a) / (b - a)
    return value if a < n < b else max(value, curve[a if abs(a - n) < abs(b - n) else b] if n > b else 0.0)


@dataclass
class Acceptance:
    """A running estimate of the acceptance rate by position, older judgements fading (about ``memory`` count).

    Counts of each position are drawn towards the pooled rate, which starts from one kept and one rejected token. A
    streak of blocks rejected at once that would be rarer than ``surprise`` under the estimate means that the text has
    changed: what was learned before it is forgotten.
    """

    memory: float = 48.0
    surprise: float = 0.01
    kept: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    streak: int = 0

    def add(self, verified: int, accepted: int, stopped: bool) -> None:
        if verified == 0:
            return
        rejected = accepted < verified and not stopped
        while len(self.judged) < verified:
            self.kept.append(0.0)
            self.judged.append(0.0)
        fade = 1 - (accepted + rejected) / (self.memory + accepted + rejected)
        self.kept, self.judged = [x * fade for x in self.kept], [x * fade for x in self.judged]
        for i in range(accepted + rejected):
            self.judged[i] += 1
            self.kept[i] += i < accepted
        self.streak = self.streak + 1 if rejected and accepted == 0 else 0
        if self.streak > 1 and (1 - self._before_streak()) ** self.streak < self.surprise:
            self.forget(self.streak)

    def forget(self, rejected: int = 0) -> None:
        """Start again, but for the last ``rejected`` rejections at the first position."""
        self.kept, self.judged, self.streak = [0.0], [float(rejected)], 0

    @property
    def alpha(self) -> float:
        """α̂, pooled over positions: the mean of a Beta(1 + kept, 1 + rejected)."""
        return (sum(self.kept) + 1) / (sum(self.judged) + 2)

    @property
    def spread(self) -> float:
        """Standard deviation of that Beta."""
        return float((self.alpha * (1 - self.alpha) / (sum(self.judged) + 3)) ** 0.5)

    def _before_streak(self) -> float:
        return min((sum(self.kept) + 1) / (max(sum(self.judged) - self.streak, sum(self.kept)) + 2), 0.999)

    def tokens(self, gamma: int, deviations: float = 0.0) -> float:
        """Expected tokens of a pass with a block of ``gamma``, so many standard deviations from the estimate."""
        total = run = 1.0
        for i in range(gamma):
            kept, judged = (self.kept[i], self.judged[i]) if i < len(self.judged) else (0.0, 0.0)
            rate = (kept + 4 * self.alpha) / (judged + 4) + deviations * self.spread
            run *= min(max(rate, 0.0), 1.0)
            total += run
        return total


@dataclass
class Adaptive(BlockLength):
    """The block length with the highest predicted speed, from live acceptance and measured costs (in the manner of
    Liu et al. 2024, arXiv 2406.14066, section 4, for one engine's own rows)."""

    most: int = 8
    start: int = 4
    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    name = "adaptive"

    def plan(self, batch: int) -> Plan:
        if self.costs.get("target", batch, 1) is None:
            return Plan(0, "off", f"one ordinary pass first, to learn its cost with {batch} rows")
        return Plan(self.best(batch)[0])

    def observe(self, seen: Observation) -> None:
        self.costs.add("target", seen.batch, seen.columns, sum(seen.seconds.values()) - seen.seconds["draft"])
        if seen.drafted:
            self.costs.add("draft", seen.batch, seen.drafted, seen.seconds["draft"])
        for verified, accepted, _, stopped in seen.rows:
            self.acceptance.add(verified, accepted, stopped)

    def best(self, batch: int, deviations: float = 0.0) -> tuple[int, float]:
        """The best block length and its predicted speed over ordinary decoding; ``start`` while no draft was timed."""
        if self.costs.get("draft", batch, 1) is None:
            return min(self.start, self.most), 1.0
        speeds = {g: self.speed(batch, g, deviations) for g in range(1, self.most + 1)}
        gamma = max(speeds, key=speeds.__getitem__)
        return gamma, speeds[gamma]

    def speed(self, batch: int, gamma: int, deviations: float = 0.0) -> float:
        """Predicted speed over ordinary decoding."""
        ordinary = self.costs.get("target", batch, 1) or 0.0
        once = (self.costs.get("draft", batch, gamma) or 0.0) + (self.costs.get("target", batch, gamma + 1) or 0.0)
        return self.acceptance.tokens(gamma, deviations) * ordinary / once if once else 1.0


@dataclass
class Fallback(BlockLength):
    """Two-way fallback around :class:`Adaptive`: speculate while it pays, stop when it does not, probe to find out.

    Off when even ``deviations`` standard deviations above the estimate the best block is predicted slower than ordinary
    decoding. Then ordinary passes, with no draft, until a probe of ``probe`` blocks is due; it starts from no opinion,
    and turns speculation on again if the estimate itself promises more than ``gain``. The gap between the two bounds is
    the hysteresis. Ordinary passes before a probe: so many that the last probe's loss is at most ``overhead`` of them,
    at least ``rest``, doubled with every probe in vain.
    """

    inner: Adaptive = field(default_factory=Adaptive)
    deviations: float = 1.0
    gain: float = 1.02
    probe: int = 3
    rest: int = 24
    overhead: float = 0.02
    name = "fallback"

    def __post_init__(self) -> None:
        self.mode = "speculate"
        self.since = 0  # passes in this mode
        self.wait = self.rest
        self.failed = 0
        self.loss = 0.0
        self.reason = ""

    def plan(self, batch: int) -> Plan:
        if self.mode == "off" and self.since >= self.wait:
            self.inner.acceptance.forget()
            self.loss = 0.0
            self._turn("probe", f"{self.since} ordinary passes since: a probe of {self.probe} blocks")
        reason, self.reason = self.reason, ""
        if self.mode == "off":
            return Plan(0, "off", reason)
        plan = self.inner.plan(batch)
        return Plan(plan.gamma, self.mode if plan.gamma else "off", reason or plan.reason)

    def observe(self, seen: Observation) -> None:
        self.inner.observe(seen)
        speculated = any(verified for verified, *_ in seen.rows)
        if self.mode == "off" or speculated:
            self.since += 1
        if not speculated:
            return
        ordinary = self.inner.costs.get("target", seen.batch, 1)
        if ordinary and self.mode == "probe":
            emitted = sum(row[2] for row in seen.rows) / max(len(seen.rows), 1)
            self.loss += max(sum(seen.seconds.values()) / ordinary - emitted, 0.0)
        self._judge(seen.batch)

    def _judge(self, batch: int) -> None:
        gamma, hoped = self.inner.best(batch, self.deviations)
        if hoped < 1:
            self.failed = self.failed + 1 if self.mode == "probe" else 0
            self.wait = max(self.rest * 2 ** min(self.failed, 5), int(self.loss / self.overhead))
            self._turn("off", self._because(batch, gamma))
        elif self.mode == "probe" and self.since >= self.probe:
            gamma, speed = self.inner.best(batch)
            if speed > self.gain:
                self.failed = 0
                self._turn("speculate", self._because(batch, gamma))
            else:
                self.failed += 1
                self.wait = max(self.rest * 2 ** min(self.failed, 5), int(self.loss / self.overhead))
                self._turn("off", self._because(batch, gamma))

    def _turn(self, mode: str, reason: str) -> None:
        self.mode, self.since, self.reason = mode, 0, reason

    def _because(self, batch: int, gamma: int) -> str:
        acceptance, costs = self.inner.acceptance, self.inner.costs
        wanted: list[tuple[Kind, int]] = [("draft", gamma), ("target", gamma + 1), ("target", 1)]
        ms = [1e3 * (costs.get(kind, batch, n) or 0.0) for kind, n in wanted]
        return (
            f"predicted {self.inner.speed(batch, gamma):.2f} of ordinary speed at γ={gamma} with {batch} rows: α̂ "
            f"{acceptance.alpha:.2f} ± {acceptance.spread:.2f}, draft {ms[0]:.1f} ms, target {ms[1]:.1f} against "
            f"{ms[2]:.1f} ms"
        )
