"""Block-length policies and the fallback control, replayed on recorded acceptance under published costs.

Recorded is, for each position of a text, how many drafted tokens the target would have kept there. The text does not
depend on where blocks end, so any policy can be walked through it; seconds are simulated and so the same each time.
Rows of a batch count as copies of the one walked, as in the published simulator. Every block is charged whole, also
where n-gram drafting found no match, which was not recorded: hard on that drafter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..control import Adaptive, BlockLength, Costs, Fallback, Fixed, Heuristic, Kind, Observation
from ..errors import SpecDecError

if TYPE_CHECKING:
    import pandas as pd

FIELDS = {"eagle3": "acc_eagle", "ngram": "acc_ngram"}  # drafter -> its field in a record
CURVES = ("eagle3, as published", "eagle3, by token", "ngram, as published")
SOURCE = (
    "Llama-3.1-8B-Instruct, H100, vLLM: coefficients of the simulator of arXiv 2601.11580 (github.com/SpecDecode-Bench/"
    "simulator at 2fdccbd, predictor.py, Llama8BH100), fitted at batch 1 to 64, here also beyond. Assumed: 256 tokens "
    "in the cache of each row; for EAGLE 'by token', a third of the published draft time for each drafted token, since "
    "its runs draft 3 tokens in 3 passes (specdecode-bench.github.io, End-to-End Performance: k=3; Figure 4)."
)


@dataclass(frozen=True)
class Recorded:
    """One request: how many drafted tokens would be kept at each position of its text."""

    id: str
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """Seconds with ``batch`` rows of a target pass over n tokens a row, and of drafting n tokens a row."""

    name: str
    batch: int
    target: Callable[[int], float]
    draft: Callable[[int], float]


def curve(name: str, batch: int) -> Curve:
    """One of ``CURVES``, with the coefficients of ``SOURCE``."""
    around, cached = 1.20683946e-3, 256 * batch  # seconds of a pass outside the models; tokens in the cache
    verify = lambda n: 5.88590713e-3 + 2.10103129e-5 * n * batch + 3.92645679e-8 * cached  # noqa: E731
    draft: dict[str, Callable[[int], float]] = {
        "eagle3, as published": lambda n: 2.13526175e-3 + 8.41429603e-7 * (n + 1) + 2.37768493e-9 * cached,
        "eagle3, by token": lambda n: 2.13526175e-3 * n / 3 + 8.41429603e-7 * (n + 1) + 2.37768493e-9 * cached,
        "ngram, as published": lambda n: 0.005875 * verify(n + 1),
    }
    return Curve(name, batch, lambda n: verify(n) + around, draft[name])


def known(curves: Sequence[Curve], most: int) -> Costs:
    """The curves, one batch size each, as a table that does not change."""
    table: dict[tuple[Kind, int, int], float] = {}
    for c in curves:
        table |= {("target", c.batch, n + 1): c.target(n + 1) for n in range(most + 1)}
        table |= {("draft", c.batch, n): c.draft(n) for n in range(1, most + 1)}
    return Costs(table)


def load_recorded(path: str | Path, drafter: str) -> list[Recorded]:
    """Requests from JSON lines with ``acc_eagle.acc_len`` or ``acc_ngram.acc_len``: tokens that a pass would emit at
    each position, the target's own included. Raises SpecDecError naming file and line."""
    from .loaders import json_lines

    file, requests = Path(path).expanduser(), []
    if drafter not in FIELDS:
        raise SpecDecError(f"There is no recorded drafter {drafter!r}: give one of {', '.join(FIELDS)}.")
    for number, record in json_lines(file):
        found = record.get(FIELDS[drafter])
        lengths = found.get("acc_len") if isinstance(found, dict) else None
        if not isinstance(lengths, list) or not lengths or any(type(x) is not int or x < 1 for x in lengths):
            what = f"{FIELDS[drafter]}.acc_len is no list of whole numbers from 1"
            raise SpecDecError(f"{file.name} line {number}: {what}: give the tokens of a pass at each position.")
        requests.append(Recorded(str(record.get("id", number)), tuple(x - 1 for x in lengths)))
    if not requests:
        raise SpecDecError(f"{file.name} holds no requests: give JSON lines, a recorded request each.")
    return requests


@dataclass
class Walk:
    """A way through a request. ``log``: each pass's position, block length, tokens, seconds; ``changes``: position,
    control, reason."""

    log: list[tuple[int, int, int, float]] = field(default_factory=list)
    changes: list[tuple[int, str, str]] = field(default_factory=list)

    def totals(self, start: int = 0) -> tuple[int, int, int, float]:
        """Passes, those that speculated, tokens and seconds, from the first pass at or after position ``start``."""
        log = [x for x in self.log if x[0] >= start]
        return len(log), sum(x[1] > 0 for x in log), sum(x[2] for x in log), sum(x[3] for x in log)


def walk(recorded: Recorded, policy: BlockLength, costs: Costs, batch: int | Sequence[int] = 1) -> Walk:
    """Let ``policy`` plan every pass of a request and see what came of it; ``batch`` may be given by position.

    It does not know where the text ends; the last pass counts as stopped, not as a rejection.
    """
    at, end, done = 0, len(recorded.kept), Walk()

    @cache
    def price(kind: Kind, rows: int, n: int) -> float:
        # Costs that are given serve other batches too, by the nearest: good for a control, not for a clock.
        seconds = (costs.get(kind, rows, n) if (kind, rows) in costs.curves else None) if n else 0.0
        if seconds is None:
            raise SpecDecError(f"The costs do not tell {kind} passes with {rows} rows: give a curve of that batch.")
        return seconds

    while at < end:
        rows = batch if isinstance(batch, int) else batch[at]
        plan = policy.plan(rows)
        if plan.reason:
            done.changes.append((at, plan.control, plan.reason))
        seconds = {"draft": price("draft", rows, plan.gamma), "score": price("target", rows, plan.gamma + 1)}
        kept = min(recorded.kept[at], plan.gamma, end - at - 1)
        row = (plan.gamma, kept, kept + 1, at + kept + 1 == end)
        policy.observe(Observation(rows, plan.gamma + 1, plan.gamma, [row], seconds))
        done.log.append((at, plan.gamma, kept + 1, sum(seconds.values())))
        at += kept + 1
    return done


def oracle(recorded: Recorded, curve: Curve, most: int) -> Walk:
    """The fastest way of all, for one who knows what will be kept: dynamic programming from the end of the text."""
    prices = [curve.target(1), *(curve.draft(g) + curve.target(g + 1) for g in range(1, most + 1))]
    end, at, done = len(recorded.kept), 0, Walk()
    room = [min(kept, end - i - 1) for i, kept in enumerate(recorded.kept)]
    rest, choice = [0.0] * (end + 1), [0] * end
    for i in reversed(range(end)):
        ways = [prices[g] + rest[i + 1 + min(g, room[i])] for g in range(most + 1)]
        rest[i] = min(ways)
        choice[i] = ways.index(rest[i])
    while at < end:
        done.log.append((at, choice[at], 1 + min(choice[at], room[at]), prices[choice[at]]))
        at += done.log[-1][2]
    return done


def best_fixed(recorded: Sequence[Recorded], curve: Curve, most: int) -> int:
    """The one block length (0: ordinary decoding) that is fastest over all requests; known only afterwards."""
    costs = known([curve], most)
    times = [sum(walk(r, Fixed(g), costs, curve.batch).totals()[3] for r in recorded) for g in range(most + 1)]
    return times.index(min(times))


def policies(costs: Costs, most: int) -> dict[str, Callable[[], BlockLength]]:
    """The policies that learn. All but the last are told the costs."""
    return {
        "heuristic": lambda: Heuristic(gamma=min(5, most), most=most),
        "adaptive": lambda: Adaptive(most=most, costs=costs),
        "fallback": lambda: Fallback(Adaptive(most=most, costs=costs)),
        "fallback, costs learned": lambda: Fallback(Adaptive(most=most)),
    }


def compare(recorded: Sequence[Recorded], curve: Curve, most: int) -> pd.DataFrame:
    """Every fixed block length, the policies that learn (over all requests in turn as in a server, and anew for each)
    and the oracle. Intervals: requests drawn anew (the best fixed length stays that of all requests)."""
    import pandas as pd

    costs = known([curve], most)
    ways = {f"fixed {g}": [walk(r, Fixed(g), costs, curve.batch) for r in recorded] for g in range(most + 1)}
    best = min(ways, key=lambda name: sum(w.totals()[3] for w in ways[name]))
    for name, make in policies(costs, most).items():
        one = make()
        ways[name] = [walk(r, one, costs, curve.batch) for r in recorded]
        ways[f"{name}, anew"] = [walk(r, make(), costs, curve.batch) for r in recorded]
    ways["oracle"] = [oracle(r, curve, most) for r in recorded]
    times = {name: [w.totals()[3] for w in walks] for name, walks in ways.items()}
    rows = []
    for name, walks in ways.items():
        passes, speculated, tokens, _ = (sum(x) for x in zip(*(w.totals() for w in walks), strict=True))
        row = {"policy": name, "best fixed": name == best} | _ratio("speed", times["fixed 0"], times[name])
        row |= _ratio("of best fixed", times[best], times[name]) | _ratio("of oracle", times["oracle"], times[name])
        row |= {"speculated": speculated / passes, "tokens a pass": tokens / passes}
        rows.append(row | {"changes": sum(len(w.changes) for w in walks)})
    return pd.DataFrame(rows)


def _ratio(name: str, over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """The ratio of two sums over requests, with its interval."""
    from .stats import bootstrap

    found = bootstrap(list(zip(over, under, strict=True)), lambda s: float(s[0] / s[1]), draws=1000)
    return {name: found.value, f"{name}, low": found.low, f"{name}, high": found.high}


def stress(recorded: Sequence[Recorded], name: str, most: int) -> pd.DataFrame:
    """SYNTHETIC changes in the middle of each request at batch 1: nothing is kept any more (G4), or the batch grows to
    the smallest where ordinary decoding is best, else a pass is assumed to cost its arithmetic alone (G3). ``delay``:
    tokens to the first ordinary pass (median of those noticed); ``time``: from the change on, against ordinary."""
    import pandas as pd

    before, rows = curve(name, 1), []
    bound = Curve("arithmetic alone (assumed)", 1024, lambda n: 2.10103129e-5 * 1024 * n, before.draft)
    grown = (curve(name, batch) for batch in (32, 64, 128, 256, 512))
    crowd = next((c for c in grown if best_fixed(recorded, c, most) == 0), bound)
    costs, gamma = known([before, crowd], most), best_fixed(recorded, before, most)
    arms: dict[str, Callable[[], BlockLength]] = {**policies(costs, most), f"fixed {gamma}": partial(Fixed, gamma)}
    for after, (arm, make) in itertools.product((before, crowd), arms.items()):
        delays, times, ordinary = [], [], []
        for r in recorded:
            half, rest = len(r.kept) // 2, len(r.kept) - len(r.kept) // 2
            changed = replace(r, kept=r.kept[:half] + (0,) * rest) if after is before else r
            done = walk(changed, make(), costs, [before.batch] * half + [after.batch] * rest)
            *_, tokens, seconds = done.totals(half)
            times.append(seconds)
            ordinary.append(tokens * after.target(1))
            delays += [at - half for at, g, *_ in done.log if at >= half and g == 0][:1]
        change = "nothing kept (G4)" if after is before else f"batch {crowd.batch}, {crowd.name} (G3)"
        row = {"synthetic change": change, "policy": arm, "noticed": len(delays) / len(recorded)}
        rows.append(row | {"delay": median(delays) if delays else None} | _ratio("time", times, ordinary))
    return pd.DataFrame(rows)


def finding(table: pd.DataFrame) -> str:
    """What the comparison says, in a sentence."""
    own, said = table, []
    for name in ("adaptive", "fallback", "fallback, anew"):
        own = table[table["policy"] == name]
        low_high = [f"{own[c].min():.2f} to {own[c].max():.2f}" for c in ("of best fixed", "of oracle", "speed")]
        said.append("{} {} of the best fixed block length, {} of the oracle, {} of ordinary".format(name, *low_high))
    return f"Speed over {len(own)} replays: {'; '.join(said)}."


def command(
    data: Annotated[Path | None, typer.Option(help="Folder with acceptance_*.jsonl; else SPECDEC_DATA.")] = None,
    most: Annotated[int, typer.Option(min=1, max=20, help="Longest block, in drafted tokens.")] = 12,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many of each file.")] = None,
) -> None:
    """Replay block-length policies on recorded acceptance with published costs: how far from the best possible?"""
    import pandas as pd

    from .lineage import open_run
    from .provenance import sha256_file
    from .workloads import data_dir

    folder, tables, changes = data or data_dir(), [], []
    files = sorted(folder.glob("acceptance_*.jsonl")) if folder else []
    if not files:
        raise SpecDecError("No acceptance_*.jsonl to replay: name their folder with --data or SPECDEC_DATA.")
    inputs = {"data": ", ".join(f.name for f in files), "most": most, "requests": requests or "all"}
    with open_run("policies", kind="policies", params=inputs) as run:
        run.set_tags({f"data.{f.name}.sha256": sha256_file(f) for f in files} | {"costs": SOURCE})
        for file, name in itertools.product(files, CURVES):
            print(f"{file.name}, {name} ...", flush=True)
            recorded = load_recorded(file, name.split(",")[0])[:requests]
            label = {"data": file.stem.removeprefix("acceptance_"), "costs": name}
            changes.append(stress(recorded, name, most).assign(**label))
            tables += [compare(recorded, curve(name, b), most).assign(**label, batch=b) for b in (1, 32, 128)]
        table, changed = pd.concat(tables, ignore_index=True), pd.concat(changes, ignore_index=True)
        run.log_table(table, "policies")
        run.log_table(changed, "synthetic_changes")
        run.finding(finding(table))
    table = table[table["best fixed"] | ~table["policy"].str.startswith("fixed")]  # the others are in the run
    shown = ["data", "costs", "batch", "policy", "speed", "of best fixed", "of oracle", "speculated"]
    print(table[shown].to_string(index=False, float_format="%.3f"))
    print(changed.to_string(index=False, float_format="%.3f"), finding(table), sep="\n")
