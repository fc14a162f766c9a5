"""Rules that do not keep the target's law: wrong on purpose, or lossy by design.

They exist so that the tests of the law are seen to catch them, and no option of ``generate`` names them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..verify import Rule, at, greedy_survival, row_of, target_row, token_residual, token_survival


def _all_survive(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    return torch.ones(tokens.shape, dtype=torch.float64, device=tokens.device)


def _one_hot_survival(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    return at(p, tokens).cumprod(1)


def _one_hot_residual(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, n: Tensor) -> Tensor:
    rejected = tokens.gather(1, n.unsqueeze(1))
    return row_of(p, n).scatter(-1, rejected, 0.0)


def _typical_survival(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    entropy = torch.special.entr(p[:, : tokens.shape[1]].double()).sum(-1)
    return (at(p, tokens) > torch.minimum(torch.tensor(0.3), 0.09**0.5 * (-entropy).exp())).double().cumprod(1)


LOSSY = {
    "always_accept": Rule("always_accept", _all_survive, target_row, False, "planted: keeps every drafted token"),
    "resample_from_p": Rule(
        "resample_from_p", token_survival, target_row, False, "planted: p in place of the residual (p - q)+"
    ),
    "one_hot_residual": Rule(
        "one_hot_residual",
        token_survival,
        _one_hot_residual,
        False,
        "planted: residual as if q were one-hot (condition A11)",
    ),
    "one_hot_accept": Rule(
        "one_hot_accept", _one_hot_survival, token_residual, False, "planted: accepts with p(x) as if q were one-hot"
    ),
    "typical": Rule(
        "typical", _typical_survival, target_row, False, "Cai et al. 2024 (Medusa), section 2.3.1: lossy by design"
    ),
    "greedy_at_t": Rule(
        "greedy_at_t", greedy_survival, target_row, False, "planted: the greedy rule used for sampling"
    ),
}
