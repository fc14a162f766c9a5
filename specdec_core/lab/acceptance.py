"""Acceptance of every drafter at every block length and rule, from texts that the target writes once.

Texts are written by ordinary decoding, in batches; then each drafter meets them (`lab.replay`), and everything that a
sweep shows follows from sums over passes: one row for each prompt and cell. Those rows are what is kept: they add up,
so any grouping can be made of them later, and intervals come from drawing prompts anew.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as tests

from ..api import Output, Pair, generate, generate_batch
from ..control import Costs
from ..record import target_passes, tokens_emitted
from ..sampling import SamplingPolicy
from .measure import energy_ratio, interleaved, speed_ratio
from .replay import REPLAYED, Meeting, Walk
from .stats import Interval, bootstrap

KEYS = ["temperature", "top_p", "drafter", "rule", "gamma"]  # what makes a cell
ABOUT = ["prompt", "category", "kind", "language"]


@dataclass(frozen=True)
class Grid:
    """What is swept. At temperature 0 there is one rule, and no top-p."""

    gammas: Sequence[int] = (1, 2, 3, 4, 6, 8)
    temperatures: Sequence[float] = (0.0, 0.7, 1.0)
    top_ps: Sequence[float] = (1.0,)
    drafters: Sequence[str] = REPLAYED[:4]
    rules: Sequence[str] = ("token", "block")

    def policies(self) -> list[SamplingPolicy]:
        warm = [SamplingPolicy(t, top_p=p) for t in self.temperatures if t for p in self.top_ps]
        return ([SamplingPolicy()] if 0 in self.temperatures else []) + warm

    def rules_of(self, policy: SamplingPolicy) -> Sequence[str]:
        return ("greedy",) if policy.greedy else self.rules

    @property
    def cells(self) -> int:
        ways = sum(len(self.rules_of(policy)) for policy in self.policies())
        return ways * len(self.drafters) * len(self.gammas)


@dataclass(frozen=True)
class Texts:
    """What the target wrote: ``outputs`` by policy, in the order of the prompts, and the seconds that took."""

    asked: pd.DataFrame
    outputs: dict[SamplingPolicy, list[Output]]
    budget: int
    seconds: float


def write(
    pair: Pair,
    asked: pd.DataFrame,
    policies: Sequence[SamplingPolicy],
    tokens: int,
    batch: int = 8,
    seed: int = 0,
    progress: Callable[[str], None] = lambda said: None,
) -> Texts:
    """Ordinary decoding of the first turn of every prompt under every policy, ``batch`` rows at a time."""
    begun, outputs = time.perf_counter(), {}
    prompts, seeds = [turns[0] for turns in asked["turns"]], [seed + i for i in range(len(asked))]
    for policy in policies:
        progress(f"the target writes at temperature {policy.temperature:g}, top-p {policy.top_p:g}")
        how: dict[str, Any] = {"temperature": policy.temperature, "top_p": policy.top_p, "max_new_tokens": tokens}
        outputs[policy] = generate_batch(
            pair, prompts, speculate=False, seed=seeds, max_batch=batch, diagnostics=False, **how
        )
    return Texts(asked, outputs, tokens, time.perf_counter() - begun)


def meet(
    pair: Pair, texts: Texts, grid: Grid, progress: Callable[[str], None] = lambda said: None
) -> tuple[pd.DataFrame, float]:
    """A row for each prompt and cell with the sums of its passes, and the seconds that all of it took."""
    begun, rows = time.perf_counter(), []
    about = texts.asked.rename(columns={"id": "prompt"})[ABOUT].to_dict("records")
    for policy, outputs in texts.outputs.items():
        progress(f"{len(grid.drafters)} drafters meet the texts of temperature {policy.temperature:g}")
        for known, output in zip(about, outputs, strict=True):
            if len(output.tokens) > 1:
                rows += [known | row for row in _met(Meeting(pair, output, policy, texts.budget), grid)]
    return pd.DataFrame(rows), time.perf_counter() - begun


def _met(meeting: Meeting, grid: Grid) -> Iterator[dict[str, Any]]:
    policy = meeting.policy
    for drafter, gamma in itertools.product(grid.drafters, grid.gammas):
        replay = meeting.replay(drafter, gamma)
        for rule in grid.rules_of(policy):
            walk = replay.walk("block" if rule == "block" else "token")
            cell = {"temperature": policy.temperature, "top_p": policy.top_p, "drafter": drafter, "rule": rule}
            yield cell | {"gamma": gamma} | _sums(walk)


def _sums(walk: Walk) -> dict[str, float]:
    plain = {name: getattr(walk, name) for name in ("passes", "drafting", "tokens", "drafted", "accepted", "rejected")}
    plain["alone"] = float(walk.sizes[:, 0].sum())  # passes with nothing drafted
    for i, (reached, kept) in enumerate(zip(walk.reached, walk.kept, strict=True), start=1):
        plain |= {f"reached_{i}": reached, f"kept_{i}": kept}
    for n in range(1, walk.sizes.shape[1]):
        plain |= {f"free_{n}": walk.sizes[0, n], f"paid_{n}": walk.sizes[1, n]}
    return plain


# --- cells ------------------------------------------------------------------------------------------------


def seconds(rows: pd.DataFrame, costs: Costs) -> pd.Series:
    """What the passes of each row take by measured costs; ordinary decoding takes ``tokens`` single passes."""
    total = rows["alone"] * _cost(costs, "target", 1)
    for n in range(1, _widest(rows) + 1):
        both = rows[f"free_{n}"].fillna(0) + rows[f"paid_{n}"].fillna(0)
        total = total + both * _cost(costs, "target", n + 1) + rows[f"paid_{n}"].fillna(0) * _cost(costs, "draft", n)
    return total


def _cost(costs: Costs, kind: Any, n: int) -> float:
    found = costs.get(kind, 1, n)
    return 0.0 if found is None else found


def _widest(rows: pd.DataFrame) -> int:
    return max(int(name.removeprefix("free_")) for name in rows.columns if name.startswith("free_"))


def cells(rows: pd.DataFrame, costs: Costs, by: Sequence[str] = KEYS) -> pd.DataFrame:
    """A row for each group of ``by``, with intervals that come from drawing its prompts anew.

    ``alpha``: accepted over judged tokens (censored at the block's end); ``block_efficiency``: tokens a pass;
    ``length``: tokens a pass that speculated, pooled, and ``length_per_request``, each prompt alike; ``speed``:
    predicted over ordinary decoding, from measured costs.
    """
    taken = rows.assign(
        cost=seconds(rows, costs),
        ordinary=rows["tokens"] * _cost(costs, "target", 1),
        judged=rows["accepted"] + rows["rejected"],
        given=rows["tokens"] - (rows["passes"] - rows["drafting"]),  # by passes that speculated; others give one each
    )
    found = []
    for key, group in taken.groupby(list(by), sort=True):
        named = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        row = named | {"prompts": group["prompt"].nunique()}
        for name, (top, bottom) in _RATIOS.items():
            row |= _shown(name, _ratio(group, top, bottom))
        per_request = (group["given"] / group["drafting"]).where(group["drafting"] > 0)
        found.append(row | {"length_per_request": float(per_request.mean())})
    return pd.DataFrame(found)


_RATIOS = {
    "alpha": ("accepted", "judged"),
    "block_efficiency": ("tokens", "passes"),
    "length": ("given", "drafting"),
    "speed": ("ordinary", "cost"),
}


def _ratio(group: pd.DataFrame, top: str, bottom: str) -> Interval:
    sums = group.groupby("prompt")[[top, bottom]].sum().to_numpy()
    return bootstrap(sums, lambda s: float(s[0] / s[1]) if s[1] else float("nan"), draws=500)


def _shown(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def by_position(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance at block position 1, 2, ...: ``conditional`` on all before being kept, and ``joint`` (survival) of
    blocks that were judged at all, beside ``geometric``, what one α at all positions would give."""
    total = rows.sum(numeric_only=True)
    alpha, found, alive = total["accepted"] / max(total["accepted"] + total["rejected"], 1e-12), [], 1.0
    for i in range(1, _widest(rows) + 1):
        reached, kept = total[f"reached_{i}"], total[f"kept_{i}"]
        if reached <= 0:
            break
        sums = rows.groupby("prompt")[[f"kept_{i}", f"reached_{i}"]].sum().to_numpy()
        conditional = bootstrap(sums, lambda s: float(s[0] / s[1]) if s[1] else float("nan"), draws=500)
        alive *= kept / reached
        row = {"position": i, "judged": reached} | _shown("conditional", conditional)
        found.append(row | {"joint": alive, "geometric": alpha**i})
    return pd.DataFrame(found)


@dataclass(frozen=True)
class ConstantAlpha:
    """Whether acceptance is the same at all positions of a block: a likelihood-ratio test over tokens, and the
    difference between later positions and the first with its interval over prompts, which does not take the tokens of a
    prompt to be independent."""

    p_value: float
    later_minus_first: Interval

    @property
    def sentence(self) -> str:
        apart = self.later_minus_first
        if not (apart.low > 0 or apart.high < 0):
            return f"α may be constant along a block ({apart.value:+.2f} [{apart.low:+.2f}, {apart.high:+.2f}])"
        how = "higher" if apart.value > 0 else "lower"
        where = f"{abs(apart.value):.2f} {how} behind an accepted token than at the first"
        return f"α is not constant along a block: {where} [{apart.low:+.2f}, {apart.high:+.2f}]"

    def __str__(self) -> str:
        return f"{self.sentence}; likelihood ratio over tokens: p = {self.p_value:.2g}."


def constant_alpha(rows: pd.DataFrame) -> ConstantAlpha:
    """`ConstantAlpha` of these rows, which should be of one cell."""
    widest, total = _widest(rows), rows.sum(numeric_only=True)
    counts = np.array([(total[f"kept_{i}"], total[f"reached_{i}"] - total[f"kept_{i}"]) for i in range(1, widest + 1)])
    counts = counts[counts.sum(1) > 0]
    informative = len(counts) > 1 and (counts.sum(0) > 0).all()
    p_value = tests.chi2_contingency(counts, lambda_="log-likelihood").pvalue if informative else 1.0
    later = [[f"{what}_{i}" for i in range(2, widest + 1)] for what in ("kept", "reached")]
    columns = {
        "kept": rows["kept_1"],
        "reached": rows["reached_1"],
        "later": rows[later[0]].sum(axis=1),
        "of": rows[later[1]].sum(axis=1),
    }
    sums = pd.DataFrame(columns).groupby(rows["prompt"]).sum().to_numpy()
    apart = bootstrap(sums, lambda s: float(s[2] / s[3] - s[0] / s[1]) if s[1] and s[3] else float("nan"))
    return ConstantAlpha(float(p_value), apart)


# --- prompts and subgroups --------------------------------------------------------------------------------


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def only(rows: pd.DataFrame, cell: Mapping[str, Any] | pd.Series) -> pd.DataFrame:
    """The rows of one cell, or of all cells that agree with ``cell`` in the keys it has."""
    keys = [key for key in KEYS if key in cell]
    return rows[np.logical_and.reduce([rows[key] == cell[key] for key in keys])]


def by_prompt(rows: pd.DataFrame, costs: Costs, asked: pd.DataFrame) -> pd.DataFrame:
    """Of one cell, each prompt with its predicted speed, α̂ and tokens a pass, the slowest first, and how it begins."""
    table = rows[ABOUT].assign(
        speed=rows["tokens"] * _cost(costs, "target", 1) / seconds(rows, costs),
        alpha=rows["accepted"] / (rows["accepted"] + rows["rejected"]),
        tokens_a_pass=rows["tokens"] / rows["passes"],
    )
    begins = {row["id"]: " ".join(row["turns"][0].split())[:90] for row in asked.to_dict("records")}
    return table.assign(begins=table["prompt"].map(begins)).sort_values("speed").reset_index(drop=True)


def subgroups(rows: pd.DataFrame, costs: Costs, of: Sequence[str] = ABOUT[1:], least: int = 2) -> pd.DataFrame:
    """Predicted speed of one cell in every subgroup of at least ``least`` prompts. ``sure``: on which side of 1 it lies
    holds at 95 % for all subgroups together (each interval at 1 - 0.05 / their number, Bonferroni)."""
    parts = [
        (name, group, some) for name in of for group, some in rows.groupby(name) if some["prompt"].nunique() >= least
    ]
    found = []
    for name, group, some in parts:
        sums = pd.DataFrame({"ordinary": some["tokens"] * _cost(costs, "target", 1), "cost": seconds(some, costs)})
        table = sums.groupby(some["prompt"]).sum().to_numpy()
        plain, strict = (
            bootstrap(table, lambda s: float(s[0] / s[1]), level=level) for level in (0.95, 1 - 0.05 / len(parts))
        )
        known = {"of": name, "group": group, "prompts": len(table), "sure": strict.low > 1 or strict.high < 1}
        found.append(known | _shown("speed", plain))
    return pd.DataFrame(found)


# --- the loop beside it -----------------------------------------------------------------------------------


def drawn(cells: pd.DataFrame, count: int, seed: int = 0) -> pd.DataFrame:
    """Cells to be run as well: those predicted fastest and slowest, and others that chance takes."""
    ends = cells.loc[list(dict.fromkeys([cells["speed"].idxmax(), cells["speed"].idxmin()]))]
    rest = cells.drop(index=ends.index)
    return pd.concat([ends, rest.sample(min(max(count - 2, 0), len(rest)), random_state=seed)])[:count]


def name_of(cell: Mapping[str, Any] | pd.Series) -> str:
    cut = f", top-p {cell['top_p']:g}" if cell["top_p"] < 1 else ""
    return f"{cell['drafter']} γ{int(cell['gamma'])}, T {cell['temperature']:g}{cut}, {cell['rule']}"


def run_cells(
    pair: Pair,
    texts: Texts,
    chosen: pd.DataFrame,
    prompts: int,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> tuple[pd.DataFrame, dict[str, list[Output]]]:
    """These cells in the loop itself and ordinary decoding under each of their policies, interleaved, on the first
    ``prompts`` prompts. Sampled texts have other coins than those that were written."""
    arms: dict[str, Callable[[Any], Output]] = {}
    for cell in _records(chosen):
        policy = {"temperature": float(cell["temperature"]), "top_p": float(cell["top_p"])}
        how: dict[str, Any] = policy | {"max_new_tokens": texts.budget, "seed": seed + 100_000, "diagnostics": False}
        own = how | {"drafter": cell["drafter"], "gamma": int(cell["gamma"]), "control": "fixed", "candidates": 1}
        own |= {"model_gamma": None, "confidence": 0.0} | ({} if cell["rule"] == "greedy" else {"rule": cell["rule"]})
        arms[_ordinary(cell)] = partial(generate, pair, speculate=False, **how)
        arms[name_of(cell)] = partial(generate, pair, **own)
    for arm in arms.values():
        arm([1, 2, 3])  # the first passes are slow, whoever makes them
    return interleaved(arms, [turns[0] for turns in texts.asked["turns"][:prompts]], progress)


def _ordinary(cell: Mapping[str, Any] | pd.Series) -> str:
    return f"ordinary, T {cell['temperature']:g}" + (f", top-p {cell['top_p']:g}" if cell["top_p"] < 1 else "")


def compare(
    rows: pd.DataFrame,
    costs: Costs,
    texts: Texts,
    chosen: pd.DataFrame,
    times: pd.DataFrame,
    outputs: Mapping[str, list[Output]],
) -> pd.DataFrame:
    """For each cell that was run: whether replay and loop agree, and predicted beside measured speed on its prompts."""
    found = []
    for cell in _records(chosen):
        arm, ordinary = name_of(cell), _ordinary(cell)
        policy = SamplingPolicy(float(cell["temperature"]), top_p=float(cell["top_p"]))
        same = [a.tokens == b.tokens for a, b in zip(outputs[arm], texts.outputs[policy], strict=False)]
        seen = pd.DataFrame([_seen(output) for output in outputs[arm]])
        seen = seen.assign(prompt=list(texts.asked["id"][: len(seen)]), same_text=same)
        told = only(rows, cell)
        told = told[told["prompt"].isin(seen["prompt"])]
        measured = speed_ratio(times, arm, ordinary, "decode_seconds")
        predicted = float((told["tokens"].sum() * _cost(costs, "target", 1)) / seconds(told, costs).sum())
        row = {key: cell[key] for key in KEYS} | {"cell": arm, "predicted": predicted} | _shown("measured", measured)
        if energy := energy_ratio(times, arm, ordinary):  # joules a token, over ordinary decoding
            row |= _shown("energy", energy)
        found.append(row | agreement(told, seen, greedy=policy.greedy))
    return pd.DataFrame(found)


def _seen(output: Output) -> dict[str, Any]:
    records = output.records
    sums = {name: float(sum(getattr(r, name) for r in records)) for name in ("drafted", "accepted", "rejected")}
    return {"passes": float(target_passes(records)), "tokens": float(tokens_emitted(records) - 1)} | sums


def agreement(told: pd.DataFrame, seen: pd.DataFrame, greedy: bool) -> dict[str, Any]:
    """How replay (``told``, rows of one cell) and the loop compare. Greedy: prompts whose passes and accepted tokens
    are the same, of those with the same text (in 16 bits rounding may part texts). Sampled: the difference of tokens a
    pass, with its interval over prompts."""
    both = told.merge(seen, on="prompt", suffixes=("_told", "_seen"))
    if greedy:
        both = both[both["same_text"]]
        same = (both["passes_told"].round(6) == both["passes_seen"]) & (
            both["accepted_told"].round(6) == both["accepted_seen"]
        )
        return {"prompts": len(both), "equal": int(same.sum()), "holds": bool(same.all())}
    sums = both[["tokens_told", "passes_told", "tokens_seen", "passes_seen"]].to_numpy()
    apart = bootstrap(sums, lambda s: float(s[0] / s[1] - s[2] / s[3]))
    return {"prompts": len(both), **_shown("apart", apart), "holds": apart.low <= 0 <= apart.high}
