"""``specdec bench --profile cpu``: does speculation pay here, and how do others fare? One run, arms interleaved.

Every arm decodes every prompt once, one after the other, the first arm another at each prompt. Texts end where the
model ends them. Ratios are of seconds per token after the prefill, by prompt; none is ever taken between two runs.

The default is chosen on one half of the prompts by a rule that is logged before, and judged on the other.
"""

from __future__ import annotations

import math
import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel
from transformers.utils import logging

from ..api import Options, Pair, encode
from ..control import Adaptive, BlockLength, Costs, Fallback, Fixed
from ..drafters import CompositeDrafter, Drafter, ModelDrafter, PromptLookupDrafter, SuffixDrafter
from ..errors import SpecDecError, number
from ..sampling import SamplingPolicy
from . import models, peers, workloads
from .calibrate import calibrate, frame
from .drafts import share_embeddings
from .lineage import Run, open_run
from .peers import Engine
from .publish import screen
from .race import Aim, Arm, Race, means, table
from .ui import run_link

RULE = (
    "Written before the run: of the candidates, take the one with the highest geometric mean of speed over ordinary "
    "decoding on the first half of the prompts (the category counts, not its number of prompts); number format and "
    "threads are those with the shortest ordinary pass. It is confirmed if on the other half the lower end of its 95 % "
    "interval is above 1. Candidates run in bfloat16, float32 and int4; int8 takes what int4 chose."
)
CHOOSING = ("bf16", "fp32", "int4")
JUDGED = {"bf16": 13, "fp32": 5, "int8": 2, "int4": 2}  # arms that judge, by number format


AIMS = (
    Aim("default over ordinary, bfloat16, greedy", "default bf16", "ordinary bf16", 1.6),
    Aim("the same in its worst category", "default bf16", "ordinary bf16", 1.0, worst=True),
    Aim("default over ordinary, float32, worst category", "default fp32", "ordinary fp32", 1.0, worst=True),
    Aim("default over ordinary, bfloat16, T=0.7", "default bf16 T=.7", "ordinary bf16 T=.7", 1.3),
    Aim("ordinary over Hugging Face generate, bfloat16", "ordinary bf16", "HF generate bf16", 1.0),
    Aim("ordinary over Hugging Face generate, bfloat16, T=0.7", "ordinary bf16 T=.7", "HF generate bf16 T=.7", 1.0),
    Aim("ordinary over Hugging Face generate, float32", "ordinary fp32", "HF generate fp32", 1.0),
    Aim("default over Hugging Face assisted, same draft, bfloat16", "default bf16", "HF assisted bf16", 1.5),
    Aim("default over Hugging Face prompt lookup, bfloat16", "default bf16", "HF lookup bf16", 1.2),
    Aim("default with int4 weights over llama.cpp Q4_1", "default int4", "llama.cpp Q4_1", 1.0),
)


class Candidate(NamedTuple):
    """A way to speculate. ``most``: longest block of a composite's model; ``tries``: tokens at each position.

    The lookup in front of a model asks for two tokens: a single one is found nearly everywhere and says little.
    """

    kind: str
    gamma: int
    control: str = "fixed"
    most: int | None = None
    tries: int = 1

    @property
    def name(self) -> str:
        parts = [self.kind, f"γ{self.gamma}" if self.control == "fixed" else f"{self.control} to γ{self.gamma}"]
        parts += [f"model {self.most}"] if self.most else []
        return " ".join(parts + ([f"×{self.tries}"] if self.tries > 1 else []))

    def drafter(self, pair: Pair, policy: SamplingPolicy) -> Drafter:
        device = pair.target.device
        if self.kind == "suffix":
            return SuffixDrafter(device)
        if self.kind == "lookup" or pair.draft is None:
            return PromptLookupDrafter(device)
        model = ModelDrafter(pair.draft, policy, pair.vocab, candidates=self.tries)
        if self.kind == "model":
            return model
        return CompositeDrafter(PromptLookupDrafter(device, ngram_min=2), model, most=self.most)


CANDIDATES = (
    Candidate("lookup", 4),
    Candidate("model", 4),
    Candidate("composite", 2),
    Candidate("composite", 4),
    Candidate("composite", 7, most=3, tries=3),
    Candidate("composite", 7, most=4, tries=3),
    Candidate("composite", 8, "fallback", most=4),
)
LOOKUP, MODEL, SUFFIX = CANDIDATES[0], CANDIDATES[1], Candidate("suffix", 4)  # rows of their own


def engine(pair: Pair, candidate: Candidate, tokens: int, costs: Costs, temperature: float = 0.0) -> Engine:
    """Our loop as the candidate says; drafter and control are new for each text, the costs those measured here."""

    def run(prompt: Sequence[int], seed: int) -> peers.Timed:
        control: BlockLength = Fixed(candidate.gamma)
        if candidate.control == "fallback":
            control = Fallback(Adaptive(most=candidate.gamma, costs=costs))
        drafter = candidate.drafter(pair, SamplingPolicy(temperature))
        options: Options = {"drafter": drafter, "control": control, "temperature": temperature}
        return peers.ours(pair, tokens, **options)(prompt, seed)

    return run


def halves(table: pd.DataFrame, pair: Pair, each: int, longest: int = 700) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``each`` first turns of every category to choose with, and as many others to judge with, by the order of their
    digests. Those of more than ``longest`` tokens are left out: their prefill would be most of the run."""
    table = table.assign(ids=table["turns"].map(lambda turns: encode(pair, turns[0])))
    table = table[table["ids"].map(len) <= longest].sort_values("sha256")
    turn = table.groupby("category").cumcount()
    first, second = table[turn < each], table[(turn >= each) & (turn < 2 * each)]
    return first.sort_values(["category", "id"]), second.sort_values(["category", "id"])


# --- the command ------------------------------------------------------------------------------------------


def bandwidth(megabytes: int = 512, rounds: int = 5) -> float:
    """Bytes a second at which memory is read, with the threads in force: the best of some sums over a large tensor."""
    data, best = torch.ones(megabytes * 2**18), math.inf
    for _ in range(rounds):
        begun = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begun)
    return megabytes * 2**20 / best


def weight_bytes(model: torch.nn.Module) -> float:
    """Bytes of weights that a pass reads: all but an embedding that is no output head too."""
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if getattr(head, "weight", None) is not embedding.weight:
        held.pop(embedding.weight.data_ptr(), None)
    return float(sum(held.values()))


@dataclass
class Contest:
    """Everything that is set against each other: the pair in each number format, and what was measured before."""

    name: str
    tokens: int  # the most of a text
    pairs: dict[str, Pair] = field(default_factory=dict)
    others: dict[str, Pair] = field(default_factory=dict)
    costs: dict[str, Costs] = field(default_factory=dict)
    chosen: dict[str, Candidate] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # engines that are not installed

    def load(self, weights: str) -> Pair:
        formats = {"bf16": {"dtype": "bfloat16"}, "fp32": {"dtype": "float32"}}
        how = formats.get(weights, {"dtype": "bfloat16", "quantize": weights})
        self.pairs[weights] = models.load_pair(self.name, device="cpu", **how)
        return self.pairs[weights]

    def plain(self, weights: str) -> Pair:
        """The pair as others have it: its weights as they lie."""
        if weights not in self.others:
            dtype = {"bf16": "bfloat16", "fp32": "float32"}[weights]
            self.others[weights] = models.load_pair(self.name, device="cpu", dtype=dtype, pack=False)
        return self.others[weights]

    def calibrate(self, weights: str, prompt: Sequence[int]) -> pd.DataFrame:
        measured = calibrate(self.pairs[weights], [list(prompt)])
        self.costs[weights] = Costs(measured)
        return frame(measured).assign(weights=weights)

    def own(self, weights: str, candidate: Candidate | None, temperature: float = 0.0, share: int = 1) -> Arm:
        """An arm of ours: the candidate, or ordinary decoding, for texts of a ``share``-th of the length."""
        pair, warm = self.pairs[weights], f" T={temperature:g}".replace("0.", ".") if temperature else ""
        over, read, tokens = f"ordinary {weights}{warm}", weight_bytes(pair.target), self.tokens // share
        if candidate is None:
            run = peers.ours(pair, tokens, speculate=False, temperature=temperature)
        else:
            run = engine(pair, candidate, tokens, self.costs[weights], temperature)
        return Arm(run, over, weights, temperature, read)

    def fit(self, seconds: float, prompts: int) -> None:
        """Shorter texts, of 32 tokens at least, where everything would take longer. An arm is taken to need an
        ordinary pass for every token, and prompts and engines that are slower to cost a third more. Of still shorter
        texts the reading of the prompt by the draft, which counts as decoding, would be a large part."""
        arms = {weights: float(JUDGED[weights]) for weights in self.pairs}
        for weights in CHOOSING:
            arms[weights] += (1 + len(CANDIDATES)) / 2  # on texts of half the length
        a_token = prompts * sum(n * (self.costs[w].get("target", 1, 1) or 0.0) for w, n in arms.items())
        self.tokens = min(self.tokens, max(32, int(seconds / (4 / 3 * a_token))))

    def choosing(self, weights: str) -> dict[str, Arm]:
        """Ordinary decoding and every candidate that this pair can be drafted with, on texts of half the length."""
        possible = [c for c in CANDIDATES if self.pairs[weights].draft is not None or c.kind == "lookup"]
        arms = {"ordinary": self.own(weights, None, share=2)} | {
            c.name: self.own(weights, c, share=2) for c in possible
        }
        return {name: arm._replace(over="ordinary") for name, arm in arms.items()}

    def judging(self) -> dict[str, Arm]:
        """The default in every number format, ordinary decoding in each, and the others' engines."""
        arms: dict[str, Arm] = {}
        for weights in self.pairs:
            chosen = self.chosen.get(weights, self.chosen["int4"])
            arms |= {f"ordinary {weights}": self.own(weights, None), f"default {weights}": self.own(weights, chosen)}
        not_packed = peers.ours(self.plain("bf16"), self.tokens, speculate=False)
        arms["not packed bf16"] = Arm(not_packed, "ordinary bf16", "bf16", bytes=arms["ordinary bf16"].bytes)
        for weights in ("bf16", "fp32"):
            arms |= self._hugging_face(weights)
        for candidate in (LOOKUP, SUFFIX, MODEL) if self.pairs["bf16"].draft is not None else (LOOKUP, SUFFIX):
            arms[f"{candidate.name} bf16"] = self.own("bf16", candidate)
        for name, known in {"ordinary": None, "default": self.chosen["bf16"]}.items():
            arms[f"{name} bf16 T=.7"] = self.own("bf16", known, 0.7)
        generate = peers.hugging_face(self.plain("bf16"), self.tokens, 0.7)
        arms["HF generate bf16 T=.7"] = Arm(generate, "ordinary bf16 T=.7", "bf16", 0.7)
        return arms | self._installed()

    def _hugging_face(self, weights: str) -> dict[str, Arm]:
        pair, over, gamma = self.plain(weights), f"ordinary {weights}", LOOKUP.gamma
        lookup = peers.hugging_face(pair, self.tokens, prompt_lookup_num_tokens=gamma, max_matching_ngram_size=3)
        engines = {"generate": peers.hugging_face(pair, self.tokens), "lookup": lookup}
        if draft := self.whole_draft(weights):
            engines["assisted"] = peers.assisted(pair, draft, self.tokens, gamma)
        return {f"HF {name} {weights}": Arm(run, over, weights) for name, run in engines.items()}

    def whole_draft(self, weights: str) -> PreTrainedModel | None:
        """The draft as others load it, with its whole output head."""
        pair = self.plain(weights)
        ref = pair.lineage.get("draft_ref")
        if ref is None or pair.draft is pair.target:
            return None
        draft = models.load_model(ref, dtype=pair.lineage["dtype"], device="cpu")
        share_embeddings(draft, pair.target)
        return draft

    def _installed(self) -> dict[str, Arm]:
        """Engines that are there; of the others their names are kept in ``missing``."""
        arms, draft, threads = {}, self.whole_draft("bf16"), torch.get_num_threads()
        ways: dict[str, Callable[[], Engine]] = {}
        if draft is not None:
            ways["flashspec bf16"] = lambda: peers.flashspec(self.plain("bf16"), draft, self.tokens)
        if self.pairs["bf16"].lineage["target_ref"] == models.DEFAULT_MODEL:
            ways["llama.cpp Q4_1"] = lambda: peers.llama_cpp(models.default_gguf(), self.tokens, threads)
        for name, make in ways.items():
            try:
                arms[name] = Arm(make(), "ordinary bf16", name.split()[-1])
            except SpecDecError as error:
                self.missing.append(f"{name}: {error}")
        return arms


def quickest_threads(contest: Contest, prompt: Sequence[int]) -> int:
    """As many threads as give the shortest ordinary pass: half of those that torch takes, or all."""
    most, best = torch.get_num_threads(), {}
    for threads in {max(1, most // 2), most}:
        torch.set_num_threads(threads)
        best[threads] = calibrate(contest.pairs["bf16"], [list(prompt)], most=0)["target", 1, 1]
    quickest = min(best, key=lambda t: best[t])
    torch.set_num_threads(quickest)
    return quickest


def command(
    pair: str = "smollm2", data: str = workloads.BUILTIN, tokens: int = 64, each: int = 1, minutes: float = 10.0
) -> None:
    """Measure, choose, confirm, print the table, and keep a run with all that produced it."""
    number("minutes", minutes, lambda m: 0 < m < 1e5, "a number above 0")
    params = {"pair": pair, "data": data, "tokens": tokens, "each": each, "minutes": minutes, "rule": RULE}
    before = {"load.before": os.getloadavg()[0]}
    named = open_run(f"bench cpu {pair}", kind="bench", params=params, tags=before)
    with named as run, _no_advice():
        if kind := models.read_pair(pair).quantize:
            raise SpecDecError(
                f"Pair {pair!r} is quantised ({kind}) already: give it without, the bench has rows for both."
            )
        contest, asked = Contest(pair, tokens), workloads.prompts(data)
        run.log_pair(contest.load("bf16"))
        first, second = halves(asked, contest.pairs["bf16"], each)
        if second.empty or first.empty:
            raise SpecDecError(f"{data} has no category with {2 * each} prompts: ask for fewer with --prompts.")
        run.log_prompts(pd.concat([first, second])[list(asked.columns)], data)
        warm = first["ids"].iloc[0]
        threads = quickest_threads(contest, warm)
        for weights in ("fp32", "int8", "int4"):
            contest.load(weights)
        costs = pd.concat([contest.calibrate(weights, warm) for weights in contest.pairs])
        run.log_table(costs, "costs")
        contest.fit(60 * minutes, len(second))
        with Progress() as progress:
            candidates = [_choose(contest, weights, first, progress) for weights in CHOOSING]
            run.log_table(pd.concat(candidates), "candidates")
            judged = _judge(contest, second, progress)
        _keep(run, contest, judged, threads)


@contextmanager
def _no_advice() -> Iterator[None]:
    """Hide what transformers says of options that it, or an engine built on it, passes to itself."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(before)


def _choose(contest: Contest, weights: str, asked: pd.DataFrame, progress: Progress) -> pd.DataFrame:
    race = Race(contest.choosing(weights))
    race.warm_up(asked["ids"].iloc[0][:32])
    race.run(asked, _bar(progress, f"choosing, {weights}", len(race.arms) * len(asked)))
    found = means(race.times, "ordinary")
    contest.chosen[weights] = next(c for c in CANDIDATES if c.name == found[0]["arm"])
    return pd.DataFrame(found).assign(weights=weights)


def _judge(contest: Contest, asked: pd.DataFrame, progress: Progress) -> Race:
    race = Race(contest.judging())
    race.warm_up(asked["ids"].iloc[0][:32])
    race.run(asked, _bar(progress, "judging", len(race.arms) * len(asked)))
    return race


def _bar(progress: Progress, what: str, total: int) -> Callable[[str], None]:
    task = progress.add_task(what, total=total)
    return lambda said: progress.update(task, advance=1, description=f"{what}: {said}")


def _keep(run: Run, contest: Contest, race: Race, threads: int) -> None:
    """Everything into the run, and the table on the screen."""
    chosen = "; ".join(f"{weights}: {candidate.name}" for weights, candidate in contest.chosen.items())
    speed = bandwidth()
    rows = table(race, speed)
    aims = [judged for aim in AIMS if (judged := aim.judge(race.times))]
    run.log_table(pd.DataFrame(rows), "speed")
    run.log_table(pd.DataFrame(aims), "aims")
    run.log_table(race.times, "times")
    run.log_tokens(list(race.texts.values()))
    run.set_tags(
        {
            "chosen": chosen,
            "threads": threads,
            "tokens": contest.tokens,
            "missing": "; ".join(contest.missing) or "none",
        }
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    run.log_metrics({"bandwidth_gb_s": speed / 1e9, "peak_memory_gb": peak / 1e9})
    plain = {r["arm"]: re.sub(r"[^\w .:/-]", "", r["arm"].replace("γ", "gamma"), flags=re.ASCII) for r in rows}
    parts = (("value", ""), ("low", ".low"), ("high", ".high"))
    run.log_metrics({f"{plain[r['arm']]}{end}": r[key] for r in rows for key, end in parts})
    said = finding(rows, aims, chosen)
    run.finding(said)
    console = Console()
    console.width = max(console.width, 150)
    for shown in (screen(rows, run.name), screen(aims, "aims")):
        console.print(shown)
    console.print(said, *contest.missing, run_link(run.store, run.id), sep="\n", soft_wrap=True, markup=False)


def finding(rows: Sequence[Mapping[str, Any]], aims: Sequence[Mapping[str, Any]], chosen: str) -> str:
    """The first line says whether the default pays; then what was aimed at, and whether texts were the same."""
    default = next(r for r in rows if r["arm"] == "default bf16")
    confirmed = "confirmed" if default["low"] > 1 else "not confirmed"
    exact = [r for r in rows if r["weights"] == "fp32" and r["arm"] != r["over"]]
    same, texts = sum(r["same_texts"] for r in exact), sum(r["texts"] for r in exact)
    lines = [
        f"Chosen on one half ({chosen}) and {confirmed} on the other: {default['ratio']} of ordinary speed in bfloat16."
    ]
    lines += ["", f"- {same} of {texts} greedy texts in float32 are those of our ordinary decoding"]
    return "\n".join(lines + [f"- {a['aim']}: aim ≥ {a['least']:g}, {a['reached']}: {a['verdict']}" for a in aims])
