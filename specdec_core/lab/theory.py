"""Closed forms of speculative decoding, and the oracle that adds up the exact law of what the loop emits.

Symbols follow Leviathan et al. 2023: α acceptance rate, γ block length, c cost of a draft token over a target pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..verify import Rule, branch_chances, next_law

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Tensor]  # text so far -> [V] float64 probabilities of the next token


# --- closed forms -----------------------------------------------------------------------------------------


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """α = Σ min(p, q) = 1 - TV(p, q), over the last axis (corollary 3.6)."""
    return torch.minimum(p, q).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """TV = ½ Σ |p - q|, over the last axis."""
    return (p - q).abs().sum(-1) / 2


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target pass, bonus included, when α is the same everywhere: (1 - α^(γ+1)) / (1 - α) (equation 1)."""
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_tokens_mixture(alphas: Iterable[float], gamma: int) -> float:
    """The same when passes have different α, each equally often. Never less than at the mean α (convexity)."""
    values = [expected_tokens(a, gamma) for a in alphas]
    return sum(values) / len(values)


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Expected speed over ordinary decoding: expected_tokens / (γc + 1) (theorem 3.8). Above 1 only if α > c."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: int, c_ops: float) -> float:
    """Expected growth in arithmetic: (1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)) (theorem 3.11)."""
    return (gamma * c_ops + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, most: int = 20) -> tuple[int, float]:
    """The γ in 1..``most`` with the largest walltime factor, and that factor."""
    gamma = max(range(1, most + 1), key=lambda g: walltime_factor(alpha, g, c))
    return gamma, walltime_factor(alpha, gamma, c)


def accepted_over_drafted(alpha: float, gamma: int) -> float:
    """Expected share of drafted tokens that are kept, (E - 1) / γ: a number often mistaken for α."""
    return (expected_tokens(alpha, gamma) - 1) / gamma


# --- the oracle -------------------------------------------------------------------------------------------


def output_law(
    target: Law, draft: Law, rule: Rule, gamma: int, horizon: int, drawn: Law | None = None, **how: Any
) -> dict[Prefix, float]:
    """The exact law of the first ``horizon`` tokens that the loop emits, over all blocks, coins and steps.

    It runs the functions of ``verify`` themselves: each block's probability is multiplied out, its survival gives
    the law of the accepted length, and ``next_law`` that of the token after it. Nothing is sampled.

    Args:
        target, draft: the laws p and q; ``drawn`` the law that draft tokens really come from when a draft lies.
        how: ``ends`` and ``candidates`` of :func:`step_law`.
    """
    target, draft = cache(target), cache(draft)
    mass: dict[Prefix, float] = {(): 1.0}
    for length in range(horizon):
        for prefix in [x for x in mass if len(x) == length]:
            weight = mass.pop(prefix)
            for emitted, chance in step_law(target, draft, rule, gamma, prefix, drawn, **how).items():
                text = (prefix + emitted)[:horizon]
                mass[text] = mass.get(text, 0.0) + weight * chance
    return mass


def step_law(
    target: Law,
    draft: Law,
    rule: Rule,
    gamma: int,
    prefix: Prefix = (),
    drawn: Law | None = None,
    ends: Callable[[Prefix], bool] = lambda text: False,
    candidates: Callable[[Prefix, int], Candidates] | None = None,
) -> dict[Prefix, float]:
    """The exact law of what one step emits after ``prefix``: the accepted tokens and what follows them.

    Args:
        ends: whether the draft stops before the position after this text (a confidence stop, a full context).
        candidates: text and first candidate -> the further ones; :func:`drawn_candidates`, :func:`chosen_candidates`.
    """
    vocab = len(target(prefix))
    blocks = list(itertools.product(range(vocab), repeat=gamma))
    tokens = torch.tensor(blocks)
    p = torch.stack([_along(target, prefix, b, gamma + 1) for b in blocks])
    q = torch.stack([_along(draft, prefix, b, gamma) for b in blocks])
    source = q if drawn is None else torch.stack([_along(drawn, prefix, b, gamma) for b in blocks])
    chance = source.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).prod(1)
    lengths = torch.tensor([_length(prefix, b, ends) for b in blocks])
    real = torch.arange(gamma) < lengths.unsqueeze(1)
    survival = rule.survival(p, q, tokens, lengths) * real
    reach = torch.cat([torch.ones(len(blocks), 1), survival, torch.zeros(len(blocks), 1)], 1)
    law: dict[Prefix, float] = {}
    for n in range(gamma + 1):
        weights = next_law(rule, p, q, tokens, lengths, torch.full((len(blocks),), n))
        joint = chance * (reach[:, n] - reach[:, n + 1])
        for row, block in enumerate(blocks):
            if joint[row] <= 0:
                continue
            tails: dict[Prefix, float] = {}
            if candidates is not None and n < int(lengths[row]):
                text = (*prefix, *block[:n])
                tails = _branched(target, rule, weights[row], q[row, n], block[n], text, candidates)
            else:
                tails = _spread((), weights[row])
            for tail, share in tails.items():
                emitted = (*block[:n], *tail)
                law[emitted] = law.get(emitted, 0.0) + float(joint[row]) * share
    return law


@dataclass(frozen=True)
class Candidates:
    """The further candidates of a position: every list of them with its probability. ``drawn`` tells the rule that they
    were drawn from q without replacement; else it takes them as chosen."""

    chances: dict[Prefix, float]
    drawn: bool


def drawn_candidates(draft: Law, k: int) -> Callable[[Prefix, int], Candidates]:
    """``k - 1`` more, drawn from the draft's law without those before."""

    def candidates(text: Prefix, first: int) -> Candidates:
        chances: dict[Prefix, float] = {(): 1.0}
        for _ in range(k - 1):
            grown: dict[Prefix, float] = {}
            for taken, chance in chances.items():
                left = draft(text).clone()
                left[[first, *taken]] = 0.0
                for token, share in _spread((), left).items() if left.sum() > 0 else [((first,), 1.0)]:
                    grown[taken + token] = grown.get(taken + token, 0.0) + chance * share
            chances = grown
        return Candidates(chances, True)

    return candidates


def chosen_candidates(
    pick: Callable[[Prefix], Sequence[int]], told: bool = True
) -> Callable[[Prefix, int], Candidates]:
    """Those that ``pick`` names but for the first. ``told=False`` is the lie of condition A10: as if drawn."""
    return lambda text, first: Candidates({tuple(t for t in pick(text) if t != first): 1.0}, not told)


def _branched(
    target: Law,
    rule: Rule,
    weights: Tensor,
    q: Tensor,
    first: int,
    text: Prefix,
    candidates: Callable[[Prefix, int], Candidates],
) -> dict[Prefix, float]:
    """What follows a rejected position with further candidates: one of them and a token after it, or what is left."""
    law: dict[Prefix, float] = {}
    found = candidates(text, first)
    for branches, chance in found.chances.items():
        kept, left = branch_chances(
            rule,
            weights.unsqueeze(0),
            q.unsqueeze(0) if found.drawn else None,
            torch.tensor([first]),
            torch.tensor([branches]),
        )
        outcomes = [((y,), target((*text, y)), float(kept[0, j])) for j, y in enumerate(branches)]
        for head, after, share in [*outcomes, ((), left[0], 1 - float(kept.sum()))]:
            for tail, x in _spread(head, after).items():
                law[tail] = law.get(tail, 0.0) + chance * share * x
    return law


def _spread(head: Prefix, weights: Tensor) -> dict[Prefix, float]:
    total = float(weights.sum())
    return {(*head, t): w / total for t, w in enumerate(weights.tolist()) if w}


def _length(prefix: Prefix, block: Prefix, ends: Callable[[Prefix], bool]) -> int:
    return next((i for i in range(len(block)) if ends((*prefix, *block[:i]))), len(block))


def target_law(target: Law, horizon: int) -> dict[Prefix, float]:
    """The law of the first ``horizon`` tokens under ordinary decoding: the product of the target's own."""
    mass: dict[Prefix, float] = {(): 1.0}
    for _ in range(horizon):
        mass = {(*x, t): m * float(v) for x, m in mass.items() for t, v in enumerate(target(x)) if v > 0}
    return mass


def law_distance(a: dict[Prefix, float], b: dict[Prefix, float]) -> float:
    """Largest difference between two laws on any text."""
    return max(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


def mean_accepted(law: dict[Prefix, float]) -> float:
    """Expected accepted tokens of a step, bonus or resampled token not counted."""
    return sum((len(text) - 1) * chance for text, chance in law.items())


def constant_law(probabilities: Sequence[float]) -> Law:
    """The law that is the same after every text."""
    law = torch.tensor(list(probabilities), dtype=torch.float64)
    return lambda prefix: law


def random_law(vocab: int, seed: int, sharpness: float = 1.0) -> Law:
    """A law that differs after every text, the same for the same seed. ``sharpness`` scales its logits."""

    def law(prefix: Prefix) -> Tensor:
        digits = (seed, vocab, *prefix)
        generator = torch.Generator().manual_seed(
            hash(digits) & 0x7FFFFFFFFFFF
        )  # tuples of int hash alike in every process
        return (torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)

    return law


def _along(law: Law, prefix: Prefix, block: Sequence[int], count: int) -> Tensor:
    """``law`` after ``prefix`` and each of the first ``count - 1`` tokens of ``block``: ``[count, V]``."""
    return torch.stack([law((*prefix, *block[:i])) for i in range(count)])
