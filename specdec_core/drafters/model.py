"""Another causal language model as draft (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..caches import ModelCache
from ..errors import SpecDecError, number, whole
from ..processors import Processing
from ..sampling import SamplingPolicy, distribution, draw, fit_vocabulary, likeliest
from .base import Drafter, Proposal


class ModelDrafter(Drafter):
    """Draws each token from the draft model, under the same sampling policy as the target.

    Args:
        model: any causal LM whose token ids mean the same as the target's.
        policy: the target's policy; at temperature 0 the draft takes its argmax and q is one-hot.
        vocab: size of the target's vocabulary. Logits beyond it are dropped *before* the law is made, and a
            smaller draft gets q = 0 there, so q lives on the target's vocabulary.
        confidence: stop drafting at a position whose largest q is below this (0 = never). The token drawn there is
            thrown away unverified; the choice rests on the law alone, so the output law is unchanged.
        candidates: tokens for each position, drawn without replacement; the block goes on behind the first.
        processing: what acts on the target's logits acts on the draft's too, so that the two agree more often.
        capacity: room for so many tokens a row, allocated at once, for fixed shapes (see ``ModelCache``).
    """

    name = "model"

    def __init__(
        self,
        model: PreTrainedModel,
        policy: SamplingPolicy,
        vocab: int,
        confidence: float = 0.0,
        candidates: int = 1,
        processing: Processing | None = None,
        capacity: int | None = None,
    ):
        if not isinstance(policy, SamplingPolicy):
            raise SpecDecError(f"policy={policy!r} is not possible: give a SamplingPolicy.")
        whole("vocab", vocab, 1, 2**31)
        number("confidence", confidence, lambda c: 0 <= c < 1, "a probability below 1, where 0 is off")
        whole("candidates", candidates, 1, min(vocab, 64))
        self.model, self.policy, self.vocab, self.confidence = model, policy, vocab, confidence
        self.candidates, self.processing, self.capacity = candidates, processing or Processing(), capacity
        self.known = min(vocab, int(model.config.get_text_config(decoder=True).vocab_size))
        ids: Tensor | None = getattr(model.get_output_embeddings(), "ids", None)  # of a ReducedHead
        ids = None if ids is None else ids[ids < vocab]
        if ids is not None and len(ids) < candidates:
            raise SpecDecError(
                f"The draft's head holds {len(ids)} of the target's tokens, fewer than {candidates}: cut less."
            )
        self.columns = None if self.processing.active else ids  # the tokens that laws are made over, where not all
        self.start()

    def start(self) -> None:
        self.cache = ModelCache(self.model, 0, self.capacity)
        self.prompts: list[int] = []
        self.sound: list[int] | None = None  # tokens of each row's cache that are text or a block just proposed

    def join(self, sequences: Sequence[Sequence[int]]) -> None:
        """Nothing is fed before the first block is asked for: a control may never ask."""
        self.prompts += [len(s) for s in sequences]
        self.cache.append(ModelCache(self.model, len(sequences), self.capacity))

    def keep(self, rows: Sequence[int]) -> None:
        self.prompts = [self.prompts[b] for b in rows]
        self.cache.keep(rows)

    def commit(self, lengths: Sequence[int]) -> None:
        held = self.cache.lengths if self.sound is None else self.sound
        self.cache.rewind([min(have, n) for have, n in zip(held, lengths, strict=True)])
        self.sound = None

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        room = [self._possible(s, r) for s, r in zip(sequences, room, strict=True)]
        width, device = max(room), self.model.device
        if width == 0:
            full = f"the draft's context of {self.cache.limit} tokens is full"
            return Proposal.nothing(len(room), device, f"{full}, or the text holds a token it does not know")
        logits = self._read(sequences, room)
        base, k = self.cache.lengths, self.candidates
        going = torch.ones(len(room), dtype=torch.bool, device=device)
        lengths = torch.zeros(len(room), dtype=torch.int64, device=device)
        tokens = lengths.new_zeros(len(room), width, k)
        laws: list[Tensor] = []
        beliefs: list[Tensor] = []
        for i in range(width):
            law, belief = self._laws(logits, sequences, tokens[:, :i, 0])
            # No law (NaN) where processors forbid all that the draft knows.
            going &= belief.amax(-1) >= self.confidence
            if i and self.known < self.vocab:  # nothing behind a token that it does not know
                going &= tokens[:, i - 1, 0] < self.known
            lengths += going
            picked = self._pick(law, belief, u[:, i * k : (i + 1) * k])
            tokens[:, i] = picked if self.columns is None else self.columns[picked]
            laws.append(law)
            beliefs.append(belief)
            # On a CPU asking costs nothing; on a GPU the block runs on, since a read would wait for it.
            if self.confidence and device.type == "cpu" and not going.any():
                break
            if i + 1 < width:
                logits = self.cache.extend(tokens[:, i, :1].clamp(max=self.known - 1))
        n = len(laws)
        # Rows with less room than the widest ran along for the shape's sake: what they drafted beyond it is no text.
        self.sound = [b + min(n, max(r, 1)) - 1 for b, r in zip(base, room, strict=True)]
        return Proposal(
            tokens[:, :n, 0],
            torch.minimum(lengths, torch.tensor(room, device=device)),
            None if self.policy.greedy else self._whole(laws),
            [min(r, n) for r in room],
            self._whole(beliefs),
            tokens[:, :n, 1:] if k > 1 else None,
        )

    def _possible(self, text: Sequence[int], room: int) -> int:
        """The room that the draft's context leaves; none behind a text with a token that it does not know."""
        if not room or (self.known < self.vocab and max(text) >= self.known):
            return 0
        return room if self.cache.limit is None else max(0, min(room, self.cache.limit - len(text) + 1))

    def _read(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Tensor:
        """Feed what the cache lacks of each text for which there is room: logits ``[B, 1, V]`` behind it."""
        self._prefill(sequences, room)
        held = [min(h, len(t) - 1) if r else h for h, t, r in zip(self.cache.lengths, sequences, room, strict=True)]
        self.cache.rewind(held)  # the last token is fed again where nothing is new: its logits are wanted
        return self._feed(self.cache, [s[h:] if r else [] for s, h, r in zip(sequences, held, room, strict=True)])

    def _prefill(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> None:
        """Feed newcomers all but the last token of their text apart from the rows that hold theirs already, which
        would otherwise be padded to the newcomers' length."""
        held = self.cache.lengths
        new = [b for b, h in enumerate(held) if h == 0 and room[b] and len(sequences[b]) > 1]
        if not new or not any(held) or self.capacity:
            return
        fresh, old = ModelCache(self.model, len(new)), [b for b in range(len(held)) if b not in new]
        self._feed(fresh, [sequences[b][:-1] for b in new])
        self.cache.keep(old)
        self.cache.append(fresh)
        self.cache.keep([(old + new).index(b) for b in range(len(held))])

    def _feed(self, cache: ModelCache, new: Sequence[Sequence[int]]) -> Tensor:
        """Feed each row what it lacks of its text (two tokens after a block kept whole): logits ``[B, 1, V]``."""
        width = max(len(row) for row in new)
        padded = torch.tensor([[*row] + [0] * (width - len(row)) for row in new], device=self.model.device)
        return cache.extend(padded, [len(row) for row in new], keep="last")

    def _laws(self, logits: Tensor, sequences: Sequence[Sequence[int]], drafted: Tensor) -> tuple[Tensor, Tensor]:
        """The law to draw from and the law at temperature 1, both ``[B, vocab]``, or ``[B, columns]`` where the head is
        cut: everywhere else they are 0."""
        logits = logits[:, -1:]
        logits = fit_vocabulary(logits, self.vocab) if self.columns is None else logits[..., self.columns]
        if self.processing.active:
            logits = self.processing.process_block(logits, sequences, self.prompts, drafted)
        plain = SamplingPolicy(temperature=1.0)
        belief = distribution(logits[:, 0], plain)
        # Greedy needs an order alone, which the law at temperature 1 has too, but for ties that rounding makes.
        if self.policy == plain or self.policy.greedy:
            return (logits[:, 0] if self.policy.greedy else belief), belief
        return distribution(logits[:, 0], self.policy), belief

    def _whole(self, laws: list[Tensor]) -> Tensor:
        """The laws of a block, ``[B, n, vocab]``."""
        found = torch.stack(laws, 1)
        if self.columns is None:
            return found
        return found.new_zeros(*found.shape[:-1], self.vocab).index_copy_(-1, self.columns, found)

    def _pick(self, law: Tensor, belief: Tensor, u: Tensor) -> Tensor:
        """``[B, k]`` candidates: the likeliest when greedy, else drawn from the law without those before."""
        if self.policy.greedy:
            return likeliest(law).unsqueeze(-1) if self.candidates == 1 else belief.topk(self.candidates).indices
        picked = [draw(law, u[:, 0])]
        for j in range(1, self.candidates):
            law = law.scatter(-1, picked[-1].unsqueeze(-1), 0.0)
            picked.append(draw(law, u[:, j]))
        return torch.stack(picked, 1)
