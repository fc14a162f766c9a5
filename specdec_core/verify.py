"""Accept and resample: pure tensor functions of p, q and the drafted tokens. They know nothing of models.

A rule answers two questions about a drafted block x_1..x_g, and with them the whole step is determined:

``survival``  S_i = P(at least i tokens are accepted | the block), ``[B, g]``, falling in i.
``residual``  the law of the token that follows the accepted prefix, ``[B, V]``.

One uniform number u decides the prefix: n = #{i : u < S_i}. For the token rule S_i is a product of
min(1, p/q), so this equals one coin per position (a coin per position decides *whether the run goes on*; the
length of a run has the same law when it is read off one number). Stating a rule by its survival is what lets
``theory.output_law`` add up the *same code* exactly instead of sampling it.

Shapes: ``p [B, g+1, V]``, ``q [B, g, V]``, ``tokens [B, g]``, ``lengths [B]`` (how many of the g are real in
each row; the rest is padding and is never accepted). Ratios and products run in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """A verification rule: its two functions, and whether it keeps the target's law."""

    name: str
    survival: Callable[[Tensor, Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    exact: bool
    source: str


def accept(rule: Rule, p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, u: Tensor) -> Tensor:
    """How many drafted tokens each row keeps: ``[B]`` int64, between 0 and ``lengths``."""
    g = tokens.shape[1]
    if g == 0:
        return torch.zeros_like(lengths)
    real = torch.arange(g, device=tokens.device) < lengths.unsqueeze(1)
    survival = rule.survival(p, q, tokens) * real
    return (u.unsqueeze(1) < survival).sum(1)


def next_law(rule: Rule, p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, n: Tensor) -> Tensor:
    """The weights ``[B, V]`` of the token after the accepted prefix.

    After a rejection that is the rule's residual at the rejected position; after a block accepted whole it is
    the target's own law one position on (the bonus token). A residual with no mass (p equal to q but for
    rounding) falls back on p, which is then the same law.
    """
    row = torch.arange(len(n), device=n.device)
    bonus = p[row, n].double()
    if tokens.shape[1] == 0:
        return bonus
    residual = rule.residual(p, q, tokens, n.clamp(max=tokens.shape[1] - 1))
    take = (n < lengths) & (residual.sum(-1) > 0)
    return torch.where(take.unsqueeze(-1), residual, bonus)


def first_invalid(q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """``lengths`` cut at the first draft row that cannot be trusted: ``[B]``.

    A row is cut when it holds NaN or a negative number, does not sum to 1, or its token lies outside the vocabulary or
    has q = 0.
    Cutting is exact: that position is then emitted from p, as if nothing had been drafted there.
    """
    if tokens.shape[1] == 0:
        return torch.zeros_like(lengths)
    safe = tokens.clamp(0, q.shape[-1] - 1)
    drawn = q.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    good = ((q.sum(-1) - 1).abs() < 1e-3) & (q.amin(-1) >= 0) & (drawn > 0) & (safe == tokens)
    return torch.minimum(lengths, good.int().cumprod(1).sum(1))


# --- the pieces rules are made of -------------------------------------------------------------------------


def _at(law: Tensor, tokens: Tensor) -> Tensor:
    """The probability that ``law [B, g, V]`` gives each drafted token: ``[B, g]`` float64."""
    return law[:, : tokens.shape[1]].gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()


def _rows(law: Tensor, n: Tensor) -> Tensor:
    """Row ``n`` of each ``law [B, g, V]``: ``[B, V]`` float64."""
    return law[torch.arange(len(n), device=n.device), n].double()


def _token_survival(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return (_at(p, tokens) / _at(q, tokens)).nan_to_num(0.0).clamp(max=1.0).cumprod(1)


def _token_residual(p: Tensor, q: Tensor, tokens: Tensor, n: Tensor) -> Tensor:
    return (_rows(p, n) - _rows(q, n)).clamp(min=0.0)


def _greedy_survival(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return (p[:, : tokens.shape[1]].argmax(-1) == tokens).double().cumprod(1)


def _target_law(p: Tensor, q: Tensor, tokens: Tensor, n: Tensor) -> Tensor:
    return _rows(p, n)


def _all_survive(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape, dtype=torch.float64, device=tokens.device)


def _one_hot_survival(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    return _at(p, tokens).cumprod(1)


def _one_hot_residual(p: Tensor, q: Tensor, tokens: Tensor, n: Tensor) -> Tensor:
    rejected = tokens.gather(1, n.unsqueeze(1))
    return _rows(p, n).scatter(-1, rejected, 0.0)


GREEDY = Rule(
    "greedy", _greedy_survival, _target_law, True, "Stern et al. 2018, section 3; Leviathan et al. 2023, 2.3 at T=0"
)
TOKEN = Rule(
    "token", _token_survival, _token_residual, True, "Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2"
)

# Wrong on purpose. They exist so that the tests of the law are seen to catch them, and are refused elsewhere.
LOSSY = {
    "always_accept": Rule("always_accept", _all_survive, _target_law, False, "planted: keeps every drafted token"),
    "resample_from_p": Rule(
        "resample_from_p", _token_survival, _target_law, False, "planted: p in place of the residual (p - q)+"
    ),
    "one_hot_residual": Rule(
        "one_hot_residual",
        _token_survival,
        _one_hot_residual,
        False,
        "planted: residual as if q were one-hot (condition A11)",
    ),
    "one_hot_accept": Rule(
        "one_hot_accept", _one_hot_survival, _token_residual, False, "planted: accepts with p(x) as if q were one-hot"
    ),
    "greedy_at_t": Rule(
        "greedy_at_t", _greedy_survival, _target_law, False, "planted: the greedy rule used for sampling"
    ),
}
RULES = {rule.name: rule for rule in (GREEDY, TOKEN, *LOSSY.values())}
