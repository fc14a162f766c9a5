"""A drafter whose acceptance rate is set: what would a draft be worth that agrees so often?"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters import Drafter, ModelDrafter, Proposal
from ..drafters.composite import Parts
from ..errors import SpecDecError, number
from ..sampling import SamplingPolicy, distribution, draw


class SyntheticDrafter(Parts):
    """Proposes what the target would say as often as ``acceptance`` asks, in one of two ways.

    With ``texts``, greedy outputs of the target that are known already, position i of a block holds the true token with
    probability ``acceptance[i]`` and another one otherwise: chosen, and free of cost. The coins are those of a prompt
    and a position in its text, so that neither neighbours nor the length of blocks change them.

    With ``model``, the target itself, position i is drawn from q = a p + (1 - a) r with a = ``acceptance[i]`` and r on
    the token that p likes least; Σ min(p, q) is then a, and (1 - a) times p of that token (mostly 0) above it.

    Args:
        acceptance: rate at each position of a block; the last one holds for all positions behind it.
        vocab: size of the target's vocabulary. policy: the target's, to go with ``model``.
        texts: prompt -> its greedy output. Where a text goes another way nothing is proposed.
        pays: a drafter whose proposals are computed and thrown away, so that drafting takes the time it would take.
    """

    name, synthetic = "synthetic", True

    def __init__(
        self,
        acceptance: Sequence[float],
        vocab: int,
        *,
        texts: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        model: PreTrainedModel | None = None,
        policy: SamplingPolicy | None = None,
        pays: Drafter | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        if (texts is None) == (model is None) or (model is not None and policy is None):
            raise SpecDecError("A synthetic drafter needs either texts, or model and policy: give one of the two.")
        if not acceptance:
            raise SpecDecError("acceptance is empty: give at least one rate.")
        self.acceptance = [number("acceptance", a, lambda a: 0 <= a <= 1, "rates from 0 to 1") for a in acceptance]
        self.vocab, self.texts, self.seed, self.device = vocab, texts or {}, seed & (2**64 - 1), torch.device(device)
        self.sizes = sorted({len(prompt) for prompt in self.texts}, reverse=True)
        self.blend = _Blend(self.acceptance, model, policy, vocab) if model is not None and policy is not None else None
        self.pays, self.parts = pays, [part for part in (self.blend, pays) if part is not None]

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        if self.pays is not None:
            self.pays.propose(sequences, room, u.repeat(1, self.pays.candidates))
            self.pays.commit([len(s) for s in sequences])  # its tokens enter no text
        if self.blend is not None:
            block = self.blend.propose(sequences, room, u)
        else:
            told = [self._told(list(s), r) for s, r in zip(sequences, room, strict=True)]
            block = Proposal.chosen(told, self.device, "the text is none of those that are known, or at its end")
        block.note = "synthetic" if block.tokens.shape[1] else block.note
        return block

    def _told(self, text: list[int], room: int) -> list[int]:
        for n in self.sizes:
            output = list(self.texts.get(tuple(text[:n]), ()))
            done = len(text) - n
            if output[:done] == text[n:] and len(output) > done:
                prompt = zlib.crc32(np.array(text[:n]).tobytes())
                true = output[done : done + room]
                return [self._token(t, i, (self.seed, prompt, done + i)) for i, t in enumerate(true)]
        return []

    def _token(self, true: int, i: int, place: tuple[int, ...]) -> int:
        random = np.random.default_rng(place)
        right = random.random() < _rate(self.acceptance, i)
        return true if right else (true + 1 + int(random.integers(self.vocab - 1))) % self.vocab


def _rate(acceptance: Sequence[float], i: int) -> float:
    return acceptance[min(i, len(acceptance) - 1)]


class _Blend(ModelDrafter):
    """Draws from the model's law with the rest of the rate on its least likely token; when greedy too."""

    def __init__(self, acceptance: Sequence[float], model: PreTrainedModel, policy: SamplingPolicy, vocab: int):
        self.acceptance = acceptance
        super().__init__(model, policy, vocab)

    def _laws(self, logits: Tensor, sequences: Sequence[Sequence[int]], drafted: Tensor) -> tuple[Tensor, Tensor]:
        a = _rate(self.acceptance, drafted.shape[1])
        law, belief = super()._laws(logits, sequences, drafted)
        if self.policy.greedy:  # an order only, of which the blend makes a law
            law = distribution(law, self.policy)
        law, belief = (
            a * x + (1 - a) * torch.zeros_like(x).scatter(-1, x.argmin(-1, keepdim=True), 1.0) for x in (law, belief)
        )
        return law, belief

    def _pick(self, law: Tensor, belief: Tensor, u: Tensor) -> Tensor:
        return draw(law, u[:, :1].squeeze(1)).unsqueeze(1)
