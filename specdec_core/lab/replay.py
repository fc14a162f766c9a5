"""What a drafter would have done on a text that exists already: acceptance at every position and every γ, without
running the loop. Used to predict before measuring.

With the text fixed, a token x that the target drew is accepted with probability min(1, q(x)/p(x)) where the draft is
drawn, and with 1 or 0 where the draft is chosen (lookup, argmax). Products along the text give every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..api import Output, Pair
from ..drafters import PromptLookupDrafter
from ..errors import SpecDecError
from ..sampling import SamplingPolicy, distribution, fit_vocabulary
from .theory import expected_tokens


@dataclass(frozen=True)
class Replay:
    """One text as a drafter would meet it.

    ``accept[t, i]``: probability that the (i+1)-th token drafted before position t is accepted, given that those
    before it were; NaN where the drafter proposes none. Position 0 is the prefill's token and has no block.
    """

    accept: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """Acceptance at block position 1, wherever something was drafted."""
        column = self.accept[1:, 0]
        return np.asarray(column[~np.isnan(column)])

    def passes(self, gamma: int) -> float:
        """Expected target passes for the text at block length ``gamma``, the prefill not counted."""
        length = len(self.accept)
        need = np.zeros(length + 1)
        for t in range(length - 1, 0, -1):
            room = min(gamma, length - t - 1)
            reach, passes = 1.0, 1.0
            for i in range(room + 1):
                chance = self.accept[t, i] if i < room and not np.isnan(self.accept[t, i]) else 0.0
                passes += reach * (1 - chance) * need[min(t + i + 1, length)]
                reach *= chance
            need[t] = passes
        return float(need[1]) if length > 1 else 0.0


def replay(pair: Pair, output: Output, drafter: str, gamma: int, policy: SamplingPolicy) -> Replay:
    """Meet ``output`` (of ordinary decoding) with a drafter, at block lengths up to ``gamma``."""
    if drafter == "prompt_lookup":
        return Replay(_lookup(output, gamma))
    model = pair.target if drafter == "self" else pair.draft
    if model is None:
        raise SpecDecError(
            f"Pair '{pair.name}' names no draft model: set 'draft' in its YAML, or drafter=prompt_lookup."
        )
    p = _laws(pair.target, output, policy, pair.vocab)
    q = p if drafter == "self" else _laws(model, output, policy, pair.vocab)
    drawn = torch.tensor(output.tokens, device=p.device).unsqueeze(1)
    chance = (q.gather(1, drawn) / p.gather(1, drawn)).nan_to_num(0.0).clamp(max=1.0).squeeze(1).cpu().double().numpy()
    table = np.full((len(chance), gamma), np.nan)
    for i in range(gamma):
        table[: len(chance) - i, i] = chance[i:]
    return Replay(table)


def predict(replays: Sequence[Replay], gamma: int) -> dict[str, float]:
    """Tokens per target pass predicted from replays, in two ways.

    ``constant_alpha`` puts one α (the mean at block position 1, where something was drafted) into the closed form,
    and counts a pass without a draft as one token. ``along_the_text`` walks the texts, so α may differ by place.
    """
    first = np.concatenate([r.first for r in replays])
    alpha = float(first.mean()) if len(first) else 0.0
    places = sum(len(r.accept) - 1 for r in replays)
    share = len(first) / places if places else 0.0
    closed = expected_tokens(alpha, gamma)
    passes = sum(r.passes(gamma) for r in replays)
    # Passes with a draft cover more text each, so their share of passes is not their share of places.
    by_pass = share / closed / (share / closed + 1 - share) if share else 0.0
    return {
        "alpha": alpha,
        "drafted_share": share,
        "constant_alpha": by_pass * closed + 1 - by_pass,
        "along_the_text": places / passes if passes else 1.0,
    }


def _lookup(output: Output, gamma: int) -> np.ndarray:
    drafter, text = PromptLookupDrafter(), output.prompt_tokens + output.tokens
    table = np.full((len(output.tokens), gamma), np.nan)
    for t in range(1, len(output.tokens)):
        at = len(output.prompt_tokens) + t
        proposal = drafter.propose([text[:at]], [gamma], torch.empty(0))
        for i, token in enumerate(proposal.tokens[0].tolist()[: len(text) - at]):
            table[t, i] = float(token == text[at + i])
    return table


@torch.inference_mode()
def _laws(model: torch.nn.Module, output: Output, policy: SamplingPolicy, vocab: int) -> torch.Tensor:
    """``[T, vocab]``: the model's law before each output token, from one pass over the whole text."""
    ids = torch.tensor([output.prompt_tokens + output.tokens], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(output.prompt_tokens) - 1 : -1]
    return distribution(fit_vocabulary(logits, vocab), policy)
