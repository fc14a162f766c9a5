"""A race: every arm decodes every prompt, arms interleaved, and the ratios and verdicts that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..record import seconds_by_stage
from .measure import ratios_by_prompt
from .peers import Engine, Timed
from .stats import Interval, bootstrap

# --- running ----------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """A row of the table: an engine, the arm of ordinary decoding it is set against, and what it decodes with."""

    engine: Engine
    over: str
    weights: str
    temperature: float = 0.0
    bytes: float = math.nan  # read in a pass of the target


@dataclass
class Race:
    """Runs arms and keeps what came of them, ``rows`` by arm and prompt, and ``texts``."""

    arms: Mapping[str, Arm]
    rows: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def warm_up(self, prompt: Sequence[int]) -> None:
        for arm in self.arms.values():
            arm.engine(prompt, 0)

    def run(self, asked: pd.DataFrame, step: Callable[[str], None]) -> None:
        """Every arm on every prompt of ``asked`` (id, category, ids), starting with another arm at each."""
        names = list(self.arms)
        for i, (name, category, ids) in enumerate(zip(asked["id"], asked["category"], asked["ids"], strict=True)):
            for arm in names[i % len(names) :] + names[: i % len(names)]:
                step(f"{arm}, {category}")
                timed = self.arms[arm].engine(ids, i)
                self.texts[arm, name] = timed.tokens
                self.rows.append({"prompt": name, "category": category, "arm": arm} | _facts(timed))

    @property
    def times(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)


def _facts(timed: Timed) -> dict[str, float]:
    """What is kept of a text: seconds and tokens after the prefill, and for our own loop the passes and stages."""
    facts: dict[str, float] = {"prefill": timed.prefill, "seconds": timed.seconds, "tokens": timed.after}
    facts["length"] = len(timed.tokens)
    if timed.records:
        stages = seconds_by_stage(timed.records)
        facts |= {"passes": sum(r.kind != "prefill" for r in timed.records), "draft_seconds": stages["draft"]}
        facts |= {
            "score_seconds": stages["score"],
            "rest_seconds": sum(stages.values()) - stages["draft"] - stages["score"],
        }
        facts |= {name: sum(getattr(r, name) for r in timed.records) for name in ("drafted", "accepted")}
    return facts


# --- what came of it --------------------------------------------------------------------------------------


def by_category(times: pd.DataFrame, arm: str, over: str) -> pd.Series:
    """Geometric mean of the speed of ``arm`` over that of ``over``, by category, of texts with something to time."""
    some = times[times["arm"].isin([arm, over])]
    short = some.loc[some["tokens"] < 2, "prompt"].unique()
    some = some[~some["prompt"].isin(short)]
    logs = pd.Series(np.log(ratios_by_prompt(some, arm, over)), index=sorted(some["prompt"].unique()))
    category = some.drop_duplicates("prompt").set_index("prompt")["category"]
    means: pd.Series = logs.groupby(category).mean()
    return means.map(math.exp)


def overall(ratios: pd.Series) -> Interval:
    """Geometric mean over categories, bootstrapped by category."""
    return bootstrap([[math.log(r), 1.0] for r in ratios], lambda s: math.exp(s[0] / s[1]))


def table(race: Race, bandwidth: float) -> list[dict[str, Any]]:
    """A row an arm. ``floor``: seconds of a pass over those in which its weights are read once at ``bandwidth``."""
    times, rows = race.times, []
    for name, arm in race.arms.items():
        mine = times[times["arm"] == name]
        sums, ratios = mine.sum(numeric_only=True), by_category(times, name, arm.over)
        ratio, texts = overall(ratios), {p: t for (a, p), t in race.texts.items() if a == name}
        # Two draws need not be equal, and an engine that gives no tokens out cannot be compared.
        same = [t == race.texts[arm.over, p] for p, t in texts.items() if t and not arm.temperature]
        row = {"arm": name, "weights": arm.weights, "temperature": arm.temperature, "over": arm.over}
        row |= vars(ratio) | {"ratio": f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"}
        row |= {"worst": ratios.min(), "worst_category": ratios.idxmin(), "prefill": sums["prefill"] / len(mine)}
        row |= {"tokens_per_second": sums["tokens"] / sums["seconds"], "same_texts": sum(same), "texts": len(same)}
        if sums.get("passes", 0):
            row["tokens_per_pass"] = sums["tokens"] / sums["passes"]
            row |= {f"{k}_ms": 1e3 * sums[f"{k}_seconds"] / sums["passes"] for k in ("draft", "score", "rest")}
            row["floor"] = sums["seconds"] / sums["passes"] / (arm.bytes / bandwidth)
            row["accepted_share"] = sums["accepted"] / max(sums["drafted"], 1)
        rows.append(row)
    return rows


def means(times: pd.DataFrame, over: str) -> list[dict[str, Any]]:
    """Of every arm but ``over``: its mean over that one, the highest first, and its worst category."""
    found = []
    for arm in sorted(set(times["arm"]) - {over}):
        ratios = by_category(times, arm, over)
        found.append({"arm": arm, **vars(overall(ratios)), "worst": ratios.min(), "worst_category": ratios.idxmin()})
    return sorted(found, key=lambda row: -row["value"])


class Aim(NamedTuple):
    """A ratio that was aimed at before the run: speed of ``arm`` over ``over``; ``worst`` asks it of every category."""

    title: str
    arm: str
    over: str
    least: float
    worst: bool = False

    def judge(self, times: pd.DataFrame) -> dict[str, Any] | None:
        """None where one of the arms was not run."""
        if not {self.arm, self.over} <= set(times["arm"]):
            return None
        ratios = by_category(times, self.arm, self.over)
        ratio, low = overall(ratios), ratios.idxmin()
        reached = (
            f"{ratios.min():.2f} ({low})" if self.worst else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        )
        met = (ratios.min() if self.worst else ratio.value) >= self.least
        verdict = "reached" if met else "missed"
        if not self.worst and ratio.low < self.least <= ratio.high:
            verdict += ", within the noise"
        return {"aim": self.title, "least": self.least, "reached": reached, "verdict": verdict}
