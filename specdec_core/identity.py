"""Where two greedy outputs part, and whether rounding explains it (condition B1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Divergence:
    """The first position where two outputs differ.

    Judged in one plain pass of the target: ``margin`` is the difference of the two tokens' logits, ``gap`` how far
    the less liked of them lies below the best token's, ``ulps`` that gap in units in the last place of the model's
    dtype at the best logit. A few ulps are rounding; more are a fault.
    """

    position: int
    a: int
    b: int
    margin: float
    gap: float
    ulps: float


@torch.inference_mode()
def first_divergence(
    target: PreTrainedModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]
) -> Divergence | None:
    """Compare two outputs of one prompt; None when one is equal to, or the beginning of, the other."""
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if position is None:
        return None
    text = torch.tensor([[*prompt, *a[:position]]], device=target.device)
    logits = target(input_ids=text, use_cache=False).logits[0, -1].double()
    best, of_a, of_b = float(logits.max()), float(logits[a[position]]), float(logits[b[position]])
    ulp = torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-30)))
    gap = best - min(of_a, of_b)
    return Divergence(position, a[position], b[position], abs(of_a - of_b), gap, gap / ulp)
