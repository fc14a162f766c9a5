"""Prompt lookup (Saxena 2023; Yang et al. 2023, "Inference with Reference"): the draft is the text itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import whole
from .base import Drafter, Proposal


class PromptLookupDrafter(Drafter):
    """Finds the last n-gram earlier in the row and proposes what followed it there, longest n-gram first.

    The most recent earlier occurrence is taken, preferring one with a full block after it. Tokens are chosen,
    not drawn, so q is one-hot and a token is accepted with probability p(token).
    """

    name = "prompt_lookup"

    def __init__(self, device: torch.device | str = "cpu", ngram_max: int = 3, ngram_min: int = 1):
        self.device = torch.device(device)
        whole("ngram_min", ngram_min, 1, whole("ngram_max", ngram_max, 1, 2**31))
        self.ngram_max, self.ngram_min = ngram_max, ngram_min

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        blocks = [self._continuation(np.asarray(s), r).tolist() for s, r in zip(sequences, room, strict=True)]
        return Proposal.chosen(blocks, self.device, "no earlier match in the text")

    def _continuation(self, text: np.ndarray, room: int) -> np.ndarray:
        for n in range(min(self.ngram_max, len(text) - 1), self.ngram_min - 1, -1) if room > 0 else ():
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            starts = np.flatnonzero((windows == text[-n:]).all(axis=1)) + n
            if len(starts):
                full = starts[starts + room <= len(text)]
                start = full[-1] if len(full) else starts[0]
                return text[start : start + room]
        return text[:0]
