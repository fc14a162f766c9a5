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


ROUNDING = 4.0  # ulps that rounding alone may explain: two logits, each off by one or two


def same_text(target: PreTrainedModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> str:
    """How two greedy outputs of one prompt compare, in words. AssertionError where rounding cannot explain it."""
    if list(a) == list(b):
        return f"all {len(a)} tokens are identical"
    split = first_divergence(target, prompt, a, b)
    if split is None:
        raise AssertionError(f"one text has {len(a)} tokens, the other goes on to {len(b)}")
    if split.ulps > ROUNDING:
        raise AssertionError(f"the texts part where rounding cannot explain it: {split}")
    where = f"where two logits lie {split.ulps:.1f} units in the last place apart"
    return f"identical up to token {split.position}, {where}"


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
