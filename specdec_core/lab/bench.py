"""``specdec bench``: what the loop itself costs, from one run with its arms interleaved.

A group is a batch of prompts. All arms decode it one after the other, in mirrored order at every second group (ABBA),
and each ratio is taken within a group. Nothing ends at EOS, so that every arm emits the same number of tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..api import Pair, Prompt, prepare
from ..control import BlockLength, Fallback, Fixed
from ..drafters import Drafter, ModelDrafter, PromptLookupDrafter, Proposal, early_exit
from ..drafters.composite import Parts
from ..errors import SpecDecError
from ..record import StepRecord, seconds_by_stage, tokens_emitted
from ..sampling import SamplingPolicy
from . import models, workloads
from .lineage import open_run
from .measure import ratios_by_prompt
from .stats import Interval, bootstrap
from .ui import run_link

GAMMA = 4
STEADY, WARM = 16, 8  # tokens where the pace does not change (the prefill's and three whole blocks); of a warm-up


class Question(NamedTuple):
    """What a ratio is, its aim, and the arm of ordinary decoding it is taken with (empty: the loop's own forwards)."""

    title: str
    aim: float
    baseline: str = ""

    def verdict(self, ratio: Interval) -> str:
        """From the whole interval: a ratio of speeds should be large, the loop's time over its forwards small."""
        low, high, aim = (ratio.low, ratio.high, self.aim) if self.baseline else (-ratio.high, -ratio.low, -self.aim)
        return "meets" if low >= aim else "does not meet" if high < aim else "may meet" if aim == aim else ""


QUESTIONS = {
    "overhead": Question("loop time over its model forwards, aim ≤ 1.05", 1.05),
    "off": Question("speed with speculation off over ordinary decoding, aim ≥ 0.97", 0.97, "ordinary.steady"),
    "control": Question("speed with a wrong draft (synthetic) under Fallback, aim ≥ 0.95", 0.95, "ordinary.whole"),
    "uncontrolled": Question("speed with that draft (synthetic) and no control", math.nan, "ordinary.steady"),
}


class Arm(NamedTuple):
    """One way of decoding: the question it answers and its name there, draft and control. No draft: ordinary."""

    key: str
    draft: str = ""
    control: str = "fixed"
    diagnostics: bool = False


ARMS = (
    Arm("overhead.lookup", "prompt_lookup"),
    Arm("overhead.lookup_diagnostics", "prompt_lookup", diagnostics=True),
    Arm("overhead.self", "self"),
    Arm("overhead.self_diagnostics", "self", diagnostics=True),
    Arm("uncontrolled.synthetic_lookup", "synthetic_lookup"),
    Arm("off.lookup", "prompt_lookup", "off"),
    Arm("ordinary.steady"),
    Arm("off.self", "self", "off"),
    Arm("uncontrolled.synthetic_model", "synthetic_model"),
    Arm("control.synthetic_lookup_fresh", "synthetic_lookup", "fresh"),
    Arm("control.synthetic_model_fresh", "synthetic_model", "fresh"),
    Arm("ordinary.whole"),
    Arm("control.synthetic_lookup_carried", "synthetic_lookup", "carried"),
    Arm("control.synthetic_model_carried", "synthetic_model", "carried"),
)


class Wrong(Parts):
    """Lets another drafter work, then proposes random tokens in place of its own: right once in ``vocab`` times."""

    name, synthetic = "wrong", True

    def __init__(self, worker: Drafter, vocab: int):
        self.parts, self.vocab = (worker,), vocab

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: torch.Tensor) -> Proposal:
        self.parts[0].propose(sequences, room, u)
        ends = [(7919 * len(s) + s[-1], r) for s, r in zip(sequences, room, strict=True)]
        return Proposal.chosen([[(e + 7919 * i) % self.vocab for i in range(r)] for e, r in ends], u.device, "no room")


@contextmanager
def forwards_timed(model: torch.nn.Module, now: Callable[[], float]) -> Iterator[list[float]]:
    """Gives numbers whose sum is the time spent in calls of ``model``."""
    marks: list[float] = []
    before = model.register_forward_pre_hook(lambda *_: marks.append(-now()))
    after = model.register_forward_hook(lambda *_: marks.append(now()))
    try:
        yield marks
    finally:
        before.remove()
        after.remove()


class Bench:
    """Runs arms and keeps what came of them: ``rows`` of times, records by arm and batch, texts by request."""

    def __init__(self, pair: Pair, tokens: int, now: Callable[[], float] = time.perf_counter):
        self.pair, self.tokens, self.clock = pair, tokens, now
        self.rows: list[dict[str, Any]] = []
        self.records: dict[str, list[StepRecord]] = {}
        self.texts: dict[tuple[int, int], list[list[int]]] = {}
        self.carried: dict[tuple[str, int], BlockLength] = {}
        depth = int(pair.target.config.get_text_config(decoder=True).num_hidden_layers)
        model, policy, vocab = early_exit(pair.target, max(1, depth // 15)), SamplingPolicy(), pair.vocab
        self.synthetic: dict[str, Callable[[], Drafter]] = {
            "synthetic_lookup": lambda: Wrong(PromptLookupDrafter(pair.target.device), vocab),
            "synthetic_model": lambda: Wrong(ModelDrafter(model, policy, vocab), vocab),
        }

    def now(self) -> float:
        if self.pair.target.device.type == "cuda":
            torch.cuda.synchronize(self.pair.target.device)
        return self.clock()

    def run(self, arm: Arm, prompts: Sequence[Prompt], group: str) -> None:
        """A group without a name is a warm-up, which leaves no trace but in the controls that are carried over."""
        batch, made, whole = len(prompts), self.synthetic.get(arm.draft), arm.key.startswith(("control", "ordinary.w"))
        carried, tokens = self.carried.setdefault((arm.key, batch), Fallback()), self.tokens if whole else STEADY
        prepared = prepare(
            self.pair, prompts, eos=[], gamma=GAMMA, max_new_tokens=tokens if group else WARM,
            control={"fixed": Fixed(GAMMA), "off": Fixed(0), "fresh": Fallback(), "carried": carried}[arm.control],
            speculate=bool(arm.draft), drafter=made() if made else arm.draft or None, diagnostics=arm.diagnostics,
        )  # fmt: skip
        for _ in range(1 if whole else 2):  # the prefill; for a steady pace also the pass in which a draft prefills
            next(prepared.steps)
        nothing = nullcontext([math.nan])
        with forwards_timed(self.pair.target, self.now) if arm.key.startswith("overhead") else nothing as marks:
            begun = self.now()
            records = [record for step in prepared.steps for record in step]
            seconds = self.now() - begun
        if not group:
            return
        row = {"batch": batch, "prompt": group, "arm": arm.key, "synthetic": bool(made), "seconds": seconds}
        row |= {"forward_seconds": sum(marks), "draft_seconds": seconds_by_stage(records)["draft"]}
        row |= {name: sum(getattr(r, name) for r in records) for name in ("drafted", "accepted")}
        self.rows.append(row | {"tokens": tokens_emitted(records)})
        kept = self.records.setdefault(f"{arm.key}.b{batch}", [])
        for i, request in enumerate(prepared.requests, kept[-1].request + 1 if kept else 0):
            self.texts.setdefault((batch, i), []).append(request.output)
            kept += [replace(r, request=i) for r in request.records]


def plan(prompts: Mapping[str, Prompt], batches: Sequence[int], groups: int) -> list[tuple[Arm, list[Prompt], str]]:
    """What to run, in order: arm, prompts, and the name of the first of them, which is the group's; none warms up.
    Groups begin evenly over the prompts. The larger the batch, the fewer they are, but 3 at least."""
    steps, names = [], list(prompts)
    for batch, count in ((b, max(groups // b, min(groups, 3))) for b in batches):
        for g in range(-1, count):
            rows = [names[(max(g, 0) * len(names) // count + j) % len(names)] for j in range(batch)]
            named = rows[0] if g >= 0 else ""
            steps += [(arm, [prompts[n] for n in rows], named) for arm in ARMS[:: -1 if g % 2 else 1]]
    return steps


def table(times: pd.DataFrame) -> list[dict[str, Any]]:
    """Each arm's ratio by batch: geometric mean over groups, bootstrapped by group, and the worst group.
    ``draft_cost`` is the time to draft a token over that of an ordinary pass."""
    rows = []
    for (batch, part), arm in ((p, a) for p in times.sort_values("prompt").groupby("batch") for a in ARMS):
        name, mine = arm.key.partition(".")[0], part[part["arm"] == arm.key]
        if question := QUESTIONS.get(name):
            own = mine["seconds"] / mine["forward_seconds"]
            found = list(ratios_by_prompt(part, arm.key, question.baseline) if question.baseline else own)
            ratio = bootstrap([[math.log(r), 1.0] for r in found], lambda s: math.exp(s[0] / s[1]))
            worst, sums = (min if question.baseline else max)(found), mine.sum(numeric_only=True)
            ordinary = part[part["arm"] == "ordinary.steady"].sum(numeric_only=True)
            cost = sums["draft_seconds"] / max(sums["drafted"], 1) / ordinary["seconds"] * ordinary["tokens"]
            row = {"batch": batch, "question": name, "arm": arm.key, "synthetic": "synthetic" in arm.draft}
            row |= {**vars(ratio), "ratio": str(ratio), "verdict": question.verdict(ratio), "groups": len(found)}
            row |= {"worst": worst, "worst_group": mine["prompt"].iloc[found.index(worst)], "draft_cost": cost}
            rows.append(row | {name: int(sums[name]) for name in ("accepted", "drafted")})
    return rows


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """One line of verdicts, then the worst row of each question."""
    verdicts, lines = [], []
    for name, question in QUESTIONS.items():
        mine = sorted((r for r in rows if r["question"] == name), key=lambda r: float(r["value"]))
        w, said = mine[0 if question.baseline else -1], [r["verdict"] for r in mine]
        verdict = next(v for v in ("does not meet", "may meet", "meets", "") if v in said)
        verdicts += [f"{name} {verdict} its aim"] if verdict else []
        met = f"{said.count('meets')} of {len(mine)} rows meet it; " if verdict else ""
        lines.append(f"- {name}, {question.title}: {met}worst {w['arm']} at batch {w['batch']}, {w['ratio']}")
    return "; ".join(verdicts).capitalize() + ".\n\n" + "\n".join(lines)


def command(
    pair: str = "smollm2", batches: str = "1,2,4,8", prompts: int = 6, tokens: int = 48, dtype: str | None = None
) -> None:
    """Run it with progress, print the table, and keep a run with all that produced it."""
    if not all(b.isdigit() and int(b) for b in batches.split(",")):
        raise SpecDecError(f"--batches {batches} is not possible: give whole numbers, such as 1,2,4,8.")
    params = {"pair": pair, "batches": batches, "prompts": prompts, "tokens": tokens, "dtype": dtype, "gamma": GAMMA}
    with open_run(f"bench {pair}", kind="bench", params=params, tags={"load.before": os.getloadavg()[0]}) as run:
        loaded, asked = models.load_pair(pair, dtype=dtype), workloads.prompts()
        asked = asked.loc[sorted(asked["turns"].map(lambda turns: len(turns[0])).nsmallest(12).index)]  # short prefills
        run.log_pair(loaded)
        run.log_prompts(asked, workloads.BUILTIN)
        bench, texts = Bench(loaded, tokens), dict(zip(asked["id"], (t[0] for t in asked["turns"]), strict=True))
        for step in track(plan(texts, [int(b) for b in batches.split(",")], prompts), "interleaved arms"):
            bench.run(*step)
        rows, written = table(pd.DataFrame(bench.rows)), list(bench.texts.values())
        parted = sum(text != max(each, key=len)[: len(text)] for each in written for text in each)
        said = f"{finding(rows)}\n- {parted} of {sum(map(len, written))} texts part from those of other arms"
        run.log_table(pd.DataFrame(rows), "bench")
        run.log_table(pd.DataFrame(bench.rows), "times")
        for arm, records in bench.records.items():
            run.log_records(records, arm)  # marks the run where they are synthetic
        run.log_tokens([text for each in written for text in each])
        for key, end in (("value", ""), ("low", "_low"), ("high", "_high")):
            run.log_metrics({f"{r['arm']}.b{r['batch']}{end}": r[key] for r in rows})
        run.finding(said)
    columns = ("batch", "arm", "ratio", "verdict", "worst", "worst_group", "groups", "draft_cost")
    shown = Table(*columns, title=run.name)
    for row in rows:
        shown.add_row(*(f"{row[k]:.3g}" if isinstance(row[k], float) else str(row[k]) for k in columns))
    console = Console()
    console.width = max(console.width, 130)  # in a log too a row of the table is a line
    console.print(shown, said, run_link(run.store, run.id), sep="\n", soft_wrap=True, markup=False)
