"""The evidence of notebook 01: laws enumerated, wrong rules caught, tables reproduced, a prediction checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..api import Output, Pair, generate
from ..drafters import ModelDrafter, Proposal
from ..loop import Request, Settings, speculative_decoding
from ..record import acceptance_length_pooled, alpha_hat, target_passes, tokens_emitted
from ..sampling import RequestRandom, SamplingPolicy
from ..verify import BLOCK, TOKEN, Rule
from .lossy import LOSSY
from .replay import Meeting, predict
from .stats import Interval, bootstrap, detectable_distance, law_test, power_against
from .table_model import iid
from .theory import (
    Law,
    best_gamma,
    constant_law,
    law_distance,
    mean_accepted,
    operations_factor,
    output_law,
    random_law,
    step_law,
    target_law,
    walltime_factor,
)

# Published by Leviathan, Kalman, Matias 2023, table 1: (alpha, gamma, operations, speed), draft cost neglected.
LEVIATHAN_TABLE_1 = (
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86),
)  # fmt: skip

# (p, q, γ) the same at every position of a block. The first can be added up by hand: 10/9 by tokens, 11/9 by blocks.
BLOCKS = (
    ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2),
    ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 3),
    ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 5),
)


@dataclass(frozen=True)
class Loop:
    """A way of verifying, right or planted: the rule, and what the draft draws from when it lies about q."""

    name: str
    rule: Rule
    exact: bool
    lie: Callable[[Tensor], Tensor] | None = None


def argmax_of(q: Tensor) -> Tensor:
    """A draft that takes its argmax but reports its softmax (condition A1)."""
    return torch.zeros_like(q).scatter_(-1, q.argmax(-1, keepdim=True), 1.0)


def top_two_of(q: Tensor) -> Tensor:
    """A draft that draws after its top-k filter but reports the law before it (condition A2)."""
    kept = q * (q >= q.topk(min(2, q.shape[-1]), dim=-1).values[..., -1:])
    return kept / kept.sum(-1, keepdim=True)


LOOPS = (
    Loop("token rule (exact)", TOKEN, True),
    Loop("block rule (exact)", BLOCK, True),
    *(Loop(name.replace("_", " "), rule, False) for name, rule in LOSSY.items()),
    Loop("argmax draft, q = softmax", TOKEN, False, argmax_of),
    Loop("top-2 draft, q unfiltered", TOKEN, False, top_two_of),
)


def enumerate_laws(vocab_max: int, gamma_max: int, laws: int, seed: int = 0) -> pd.DataFrame:
    """The exact error of every loop on ``laws`` random (p, q) pairs, over vocabularies and block lengths in turn.

    Vocabularies start at 3: with two tokens every residual is the other token, so there is less to get wrong.
    """
    rows = []
    for i in range(laws):
        vocab = 3 + i % (vocab_max - 2) if vocab_max > 2 else 2
        gamma = 1 + i % gamma_max
        p, q = random_law(vocab, seed + 2 * i, 1.5), random_law(vocab, seed + 2 * i + 1, 1.5)
        want = target_law(p, 2)
        for loop in LOOPS:
            got = output_law(p, q, loop.rule, gamma, 2, drawn=_drawn(loop, q))
            error = law_distance(got, want)
            rows.append(
                {"rule": loop.name, "exact": loop.exact, "vocab": vocab, "gamma": gamma, "law": i, "error": error}
            )
    return pd.DataFrame(rows)


def _drawn(loop: Loop, q: Law) -> Law | None:
    lie = loop.lie
    return None if lie is None else lambda prefix: lie(q(prefix))


class _Liar(ModelDrafter):
    """A model drafter that draws from ``lie(q)`` and reports q."""

    def __init__(self, drawn: Sequence[float], reported: Tensor):
        super().__init__(iid(drawn), SamplingPolicy(1.0), len(drawn))
        self.reported = reported.float()

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        proposal = super().propose(sequences, room, u)
        proposal.q = self.reported.expand(*proposal.tokens.shape, -1)
        return proposal


def sample_laws(rows: int, false_alarm: float = 1e-6, seed: int = 0) -> pd.DataFrame:
    """Run the whole loop ``rows`` times a rule, on p = (.5, .3, .2) and q = (.2, .3, .5), and test the second token.

    The table says what came out, the p-value, and the power: the probability that this test, at this size and
    false-alarm rate, notices the law that this loop truly has (which enumeration tells). Exact rules have none: there
    is nothing to notice.
    """
    p, q = [0.5, 0.3, 0.2], torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    found = []
    for loop in LOOPS:
        drawn = q if loop.lie is None else loop.lie(q)
        settings = Settings(gamma=2, policy=SamplingPolicy(1.0), rule=loop.rule, diagnostics=False)
        requests = [Request(i, [0], 4, RequestRandom(seed, i)) for i in range(rows)]
        for _ in speculative_decoding(iid(p), requests, _Liar(drawn.tolist(), q), settings):
            pass
        seen = Counter(r.output[1] for r in requests)
        counts = [seen[t] for t in range(3)]
        true = output_law(
            constant_law(p), constant_law(q.tolist()), loop.rule, 2, 1, drawn=constant_law(drawn.tolist())
        )
        law = [true.get((t,), 0.0) for t in range(3)]
        value = law_test(counts, p)
        found.append(
            {
                "rule": loop.name,
                "emitted": " ".join(f"{c / rows:.3f}" for c in counts),
                "enumerated law": " ".join(f"{x:.3f}" for x in law),
                "p-value": value,
                "power": None if loop.exact else power_against(p, law, rows, false_alarm),
                "caught": value < false_alarm,
                "should be caught": not loop.exact,
            }
        )
    table = pd.DataFrame(found)
    table.attrs["detectable"] = detectable_distance(p, rows, false_alarm)
    return table


def leviathan_table() -> pd.DataFrame:
    """Table 1 of the paper beside our closed forms."""
    rows = [
        {
            "α": a, "γ": g,
            "operations, published": ops, "operations, ours": round(operations_factor(a, g, 0.0), 2),
            "speed, published": speed, "speed, ours": round(walltime_factor(a, g, 0.0), 2),
        }
        for a, g, ops, speed in LEVIATHAN_TABLE_1
    ]  # fmt: skip
    return pd.DataFrame(rows)


def block_table() -> pd.DataFrame:
    """Accepted tokens a block, the one that follows not counted, by the token and by the block rule: enumerated."""
    rows = []
    for p, q, gamma in BLOCKS:
        token, block = (
            mean_accepted(step_law(constant_law(p), constant_law(q), rule, gamma)) for rule in (TOKEN, BLOCK)
        )
        named = {name: ", ".join(f"{x:.3g}" for x in law) for name, law in (("p", p), ("q", q))}
        rows.append({**named, "γ": gamma, "token rule": token, "block rule": block, "more by": block / token - 1})
    return pd.DataFrame(rows)


def best_gammas(alphas: Sequence[float] = (0.6, 0.8, 0.9), cs: Sequence[float] = (0.05, 0.1, 0.5)) -> pd.DataFrame:
    """The best γ up to 20 and its walltime factor, by α (rows) and c (columns)."""
    cells = {f"c = {c}": [f"γ = {g}: {f:.2f} ×" for g, f in (best_gamma(a, c) for a in alphas)] for c in cs}
    return pd.DataFrame(cells, index=[f"α = {a}" for a in alphas])


# --- prediction before measurement ------------------------------------------------------------------------


def ordinary_texts(
    pair: Pair,
    prompts: Sequence[str],
    policy: SamplingPolicy,
    max_new_tokens: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Output]:
    """What the prediction may know: texts of ordinary decoding, no draft involved."""
    texts = []
    for i, prompt in enumerate(prompts):
        progress(f"ordinary text {i + 1} of {len(prompts)}")
        texts.append(
            generate(pair, prompt, speculate=False, max_new_tokens=max_new_tokens, seed=seed + i, **policy.as_dict())
        )
    return texts


def predicted(
    pair: Pair, texts: Sequence[Output], drafter: str, gammas: Sequence[int], policy: SamplingPolicy
) -> pd.DataFrame:
    """α and tokens per pass by γ, from the texts alone."""
    met = [Meeting(pair, text, policy) for text in texts]
    return pd.DataFrame([{"gamma": g, **predict([m.replay(drafter, g) for m in met])} for g in gammas])


def measured(
    pair: Pair,
    prompts: Sequence[str],
    drafter: str,
    gammas: Sequence[int],
    policy: SamplingPolicy,
    max_new_tokens: int,
    seed: int,
    progress: Callable[[str], None],
) -> tuple[pd.DataFrame, dict[int, list[Output]]]:
    """The same numbers from the loop, with intervals over prompts. Other coins than the texts of the prediction."""
    rows = []
    outputs: dict[int, list[Output]] = {}
    for g in gammas:
        outputs[g] = []
        for i, prompt in enumerate(prompts):
            progress(f"γ = {g}, prompt {i + 1} of {len(prompts)}")
            options = {
                "drafter": drafter,
                "control": "fixed",
                "candidates": 1,
                "confidence": 0.0,
                "model_gamma": None,
                "max_new_tokens": max_new_tokens,
                "seed": seed + 1000 + i,
                **policy.as_dict(),
            }
            outputs[g].append(generate(pair, prompt, gamma=g, **options))
        sums = [_totals(o) for o in outputs[g]]
        per_pass = bootstrap(sums, lambda s: s[0] / s[1] if s[1] else np.nan)
        everything = [r for o in outputs[g] for r in o.records]
        rows.append(
            {
                "gamma": g,
                "alpha_hat": alpha_hat(everything),
                "acceptance_length": acceptance_length_pooled(everything),
                "tokens_per_pass": per_pass.value,
                "low": per_pass.low,
                "high": per_pass.high,
            }
        )
    return pd.DataFrame(rows), outputs


def side_by_side(told: pd.DataFrame, seen: pd.DataFrame) -> pd.DataFrame:
    """Prediction and measurement by γ, with columns for people."""
    both = told.merge(seen, on="gamma")
    return pd.DataFrame(
        {
            "γ": both["gamma"],
            "α predicted": both["alpha"],
            "α measured": both["alpha_hat"],
            "tokens a pass, along the text": both["along_the_text"],
            "with a constant α": both["constant_alpha"],
            "measured": both["tokens_per_pass"],
            "95 % interval": [f"{low:.2f} to {high:.2f}" for low, high in zip(both["low"], both["high"], strict=True)],
        }
    )


def worst_error(predicted: pd.Series, seen: pd.DataFrame) -> float:
    """Largest relative error of a prediction of tokens per pass, over γ."""
    return float(np.abs(predicted.to_numpy() / seen["tokens_per_pass"].to_numpy() - 1).max())


def p_text(value: float) -> str:
    """A p-value for a table."""
    return "below 1e-100" if value < 1e-100 else f"{value:.1e}"


def intervals(table: pd.DataFrame) -> list[Interval]:
    """The measured tokens per pass of :func:`measured` as intervals, in the order of its rows."""
    return [Interval(*row) for row in table[["tokens_per_pass", "low", "high"]].to_numpy(dtype=float).tolist()]


def _totals(output: Output) -> list[float]:
    decode = [r for r in output.records if r.kind != "prefill"]
    return [tokens_emitted(decode), target_passes(decode)]
