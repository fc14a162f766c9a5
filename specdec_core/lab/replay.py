"""What a drafter would have done on a text that exists already, at every block length and under every rule, without
running the loop: measure once, replay everything.

The text is fixed, so all that can vary is where blocks end. A token x of it that the target drew from p is accepted
from a draft that draws from q with probability min(1, q(x)/p(x)); a drafter that chooses its token (lookup, or any at
temperature 0) is accepted where it chose x. Under block verification the first i tokens of a block are accepted with
probability A_i = min(A_{i-1}, Π q/p), since Pr(τ ≥ i | the draft) = min(w_{i-1} p/q, 1) = w_i (Sun et al. 2024,
arXiv 2403.10444, lemma 5). Sums along the text then give every number that the loop would have had on average; at
temperature 0 these are the loop's own, pass for pass.

Blocks have one length throughout. Where replay cannot speak: drafters that remember what was rejected or other texts,
several candidates a position, a draft that stops where it is unsure, processors, and drafts with another tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..api import Output, Pair
from ..caches import context_limit
from ..control import Costs
from ..drafters import Drafter, PromptLookupDrafter, SuffixDrafter
from ..errors import SpecDecError, choice
from ..processors import from_generation_config
from ..sampling import SamplingPolicy, distribution, fit_vocabulary
from .theory import expected_tokens

REPLAYED = ("prompt_lookup", "suffix", "model", "composite", "self")
RULES = ("token", "block")


@dataclass(frozen=True)
class Walk:
    """Expected sums over the passes of a text, the prefill not counted; those of several texts may be added.

    ``drafting``: passes that put something before the target; ``reached[i]`` and ``kept[i]``: blocks whose position
    i + 1 was judged (all before it were kept), and was kept too. ``sizes[k, n]``: passes with n drafted tokens,
    for nothing (k = 0: looked up, or none) or by a model (k = 1).
    """

    passes: float
    drafting: float
    tokens: float
    drafted: float
    accepted: float
    rejected: float
    reached: np.ndarray
    kept: np.ndarray
    sizes: np.ndarray

    def seconds(self, costs: Costs) -> float:
        """What the passes take, by measured costs of a pass with its draft; lookups are taken to cost nothing."""
        target = [costs.get("target", 1, n + 1) for n in range(self.sizes.shape[1])]
        draft = [0.0, *(costs.get("draft", 1, n) for n in range(1, self.sizes.shape[1]))]
        return float(self.sizes.sum(0) @ np.array(target, float) + self.sizes[1] @ np.array(draft, float))


@dataclass(frozen=True)
class Replay:
    """One text as a drafter meets it at one block length.

    ``ratio[t, i]``: q/p of the text's token t + i, for the (i+1)-th of ``drafted[t]`` tokens drafted before position t.
    Position 0 is the prefill's token and has no block. ``stopped``: the text ends by itself, and not because its budget
    was spent. ``by_model [T]``: where the draft comes from a model; by default nowhere.
    """

    ratio: np.ndarray
    drafted: np.ndarray
    stopped: bool = False
    by_model: np.ndarray | None = None

    @property
    def first(self) -> np.ndarray:
        """Acceptance at block position 1, wherever something was drafted."""
        return np.asarray(np.minimum(self.ratio[1:, 0], 1)[self.judged[1:] > 0])

    @property
    def judged(self) -> np.ndarray:
        """How much of each block lies within the text."""
        length = len(self.ratio)
        return np.asarray(np.minimum(self.drafted, length - np.arange(length)))

    def at(self, gamma: int) -> Replay:
        """The same at a shorter block length, for drafters whose tokens do not depend on it."""
        return Replay(self.ratio[:, :gamma], np.minimum(self.drafted, gamma), self.stopped, self.by_model)

    def chances(self, rule: str) -> np.ndarray:
        """``[T, γ + 2]``: probability that at least 0, 1, ... γ tokens of a block are accepted, and 0 for γ + 1."""
        within = np.arange(self.ratio.shape[1]) < self.judged[:, None]
        if rule == "token":
            joint = np.cumprod(np.where(within, np.minimum(self.ratio, 1), 0), axis=1)
        else:
            with np.errstate(over="ignore"):
                joint = np.minimum.accumulate(
                    np.minimum(np.cumprod(np.where(within, self.ratio, 0), axis=1), 1), axis=1
                )
        ones, zeros = np.ones((len(joint), 1)), np.zeros((len(joint), 1))
        return np.hstack([ones, joint, zeros])

    def walk(self, rule: str = "token") -> Walk:
        """All passes of the text, each weighed with the probability that it happens."""
        length, gamma = self.ratio.shape
        atleast, judged = self.chances(choice("rule", rule, RULES)), self.judged
        exactly = atleast[:, :-1] - atleast[:, 1:]
        visits = np.zeros(length + gamma + 1)
        visits[1:2] = 1.0
        for t in range(1, length):
            visits[t + 1 : t + gamma + 2] += visits[t] * exactly[t]
        weight, sizes = visits[1:length], np.zeros((2, gamma + 1))
        by_model = np.zeros(length, bool) if self.by_model is None else self.by_model
        np.add.at(sizes, (by_model[1:].astype(int), self.drafted[1:]), weight)
        atleast, judged = atleast[1:], judged[1:]
        within = np.arange(gamma) < judged[:, None]
        reached, kept = weight @ (atleast[:, :gamma] * within), weight @ atleast[:, 1 : gamma + 1]
        return Walk(
            passes=float(weight.sum()),
            drafting=float(weight @ (judged > 0)),
            tokens=float(length - 1),
            drafted=float(weight @ self.drafted[1:]),
            accepted=float(kept.sum()),
            rejected=float((reached - kept).sum()),
            reached=reached,
            kept=kept,
            sizes=sizes,
        )

    def passes(self, rule: str = "token") -> float:
        """Expected target passes, the prefill not counted."""
        return self.walk(rule).passes


@dataclass
class Meeting:
    """A text of ordinary decoding, ready to meet drafters.

    Args:
        output: what `generate` gave with ``speculate=False`` under ``policy``.
        budget: its ``max_new_tokens``; by default the text is taken to have spent it, if no stop ended it.
    """

    pair: Pair
    output: Output
    policy: SamplingPolicy
    budget: int | None = None
    known: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ends = [self.pair.tokenizer.eos_token_id] if hasattr(self.pair.tokenizer, "eos_token_id") else []
        asked = from_generation_config(self.pair.target.generation_config, [e for e in ends if e is not None], 1)
        if asked.active:
            raise SpecDecError(
                f"The generation_config of pair '{self.pair.name}' asks for penalties or other processors, of which a "
                "replay knows nothing: run the loop itself."
            )

    def replay(self, drafter: str, gamma: int) -> Replay:
        """How ``drafter`` fares at block length ``gamma``. Raises SpecDecError for one that cannot be replayed."""
        choice("drafter", drafter, REPLAYED, " for a replay")
        length, context = len(self.output.tokens), context_limit(self.pair.target)
        most = min(self.budget or length, (context or 2**31) - len(self.output.prompt_tokens))
        room = np.minimum(gamma, most - 1 - np.arange(length)).clip(min=0)
        if drafter == "composite":
            ratio, drafted = self._chosen(PromptLookupDrafter(ngram_min=2), room, gamma)
            other, rest = self._model("model", room, gamma)
            found = drafted > 0
            ratio, drafted = np.where(found[:, None], ratio, other), np.where(found, drafted, rest)
            by_model = ~found
        elif drafter in ("model", "self"):
            ratio, drafted = self._model(drafter, room, gamma)
            by_model = np.ones(length, bool)
        else:
            made: Drafter = PromptLookupDrafter() if drafter == "prompt_lookup" else SuffixDrafter()
            ratio, drafted = self._chosen(made, room, gamma)
            by_model = np.zeros(length, bool)
        return Replay(ratio, drafted, self.output.stop in ("eos", "stop_string"), by_model)

    def _chosen(self, drafter: Drafter, room: np.ndarray, gamma: int) -> tuple[np.ndarray, np.ndarray]:
        """A drafter that chooses its tokens is asked at every position."""
        at, text = len(self.output.prompt_tokens), [*self.output.prompt_tokens, *self.output.tokens]
        ratio, drafted = np.zeros((len(room), gamma)), np.zeros(len(room), dtype=int)
        drafter.start()
        drafter.join([text[: at + 1]])
        for t in range(1, len(room)):
            block = drafter.propose([text[: at + t]], [int(room[t])], torch.empty(0)).tokens[0].tolist()
            drafted[t] = len(block)
            told = text[at + t : at + t + len(block)]
            ratio[t, : len(told)] = [float(a == b) for a, b in zip(block, told, strict=False)]
        return ratio, drafted

    def _model(self, drafter: str, room: np.ndarray, gamma: int) -> tuple[np.ndarray, np.ndarray]:
        if drafter not in self.known:
            self.known[drafter] = self._ratios(drafter)
        model = self.pair.target if drafter == "self" else self.pair.draft
        if model is not None and (limit := context_limit(model)) is not None:
            held = len(self.output.prompt_tokens) + np.arange(len(room))
            room = np.minimum(room, limit - held + 1).clip(min=0)
        ratio = np.zeros((len(room), gamma))
        for i in range(min(gamma, len(room))):
            ratio[: len(room) - i, i] = self.known[drafter][i:]
        return ratio, room

    def _ratios(self, drafter: str) -> np.ndarray:
        """q/p of every token of the text, from one pass of each model over the whole of it."""
        if drafter == "self":
            return np.ones(len(self.output.tokens))
        if self.pair.draft is None or self.pair.draft_tokenizer is not None:
            raise SpecDecError(
                f"Pair '{self.pair.name}' has no draft model in the target's own tokens, so it cannot be replayed: set "
                "'draft' in its YAML, or take drafter=prompt_lookup."
            )
        known = int(self.pair.draft.config.get_text_config(decoder=True).vocab_size)
        if max(*self.output.prompt_tokens, *self.output.tokens) >= known:
            raise SpecDecError(
                f"A text holds a token beyond the draft's {known}, so it cannot be replayed: run the loop."
            )
        drawn = torch.tensor(self.output.tokens, device=self.pair.target.device).unsqueeze(1)
        q = self._law(self.pair.draft).gather(1, drawn)
        if self.policy.greedy:  # the text says what the target chose
            return np.asarray(q.squeeze(1).cpu().double().numpy())
        p = self._law(self.pair.target).gather(1, drawn)
        return np.asarray((q.double() / p.double()).nan_to_num(0.0, posinf=1.0).squeeze(1).cpu().numpy())

    @torch.inference_mode()
    def _law(self, model: torch.nn.Module) -> torch.Tensor:
        """``[T, vocab]``: the model's law before each token of the text."""
        before = len(self.output.prompt_tokens) - 1
        ids = torch.tensor([[*self.output.prompt_tokens, *self.output.tokens]], device=self.pair.target.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(self.output.tokens)).logits[0]
        assert len(logits) == len(self.output.tokens) <= ids.shape[1] - 1 - before
        return distribution(fit_vocabulary(logits, self.pair.vocab), self.policy)


def predict(replays: Sequence[Replay]) -> dict[str, float]:
    """Tokens per target pass predicted from replays at one block length, in two ways.

    ``constant_alpha`` puts one α (the mean at block position 1, where something was drafted) into the closed form,
    and counts a pass without a draft as one token. ``along_the_text`` walks the texts, so α may differ by place.
    """
    first = np.concatenate([r.first for r in replays])
    alpha = float(first.mean()) if len(first) else 0.0
    places = sum(len(r.ratio) - 1 for r in replays)
    share = len(first) / places if places else 0.0
    closed = expected_tokens(alpha, replays[0].ratio.shape[1])
    passes = sum(r.passes() for r in replays)
    # Passes with a draft cover more text each, so their share of passes is not their share of places.
    by_pass = share / closed / (share / closed + 1 - share) if share else 0.0
    return {
        "alpha": alpha,
        "drafted_share": share,
        "constant_alpha": by_pass * closed + 1 - by_pass,
        "along_the_text": places / passes if passes else 1.0,
    }
