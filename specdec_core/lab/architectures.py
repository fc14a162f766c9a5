"""Which model types of transformers the loop decodes exactly: each is built tiny and random, run, and held against
plain passes that know no cache. A cache that loses an architecture shows here as another text, not as a bad figure."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..caches import rewind_error
from ..drafters import PromptLookupDrafter, Proposal
from ..drafters.base import Drafter
from ..errors import SpecDecError
from ..loop import Request, Settings, ordinary_decoding, speculative_decoding
from ..sampling import RequestRandom

Kind = Literal["exact", "refused", "silently wrong", "crashed", "not loadable"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LONG = 30  # tokens
GAMMA, VOCAB, WINDOW = 4, 128, 8
PROMPTS = tuple([(37 * i + 11 * n) % VOCAB for i in range(n)] for n in (3, 11, 20))  # inside, over, far over a window
MOST_PARAMETERS, MOST_SECONDS, NEAR_TIE, SEEDS = 3_000_000, 10.0, 1e-4, 3

# What a configuration keeps at most under names like these, the first that fits; what it leaves empty is filled.
_MOST = {
    r"(^|_)expand$|indexer_kv_heads": 1,
    r"expert.*_per_tok|moe_(top_?)?k$|group$|[no]_groups$|(key|kv|query).*(heads|groups)$|kv_n_heads|compress_ratio": 2,
    r"^(num|n|encoder|decoder)(_hidden|_encoder|_decoder)?_layers?$|^depth$|num_blocks|topk_blocks|index_block_size": 2,
    r"(qk|attention)_head_dim|rank$|rel$|rel_extent|prompt_length|router_hidden": 16,
    r"head_?(dim|size)$|(d|dim)_head$|rotary_dim|state(_size)?$|hidden_size_per_layer": WINDOW,
    r"window(_size)?$|local_attention$|chunk_size$|_floor|floor_": WINDOW,
    r"heads?$|(local|routed|moe_num|num)_experts$|zero_expert_num|index_topk|budget$|conv_kernel|block_size": 4,
    r"intermediate_size|ffn_(dim|hidden)|inner$|ff$|feed_forward": 64,
    r"vocab_size|byte_group_vocab|n_words|n_token": VOCAB,
    r"hidden_size|n_embd|d_model|(emb|embed|embedding|proj)_?(dim|size)$|lru_width|model_base|d_ssm": 32,
    r"max_(position|seq|target|source)|n_positions|n_ctx|(context|model_max|seq)_length": 256,
}
_SPREAD = {"initializer_range": 0.25, "init_std": 0.25, "embed_init_std": 0.25}
_SWITCHES = {"is_decoder": True, "use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": False}
_TOKENS = re.compile(r"^(pad|bos|eos|sep|cls|mask|unk|start|decoder_start|forced_.os)_(token_id|index)$")

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING = ["full_attention", "sliding_attention"]
_CONV = ["conv", "full_attention"]
_SHARED = ["linear_attention", "hybrid", "hybrid"]
_LOOPED = ["hybrid_sliding", "hybrid", "hybrid_sliding"]
_BLOCKS = {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
_SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_kv_lora_rank": 16, "swa_q_lora_rank": 16}
_SWA_DIMS = {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
_SPARSE = {"intermediate_size": 64, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}
_AXES = {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]}
_HASH = {"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8}
# What the names above cannot say: where the layers of each kind lie, and sizes that hang on others.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING, _ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dory": {"layer_types": _SLIDING * 2, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _SWA | _SWA_DIMS,
    "gemma3n_text": {"layer_types": _SLIDING * 2, "num_kv_shared_layers": 2} | _SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "inkling2_loop_text": {"layer_types": _LOOPED} | _BLOCKS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _SLIDING, "num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"layer_types": _CONV, "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": _CONV, "num_dense_layers": 1},
    "mellum": {"layer_types": _SLIDING},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "qwen4_exp_text": {"ple_layer_ids": [1], "eos_token_id": 1},
    "qwen2_moe": {"sliding_window": WINDOW},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": _AXES | _HASH,
    "smollm3": {"layer_types": _SLIDING, "no_rope_layers": [1, 0]},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _SHARED, "attention_hidden_size": 64},
    "zamba2": {"layers_block_type": _SHARED, "attention_hidden_size": 64},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"]},
}


def causal_types() -> list[str]:
    """Every model type that transformers offers as a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A small random model of the type, float32, with every kind of layer that its default configuration has.

    Raises whatever keeps it from being built, and ValueError where it does not come out small.
    """
    started = time.perf_counter()
    config: PreTrainedConfig = AutoConfig.for_model(model_type)
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config = _shrunk(config if isinstance(config, made.config_class) else config.get_text_config(decoder=True))
    with torch.device("meta"):
        size = sum(p.numel() for p in made(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters are too many for a small model")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = made(config).float().eval()
        for weight in model.parameters():  # no bias, norm, gate or sink stays at a start that makes it invisible
            weight.add_(0.05 * torch.randn_like(weight))
    if time.perf_counter() - started > MOST_SECONDS:
        raise ValueError(f"took more than {MOST_SECONDS:.0f} s to build")
    return model


def _shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration made again with small sizes, so that what it derives from them is derived anew."""
    values = dict(vars(config))
    changes: dict[str, Any] = {name: new for name, new in (_SPREAD | _SWITCHES).items() if name in values}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrunk(value)
        elif _TOKENS.search(name) and value is not None:
            changes[name] = min(value, VOCAB - 1) if isinstance(value, int) else [min(t, VOCAB - 1) for t in value]
        elif (most := _most(name)) and (value is None or (type(value) is int and value > 0)):
            changes[name] = min(value or most, most)
        elif type(value) is float and ("dropout" in name or name.endswith("_pdrop")):
            changes[name] = 0.0
    changes |= _one_layer_of_each_kind(values)
    if changes.get("kv_lora_rank"):  # a latent is expanded to keys and values of every head
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    special = _OVERRIDES.get(config.model_type, {})
    if layers := special.get("layer_types") or special.get("layers_block_type"):
        changes["num_hidden_layers"] = len(layers)
    return type(config)(**changes | special)


def _most(name: str) -> int | None:
    return next((most for pattern, most in _MOST.items() if re.search(pattern, name)), None)


def _one_layer_of_each_kind(values: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, cut to the layers that differ; nothing where all layers are alike."""
    depth = values.get("num_hidden_layers", 0)
    lists = {n: v for n, v in values.items() if isinstance(v, list | tuple) and len(v) == depth > 1}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:4]
    if len(kinds) < 2:
        return {}
    columns = zip(*kinds, strict=True)
    return {"num_hidden_layers": len(kinds)} | {n: list(c) for n, c in zip(lists, columns, strict=True)}


@dataclass(frozen=True)
class Verdict:
    """What became of a model type: ``layers`` its kinds of layer, ``detail`` the evidence or the reason."""

    model_type: str
    verdict: Kind
    detail: str
    layers: str


class Truth(Drafter):
    """Proposes each row's true continuation, spoilt at a place that moves: every length from none to the whole block is
    accepted, and rows of a batch accept different ones."""

    name = "truth"

    def __init__(self, texts: Sequence[Sequence[int]]):
        self.texts, self.calls = texts, 0

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        self.calls += 1
        blocks = []
        for row, (held, most) in enumerate(zip(sequences, room, strict=True)):
            known = next((t for t in self.texts if list(t[: len(held)]) == list(held)), held)
            right = (self.calls + 2 * row) % (GAMMA + 1)
            block = known[len(held) :][:most]
            blocks.append([t if i < right else (t + 1) % VOCAB for i, t in enumerate(block)])
        return Proposal.chosen(blocks, u.device, "the row has left the true text")


class NearTie(Exception):
    """The reference can hardly choose where the texts part: rounding decides there, and not the cache."""


@dataclass(frozen=True)
class Reference:
    """Greedy texts, prompt included, of plain passes over the whole text for each token, and how clear each choice was:
    the lead of the best logit over the second, relative to the largest."""

    texts: list[list[int]]
    leads: list[list[float]]

    @staticmethod
    @torch.inference_mode()
    def of(model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int) -> Reference:
        reference = Reference([list(p) for p in prompts], [[] for _ in prompts])
        for text, leads in zip(reference.texts, reference.leads, strict=True):
            for _ in range(tokens):
                logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float()
                if not logits.isfinite().all():
                    raise ValueError(f"a plain pass over {len(text)} tokens gives logits that are not finite")
                first, second = logits.topk(2).values
                leads.append(float((first - second) / logits.abs().max()))
                text.append(int(logits.argmax()))
        return reference

    def against(self, requests: Sequence[Request]) -> str:
        """Where the rows first part from these texts, in words; empty where they are the same."""
        for row, (request, text, leads) in enumerate(zip(requests, self.texts, self.leads, strict=True)):
            true = text[len(request.prompt) :]
            for at, (got, want) in enumerate(zip(request.output, true, strict=True)):
                if got != want and leads[at] < NEAR_TIE:
                    raise NearTie(f"row {row} token {at} leads by {leads[at]:.0e}")
                if got != want:
                    return f"row {row} token {at} is {got} and should be {want}, which leads by {leads[at]:.1e}"
        return ""


def examine(model: PreTrainedModel, tokens: int = 24) -> Verdict:
    """Hold the loop's greedy texts of one ragged batch against plain passes. Raises NearTie where these cannot tell."""
    name, layers = model.config.model_type, layers_of(model)
    try:
        _decoded(model, None, 1)
        truth = Reference.of(model, PROMPTS, tokens)
    except SpecDecError as refusal:
        return Verdict(name, "refused", str(refusal), layers)
    except Exception as error:
        return Verdict(name, "crashed", f"first token: {_line(error)}", layers)
    # Texts can agree by luck where logits do not: past every window and step of these configurations they are compared.
    with torch.inference_mode():
        worst = rewind_error(model, LONG)
    if not worst < 2e-4:
        return Verdict(name, "silently wrong", f"ragged logits are off by {worst:.0e} of the largest", layers)
    drafters = {"ordinary decoding": None, "prompt lookup": PromptLookupDrafter(), "true drafts": Truth(truth.texts)}
    kept: set[int] = set()
    for case, drafter in drafters.items():
        try:
            requests = _decoded(model, drafter, tokens)
            parted = truth.against(requests)
        except NearTie:
            raise
        except Exception as error:
            return Verdict(name, "crashed", f"{case}: {_line(error)}", layers)
        if parted:
            return Verdict(name, "silently wrong", f"{case}: {parted}", layers)
        kept |= {r.accepted for request in requests for r in request.records if r.verified == GAMMA}
    if kept != set(range(GAMMA + 1)):
        return Verdict(name, "crashed", f"blocks kept only {sorted(kept)} tokens: drafts went unused", layers)
    distinct = len({t for text, p in zip(truth.texts, PROMPTS, strict=True) for t in text[len(p) :]})
    lead = min(min(row) for row in truth.leads)
    return Verdict(name, "exact", f"{tokens * len(PROMPTS)} tokens, {distinct} distinct, least lead {lead:.0e}", layers)


def verdict_on(model_type: str, tokens: int = 24) -> Verdict:
    """Build the type and examine it; a near tie is decided by another seed."""
    ties = ""
    for seed in range(SEEDS):
        try:
            model = tiny(model_type, seed)
            Reference.of(model, PROMPTS[:1], 1)
        except Exception as error:
            return Verdict(model_type, "not loadable", _line(error), "")
        try:
            return replace(found := examine(model, tokens), model_type=model_type, detail=ties + found.detail)
        except NearTie as tie:
            ties += f"seed {seed}: {tie}; "
    return Verdict(model_type, "silently wrong", ties, "")


def matrix(
    types: Iterable[str] | None = None, progress: Callable[[Verdict], None] | None = None, tokens: int = 24
) -> pd.DataFrame:
    """The verdict on each type, one row a type; ``progress`` hears each as it falls."""
    rows = []
    for model_type in causal_types() if types is None else types:
        rows.append(verdict_on(model_type, tokens))
        if progress is not None:
            progress(rows[-1])
    return pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(Verdict)])


def as_text(table: pd.DataFrame) -> str:
    """The table, the worst verdicts last, and a line of counts."""
    order = table.sort_values("verdict", key=lambda column: column.map(KINDS.index), kind="stable")
    lines = [f"{r.model_type:26} {r.verdict:15} {r.layers:45} {r.detail}" for r in order.itertuples()]
    counts = table["verdict"].value_counts()
    return "\n".join([*lines, ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in KINDS)])


def layers_of(model: PreTrainedModel) -> str:
    """The kinds of layer, by the configuration's own names or else by the cache that transformers makes for them."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    with suppress(Exception):
        kinds = kinds or [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    return ", ".join(f"{n} {kind}" for kind, n in Counter(kinds or ()).items())


def _decoded(model: PreTrainedModel, drafter: Drafter | None, tokens: int) -> list[Request]:
    requests = [Request(i, list(prompt), tokens, RequestRandom(0, i)) for i, prompt in enumerate(PROMPTS)]
    settings = Settings(gamma=GAMMA)
    if drafter is None:
        steps = ordinary_decoding(model, requests, settings)
    else:
        steps = speculative_decoding(model, requests, drafter, settings)
    for _ in steps:
        pass
    return requests


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160] or 'no message'}"
