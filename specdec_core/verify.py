"""Accept and resample: pure tensor functions of p, q and the drafted tokens. They know nothing of models.

A rule answers two questions about a drafted block x_1..x_g, and with them the whole step is determined:

``survival``  S_i = P(at least i tokens are accepted | the block), ``[B, g]``, falling in i.
``residual``  the law of the token that follows the accepted prefix, ``[B, V]``.

One uniform number u decides the prefix: n = #{i : u < S_i}. For the token rule S_i is a product of
min(1, p/q), so this equals one coin per position (a coin per position decides *whether the run goes on*; the
length of a run has the same law when it is read off one number). Stating a rule by its survival is what lets
``lab.theory.output_law`` add up the *same code* exactly instead of sampling it.

Where several candidates stand at a position, those behind the first are tried at the rejected position alone
(``try_branches``), each against what the rejected ones left of p.

Shapes: ``p [B, g+1, V]``, ``q [B, g, V]``, ``tokens [B, g]``, ``lengths [B]`` (how many of the g are real in
each row; the rest is padding and is never accepted). Ratios and products run in float64. The greedy rule reads no q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .sampling import likeliest


@dataclass(frozen=True)
class Rule:
    """A verification rule: its two functions, and whether it keeps the target's law.

    ``survival(p, q, tokens, lengths)`` and ``residual(p, q, tokens, lengths, n)``; ``branches`` says whether further
    candidates at the rejected position can be tried after it.
    """

    name: str
    survival: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    exact: bool
    source: str
    branches: bool = False


def accept(rule: Rule, p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, u: Tensor) -> Tensor:
    """How many drafted tokens each row keeps: ``[B]`` int64, between 0 and ``lengths``."""
    g = tokens.shape[1]
    if g == 0:
        return torch.zeros_like(lengths)
    real = torch.arange(g, device=tokens.device) < lengths.unsqueeze(1)
    survival = rule.survival(p, cast(Tensor, q), tokens, lengths) * real
    return (u.unsqueeze(1) < survival).sum(1)


def next_law(rule: Rule, p: Tensor, q: Tensor | None, tokens: Tensor, lengths: Tensor, n: Tensor) -> Tensor:
    """The weights ``[B, V]`` of the token after the accepted prefix.

    After a rejection that is the rule's residual at the rejected position; after a block accepted whole it is
    the target's own law one position on (the bonus token). A residual with no mass (p equal to q but for
    rounding) falls back on p, which is then the same law.
    """
    row = torch.arange(len(n), device=n.device)
    bonus = p[row, n] if rule is GREEDY else p[row, n].double()  # an order needs no more digits
    if tokens.shape[1] == 0:
        return bonus
    if rule is GREEDY:  # its residual is p itself, wherever the prefix ends
        return bonus
    residual = rule.residual(p, cast(Tensor, q), tokens, lengths, n.clamp(max=tokens.shape[1] - 1))
    take = (n < lengths) & (residual.sum(-1) > 0)
    return torch.where(take.unsqueeze(-1), residual, bonus)


def try_branches(
    rule: Rule, law: Tensor, q: Tensor | None, rejected: Tensor, branches: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Recursive rejection sampling over the further candidates of a rejected position.

    Miao et al. 2024 (SpecInfer), algorithm 2, with candidates drawn without replacement (Jeon et al. 2024, RSD,
    algorithm 2): candidate y, drawn from q without the earlier ones, is kept with probability min(1, r(y)/q(y)), where
    r is what the earlier ones left of p; otherwise r becomes (r - q)+, normalised.

    Args:
        law: ``[B, V]`` weights after the first candidate was turned down (``next_law``).
        q: ``[B, V]`` the law of the first candidate ``rejected [B]``, or None where candidates were chosen.
        branches: ``[B, k-1]``. u: ``[B]`` one coin a row.

    Returns:
        Which branch each row keeps, ``[B]`` (k-1: none), and the weights ``[B, V]`` of the token where none is kept.
    """
    chances, left = branch_chances(rule, law, q, rejected, branches)
    return (u.unsqueeze(1) >= chances.cumsum(1)).sum(1), left


def branch_chances(
    rule: Rule, law: Tensor, q: Tensor | None, rejected: Tensor, branches: Tensor
) -> tuple[Tensor, Tensor]:
    """P(branch j is the one that is kept) ``[B, k-1]``, and what is left of ``law`` when none is: ``[B, V]``."""
    law = law.double()
    if rule is GREEDY:  # the target's preference decides, whatever the candidates' law
        return (branches == likeliest(law).unsqueeze(1)).double(), law
    left = law / law.sum(-1, keepdim=True)
    source = None if q is None else q.double().scatter(-1, rejected.unsqueeze(-1), 0.0)
    going, chances = torch.ones_like(left[:, 0]), []
    for y in branches.unsqueeze(-1).unbind(1):
        if source is None:
            drawn = torch.zeros_like(left).scatter(-1, y, 1.0)
        else:
            drawn = (source / source.sum(-1, keepdim=True)).nan_to_num(0.0)  # no mass left: nothing was drawn
            source = source.scatter(-1, y, 0.0)
        ratio = (left.gather(-1, y) / drawn.gather(-1, y)).nan_to_num(0.0, posinf=0.0).squeeze(-1).clamp(max=1.0)
        chances.append(going * ratio)
        going = going * (1 - ratio)
        rest = (left - drawn).clamp(min=0.0)
        mass = rest.sum(-1, keepdim=True)
        left = torch.where(mass > 0, rest / mass, left)
    return torch.stack(chances, 1), left


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


def at(law: Tensor, tokens: Tensor) -> Tensor:
    """The probability that ``law [B, g, V]`` gives each drafted token: ``[B, g]`` float64."""
    return law[:, : tokens.shape[1]].gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()


def row_of(law: Tensor, n: Tensor) -> Tensor:
    """Row ``n`` of each ``law [B, g, V]``: ``[B, V]`` float64."""
    return law[torch.arange(len(n), device=n.device), n].double()


def token_survival(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    return (at(p, tokens) / at(q, tokens)).nan_to_num(0.0).clamp(max=1.0).cumprod(1)


def token_residual(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, n: Tensor) -> Tensor:
    return (row_of(p, n) - row_of(q, n)).clamp(min=0.0)


def _balance(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """How far the block is still no likelier under q than under p: w_0 = 1, w_i = min(1, w_{i-1} p/q): ``[B, g+1]``."""
    ratio = (at(p, tokens) / at(q, tokens)).nan_to_num(0.0)
    steps = [torch.ones_like(ratio[:, 0])]
    for r in ratio.unbind(1):
        steps.append((steps[-1] * r).clamp(max=1.0))
    return torch.stack(steps, 1)


def _block_survival(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """The longest sub-block that passes its own test is kept, so S_i = 1 - prod_{j >= i} (1 - h_j). Within the block
    h_j weighs what the residual behind j still owes against what the block may still give; at its end h is w itself."""
    g = tokens.shape[1]
    w = _balance(p, q, tokens)[:, 1:]
    owed = (w[:, :-1, None] * p[:, 1:g].double() - q[:, 1:g].double()).clamp(min=0.0).sum(-1)
    inner = (owed / (owed + 1 - w[:, :-1])).nan_to_num(0.0)  # 0/0: w = 1 and nothing owed, settled further on
    last = torch.arange(1, g + 1, device=tokens.device) == lengths.unsqueeze(1)
    h = torch.where(last, w, torch.nn.functional.pad(inner, (0, 1)))
    real = torch.arange(g, device=tokens.device) < lengths.unsqueeze(1)
    return 1 - (1 - h * real).flip(1).cumprod(1).flip(1)


def _block_residual(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, n: Tensor) -> Tensor:
    w = _balance(p, q, tokens).gather(1, n.unsqueeze(1))
    return (w * row_of(p, n) - row_of(q, n)).clamp(min=0.0)


def greedy_survival(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    return (likeliest(p[:, : tokens.shape[1]]) == tokens).double().cumprod(1)


def target_row(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, n: Tensor) -> Tensor:
    return row_of(p, n)


GREEDY = Rule(
    "greedy",
    greedy_survival,
    target_row,
    True,
    "Stern et al. 2018, section 3; Leviathan et al. 2023, 2.3 at T=0",
    True,
)
TOKEN = Rule(
    "token",
    token_survival,
    token_residual,
    True,
    "Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2",
    True,
)
BLOCK = Rule("block", _block_survival, _block_residual, True, "Sun et al. 2024 (arXiv 2403.10444), algorithm 2")
