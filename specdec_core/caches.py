"""What a model keeps between steps: prefill, extend, rewind, with rows of different length. No probability here.

Keys and values lie in one buffer per layer, written in place at each row's own length. Rewinding is then only a
smaller number: what lies beyond a row's length is never seen and is overwritten next. Nothing is copied, and
rows of a batch may accept different counts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from .errors import SpecDecError


class RowLayer(CacheLayerMixin):
    """One attention layer's keys and values, ``[B, heads, capacity, dim]``, each row written at its own length."""

    is_sliding = False

    def __init__(self, rows: RowLengths):
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._grown(None, key_states)
        self.values = self._grown(None, value_states)
        self.is_initialized = True

    def _grown(self, old: Tensor | None, like: Tensor) -> Tensor:
        b, heads, _, dim = like.shape
        buffer = like.new_zeros(b, heads, self.rows.capacity(), dim)
        if old is not None:
            buffer[:, :, : old.shape[2]] = old
        return buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        if self.rows.end > keys.shape[2]:
            keys, values = self._grown(keys, key_states), self._grown(values, value_states)
            self.keys, self.values = keys, values
        if self.rows.positions is None:  # every row at the same length: a plain slice
            start = self.rows.end - key_states.shape[2]
            keys[:, :, start : self.rows.end] = key_states
            values[:, :, start : self.rows.end] = value_states
        else:
            row = torch.arange(keys.shape[0], device=keys.device).unsqueeze(1)
            keys[row, :, self.rows.positions] = key_states.transpose(1, 2)
            values[row, :, self.rows.positions] = value_states.transpose(1, 2)
        return keys[:, :, : self.rows.end], values[:, :, : self.rows.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.rows.lengths)

    def get_max_length(self) -> int:
        return -1


class RowLengths:
    """Where the rows of a batch stand; shared by all layers. Host numbers: no device is asked for them."""

    def __init__(self, batch: int):
        self.lengths = [0] * batch
        self.end = 0  # one past the last slot that the pass under way writes
        self.positions: Tensor | None = None  # [B, n] slots written by that pass, or None when rows agree

    def capacity(self) -> int:
        return max(64, 1 << math.ceil(math.log2(self.end + 1)))


class ModelCache:
    """A model with its cache for a batch of rows.

    ``lengths[b]`` tokens of row b are held. Raises SpecDecError for a model whose cache cannot be rewound
    exactly (recurrent, hybrid, sliding window), before the first token.
    """

    def __init__(self, model: PreTrainedModel, batch: int):
        layers = _layer_count(model)
        check_rewindable(model)
        self.model = model
        self.rows = RowLengths(batch)
        self.cache = Cache(layers=[RowLayer(self.rows) for _ in range(layers)])
        self.limit = context_limit(model)
        self.trims = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def lengths(self) -> list[int]:
        return list(self.rows.lengths)

    def extend(
        self, tokens: Tensor, counts: Sequence[int] | None = None, keep: Literal["all", "last"] = "all"
    ) -> Tensor:
        """Feed tokens and hold their keys and values.

        Args:
            tokens: ``[B, n]`` int64 on the model's device.
            counts: how many of the n are real in each row (the rest is padding on the right and is not held).
            keep: ``"all"`` gives logits ``[B, n, V]``, ``"last"`` those after each row's last real token
                ``[B, 1, V]``, so that a long prompt does not pay for the output head at every position.
        """
        batch, n = tokens.shape
        counts = [n] * batch if counts is None else counts
        rows, start = self.rows, self.rows.lengths
        rows.end = max(start) + n
        ragged = len(set(start)) > 1
        at = torch.tensor(start, device=tokens.device).unsqueeze(1) + torch.arange(n, device=tokens.device)
        rows.positions = at if ragged else None
        positions = at if self.limit is None else at.clamp(max=self.limit - 1)  # padding may run over the edge
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "cache": self.cache,
            "use_cache": True,
        }
        if ragged:
            inputs["attention_mask"] = self._ragged_mask(at)
        ends = [max(c - 1, 0) for c in counts]  # column of each row's last real token
        wanted = sorted(set(ends))
        if keep == "last" and self.trims:
            inputs["logits_to_keep"] = 1 if wanted == [n - 1] else torch.tensor(wanted, device=tokens.device)
        logits = self.model(**inputs).logits
        if keep == "last" and logits.shape[1] != 1:
            column = [wanted.index(e) for e in ends] if self.trims else ends
            logits = logits[torch.arange(batch), torch.tensor(column)].unsqueeze(1)
        rows.lengths = [s + c for s, c in zip(start, counts, strict=True)]
        return cast(Tensor, logits)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` tokens of each row."""
        for row, (have, want) in enumerate(zip(self.rows.lengths, lengths, strict=True)):
            if not 0 <= want <= have:
                raise ValueError(f"row {row} holds {have} tokens and cannot be rewound to {want}")
        self.rows.lengths = list(lengths)

    def _ragged_mask(self, at: Tensor) -> Tensor:
        """``[B, 1, n, end]`` additive: the query at position i sees the slots up to i of its own row."""
        seen = torch.arange(self.rows.end, device=at.device) <= at.unsqueeze(-1)
        dtype = self.model.dtype
        return (
            torch.zeros(seen.shape, dtype=dtype, device=at.device)
            .masked_fill_(~seen, torch.finfo(dtype).min)
            .unsqueeze(1)
        )


def context_limit(model: PreTrainedModel) -> int | None:
    """The most positions the model was made for, or None when its configuration names none.

    For a "longrope" model that is the length it was first trained for: beyond it the frequencies of *all* positions
    depend on the furthest one in the pass, so that a draft or a neighbour in the batch would change a row's keys.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return min(int(original), int(config.max_position_embeddings))
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _layer_count(model: PreTrainedModel) -> int:
    """Number of cache layers; refuses a model with any layer other than full attention."""
    config = model.config.get_text_config(decoder=True)
    kinds: list[Any] = []
    # A configuration that transformers itself cannot map onto its caches is refused below.
    with suppress(KeyError, AttributeError, TypeError, ValueError):
        kinds = DynamicCache(config=config).layers
    odd = sorted({type(layer).__name__ for layer in kinds if type(layer) is not DynamicLayer})
    if "local" in (getattr(config, "attention_layers", None) or ()):
        odd.append("local attention")  # GPT-Neo builds its window inside the layer, where no cache shows it
    if odd or not kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(odd) or "a state that is not a key-value cache"
        raise SpecDecError(
            f"Model type '{config.model_type}' keeps {what}, which cannot be rewound after a rejection yet: "
            "use a model with full attention in every layer."
        )
    return len(kinds)


_checked: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def check_rewindable(model: PreTrainedModel) -> None:
    """Refuse a model that gives other logits in blocks, after a rewind or in a ragged batch than in one plain pass.

    Looking at the configuration cannot settle this for every architecture, eight tokens can. Done once a model.
    """
    if model in _checked:
        return
    _checked[model] = True  # set first: the check itself makes caches
    try:
        with torch.inference_mode():
            worst = _rewind_error(model)
    except Exception as error:
        del _checked[model]
        raise SpecDecError(
            f"Model type '{model.config.model_type}' cannot run on a row-wise cache ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}): use another model."
        ) from error
    if not worst < (1e-4 if torch.finfo(model.dtype).bits > 16 else 5e-2):
        del _checked[model]
        raise SpecDecError(
            f"Model type '{model.config.model_type}' gives other logits after a rewind (relative error {worst:.1e} in "
            f"{str(model.dtype).removeprefix('torch.')}), so its output would not be exact: use another model."
        )


def _rewind_error(model: PreTrainedModel) -> float:
    """Largest difference, relative to the largest logit, between a plain pass and a ragged one with rewinds."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    length = min(8, context_limit(model) or 8)
    cut = length // 2
    ids = (torch.arange(length, device=model.device) * 7919 + 11) % vocab
    plain = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    scale, worst = plain.abs().max().clamp(min=1e-6), 0.0
    if not torch.isfinite(scale):
        return 0.0  # broken weights are no fault of the cache: the loop names the position where they show
    for batch in (1, 2):
        cache = ModelCache(model, batch)
        wrong = ids.flip(0).expand(batch, -1)
        cache.extend(wrong[:, :cut])
        cache.rewind([0, min(1, cut)][:batch])
        if batch == 2:  # the second row stands one token further, so the rows are ragged from here on
            cache.rewind([0, 0])
            cache.extend(ids[:1].expand(2, -1), counts=[0, 1])
        starts = cache.lengths
        block = torch.stack([ids[s : s + cut] for s in starts])
        cache.extend(block)
        cache.rewind([s + 1 for s in starts])
        rest = torch.stack([ids[s + 1 : s + 1 + cut] for s in starts])
        got = cache.extend(rest).float()
        for row, s in enumerate(starts):
            want = plain[s + 1 : s + 1 + cut]
            worst = max(worst, float((got[row, : len(want)] - want).abs().max() / scale))
    return worst if math.isfinite(worst) else math.inf
