"""Llama layers with fewer, larger operations: the same numbers from fewer calls.

A pass over a few tokens spends a third of its time between the matrix products of a small model: in Python, and in
starting some forty operations a layer. Here queries, keys and values come from one product and both halves of the
gated MLP from another, and queries and keys are turned together. Norms, rounding and order of the arithmetic are those
of transformers' own layer, to the last bit for SiLU, which is Llama's activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRotaryEmbedding

from ..drafters.early_exit import shell
from ..errors import SpecDecError


class LeanRotary(nn.Module):
    """Cosines and sines ``[B, n, 1, dim]``; the sines of the first half negative, so that turning by half the width
    stands for ``rotate_half``."""

    def __init__(self, rotary: LlamaRotaryEmbedding):
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (x.unsqueeze(2) for x in self.rotary(hidden, position_ids=position_ids))
        half = sin.shape[-1] // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


class LeanLayer(LlamaDecoderLayer):
    """Stands where a ``LlamaDecoderLayer`` with attention ``sdpa`` stood, and keeps that attention: hidden
    ``[B, n, d]`` -> ``[B, n, d]``. It is one by name alone, so that transformers finds it among its layers."""

    def __init__(self, layer: LlamaDecoderLayer):
        nn.Module.__init__(self)
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.act_fn = attention.o_proj, mlp.act_fn
        self.gate_up, self.down = joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self.heads = attention.q_proj.out_features // self.dim
        self.groups = attention.k_proj.out_features // self.dim

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        **_: Any,
    ) -> Tensor:
        assert position_embeddings is not None
        (cos, sin), (batch, n, _width) = position_embeddings, hidden.shape
        heads = self.qkv(self.before(hidden)).view(batch, n, -1, self.dim)
        turned, values = heads[:, :, : -self.groups], heads[:, :, -self.groups :].transpose(1, 2)
        turned = (turned * cos + turned.roll(self.dim // 2, -1) * sin).transpose(1, 2)
        queries, keys = turned[:, : self.heads], turned[:, self.heads :]
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        seen = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and n > 1,
            scale=self.scaling,
            enable_gqa=True,
        )
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, n, -1))
        gate, up = self.gate_up(self.after(hidden)).chunk(2, -1)
        made: Tensor = hidden + self.down(self.act_fn(gate) * up)
        return made


def _not_saved(*_: Any, **__: Any) -> None:
    raise SpecDecError("Joined weights have names that no other model has: save the model as it was before.")


def joined(*linears: nn.Linear) -> nn.Linear:
    """One ``nn.Linear`` whose outputs are those of all of these, one behind the other."""
    biased = linears[0].bias is not None
    whole = nn.Linear(linears[0].in_features, sum(x.out_features for x in linears), bias=biased, device="meta")
    for name in ("weight", "bias") if biased else ("weight",):
        parts = [getattr(x, name).detach() for x in linears]
        setattr(whole, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    return whole


def possible(model: PreTrainedModel) -> bool:
    """Whether these are plain Llama layers on a CPU with attention ``sdpa``."""
    decoder = model.get_decoder()
    if type(decoder) is not LlamaModel or decoder.config._attn_implementation != "sdpa" or model.device.type != "cpu":
        return False
    return all(type(layer) is LlamaDecoderLayer and _plain(layer) for layer in decoder.layers)


def _plain(layer: LlamaDecoderLayer) -> bool:
    names = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    parts = [[getattr(of, n) for n in some] for of, some in zip((layer.self_attn, layer.mlp), names, strict=True)]
    return all(type(part) is nn.Linear for some in parts for part in some)


def lean(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with its layers joined so, for inference; where that is not `possible` the model itself.

    The joined weights are copies, under other names than in the model's file; everything else is shared.
    """
    if not possible(model):
        return model
    slim = shell(model)
    slim.save_pretrained = _not_saved  # type: ignore[method-assign, assignment]
    decoder: Any = slim.get_decoder()
    decoder.rotary_emb = LeanRotary(decoder.rotary_emb)
    for i, layer in enumerate(decoder.layers):
        decoder.layers[i] = LeanLayer(layer)
    return slim
