"""What a model keeps between steps: prefill, extend, rewind, with rows of different length. No probability here.

Keys and values lie in one buffer per layer, written in place at each row's own length. Rewinding is then only a
smaller number: what lies beyond a row's length is never seen and is overwritten next. Nothing is copied, and
rows of a batch may accept different counts. Windows (sliding, chunked) are cut by the mask, not by the buffer, so that
they too can be rewound. A recurrent state cannot be taken back: it is kept from before each pass and restored.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .errors import SpecDecError


class RowLengths:
    """Where the rows of a batch stand; shared by all layers. Host numbers: no device is asked for them."""

    def __init__(self, batch: int, fixed: int | None):
        self.lengths = [0] * batch
        self.fixed = fixed  # slots a row, where shapes must not change
        self.end = 0  # one past the last slot that the pass under way may see
        self.index: Tensor | None = None  # [B, 1] row numbers, to go with the slots
        self.slots: Tensor | None = None  # [B, n] written by that pass; None when rows agree: the last n before end

    def capacity(self) -> int:
        return self.fixed or max(64, 1 << math.ceil(math.log2(self.end + 1)))


class RowLayer(CacheLayerMixin):
    """One attention layer's keys and values, ``[B, heads, capacity, dim]``, each row written at its own length."""

    is_sliding = False

    def __init__(self, rows: RowLengths):
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._grown(None, key_states), self._grown(None, value_states)
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
        if self.rows.slots is None:  # every row at the same length: a plain slice
            start = self.rows.end - key_states.shape[2]
            keys[:, :, start : self.rows.end] = key_states
            values[:, :, start : self.rows.end] = value_states
        else:
            keys[self.rows.index, :, self.rows.slots] = key_states.transpose(1, 2)
            values[self.rows.index, :, self.rows.slots] = value_states.transpose(1, 2)
        return keys[:, :, : self.rows.end], values[:, :, : self.rows.end]

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

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (RowLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


def _state_layer(rows: RowLengths, states: int) -> LinearAttentionLayer:
    return LinearAttentionLayer(number_of_states=states)


@dataclass(frozen=True)
class Tree:
    """A block that branches: column i stands ``depth[i]`` behind what is held and sees the columns ``sees[i]``."""

    depth: Tensor  # [n] int64
    sees: Tensor  # [n, n] bool, itself included


class ModelCache:
    """A model with its cache for a batch of rows. ``lengths[b]`` tokens of row b are held.

    ``capacity`` allocates that many slots a row at once and fixes every shape, so that on a GPU a pass is captured as
    a CUDA graph and replayed. Raises SpecDecError for a model whose output would not be exact, before the first token.
    """

    def __init__(self, model: PreTrainedModel, batch: int, capacity: int | None = None):
        self.plan = plan_of(model)
        check_rewindable(model)
        self.model, self.dtype, self.rows = model, model.dtype, RowLengths(batch, capacity)
        self.layers = [make(self.rows) for make in self.plan.layers]
        self.cache = Cache(layers=list(self.layers))
        self.limit = context_limit(model)
        self.trims = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.states = _States([x for x in self.layers if isinstance(x, LinearAttentionLayer)])
        self.graphs: dict[int, _Captured] = {}
        if capacity is not None and self.plan.recurrent:
            raise SpecDecError(f"Model type '{self.plan.kind}' keeps a recurrent state: fixed_shapes is for attention.")

    def allow(self, batch: int, candidates: int) -> None:
        """Refuse, before the first token, more rows or candidates than the model can take exactly."""
        if self.plan.alone and (batch > 1 or candidates > 1 or self.rows.fixed):
            raise SpecDecError(
                f"{self.plan.alone}, so batches, several candidates and fixed shapes would not be exact: decode one "
                "prompt at a time with one candidate, or take another model or attention."
            )
        if candidates > 1 and self.plan.recurrent:
            raise SpecDecError(
                f"Model type '{self.plan.kind}' keeps a recurrent state, which cannot branch: use candidates=1."
            )
        if candidates > 1 and self.model not in _branches:
            _branches[self.model] = branch_error(self.model)  # once a model
        if candidates > 1 and not _branches[self.model] < _tolerance(self.model):
            raise SpecDecError(
                f"Model type '{self.plan.kind}' takes a token's position from its place in the cache, "
                "so it cannot branch: use candidates=1."
            )

    @property
    def lengths(self) -> list[int]:
        return list(self.rows.lengths)

    def extend(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None = None,
        keep: Literal["all", "last"] = "all",
        tree: Tree | None = None,
    ) -> Tensor:
        """Feed tokens and hold their keys and values.

        Args:
            tokens: ``[B, n]`` int64 on the model's device.
            counts: how many of the n are real in each row (the rest is padding on the right and is not held).
            keep: ``"all"`` gives logits ``[B, n, V]``, ``"last"`` those after each row's last real token
                ``[B, 1, V]``, so that a long prompt does not pay for the output head at every position.
            tree: what each column sees, where that is not all before it.
        """
        counts = [tokens.shape[1]] * len(tokens) if counts is None else list(counts)
        start = self.lengths
        if self.states.layers:
            logits = self._extend_states(tokens, counts)
            if keep == "last":
                logits = logits[torch.arange(len(counts)), torch.tensor([max(c - 1, 0) for c in counts])].unsqueeze(1)
        else:
            logits = self._last(tokens, counts) if keep == "last" else self._pass(tokens, tree)
        self.rows.lengths = [s + c for s, c in zip(start, counts, strict=True)]
        return logits

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` tokens of each row."""
        for row, (have, want) in enumerate(zip(self.rows.lengths, lengths, strict=True)):
            if not 0 <= want <= have:
                raise ValueError(f"row {row} holds {have} tokens and cannot be rewound to {want}")
        if self.states.layers:
            self._rewind_states(list(lengths))
        self.rows.lengths = list(lengths)

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        """Row by row, the token held at slot ``source[b]`` goes to slot ``to[b]``: a branch joins the text."""
        row = torch.arange(len(source))
        for layer in self.layers:
            if isinstance(layer, RowLayer) and layer.is_initialized:
                for buffer in (cast(Tensor, layer.keys), cast(Tensor, layer.values)):
                    buffer[row, :, torch.tensor(to)] = buffer[row, :, torch.tensor(source)]

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order; the places of the others are free."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.model.device)
        for layer in self.layers:
            if isinstance(layer, RowLayer) and layer.is_initialized:
                layer.keys, layer.values = (cast(Tensor, x).index_select(0, index) for x in (layer.keys, layer.values))
        self.states.keep(index)
        self.rows.lengths = [self.rows.lengths[b] for b in rows]
        self.graphs.clear()  # made for another batch

    def append(self, other: ModelCache) -> None:
        """The rows of ``other``, a cache of the same model, behind these; ``other`` is used up."""
        sizes = len(self.rows.lengths), len(other.rows.lengths)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, RowLayer) and (mine.is_initialized or theirs.is_initialized):
                mine.keys = _stacked(mine.keys, theirs.keys, *sizes)
                mine.values = _stacked(mine.values, theirs.values, *sizes)
                mine.is_initialized = True
        self.states.append(other.states, *sizes)
        self.rows.lengths += other.rows.lengths
        self.graphs.clear()

    # --- one pass of the model ----------------------------------------------------------------------------

    def _last(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        ends = [max(c - 1, 0) for c in counts]  # column of each row's last real token
        wanted = sorted(set(ends))
        if not self.trims:
            return self._pass(tokens)[torch.arange(len(ends)), torch.tensor(ends)].unsqueeze(1)
        logits = self._pass(tokens, keep=1 if wanted == [tokens.shape[1] - 1] else wanted)
        if logits.shape[1] == 1:
            return logits
        return logits[torch.arange(len(ends)), torch.tensor([wanted.index(e) for e in ends])].unsqueeze(1)

    def _pass(self, tokens: Tensor, tree: Tree | None = None, keep: int | list[int] | None = None) -> Tensor:
        start = self.rows.lengths
        self.rows.end = self.rows.fixed or max(start) + tokens.shape[1]
        ragged = len(set(start)) > 1
        at = torch.tensor(start, device=tokens.device)
        if self.rows.fixed and keep is None and tree is None:
            captured = self.graphs.setdefault(tokens.shape[1], _Captured(self._forward))
            return captured(tokens, at)
        return self._forward(tokens, at, ragged or self.rows.fixed is not None, tree, keep)

    def _forward(
        self, tokens: Tensor, start: Tensor, rowwise: bool = True, tree: Tree | None = None, keep: Any = None
    ) -> Tensor:
        """The model's logits for ``tokens [B, n]`` behind ``start [B]``. Reads nothing from the device."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        slots = start.unsqueeze(1) + columns
        if self.rows.fixed:  # padding beside a row that catches up; the last slot is spare
            slots = slots.clamp(max=self.rows.fixed - 1)
        positions = slots if tree is None else start.unsqueeze(1) + tree.depth
        self.rows.slots = slots if rowwise else None
        self.rows.index = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        inputs: dict[str, Any] = {"input_ids": tokens, "cache": self.cache, "use_cache": True}
        # Padding may run over the edge of the context.
        inputs["position_ids"] = positions if self.limit is None else positions.clamp(max=self.limit - 1)
        if rowwise or tree is not None:
            inputs["attention_mask"] = self._masks(start, slots, positions, tree)
        if keep is not None:
            inputs["logits_to_keep"] = keep if isinstance(keep, int) else torch.tensor(keep, device=tokens.device)
        return cast(Tensor, self.model(**inputs).logits)

    def _masks(self, start: Tensor, slots: Tensor, positions: Tensor, tree: Tree | None) -> Any:
        """``[B, 1, n, end]`` additive: a query sees the slots of its own row up to itself (or what its tree says),
        within its layer's window; a dict by kind of layer where the model has several kinds."""
        all_slots = torch.arange(self.rows.end, device=start.device)
        seen, where = all_slots <= slots.unsqueeze(-1), all_slots.expand(len(start), 1, -1)
        if tree is not None:
            n = slots.shape[1]
            inside = all_slots - start.unsqueeze(1)  # [B, end]: column of the block that lies in each slot
            column = inside.clamp(0, n - 1)
            seen = (inside < 0).unsqueeze(1) | (
                ((inside >= 0) & (inside < n)).unsqueeze(1) & tree.sees[:, column].transpose(0, 1)
            )
            where = torch.where(inside < 0, all_slots, start.unsqueeze(1) + tree.depth[column]).unsqueeze(1)
        masks: dict[str, Tensor | None] = {}
        for kind, near in self.plan.windows.items():
            visible = seen if near is None else seen & near(positions.unsqueeze(-1), where)
            blank = torch.zeros(visible.shape, dtype=self.dtype, device=start.device)
            masks[kind] = blank.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        return {**masks, "linear_attention": None, "conv": None}

    # --- recurrent states ---------------------------------------------------------------------------------

    def _extend_states(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Padding would enter a state, so rows with the same count of real tokens are taken together."""
        self.states.remember(self.rows.lengths, tokens)
        logits = self._by_count(tokens, counts)
        assert logits is not None
        return logits

    def _by_count(self, tokens: Tensor, counts: list[int]) -> Tensor | None:
        """Feed ``tokens[b, :counts[b]]`` from the present states: one pass for each count that occurs."""
        base, reached, logits = self.states.now(), self.states.now(), None
        for count in sorted(set(counts) - {0}):
            self.states.set([base] * len(counts))
            out = self._continued(tokens[:, :count])
            mine = torch.tensor([c == count for c in counts], device=tokens.device)
            after = self.states.now()
            reached = [_rowwise(mine, a, r) for a, r in zip(after, reached, strict=True)]
            if logits is None:
                logits = out.new_zeros(len(counts), tokens.shape[1], out.shape[-1])
            logits[mine, :count] = out[mine]
        self.states.put(reached)
        return logits

    def _continued(self, tokens: Tensor) -> Tensor:
        """A pass, or as many as there are tokens for a model whose scan over several starts from nothing."""
        if not _stepwise.get(self.model) or not any(self.rows.lengths):
            return self._pass(tokens)
        start, outs = self.lengths, []
        for i in range(tokens.shape[1]):
            outs.append(self._pass(tokens[:, i : i + 1]))
            self.rows.lengths = [n + 1 for n in self.rows.lengths]
        self.rows.lengths = start
        return torch.cat(outs, 1)

    def _rewind_states(self, lengths: list[int]) -> None:
        """Back to the last state kept at or before each row's new length, and the few tokens after it once more."""
        present = self.states.now()
        chosen: list[list[Tensor | None]] = []
        counts: list[int] = []
        lines: list[list[int]] = []
        for b, (have, want) in enumerate(zip(self.rows.lengths, lengths, strict=True)):
            index = max((i for i, k in enumerate(self.states.kept) if k.lengths[b] <= want), default=None)
            if want < have and index is None:
                raise ValueError(f"row {b} of a recurrent state can be rewound once after it was extended, not further")
            if want == have or index is None:
                chosen.append(present)
                counts.append(0)
                lines.append([])
                continue
            kept = self.states.kept[index]
            chosen.append(kept.tensors)
            counts.append(want - kept.lengths[b])
            lines.append(kept.tokens[b, : counts[-1]].tolist() if counts[-1] else [])
        if lengths != self.rows.lengths:
            self.states.set(chosen)
            if any(counts):
                self.rows.lengths = [n - c for n, c in zip(lengths, counts, strict=True)]
                padded = [line + [0] * (max(counts) - len(line)) for line in lines]
                self._by_count(torch.tensor(padded, device=self.model.device), counts)
        self.states.kept.clear()


def _stacked(mine: Tensor | None, theirs: Tensor | None, rows: int, others: int) -> Tensor:
    """Two buffers ``[B, heads, capacity, dim]`` as one; one that was never written counts as that many empty rows."""
    like = theirs if mine is None else mine
    assert like is not None
    both = [like.new_zeros(n, *like.shape[1:]) if x is None else x for x, n in ((mine, rows), (theirs, others))]
    longest = max(x.shape[2] for x in both)
    return torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in both])


def _rowwise(mine: Tensor, yes: Tensor | None, no: Tensor | None) -> Tensor | None:
    """Rows of ``yes`` where ``mine [B]``, else of ``no``; a state not yet made is zero."""
    if yes is None:
        return no
    return torch.where(mine.view(-1, *[1] * (yes.ndim - 1)), yes, torch.zeros_like(yes) if no is None else no)


@dataclass
class _Kept:
    """The states before a pass, and what the pass fed."""

    lengths: list[int]
    tensors: list[Tensor | None]
    tokens: Tensor


class _States:
    """The recurrent states of a model, row by row; none for most models."""

    def __init__(self, layers: list[LinearAttentionLayer]):
        self.layers = layers
        self.kept: list[_Kept] = []  # since the last rewind

    def _slots(self) -> list[tuple[LinearAttentionLayer, dict[int, Tensor | None], int]]:
        return [
            (layer, store, i)
            for layer in self.layers
            for store in (layer.conv_states, layer.recurrent_states)
            for i in range(layer.number_of_states)
        ]

    def now(self) -> list[Tensor | None]:
        return [None if store[i] is None else cast(Tensor, store[i]).clone() for _, store, i in self._slots()]

    def remember(self, lengths: Sequence[int], tokens: Tensor) -> None:
        self.kept.append(_Kept(list(lengths), self.now(), tokens))

    def set(self, by_row: Sequence[list[Tensor | None]]) -> None:
        """Row b gets its states from ``by_row[b]``; one that was not made yet is zero, as before the first token."""
        for n, (_, store, i) in enumerate(self._slots()):
            state = store[i]
            if state is not None:
                rows = [row[n][b] if row[n] is not None else torch.zeros_like(state[b]) for b, row in enumerate(by_row)]  # type: ignore[index]
                state.copy_(torch.stack(rows))

    def put(self, tensors: list[Tensor | None]) -> None:
        for (_, store, i), tensor in zip(self._slots(), tensors, strict=True):
            if tensor is not None:
                cast(Tensor, store[i]).copy_(tensor)

    def keep(self, index: Tensor) -> None:
        for _, store, i in self._slots():
            store[i] = None if store[i] is None else cast(Tensor, store[i]).index_select(0, index)

    def append(self, other: _States, mine: int, theirs: int) -> None:
        for (layer, store, i), (source, new, _) in zip(self._slots(), other._slots(), strict=True):
            a, b = store[i], new[i]
            like = a if a is not None else b
            if like is None:
                continue
            a = like.new_zeros(mine, *like.shape[1:]) if a is None else a
            b = like.new_zeros(theirs, *like.shape[1:]) if b is None else b
            store[i] = torch.cat([a, b])
            for flags in ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized"):
                getattr(layer, flags)[i] |= getattr(source, flags)[i]
            layer.conv_kernel_size[i] = layer.conv_kernel_size[i] or source.conv_kernel_size[i]
            layer.device, layer.dtype = layer.device or source.device, layer.dtype or source.dtype


class _Captured:
    """A pass of fixed shape: on a GPU recorded once as a CUDA graph and replayed, elsewhere simply run."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]):
        self.run = run
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.graph: Any = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.inputs is None:
            self.inputs = (inputs[0].clone(), inputs[1].clone())
            if inputs[0].is_cuda:
                self._capture()
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        if self.graph is None:
            return self.run(*self.inputs)
        self.graph.replay()
        return self.output.clone()

    def _capture(self) -> None:
        assert self.inputs is not None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first runs allocate and choose kernels, which a graph must not
            for _ in range(3):
                self.run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = self.run(*self.inputs)


# --- what a model can do ----------------------------------------------------------------------------------

Window = Callable[[Tensor, Tensor], Tensor]  # positions of query and slot -> whether the one is near enough


@dataclass(frozen=True)
class Plan:
    """How a model is cached: how each layer is made, which windows its attention has, whether it keeps a state, and why
    its rows can only run alone, where they can."""

    kind: str
    layers: list[Callable[[RowLengths], Any]]
    windows: dict[str, Window | None]
    recurrent: bool
    alone: str


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


_IGNORES_ITS_WINDOW = ("moshi",)  # its configuration names one, its code attends to everything
# Scales attention by a position that it takes from the cache, the same for every row; shows behind 8,192 tokens only.
_READS_POSITIONS_OFF_ITS_CACHE = ("llama4_text",)


def plan_of(model: PreTrainedModel) -> Plan:
    """Reads off the configuration how the model is cached; refuses what could not be exact."""
    config = model.config.get_text_config(decoder=True)
    try:
        found = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError, ValueError):
        found = []  # a configuration that transformers itself cannot map onto its caches
    makers: list[Callable[[RowLengths], Any]] = []
    odd: list[str] = []
    windows: set[int] = set()
    for layer in found:
        kind, states = type(layer), getattr(layer, "number_of_states", 1)
        windows |= {layer.sliding_window} if hasattr(layer, "sliding_window") else set()
        if kind in (DynamicLayer, DynamicSlidingWindowLayer):
            makers.append(RowLayer)
        elif kind in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
            makers.append(partial(RowStateLayer, states=states))
        elif kind is LinearAttentionLayer:
            makers.append(partial(_state_layer, states=states))
        elif kind is DummyLayer:
            makers.append(lambda rows: DummyLayer())
        else:
            odd.append(kind.__name__)
    if "local" in (getattr(config, "attention_layers", None) or ()):
        odd.append("local attention")  # GPT-Neo builds its window inside the layer, where no mask of ours reaches
    if len(windows) > 1:
        odd.append(f"windows of {len(windows)} lengths")
    own = type(model).__module__.startswith("transformers.models.")
    if windows and (not own or config.model_type in _IGNORES_ITS_WINDOW):
        odd.append("a window that is not known to be applied")
    if odd or not found:
        what = ", ".join(sorted(set(odd))) or "a state that is not a key-value cache"
        raise SpecDecError(
            f"Model type '{config.model_type}' keeps {what}, which cannot be rewound after a rejection: "
            "use a model with full, sliding or linear attention."
        )
    kinds = _windows(config, found, windows.pop() if windows else 0)
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in found)
    alone, attention = "", config._attn_implementation
    if attention not in ("eager", "sdpa"):
        alone = f"attention '{attention}' takes no mask of ours"
    elif config.model_type in _READS_POSITIONS_OFF_ITS_CACHE:
        alone = f"Model type '{config.model_type}' takes all rows to be as long as the longest"
    return Plan(str(config.model_type), makers, kinds, recurrent, alone)


def _windows(config: Any, layers: Sequence[Any], size: int) -> dict[str, Window | None]:
    near: dict[str, Window] = {
        "sliding_attention": lambda query, slot: query - slot < size,
        "chunked_attention": lambda query, slot: query // max(size, 1) == slot // max(size, 1),
    }
    kinds: dict[str, Window | None] = {}
    named = getattr(config, "layer_types", None) or [None] * len(layers)
    for layer, name in zip(layers, named, strict=False):
        if hasattr(layer, "sliding_window"):
            chunked = name == "chunked_attention" or (name is None and getattr(config, "attention_chunk_size", None))
            kind = "chunked_attention" if chunked else "sliding_attention"
            kinds[kind] = near[kind]
        elif isinstance(layer, CacheLayerMixin):
            kinds["full_attention"] = None
    return kinds


_checked: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_stepwise: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_branches: WeakKeyDictionary[PreTrainedModel, float] = WeakKeyDictionary()


def check_rewindable(model: PreTrainedModel) -> None:
    """Refuse a model that gives other logits in blocks, after a rewind or in a ragged batch than in one plain pass.

    Looking at the configuration cannot settle this for every architecture, eight tokens can. Done once a model. A
    recurrent model that fails is tried again one token at a time: exact then, if never faster.
    """
    if model in _checked:
        return
    _checked[model] = True  # set first: the check itself makes caches
    fault = _rewind_fault(model)
    if fault and plan_of(model).recurrent:
        _stepwise[model] = True
        fault = _rewind_fault(model)
    if fault:
        del _checked[model]
        raise SpecDecError(f"Model type '{model.config.model_type}' {fault}: use another model.")


def _rewind_fault(model: PreTrainedModel) -> str:
    """What is wrong with the model's logits after a rewind, in words; empty if nothing is."""
    try:
        with torch.inference_mode():
            worst = rewind_error(model)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else "no message"
        return f"cannot run on a row-wise cache ({type(error).__name__}: {line})"
    if worst < _tolerance(model):
        return ""
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"gives other logits after a rewind (relative error {worst:.1e} in {dtype}), so its output would not be exact"
    )


def _tolerance(model: PreTrainedModel) -> float:
    return 1e-4 if torch.finfo(model.dtype).bits > 16 else 5e-2


@torch.inference_mode()
def branch_error(model: PreTrainedModel) -> float:
    """Largest difference, relative to the largest logit, between plain passes and a pass that branches, and between
    them once the branch has joined the text."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(7, device=model.device) * 7919 + 11) % vocab
    text, spine, branch, after = ids[:4], ids[4], ids[5], ids[6]
    cache = ModelCache(model, 1)
    cache.extend(text[:3].unsqueeze(0))
    # The pending token, a spine of two, and a branch beside each of the two.
    sees = torch.eye(5, dtype=torch.bool, device=model.device)
    sees[:, 0], sees[[2, 4], 1] = True, True
    tree = Tree(torch.tensor([0, 1, 2, 1, 2], device=model.device), sees)
    got = cache.extend(torch.stack([text[3], spine, after, branch, after]).unsqueeze(0), tree=tree)[0, 3]
    cache.move([6], [4])  # the first branch, behind the pending token
    cache.rewind([5])
    then = cache.extend(after.view(1, 1))[0, 0]
    plain = model(input_ids=torch.cat([text, branch.view(1), after.view(1)]).unsqueeze(0), use_cache=False).logits[0]
    real = torch.isfinite(plain[4:6])
    return float(
        (torch.stack([got, then]) - plain[4:6])[real].abs().max() / plain[4:6][real].abs().max().clamp(min=1e-6)
    )


def rewind_error(model: PreTrainedModel, length: int = 8) -> float:
    """Largest difference, relative to the largest logit, between a plain pass and a ragged one with rewinds."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    length = min(length, context_limit(model) or length)
    cut = length // 2
    ids = (torch.arange(length, device=model.device) * 7919 + 11) % vocab
    plain = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    real = torch.isfinite(plain)  # a head that is cut says -inf of the rest
    if torch.isnan(plain).any() or not real.any():
        return 0.0  # broken weights are no fault of the cache: the loop names the position where they show
    scale, worst = plain[real].abs().max().clamp(min=1e-6), 0.0
    for batch in (1,) if plan_of(model).alone else (1, 2):
        cache = ModelCache(model, batch)
        wrong = ids.flip(0).expand(batch, -1)
        cache.extend(wrong[:, :cut])
        cache.rewind([0] * batch)
        if batch == 2:  # the second row stands one token further, so the rows are ragged from here on
            cache.extend(ids[:1].expand(2, -1), counts=[0, 1])
        starts = cache.lengths
        block = torch.stack([ids[s : s + cut] for s in starts])
        cache.extend(block)
        cache.rewind([s + 1 for s in starts])
        rest = torch.stack([ids[s + 1 : s + 1 + cut] for s in starts])
        got = cache.extend(rest).float()
        for row, s in enumerate(starts):
            want = plain[s + 1 : s + 1 + cut]
            here, known = got[row, : len(want)], real[s + 1 : s + 1 + cut]
            worst = max(worst, float((here - want)[known].abs().max() / scale) if known.any() else 0.0)
            worst = worst if torch.equal(torch.isfinite(here), known) else math.inf
    return worst if math.isfinite(worst) else math.inf
