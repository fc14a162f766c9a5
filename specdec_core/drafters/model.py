"""Another causal language model as draft (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..caches import ModelCache
from ..sampling import SamplingPolicy, distribution, draw, fit_vocabulary
from .base import Proposal


class ModelDrafter:
    """Draws each token from the draft model, under the same sampling policy as the target.

    Args:
        model: any causal LM whose token ids mean the same as the target's.
        policy: the target's policy; at temperature 0 the draft takes its argmax and q is one-hot.
        vocab: size of the target's vocabulary. Logits beyond it are dropped *before* the law is made, and a
            smaller draft gets q = 0 there, so q lives on the target's vocabulary.
        confidence: stop drafting at a position whose largest q is below this (0 = never). The token drawn there is
            thrown away unverified; the choice rests on the law alone, so the output law is unchanged.
    """

    name = "model"

    def __init__(self, model: PreTrainedModel, policy: SamplingPolicy, vocab: int, confidence: float = 0.0):
        self.model, self.policy, self.vocab, self.confidence = model, policy, vocab, confidence
        self.cache = ModelCache(model, 1)

    def start(self, batch: int) -> None:
        self.cache = ModelCache(self.model, batch)

    def commit(self, lengths: Sequence[int]) -> None:
        self.cache.rewind([min(have, n - 1) for have, n in zip(self.cache.lengths, lengths, strict=True)])

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        room = self._possible(sequences, room)
        width = max(room)
        device = self.model.device
        if width == 0:
            why = (
                f"the draft's context of {self.cache.limit} tokens is full, or the text holds a token it does not know"
            )
            return Proposal.nothing(len(room), device, why)
        logits = self._catch_up(sequences, room)
        base = self.cache.lengths
        tokens, laws, beliefs = [], [], []
        going = torch.ones(len(room), dtype=torch.bool, device=device)
        lengths = torch.zeros(len(room), dtype=torch.int64, device=device)
        for i in range(width):
            law, belief = self._laws(logits[:, -1])
            going = going & (belief.amax(-1) >= self.confidence) if self.confidence else going
            lengths += going
            tokens.append(law.argmax(-1) if self.policy.greedy else draw(law, u[:, i]))
            laws.append(law)
            beliefs.append(belief)
            # On a CPU asking costs nothing; on a GPU the block runs on, since a read would wait for it.
            if self.confidence and device.type == "cpu" and not going.any():
                break
            if i + 1 < width:
                logits = self.cache.extend(tokens[-1].unsqueeze(1))
        # Rows with less room than the widest ran along for the shape's sake: what they drafted beyond it goes.
        self.cache.rewind([b + min(len(tokens), max(r, 1)) - 1 for b, r in zip(base, room, strict=True)])
        lengths = torch.minimum(lengths, torch.tensor(room, device=device))
        q = None if self.policy.greedy else torch.stack(laws, 1)
        drafted = [min(r, len(tokens)) for r in room]
        return Proposal(torch.stack(tokens, 1), lengths, q, drafted, torch.stack(beliefs, 1))

    def _possible(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> list[int]:
        """Room by row, 0 where the draft cannot follow: its context is full, or a token is not in its vocabulary."""
        limit, known = self.cache.limit, self.model.config.get_text_config(decoder=True).vocab_size
        if known < self.vocab:
            room = [r if r and max(s) < known else 0 for s, r in zip(sequences, room, strict=True)]
        if limit is None:
            return list(room)
        return [
            max(0, min(r, limit - len(s) + 1)) if len(s) <= limit else 0 for s, r in zip(sequences, room, strict=True)
        ]

    def _catch_up(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Tensor:
        """Feed what was committed since the last block (after a block kept whole that is two tokens): ``[B, 1, V]``."""
        new = [list(s[have:]) if r else [] for s, have, r in zip(sequences, self.cache.lengths, room, strict=True)]
        width = max(len(row) for row in new)
        padded = torch.tensor([row + [0] * (width - len(row)) for row in new], device=self.model.device)
        return self.cache.extend(padded, [len(row) for row in new], keep="last")

    def _laws(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The law to draw from and the law at temperature 1, both ``[B, vocab]``."""
        logits = fit_vocabulary(logits, self.vocab)
        belief = distribution(logits, SamplingPolicy(temperature=1.0))
        return (belief if self.policy == SamplingPolicy(temperature=1.0) else distribution(logits, self.policy)), belief
