"""Controls that act before the cost is paid: how long a block may be, and whether to speculate at all.

A block-length policy is asked before each pass (``plan``) and told what came of it (``observe``). The speed it
predicts is E(gamma) * T(1) / (D(gamma) + T(gamma + 1)): tokens per pass over the cost of a pass, against ordinary
decoding (Leviathan et al. 2023, theorem 3.8, with measured costs in place of gamma * c + 1).
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from .errors import SpecDecError, number, whole

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
    width: int = 0  # positions of the block; with several candidates fewer than columns


class BlockLength:
    """Chooses the block length of each pass. It sees acceptance and costs, never a token."""

    name = "block length"
    widest = 64  # the longest block it may ever ask for; fixed shapes make room for it

    def plan(self, batch: int) -> Plan:
        raise NotImplementedError

    def observe(self, seen: Observation) -> None:
        pass


@dataclass
class Fixed(BlockLength):
    """Always gamma."""

    gamma: int
    name = "fixed"

    def __post_init__(self) -> None:
        self.widest = whole("gamma", self.gamma, 0, 1024)

    def plan(self, batch: int) -> Plan:
        return Plan(self.gamma)


@dataclass
class Heuristic(BlockLength):
    """Two more after a block that every row kept whole, else one less: the schedule of Hugging Face's assisted
    generation (Gante 2023)."""

    gamma: int = 5
    most: int = 16
    name = "heuristic"

    def __post_init__(self) -> None:
        self.widest = max(whole("gamma", self.gamma, 1, 1024), whole("most", self.most, 1, 1024))

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
        if table is not None and not isinstance(table, Mapping):
            raise SpecDecError(f"Costs({table!r:.60}) is not possible: give a table, or nothing to have them learned.")
        self.given = table is not None
        self.seen: dict[tuple[Kind, int, int], deque[float]] = {}
        self.curves: dict[tuple[Kind, int], dict[int, float]] = {}  # by kind and batch: n -> median of the last nine
        for key, seconds in (table or {}).items():
            if not isinstance(key, tuple) or len(key) != 3 or key[0] not in ("target", "draft"):
                raise SpecDecError(
                    f"Costs has no place for {key!r}: give ('target' or 'draft', batch, tokens) -> seconds."
                )
            batch, n = whole("batch", key[1], 1, 2**31), whole("tokens", key[2], 1, 2**31)
            number("seconds", seconds, lambda s: 0 < s < float("inf"), "a number above 0")
            self.curves.setdefault((key[0], batch), {})[n] = seconds
        if table is not None and not any(kind == "target" for kind, _ in self.curves):
            raise SpecDecError("Costs holds no target pass: give ('target', batch, tokens) -> seconds, or no table.")

    def add(self, kind: Kind, batch: int, n: int, seconds: float) -> None:
        if not self.given and seconds > 0:
            last = self.seen.setdefault((kind, batch, n), deque(maxlen=9))
            last.append(seconds)
            self.curves.setdefault((kind, batch), {})[n] = median(last)

    def get(self, kind: Kind, batch: int, n: int) -> float | None:
        """The seconds at this size, measured or on the line between its measured neighbours. A batch size of which one
        point is known takes the shape of the nearest other; None where nothing is known."""
        curve = self.curves.get((kind, batch), {})
        others = [b for k, b in self.curves if k == kind and b != batch]
        if n in curve or len(curve) > 1 or (curve and not others):
            return _on_line(curve, n)
        if not others:
            return 0.0 if self.given else None  # a given table without a draft says that drafting is free
        shape = self.curves[kind, min(others, key=lambda b: abs(b - batch))]
        if curve:
            ((known, seconds),) = curve.items()
            return seconds * _on_line(shape, n) / max(_on_line(shape, known), 1e-12)
        return _on_line(shape, n) if self.given or kind == "draft" else None


def _on_line(curve: Mapping[int, float], n: int) -> float:
    """Piecewise linear through the known points, the outer pieces going on beyond them, but never below the left end of
    its piece, nor before the first point below that in proportion to n."""
    known = sorted(curve)
    if n in curve or len(known) == 1:
        return curve.get(n, curve[known[0]])
    right = min(max(bisect(known, n), 1), len(known) - 1)
    a, b = known[right - 1], known[right]
    return max(curve[a] + (curve[b] - curve[a]) * (n - a) / (b - a), curve[a] * min(1, n / a))


@dataclass
class Acceptance:
    """A running estimate of the acceptance rate by position, older judgements fading (about ``memory`` count).

    Counts of each position are drawn towards the pooled rate, which starts from one kept and one rejected token. A
    streak of blocks rejected at once that would be rarer than ``surprise`` under the estimate means that the text has
    changed: what was learned before it is forgotten.
    """

    memory: float = 48.0
    surprise: float = 1e-4
    kept: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    streak: int = 0

    def add(self, verified: int, accepted: int, stopped: bool) -> None:
        if verified == 0:
            return
        rejected = accepted < verified and not stopped
        new = [0.0] * (verified - len(self.judged))
        self.kept, self.judged = self.kept + new, self.judged + new
        fade = 1 - (accepted + rejected) / (self.memory + accepted + rejected)
        self.kept, self.judged = [x * fade for x in self.kept], [x * fade for x in self.judged]
        for i in range(accepted + rejected):
            self.judged[i] += 1
            self.kept[i] += i < accepted
        self.streak = self.streak + 1 if rejected and accepted == 0 else 0
        kept, before = sum(self.kept), max(sum(self.judged) - self.streak, sum(self.kept))  # the streak
        if self.streak > 1 and (1 - min((kept + 1) / (before + 2), 0.999)) ** self.streak < self.surprise:
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

    def tokens(self, most: int, deviations: float = 0.0) -> list[float]:
        """Expected tokens of a pass with a block of 0, 1, ... ``most``, shifted by so many standard deviations."""
        alpha, shift = self.alpha, deviations * self.spread
        run, totals = 1.0, [1.0]
        known = [*zip(self.kept, self.judged, strict=True), *[(0.0, 0.0)] * most]
        for kept, judged in known[:most]:
            run *= min(max((kept + 4 * alpha) / (judged + 4) + shift, 0.0), 1.0)
            totals.append(totals[-1] + run)
        return totals


@dataclass
class Adaptive(BlockLength):
    """The block length with the highest predicted speed, from live acceptance and measured costs (in the manner of
    Liu et al. 2024, arXiv 2406.14066, section 4, for one engine's own rows)."""

    most: int = 8
    start: int = 4
    costs: Costs = field(default_factory=Costs)
    after_whole: Acceptance = field(default_factory=Acceptance)
    otherwise: Acceptance = field(default_factory=Acceptance)
    whole: bool = False  # most rows kept their last block whole
    candidates: int = 1  # seen in what the target is fed
    name = "adaptive"

    def __post_init__(self) -> None:
        self.widest = whole("most", self.most, 1, 1024)
        whole("start", self.start, 1, 1024)
        if not isinstance(self.costs, Costs):
            raise SpecDecError(f"costs={self.costs!r} is not possible: give Costs(), or Costs of a table.")

    @property
    def acceptance(self) -> Acceptance:
        """The estimate that speaks of the next block. Agreement comes in bursts: after a block kept whole the next
        token is accepted far more often than after another, so each case has an estimate of its own."""
        return self.after_whole if self.whole else self.otherwise

    def plan(self, batch: int) -> Plan:
        if self.costs.get("target", batch, 1) is None:
            return Plan(0, "off", f"one ordinary pass first, to learn its cost with {batch} rows")
        return Plan(self.best(batch)[0])

    def observe(self, seen: Observation) -> None:
        self.costs.add("target", seen.batch, seen.columns, sum(seen.seconds.values()) - seen.seconds["draft"])
        if seen.drafted:
            self.costs.add("draft", seen.batch, seen.drafted, seen.seconds["draft"])
        if seen.width:
            self.candidates = (seen.columns - 1) // seen.width
        estimate, judged = self.acceptance, [row for row in seen.rows if row[0]]
        for verified, accepted, _, stopped in judged:
            estimate.add(verified, accepted, stopped)
        if judged:
            self.whole = 2 * sum(accepted >= verified for verified, accepted, *_ in judged) > len(judged)

    def forget(self) -> None:
        self.after_whole.forget()
        self.otherwise.forget()
        self.whole = False

    def best(self, batch: int, deviations: float = 0.0) -> tuple[int, float]:
        """The best block length and its predicted speed over ordinary decoding; ``start`` while no draft was timed."""
        ordinary = self.costs.get("target", batch, 1)
        if ordinary is None or self.costs.get("draft", batch, 1) is None:
            return min(self.start, self.most), 1.0
        tokens = self.acceptance.tokens(self.most, deviations)
        return max(
            ((g, tokens[g] * ordinary / self._cost(batch, g)) for g in range(1, self.most + 1)), key=lambda x: x[1]
        )

    def _cost(self, batch: int, gamma: int) -> float:
        draft = self.costs.get("draft", batch, gamma)
        target = self.costs.get("target", batch, gamma * self.candidates + 1)
        return max((draft or 0.0) + (target or 0.0), 1e-12)


@dataclass
class Fallback(BlockLength):
    """Two-way fallback around :class:`Adaptive`: speculate while it pays, stop when it does not, probe to find out.

    Off when even ``deviations`` standard deviations above the estimate the best block is predicted slower than ordinary
    decoding. Then ordinary passes, with no draft, until a probe of ``probe`` blocks is due; it starts from no opinion,
    and turns speculation on again if a quarter as many deviations below the estimate it is predicted faster. The gap
    between the two bounds is the hysteresis. Ordinary passes before a probe: so many that the last probe's loss is at
    most ``overhead`` of them, at least ``rest``, doubled with every probe in vain.
    """

    inner: Adaptive = field(default_factory=Adaptive)
    deviations: float = 1.5
    probe: int = 3
    rest: int = 8
    overhead: float = 0.02
    name = "fallback"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Adaptive):
            raise SpecDecError(f"inner={self.inner!r} is not possible: give an Adaptive.")
        number("deviations", self.deviations, lambda x: 0 <= x < 100, "a number from 0")
        number("overhead", self.overhead, lambda x: 0 < x <= 1, "a share above 0, at most 1")
        whole("probe", self.probe, 1, 10**6)
        whole("rest", self.rest, 1, 10**6)
        self.widest = self.inner.widest
        self.mode = "speculate"
        self.since = 0  # passes in this mode
        self.rows = 0
        self.wait = self.rest
        self.failed = 0
        self.loss = 0.0
        self.reason = ""

    def plan(self, batch: int) -> Plan:
        if batch != self.rows:  # another load, another break-even: what was learned in vain is no reason to wait
            self.rows, self.wait, self.failed = batch, min(self.wait, self.rest), 0
        if self.mode == "off" and self.since >= self.wait:
            self.inner.forget()
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
        decided = self.mode == "probe" and self.since >= self.probe
        if decided and self.inner.best(batch, -self.deviations / 4)[1] > 1:
            self.failed = 0
            self._turn("speculate", self._because(batch, gamma))
        elif decided or hoped < 1:
            self.failed = self.failed + 1 if self.mode == "probe" else 0
            self.wait = max(self.rest * 2 ** min(self.failed, 5), int(self.loss / self.overhead))
            self._turn("off", self._because(batch, gamma))

    def _turn(self, mode: str, reason: str) -> None:
        self.mode, self.since, self.reason = mode, 0, reason

    def _because(self, batch: int, gamma: int) -> str:
        acceptance, costs = self.inner.acceptance, self.inner.costs
        wanted: list[tuple[Kind, int]] = [
            ("draft", gamma),
            ("target", gamma * self.inner.candidates + 1),
            ("target", 1),
        ]
        draft, target, ordinary = (1e3 * (costs.get(kind, batch, n) or 0.0) for kind, n in wanted)
        speed = acceptance.tokens(gamma)[gamma] * ordinary / max(draft + target, 1e-9)
        return (
            f"predicted {speed:.2f} of ordinary speed at γ={gamma} with {batch} rows: α̂ {acceptance.alpha:.2f} ± "
            f"{acceptance.spread:.2f}, draft {draft:.1f} ms, target {target:.1f} against {ordinary:.1f} ms"
        )
