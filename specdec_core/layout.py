"""How a model is cached, read off its configuration; what could not be exact is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionLayer

from .errors import SpecDecError

Window = Callable[[Tensor, Tensor], Tensor]  # positions of query and slot -> whether the one is near enough

_ATTENTION = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_LINEAR = {"LinearAttentionLayer"} | {f"LinearAttentionAnd{x}AttentionLayer" for x in ("Full", "SlidingWindow")}
_IGNORES_ITS_WINDOW = ("moshi",)  # its configuration names one, its code attends to everything
# Scales attention by a position that it takes from the cache, the same for every row; shows behind 8,192 tokens only.
_READS_POSITIONS_OFF_ITS_CACHE = ("llama4_text",)


@dataclass(frozen=True)
class Layout:
    """How a model is cached: the layers of transformers' own cache, which windows its attention has, whether it keeps a
    state, and why its rows can only run alone, where they can."""

    kind: str
    layers: list[Any]
    windows: dict[str, Window | None]
    recurrent: bool
    alone: str


def layout_of(model: PreTrainedModel) -> Layout:
    config = model.config.get_text_config(decoder=True)
    layers: list[Any] = []
    with suppress(KeyError, AttributeError, TypeError, ValueError):  # one that transformers cannot map onto its caches
        layers = DynamicCache(config=config).layers
    windows = {layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")}
    own = type(model).__module__.startswith("transformers.models.") and config.model_type not in _IGNORES_ITS_WINDOW
    odd = {type(layer).__name__ for layer in layers} - _ATTENTION - _LINEAR - {"DummyLayer"}
    if "local" in (getattr(config, "attention_layers", None) or ()):
        odd.add("local attention")  # GPT-Neo builds its window inside the layer, where no mask of ours reaches
    if len(windows) > 1:
        odd.add(f"windows of {len(windows)} lengths")
    if windows and not own:
        odd.add("a window that is not known to be applied")
    if odd or not layers:
        what = ", ".join(sorted(odd)) or "a state that is not a key-value cache"
        raise SpecDecError(
            f"Model type '{config.model_type}' keeps {what}, which cannot be rewound after a rejection: "
            "use a model with full, sliding or linear attention."
        )
    alone = ""
    if config._attn_implementation not in ("eager", "sdpa"):
        alone = f"attention '{config._attn_implementation}' takes no mask of ours"
    elif config.model_type in _READS_POSITIONS_OFF_ITS_CACHE:
        alone = f"Model type '{config.model_type}' takes all rows to be as long as the longest"
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in layers)
    return Layout(str(config.model_type), layers, _windows(config, layers, max(windows, default=1)), recurrent, alone)


def _windows(config: Any, layers: Sequence[Any], size: int) -> dict[str, Window | None]:
    near: dict[str, Window] = {
        "sliding_attention": lambda query, slot: query - slot < size,
        "chunked_attention": lambda query, slot: query // size == slot // size,
    }
    kinds: dict[str, Window | None] = {}
    default = "chunked_attention" if getattr(config, "attention_chunk_size", None) else "sliding_attention"
    named = getattr(config, "layer_types", None) or [default] * len(layers)
    for layer, name in zip(layers, named, strict=False):
        if hasattr(layer, "sliding_window"):
            kind = "chunked_attention" if name == "chunked_attention" else "sliding_attention"
            kinds[kind] = near[kind]
        elif isinstance(layer, CacheLayerMixin):
            kinds["full_attention"] = None
    return kinds


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
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    values = (getattr(config, name, None) for name in names)
    return next((n for n in values if isinstance(n, int) and n > 0), None)
