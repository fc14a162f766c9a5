"""Logits -> distribution -> token. One function serves draft and target alike, so p and q cannot differ by policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .errors import number, whole


def _possible_heat(t: float) -> bool:
    # Below 1e-6 logits divided by the temperature may leave float32; greedy is what was meant.
    return t == 0 or 1e-6 <= t < 1e30


@dataclass(frozen=True)
class SamplingPolicy:
    """How a distribution is made from logits. ``temperature=0`` is greedy decoding.

    The filters act in the order temperature, top-k, top-p, min-p, which is the order of Hugging Face
    ``generate``; 0, 1.0 and 0.0 switch top-k, top-p and min-p off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        heat = number("temperature", self.temperature, _possible_heat, "0 (greedy), or at least 1e-6 and finite")
        top_p = number("top_p", self.top_p, lambda p: 0 < p <= 1, "a number in (0, 1], where 1 is off")
        min_p = number("min_p", self.min_p, lambda p: 0 <= p < 1, "a number in [0, 1), where 0 is off")
        checked = {"temperature": heat, "top_k": whole("top_k", self.top_k, 0, 2**31), "top_p": top_p, "min_p": min_p}
        for name, value in checked.items():  # fractions and NumPy's numbers become plain ones
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_vocabulary(logits: Tensor, vocab: int) -> Tensor:
    """``[..., V']`` -> ``[..., vocab]``: surplus logits dropped, missing ones -inf. Done *before* a law is made of
    them, so that the law lives on the target's vocabulary and sums to 1 there."""
    if logits.shape[-1] == vocab:
        return logits
    logits = logits[..., :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)


def distribution(logits: Tensor, policy: SamplingPolicy) -> Tensor:
    """The law that ``policy`` makes of ``logits``.

    Args:
        logits: ``[..., V]`` in any float type; computed in float32, or float64 if given that.

    Returns:
        ``[..., V]`` probabilities. Greedy gives the one-hot of the first maximum. A row that is NaN, or has
        nothing above -inf, comes out as NaN: callers look for that with :func:`invalid_rows`.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    if policy.greedy:
        hot = torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
        return hot.masked_fill(invalid_rows(x).unsqueeze(-1), torch.nan)
    x = x / policy.temperature
    if 0 < policy.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(policy.top_k, dim=-1).values[..., -1:], -torch.inf)
    if policy.top_p < 1:
        x = _keep_top_p(x, policy.top_p)
    if policy.min_p > 0:
        probs = x.softmax(-1)
        x = x.masked_fill(probs < policy.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return x.softmax(-1)


def _keep_top_p(x: Tensor, top_p: float) -> Tensor:
    """Nucleus filter (Holtzman et al. 2020): the smallest set of likeliest tokens that holds ``top_p``."""
    ordered, index = x.sort(dim=-1, descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1] = False  # the likeliest token always stays
    return x.masked_fill(torch.zeros_like(drop).scatter_(-1, index, drop), -torch.inf)


def invalid_rows(x: Tensor) -> Tensor:
    """``[..., V]`` logits or probabilities -> ``[...]`` bool: rows from which nothing can be drawn.

    That is a NaN anywhere, +inf, or no entry above -inf. The maximum alone tells: NaN spreads through it.
    """
    return ~torch.isfinite(x.amax(-1))


def likeliest(x: Tensor) -> Tensor:
    """``[..., V]`` -> ``[...]`` int64: the first maximum. On a CPU ``max`` is three times as fast as ``argmax``."""
    return x.max(-1).indices


def entropy(log_p: Tensor) -> Tensor:
    """``[..., V]`` logarithms of a law -> ``[...]`` in nats; what is impossible adds nothing."""
    return cast(Tensor, 0.0 - torch.linalg.vecdot(log_p.exp(), log_p.clamp(min=-1e30)))


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw by inverse transform: the first token whose cumulative weight exceeds ``u`` times the total.

    Args:
        weights: ``[..., V]`` non-negative, not necessarily normalised.
        u: ``[...]`` float64 in [0, 1).

    Returns:
        ``[...]`` int64. A token of weight 0 is never returned, whatever the rounding. The sums run in
        float64: over 50,000 tokens a float32 sum would shift the law by about 1e-4.
    """
    cdf = weights.double().cumsum(-1)
    token = (cdf <= u.unsqueeze(-1) * cdf[..., -1:]).sum(-1)
    last = (weights > 0).int().cumsum(-1).argmax(-1)  # u * total may round up to the total
    return torch.minimum(token, last)


class RequestRandom:
    """The random numbers of one request, seeded from (run seed, request id).

    A request draws from its own stream and always the same count per step, so its tokens depend neither on
    its neighbours in a batch nor on their order. ``seed=None`` takes fresh entropy.
    """

    def __init__(self, seed: int | None, request: int = 0):
        entropy = None if seed is None else [seed & 0xFFFFFFFFFFFFFFFF, request]
        self._rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

    def uniforms(self, count: int) -> list[float]:
        """``count`` numbers in [0, 1), float64."""
        return [float(u) for u in self._rng.random(count)]
