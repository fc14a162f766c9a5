"""What the tests of all drafters ask: rows that do not touch each other, and laws that are the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import torch
from kit import decode
from scipy.stats import chisquare
from torch import Tensor

from specdec_core import SamplingPolicy
from specdec_core.drafters import Drafter
from specdec_core.lab.theory import Law, Prefix, law_distance, step_law, target_law
from specdec_core.loop import Request, Settings
from specdec_core.verify import TOKEN

FALSE_ALARM = 1e-6
PROMPTS = ([7, 8, 9], [3, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [5] * 20)  # ragged; some repeat themselves


def as_alone(
    target, make: Callable[[], Drafter], policy: SamplingPolicy, tokens: int = 20, prompts=PROMPTS, gamma: int = 3
) -> list[Request]:
    """Rows decoded together, each held against its own run, one in which rows wait for a place, and, when greedy,
    ordinary decoding."""
    settings = Settings(gamma=gamma, policy=policy)
    together = decode(target, prompts, make(), tokens, settings)
    by_two = decode(target, prompts, make(), tokens, Settings(gamma=gamma, policy=policy, max_batch=2))
    assert [r.output for r in by_two] == [r.output for r in together]
    plain = decode(target, prompts, None, tokens, settings)
    for row, prompt in enumerate(prompts):
        (alone,) = decode(target, [prompt], make(), tokens, settings, first_id=row)
        assert together[row].output == alone.output
        if policy.greedy:
            assert together[row].output == plain[row].output
    assert not [r.reason for request in together for r in request.records if r.control == "degraded"]
    return together


def blocks_of(
    make: Callable[[], Drafter], vocab: int, context: Prefix, text: Prefix, beside: Prefix, order: Prefix
) -> Callable[[Prefix], tuple[Tensor, int]]:
    """The drafter's own law for each position of a block behind ``context + text``, and the length of that block; read
    off by giving it the coins that draw what is asked for. ``beside`` is a neighbour's text, if there is one; ``order``
    that in which the drafter lays out its tokens when it draws, where that is not the vocabulary's."""
    others = [list(beside)] if beside else []
    order = order or tuple(range(vocab))

    @cache
    def judged(whole: Prefix) -> tuple[Tensor, int]:
        block, toss = whole[len(text) :], []
        for i, token in enumerate(block):
            law, length = judged(whole[: len(text) + i])
            if length <= i or law[token] == 0:
                return law, min(length, i)  # never drawn: what follows it does not count
            before = list(order[: order.index(token)])
            toss.append(float((law[before].sum() + law[token] / 2) / law.sum()))
        drafter = make()
        drafter.start()
        drafter.join([list(context), *others])
        coins = torch.tensor([[*toss, 0.5]] * (1 + len(others)), dtype=torch.float64)
        with torch.inference_mode():
            found = drafter.propose([[*context, *text], *others], [len(block) + 1] * len(coins), coins)
        length = int(found.lengths[0])
        if length <= len(block):
            return torch.full((vocab,), 1 / vocab, dtype=torch.float64), length
        if found.q is None:
            return torch.eye(vocab, dtype=torch.float64)[found.tokens[0, len(block)]], length
        assert found.tokens[0, : len(block)].tolist() == list(block)
        return found.q[0, len(block)].double(), length

    return judged


def distance_from_target(
    make: Callable[[], Drafter],
    target: Law,
    context: Prefix,
    gamma: int,
    horizon: int,
    beside: Prefix = (),
    order: Prefix = (),
) -> float:
    """How far the law of the first ``horizon`` tokens is from the target's, all blocks of the drafter added up."""
    mass: dict[Prefix, float] = {(): 1.0}
    for length in range(horizon):
        for text in [x for x in mass if len(x) == length]:
            weight, judged = mass.pop(text), blocks_of(make, len(target(())), context, text, beside, order)
            law = lambda whole, judged=judged: judged(whole)[0]  # noqa: E731
            ends = lambda whole, judged=judged, n=length: judged(whole)[1] <= len(whole) - n  # noqa: E731
            for emitted, chance in step_law(target, law, TOKEN, gamma, text, ends=ends).items():
                longer = (text + emitted)[:horizon]
                mass[longer] = mass.get(longer, 0.0) + weight * chance
    return law_distance(mass, target_law(target, horizon))


def samples_p_value(
    target,
    law: Law,
    make: Callable[[], Drafter],
    prompt: Sequence[int],
    gamma: int = 2,
    rows: int = 3000,
    seed: int = 1,
) -> float:
    """Chi-square of the loop's second and third token over ``rows`` requests; the first comes with the prefill."""
    settings = Settings(gamma=gamma, policy=SamplingPolicy(1.0), diagnostics=False)
    seen: Counter[Prefix] = Counter()
    requests = decode(target, [prompt] * rows, make(), 4, settings, seed)
    assert sum(r.verified for request in requests for r in request.records) > 0
    for request in requests:
        seen[tuple(request.output[:3])] += 1
    want = target_law(law, 3)
    assert seen.keys() <= want.keys(), "a text of probability 0 was emitted"
    # Rare texts are taken together, so that the test's own law holds.
    often = [x for x in want if want[x] * rows >= 10]
    counts, expected = [seen[x] for x in often], [want[x] * rows for x in often]
    if (rest := rows - sum(expected)) > 1e-6:
        counts, expected = [*counts, rows - sum(counts)], [*expected, rest]
    return float(chisquare(counts, expected).pvalue)
