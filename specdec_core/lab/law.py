"""The law of the output on a real pair: a test that says beforehand what it would notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..api import Pair, Prompt, encode
from ..drafters import Drafter
from ..loop import Request, Settings, speculative_decoding
from ..processors import Processing
from ..sampling import RequestRandom, SamplingPolicy, distribution
from ..verify import Rule
from .stats import detectable_distance, law_test


@dataclass(frozen=True)
class PairLaw:
    """What a test of the second token's law found, and what it could have found."""

    p_value: float
    false_alarm: float
    rows: int
    cells: int
    detectable: float
    power: float
    accepted: float
    distance: float

    @property
    def kept(self) -> bool:
        return self.p_value >= self.false_alarm

    def __str__(self) -> str:
        verdict = "consistent with the target's law" if self.kept else "NOT the target's law"
        return (
            f"{self.rows} texts, {self.accepted:.0%} of first drafted tokens accepted: the token after is {verdict} "
            f"(p = {self.p_value:.2g}, false alarm {self.false_alarm:g}; seen distance {self.distance:.3f}). The test "
            f"would detect a total variation of {self.detectable:.3f} with probability {self.power:.2f}."
        )


@torch.inference_mode()
def pair_law(
    pair: Pair,
    prompt: Prompt,
    drafter: Drafter,
    policy: SamplingPolicy,
    rows: int,
    rule: Rule | None = None,
    gamma: int = 3,
    cells: int = 24,
    false_alarm: float = 1e-6,
    power: float = 0.99,
    batch: int = 64,
    progress: Callable[[int], None] = lambda done: None,
) -> PairLaw:
    """Sample ``rows`` texts of one prompt and hold their second token against the target's exact law there.

    The first token is forced to the target's likeliest, so that the second, the first that a draft proposes, has one
    known law. Its likeliest tokens are counted each (at most ``cells``, expected 5 times or more), the others together.
    """
    ids = encode(pair, prompt)
    logits = pair.target(input_ids=torch.tensor([ids], device=pair.target.device), use_cache=False).logits[0, -1]
    text = torch.tensor([[*ids, int(logits.argmax())]], device=pair.target.device)
    law = distribution(pair.target(input_ids=text, use_cache=False).logits[0, -1].double(), policy)
    likeliest = [t for t in law.topk(cells).indices.tolist() if float(law[t]) * rows >= 5]  # chi-square wants that
    cut = [float(law[t]) for t in likeliest]
    expected = [*cut, max(1 - sum(cut), 0.0)]
    settings = Settings(
        gamma=gamma,
        policy=policy,
        rule=rule,
        diagnostics=False,
        processing=Processing(forced=((0, int(text[0, -1])),)),
        max_batch=batch,
    )
    requests = [Request(i, ids, gamma + 2, RequestRandom(0, i)) for i in range(rows)]
    for _ in speculative_decoding(pair.target, requests, drafter, settings):
        progress(sum(len(r.output) > 1 for r in requests))
    seen = Counter(r.output[1] for r in requests)
    counts = [seen[t] for t in likeliest]
    counts.append(rows - sum(counts))
    judged = [r.records[1] for r in requests if r.records[1].verified]
    return PairLaw(
        law_test(counts, expected),
        false_alarm,
        rows,
        len(expected),
        detectable_distance(expected, rows, false_alarm, power),
        power,
        sum(r.accepted > 0 for r in judged) / max(len(judged), 1),
        sum(abs(c / rows - x) for c, x in zip(counts, expected, strict=True)) / 2,
    )
