"""A draft with another tokenizer (Timor et al. 2025, arXiv 2502.05202, algorithm 4: token-level intersection)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SpecDecError
from ..sampling import SamplingPolicy
from .base import Proposal
from .model import ModelDrafter


@lru_cache(maxsize=4)
def pieces(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ordinary tokens by what they add to a text, a leading space included. One that is a part of a character is
    known by its own spelling, so that tokenizers that spell bytes alike share it."""
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    vocab = {token: i for token, i in tokenizer.get_vocab().items() if i not in special}
    # A letter may have a token beside that of its byte: the shorter comes last and counts, texts are written with it.
    names = sorted(vocab, key=len, reverse=True)
    before = tokenizer("a", add_special_tokens=False).input_ids
    start, *texts = tokenizer.batch_decode(
        [before, *([*before, vocab[name]] for name in names)], clean_up_tokenization_spaces=False
    )
    added = {name: text[len(start) :] for name, text in zip(names, texts, strict=True)}
    return {(f"\ufffd{name}" if "\ufffd" in text else text): vocab[name] for name, text in added.items()}


def shared_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    """Ids that mean the same in both, one to one. Of the special tokens the end of the text alone is shared."""
    mine, theirs = pieces(one), pieces(other)
    ends = (one.eos_token_id, other.eos_token_id)
    return [*([] if None in ends else [ends]), *((i, theirs[text]) for text, i in mine.items() if text in theirs)]


class TranslatedDrafter(ModelDrafter):
    """A :class:`ModelDrafter` in the draft's own tokens: its law is restricted to those that the target knows too,
    renormalised, and mapped to the target's ids. Its context is the target's text in the draft's tokens, read anew in
    each pass; what of it has not changed stays in the cache. Processors speak of the target's ids and a capacity of its
    texts, so neither applies.

    Args:
        vocab: size of the target's vocabulary.
        tokenizer, target_tokenizer: the draft's and the target's.
        least: refuse where fewer than this share of the smaller vocabulary is common to both.
        kwargs: ``confidence`` and ``candidates`` of :class:`ModelDrafter`.
    """

    name = "translated"

    def __init__(
        self,
        model: PreTrainedModel,
        policy: SamplingPolicy,
        vocab: int,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        least: float = 0.1,
        **kwargs: Any,
    ):
        own, size = int(model.config.get_text_config(decoder=True).vocab_size), vocab
        pairs = [(i, t) for i, t in shared_tokens(tokenizer, target_tokenizer) if i < own and t < size]
        if len(pairs) < max(least * min(len(tokenizer), len(target_tokenizer)), kwargs.get("candidates", 1), 2):
            raise SpecDecError(
                f"Draft and target share only {len(pairs)} tokens (of {len(tokenizer)} and {len(target_tokenizer)}): "
                "take a draft whose tokenizer is closer to the target's."
            )
        self.tokenizer, self.target_tokenizer, self.size = tokenizer, target_tokenizer, size
        self.ids, self.target_ids = torch.tensor(pairs, device=model.device).unbind(1)
        self.to_target = self.ids.new_zeros(own).index_copy(0, self.ids, self.target_ids)
        first = tokenizer("a").input_ids[:1]
        self.lead = first if first == [tokenizer.bos_token_id] else []
        super().__init__(model, policy, own, **{**kwargs, "processing": None, "capacity": None})
        self.columns = None  # restricted to the shared tokens instead
        if self.cache.layout.recurrent:
            raise SpecDecError(
                f"Draft '{model.config.model_type}' keeps a recurrent state, which cannot follow a text that is read "
                "anew: take one with attention."
            )

    def start(self) -> None:
        super().start()
        self.held: list[list[int]] = []  # the draft's tokens in the cache

    def join(self, sequences: Sequence[Sequence[int]]) -> None:
        super().join(sequences)
        self.held += [[] for _ in sequences]

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.held = [self.held[b] for b in rows]

    def commit(self, lengths: Sequence[int]) -> None:
        """What was drafted stays until ``propose`` sees how much of it the text has become."""
        super().commit([len(held) for held in self.held])

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        texts = [self._encode(s) for s in sequences]
        self.held = [h[: _common(h, t[:-1])] if t else h for h, t in zip(self.held, texts, strict=True)]
        self.cache.rewind([len(held) for held in self.held])
        self.sound = None
        block = super().propose(texts, [r if t else 0 for t, r in zip(texts, room, strict=True)], u)
        rows = zip(self.held, texts, block.tokens.tolist(), self.sound or self.cache.lengths, strict=True)
        self.held = [[*text, *drafted][:n] if text else held for held, text, drafted, n in rows]
        return replace(
            block,
            tokens=self.to_target[block.tokens],
            q=self._mapped(block.q),
            belief=self._mapped(block.belief),
            branches=None if block.branches is None else self.to_target[block.branches],
            note=block.note and f"{block.note}, or the text ends within a character",
        )

    def _encode(self, ids: Sequence[int]) -> list[int]:
        """The text in the draft's tokens; none where it ends within a character."""
        text = self.target_tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole = not str(text).endswith("\ufffd")
        return [*self.lead, *self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids] if whole else []

    def _laws(self, logits: Tensor, sequences: Sequence[Sequence[int]], drafted: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.full_like(logits, -torch.inf).index_copy(-1, self.ids, logits[..., self.ids])
        return super()._laws(known, sequences, drafted)

    def _mapped(self, law: Tensor | None) -> Tensor | None:
        """``[B, g, own]`` -> ``[B, g, V]``."""
        if law is None:
            return None
        return law.new_zeros(*law.shape[:-1], self.size).index_copy(-1, self.target_ids, law[..., self.ids])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
