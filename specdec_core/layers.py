"""What the layers of a model keep for the rows of a batch: keys and values, and recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicLayer, LinearAttentionLayer

Place = tuple[dict[Any, Tensor | None], Any]  # where a layer keeps a tensor, a row for each of the batch


class RowLengths:
    """Where the rows of a batch stand; shared by all layers. Host numbers: no device is asked for them."""

    def __init__(self, batch: int, fixed: int | None):
        self.lengths = [0] * batch
        self.fixed = fixed  # slots a row, where shapes must not change
        self.end = 0  # one past the last slot that the pass under way may see
        # What it writes: row numbers [B, 1] and their slots [B, n]; None where all rows write those before the end.
        self.written: tuple[Tensor, Tensor] | None = None


class RowLayer(CacheLayerMixin):
    """One attention layer's keys and values, ``[B, heads, capacity, dim]``, each row written at its own length."""

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None

    def __init__(self, rows: RowLengths):
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are made, and made longer, by ``update``."""

    def _with_room(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        if buffer is not None and self.rows.end <= buffer.shape[2]:
            return buffer
        capacity = self.rows.fixed or max(64, 1 << self.rows.end.bit_length())
        longer = new.new_zeros(*new.shape[:2], capacity, new.shape[3])
        if buffer is not None:
            longer[:, :, : buffer.shape[2]] = buffer
        return longer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._with_room(self.keys, key_states), self._with_room(self.values, value_states)
        self.is_initialized = True
        end = self.rows.end
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if self.rows.written is None:  # a plain slice
                buffer[:, :, end - new.shape[2] : end] = new
            else:
                row, slots = self.rows.written
                buffer[row, :, slots] = new.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.rows.lengths)

    def get_max_length(self) -> int:
        return -1


class RowStateLayer(LinearAttentionLayer, RowLayer):  # type: ignore[misc, override]
    """A layer with both a recurrent state and attention."""

    def __init__(self, rows: RowLengths, states: int):
        RowLayer.__init__(self, rows)
        LinearAttentionLayer.__init__(self, number_of_states=states)


def row_layer(layer: Any, rows: RowLengths) -> Any:
    """Our own in place of a layer of transformers' cache."""
    if isinstance(layer, LinearAttentionLayer):
        states = layer.number_of_states
        return RowStateLayer(rows, states) if isinstance(layer, DynamicLayer) else LinearAttentionLayer(states)
    return RowLayer(rows) if isinstance(layer, DynamicLayer) else DummyLayer()


def stacked(mine: Tensor | None, theirs: Tensor | None, rows: int) -> Tensor | None:
    """``rows`` rows of another cache behind these, zeros where nothing was ever written for them."""
    if mine is None:
        assert theirs is None, "rows that were fed cannot stand behind rows that never were"
        return None
    if theirs is None:
        return torch.cat([mine, mine.new_zeros(rows, *mine.shape[1:])])
    if mine.ndim == 4:  # keys and values: the longer capacity
        longest = max(mine.shape[2], theirs.shape[2])
        mine, theirs = (pad(x, (0, 0, 0, longest - x.shape[2])) for x in (mine, theirs))
    return torch.cat([mine, theirs])


@dataclass(frozen=True)
class _Kept:
    """The states before a pass, and what the pass fed."""

    lengths: list[int]
    states: list[Tensor | None]
    tokens: Tensor


class States:
    """The recurrent states of a model, row by row. A pass over them cannot be taken back: they are kept from before it
    and restored. With ``stepwise`` a pass that goes on from a state takes one token."""

    def __init__(self, layers: Iterable[Any], rows: RowLengths, run: Callable[[Tensor], Tensor], stepwise: bool):
        self.rows, self.run, self.stepwise = rows, run, stepwise
        self.kept: list[_Kept] = []  # since the last rewind
        linear = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        stores = [store for layer in linear for store in (layer.conv_states, layer.recurrent_states)]
        self.places: list[Place] = [(store, i) for store in stores for i in store]

    def extend(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        self.kept.append(_Kept(list(self.rows.lengths), self._now(), tokens))
        return self._feed(tokens, counts)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Back to the last states kept at or before each row's new length, and the few tokens after them once more."""
        back: dict[int, _Kept] = {}
        for b, (have, want) in enumerate(zip(self.rows.lengths, lengths, strict=True)):
            if want < have:
                fit = [kept for kept in self.kept if kept.lengths[b] <= want]
                if not fit:
                    raise ValueError(f"row {b} of a recurrent state can be rewound to before its last pass, no further")
                back[b] = fit[-1]
        for b, kept in back.items():
            self._put(kept.states, [b])
            self.rows.lengths[b] = kept.lengths[b]
        counts = [want - held for want, held in zip(lengths, self.rows.lengths, strict=True)]
        if any(counts):
            again = self.kept[0].tokens.new_zeros(len(counts), max(counts))
            for b, kept in back.items():
                again[b, : counts[b]] = kept.tokens[b, : counts[b]]
            self._feed(again, counts)
        self.kept.clear()

    def _feed(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Padding would enter a state, so rows with the same count of real tokens are taken together: a pass for each
        count, over all rows, of which these keep what it gave."""
        if len(set(counts)) == 1:
            return self._pass(tokens[:, : counts[0]])
        before = self._now()
        outs, after = {}, {0: before}
        for count in set(counts) - {0}:
            self._put(before, range(len(counts)))
            outs[count], after[count] = self._pass(tokens[:, :count]), self._now()
        logits = outs[max(counts)]
        for b, count in enumerate(counts):
            self._put(after[count], [b])
            if count:
                logits[b, :count] = outs[count][b]
        return logits

    def _pass(self, tokens: Tensor) -> Tensor:
        if not self.stepwise or not any(self.rows.lengths):
            return self.run(tokens)
        start, outs = self.rows.lengths, []
        for column in tokens.split(1, 1):
            outs.append(self.run(column))
            self.rows.lengths = [n + 1 for n in self.rows.lengths]
        self.rows.lengths = start
        return torch.cat(outs, 1)

    def _now(self) -> list[Tensor | None]:
        return [None if (state := store[i]) is None else state.clone() for store, i in self.places]

    def _put(self, states: Sequence[Tensor | None], rows: Sequence[int]) -> None:
        """These rows get their ``states``; one that was not made yet is zero, as before the first token."""
        index = list(rows)
        for (store, i), state in zip(self.places, states, strict=True):
            if (mine := store[i]) is not None:
                mine[index] = 0 if state is None else state[index]
