"""What a model keeps between steps: prefill, extend, rewind, with rows of different length. No probability here.

Keys and values lie in one buffer per layer, written in place at each row's own length. Rewinding is then only a
smaller number: what lies beyond a row's length is never seen and is overwritten next. Nothing is copied, and
rows of a batch may accept different counts. Windows (sliding, chunked) are cut by the mask, not by the buffer, so that
they too can be rewound. A recurrent state cannot be taken back: it is kept from before each pass and restored.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .errors import SpecDecError
from .layers import Place, RowLayer, RowLengths, States, row_layer, stacked
from .layout import context_limit, layout_of

__all__ = ["ModelCache", "Tree", "branch_error", "context_limit", "rewind_error"]


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
        self.layout = layout_of(model)
        if capacity is not None and self.layout.recurrent:
            raise SpecDecError(
                f"Model type '{self.layout.kind}' keeps a recurrent state: fixed_shapes is for attention."
            )
        seen = _self_checked(model)
        self.model, self.dtype, self.rows = model, model.dtype, RowLengths(batch, capacity)
        layers = [row_layer(layer, self.rows) for layer in self.layout.layers]
        self.cache, self.states = Cache(layers=layers), States(layers, self.rows, self._pass, seen.stepwise)
        attention = [vars(layer) for layer in layers if isinstance(layer, RowLayer)]
        self.buffers: list[Place] = [(layer, name) for layer in attention for name in ("keys", "values")]
        self.limit = context_limit(model)
        self.trims = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.graphs: dict[int, _Captured] = {}

    def allow(self, batch: int, candidates: int) -> None:
        """Refuse, before the first token, more rows or candidates than the model can take exactly."""
        if self.layout.alone and (batch > 1 or candidates > 1 or self.rows.fixed):
            raise SpecDecError(
                f"{self.layout.alone}, so batches, several candidates and fixed shapes would not be exact: decode one "
                "prompt at a time with one candidate, or take another model or attention."
            )
        if candidates > 1 and (self.layout.recurrent or not _branches(self.model)):
            raise SpecDecError(
                f"Model type '{self.layout.kind}' keeps a recurrent state, or takes a token's position from its place "
                "in the cache, so it cannot branch: use candidates=1."
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
        start, ends = self.lengths, [max(c - 1, 0) for c in counts]
        if self.states.places:
            logits = self.states.extend(tokens, counts)
        elif keep == "last" and self.trims:
            wanted = sorted(set(ends))
            logits, ends = self._pass(tokens, keep=wanted), [wanted.index(e) for e in ends]
        else:
            logits = self._pass(tokens, tree)
        if keep == "last" and logits.shape[1] > 1:
            logits = logits[torch.arange(len(ends)), torch.tensor(ends)].unsqueeze(1)
        self.rows.lengths = [s + c for s, c in zip(start, counts, strict=True)]
        return logits

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` tokens of each row."""
        for row, (have, want) in enumerate(zip(self.rows.lengths, lengths, strict=True)):
            if not 0 <= want <= have:
                raise ValueError(f"row {row} holds {have} tokens and cannot be rewound to {want}")
        if self.states.places:
            self.states.rewind(lengths)
        self.rows.lengths = list(lengths)

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        """Row by row, the token held at slot ``source[b]`` goes to slot ``to[b]``: a branch joins the text."""
        row = torch.arange(len(source))
        for store, name in self.buffers:
            if (held := store[name]) is not None:
                held[row, :, torch.tensor(to)] = held[row, :, torch.tensor(source)]

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order; the places of the others are free."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.model.device)
        for store, name in self.buffers + self.states.places:
            if (held := store[name]) is not None:
                store[name] = held.index_select(0, index)
        self.rows.lengths = [self.rows.lengths[b] for b in rows]
        self.graphs.clear()  # made for another batch

    def append(self, other: ModelCache) -> None:
        """The rows of ``other``, a cache of the same model, behind these; ``other`` is used up. Where these were never
        fed, the others must not have been either."""
        pairs = zip(self.buffers + self.states.places, other.buffers + other.states.places, strict=True)
        for (store, name), (theirs, _) in pairs:
            store[name] = stacked(store[name], theirs[name], len(other.rows.lengths))
        self.rows.lengths += other.rows.lengths
        self.graphs.clear()

    # --- one pass of the model ----------------------------------------------------------------------------

    def _pass(self, tokens: Tensor, tree: Tree | None = None, keep: Sequence[int] = ()) -> Tensor:
        """Logits of one pass, of the columns ``keep`` alone if there are any."""
        width = tokens.shape[1]
        self.rows.end = self.rows.fixed or max(self.rows.lengths) + width
        start = torch.tensor(self.rows.lengths, device=tokens.device)
        if self.rows.fixed and tokens.is_cuda and tree is None and not keep:
            if width not in self.graphs:
                self.graphs[width] = _Captured(self._forward, tokens, start)
            return self.graphs[width](tokens, start)
        return self._forward(tokens, start, tree, keep)

    def _forward(self, tokens: Tensor, start: Tensor, tree: Tree | None = None, keep: Sequence[int] = ()) -> Tensor:
        """The model's logits for ``tokens [B, n]`` behind ``start [B]``. Reads nothing from the device."""
        width, rowwise = tokens.shape[1], self.rows.fixed is not None or len(set(self.rows.lengths)) > 1
        slots = start.unsqueeze(1) + torch.arange(width, device=tokens.device)
        if self.rows.fixed:  # padding beside a row that catches up; the last slot is spare
            slots = slots.clamp(max=self.rows.fixed - 1)
        positions = slots if tree is None else start.unsqueeze(1) + tree.depth
        self.rows.written = None
        if rowwise:
            self.rows.written = torch.arange(len(tokens), device=tokens.device).unsqueeze(1), slots
        inputs: dict[str, Any] = {"input_ids": tokens, "cache": self.cache, "use_cache": True}
        # Padding may run over the edge of the context.
        inputs["position_ids"] = positions if self.limit is None else positions.clamp(max=self.limit - 1)
        if rowwise or tree is not None:
            inputs["attention_mask"] = self._masks(start, slots, positions, tree)
        if keep:
            last = list(keep) == [width - 1]
            inputs["logits_to_keep"] = 1 if last else torch.tensor(keep, device=tokens.device)
        with _grouped_queries(tokens.device):
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
        for kind, near in self.layout.windows.items():
            visible = seen if near is None else seen & near(positions.unsqueeze(-1), where)
            blank = torch.zeros(visible.shape, dtype=self.dtype, device=start.device)
            masks[kind] = blank.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        return {**masks, "linear_attention": None, "conv": None}


@contextmanager
def _grouped_queries(device: torch.device) -> Iterator[None]:
    """Where there is a mask, transformers copies keys and values for every query head unless it is told not to. Torch's
    CPU kernel needs no copies, which are a tenth of a block's pass behind 600 tokens."""
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    if device.type != "cpu" or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


class _Captured:
    """A pass of fixed shape, recorded once as a CUDA graph and replayed."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, start: Tensor):
        self.inputs = tokens.clone(), start.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first runs allocate and choose kernels, which a graph must not
            for _ in range(3):
                run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = run(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        self.graph.replay()
        return self.output.clone()


# --- what a model shows when it is run: looking at the configuration cannot settle everything, eight tokens can -----


@dataclass
class _Seen:
    """``stepwise``: its scan over several tokens starts from nothing, so that it takes one at a time: exact then, if
    never faster. ``branches``: whether it can branch, once that was asked."""

    stepwise: bool = False
    branches: bool | None = None


_seen: WeakKeyDictionary[PreTrainedModel, _Seen] = WeakKeyDictionary()


def _self_checked(model: PreTrainedModel) -> _Seen:
    """Refuse, once a model, what gives other logits in blocks, after a rewind or in a ragged batch than in one plain
    pass. A recurrent model that fails is tried again one token at a time."""
    if model not in _seen:
        seen = _seen[model] = _Seen()  # set first: the check itself makes caches
        fault = _fault(model)
        if fault and layout_of(model).recurrent:
            seen.stepwise = True
            fault = _fault(model)
        if fault:
            del _seen[model]
            raise SpecDecError(f"Model type '{model.config.model_type}' {fault}: use another model.")
    return _seen[model]


def _fault(model: PreTrainedModel) -> str:
    """What is wrong with the model's logits after a rewind, in words; empty if nothing is."""
    try:
        worst = rewind_error(model)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else "no message"
        return f"cannot run on a row-wise cache ({type(error).__name__}: {line})"
    off = f"relative error {worst:.1e} in {str(model.dtype).removeprefix('torch.')}"
    exact = worst < _tolerance(model)
    return "" if exact else f"gives other logits after a rewind ({off}), so its output would not be exact"


def _branches(model: PreTrainedModel) -> bool:
    seen = _self_checked(model)
    if seen.branches is None:
        seen.branches = branch_error(model) < _tolerance(model)
    return seen.branches


def _tolerance(model: PreTrainedModel) -> float:
    return 1e-4 if torch.finfo(model.dtype).bits > 16 else 5e-2


@torch.inference_mode()
def rewind_error(model: PreTrainedModel, length: int = 8) -> float:
    """How far a ragged pass with rewinds is from a plain one."""
    length = min(length, context_limit(model) or length)
    cut, ids = length // 2, _some_ids(model, length)
    plain = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    got: list[Tensor] = []
    want: list[Tensor] = []
    for batch in (1,) if layout_of(model).alone else (1, 2):
        cache = ModelCache(model, batch)
        cache.extend(ids.flip(0).expand(batch, -1)[:, :cut])
        cache.rewind([0] * batch)
        if batch == 2:  # the second row stands one token further, so the rows are ragged from here on
            cache.extend(ids[:1].expand(2, -1), counts=[0, 1])
        starts = cache.lengths
        cache.extend(torch.stack([ids[s : s + cut] for s in starts]))
        cache.rewind([s + 1 for s in starts])
        got += cache.extend(torch.stack([ids[s + 1 : s + 1 + cut] for s in starts]))
        want += [plain[s + 1 : s + 1 + cut] for s in starts]
    return _apart(torch.cat(got), torch.cat(want))


@torch.inference_mode()
def branch_error(model: PreTrainedModel) -> float:
    """How far a pass that branches, and the next once the branch has joined the text, are from plain ones."""
    ids = _some_ids(model, 7)
    text, spine, branch, after = ids[:4], ids[4:5], ids[5:6], ids[6:]
    cache = ModelCache(model, 1)
    cache.extend(text[:3].unsqueeze(0))
    # The pending token, a spine of two, and a branch beside each of the two.
    depth = torch.tensor([0, 1, 2, 1, 2], device=model.device)
    sees = torch.eye(5, dtype=torch.bool, device=model.device)
    sees[:, :3] |= depth[:3] < depth.unsqueeze(1)
    block = torch.cat([text[3:], spine, after, branch, after]).unsqueeze(0)
    branched = cache.extend(block, tree=Tree(depth, sees))[0, 3:4]
    cache.move([6], [4])  # the first branch, behind the pending token
    cache.rewind([5])
    then = cache.extend(after.unsqueeze(0))[0]
    plain = model(input_ids=torch.cat([text, branch, after]).unsqueeze(0), use_cache=False).logits[0]
    return _apart(torch.cat([branched, then]), plain[4:])


def _some_ids(model: PreTrainedModel, n: int) -> Tensor:
    vocab = model.config.get_text_config(decoder=True).vocab_size
    return (torch.arange(n, device=model.device) * 7919 + 11).remainder(vocab)


def _apart(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest logit; infinite where only one of the two is a number."""
    known = torch.isfinite(want)  # a head that is cut says -inf of the rest
    if torch.isnan(want).any() or not known.any():
        return 0.0  # broken weights are no fault of the cache: the loop names the position where they show
    if not torch.equal(torch.isfinite(got), known):
        return math.inf
    got, want = got[known].float(), want[known].float()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
