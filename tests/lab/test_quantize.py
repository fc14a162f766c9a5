"""Integer weights: their products, what stays as it was, what is refused, and decoding with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import decode, tiny_llama
from test_models import one_line, tiny_folder, tiny_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from specdec_core import SamplingPolicy, SpecDecError, generate, generate_batch
from specdec_core.drafters import ModelDrafter
from specdec_core.drafters.early_exit import early_exit
from specdec_core.drafters.reduced import reduced_head
from specdec_core.lab import models as lab_models
from specdec_core.lab.drafts import share_embeddings
from specdec_core.lab.identity import same_text
from specdec_core.lab.models import load_pair
from specdec_core.lab.quantize import KINDS, Int4Linear, Int8Linear, PackedLinear, int4_grid, int8_grid, quantize, size

PACKED: dict[str, type[PackedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], [31, 41, 59, 26, 53, 58, 9, 7, 9, 3, 2, 38]]


def target(seed: int = 0, **kwargs: Any) -> LlamaForCausalLM:
    return tiny_llama(seed, **kwargs).bfloat16()


def linear(inputs: int = 96, outputs: int = 48, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)


def dequantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """[out, in] in float64, from the grids alone."""
    if kind == "int8":
        q, scales = int8_grid(weight)
        return q.double() * scales.double()[:, None]
    q, grid = int4_grid(weight)
    scale, zero = (part.T.repeat_interleave(32, dim=1) for part in grid.double().unbind(2))
    return (q.double() - 8) * scale + zero


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    have, want = have.detach().double(), want.detach().double()
    return float((have - want).norm() / want.norm())


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_that_of_the_dequantised_weights(kind: str, bias: bool) -> None:
    plain = linear(bias=bias)
    hidden = torch.randn(2, 5, 96).bfloat16()
    want = hidden.double() @ dequantised(plain.weight, kind).T + (plain.bias.double() if bias else 0.0)
    have = PACKED[kind](plain)(hidden)
    assert (have.dtype, have.shape) == (torch.bfloat16, (2, 5, 48))
    assert relative(have, want) < 2**-8  # bfloat16 has 8 bits


@pytest.mark.parametrize(("kind", "error"), [("int8", 1 / 254), ("int4", 1 / 15)])
def test_the_grid_is_as_near_as_its_levels_allow(kind: str, error: float) -> None:
    """Of weights spread evenly over a range, n steps leave an error of 1 / n of their norm."""
    weight = linear(576, 64).weight
    assert relative(dequantised(weight, kind), weight) < 1.05 * error


def test_weights_on_a_grid_of_32_with_16_levels_are_recovered() -> None:
    """The default target's layers were Q4_1; bfloat16 alone has an error of 0.0013."""
    torch.manual_seed(0)
    q = torch.randint(0, 16, (64, 6, 32)).float()
    q[..., 0], q[..., 1] = 0, 15
    weight = ((q - 7.2) * (0.01 + torch.rand(64, 6, 1))).flatten(1).bfloat16()
    assert torch.equal(int4_grid(weight)[0], q.flatten(1).int())
    assert relative(dequantised(weight, "int4"), weight) < 0.004


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 0.3, -7.0])
def test_weights_that_are_all_alike_stay_so(kind: str, value: float) -> None:
    weight = torch.full((16, 64), value).bfloat16()
    assert torch.allclose(dequantised(weight, kind).float(), weight.float(), rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_product_is_the_same_in_a_block_of_any_length(kind: str) -> None:
    packed, rows = PACKED[kind](linear(576, 192, bias=True)), torch.randn(40, 576).bfloat16()
    alone = torch.cat([packed(row) for row in rows.split(1)])
    for n in (2, 3, 4, 5, 8, 17, 40):
        assert torch.equal(packed(rows[:n]), alone[:n]), n


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_do_not_lie_together_are_taken(kind: str) -> None:
    packed, wide = PACKED[kind](linear()), torch.randn(3, 4, 192).bfloat16()
    half = wide[:, 1::2, 96:]
    assert not half.is_contiguous()
    assert torch.equal(packed(half), packed(half.clone().contiguous()))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_begin_anywhere_in_memory_are_taken(kind: str) -> None:
    """The int8 kernel alone would crash the process."""
    packed, memory = PACKED[kind](linear()), torch.randn(500).bfloat16()
    for start in (1, 3, 8):
        rows = memory[start : start + 480].view(5, 96)
        assert torch.equal(packed(rows), packed(rows.clone()))


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_head_are_packed_and_the_model_given_stays(kind: str) -> None:
    model = target()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    packed = quantize(model, kind)
    layers = [m for m in packed.model.modules() if isinstance(m, PackedLinear)]
    assert {type(m) for m in layers} == {PACKED[kind]}
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert not any(isinstance(m, nn.Linear) for m in packed.modules())
    assert type(packed.lm_head) is Int8Linear
    assert packed.dtype == torch.bfloat16
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert packed.model.norm.weight is model.model.norm.weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_head_is_packed_beside_an_embedding_that_keeps_its_values(kind: str) -> None:
    model = target(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    packed = quantize(model, kind)
    assert type(packed.get_input_embeddings()) is nn.Embedding
    assert packed.get_input_embeddings().weight is model.model.embed_tokens.weight
    assert torch.equal(packed.lm_head.packed, int8_grid(model.lm_head.weight)[0])


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_a_model_with_the_dequantised_weights(kind: str) -> None:
    model, packed = target(tie_word_embeddings=False), quantize(target(tie_word_embeddings=False), kind)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(dequantised(module.weight, "int8" if name == "lm_head" else kind))
    have, want = (
        m.float() for m in (packed(torch.tensor(PROMPTS[:1])).logits, model(torch.tensor(PROMPTS[:1])).logits)
    )
    assert relative(have, want) < 0.02


@torch.inference_mode()
def test_biases_of_layers_and_head_are_kept() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = PhiForCausalLM(PhiConfig(vocab_size=50, **shape, bos_token_id=1, eos_token_id=2)).eval().bfloat16()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias.normal_()
    packed = quantize(model, "int8")
    assert packed.lm_head.bias is model.lm_head.bias
    text = torch.tensor(PROMPTS[:1])
    assert relative(packed(text).logits, model(text).logits) < 0.03


# --- refusals -------------------------------------------------------------------------------------------------------


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)).bfloat16()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (target, "int3", "quantize='int3' is unknown: choose one of int8, int4."),
        (target, None, "quantize=None is unknown"),
        (tiny_llama, "int8", "needs a model in bfloat16, not float32: give dtype='bfloat16'."),
        (lambda: target().to("meta"), "int4", "packs weights for a CPU, not for 'meta': give device='cpu'."),
        (gpt2, "int8", "Model type 'gpt2' has no nn.Linear in its layers"),
        (lambda: quantize(target(), "int8"), "int8", "or is quantised already"),
        (lambda: target(intermediate_size=48), "int4", "'layers.0.mlp.down_proj' of 48 inputs and 32 outputs"),
        (lambda: target(num_key_value_heads=1), "int4", "'layers.0.self_attn.k_proj' of 32 inputs and 8 outputs"),
        (lambda: target(intermediate_size=40), "int8", "must be multiples of 16 and 1: take another kind"),
    ],
)
def test_what_cannot_be_packed_is_one_line(make: Any, kind: str, words: str) -> None:
    with pytest.raises(SpecDecError) as error:
        quantize(make(), kind)
    assert words in one_line(error)


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_speculative_run_has_the_tokens_of_ordinary_decoding(kind: str) -> None:
    model = quantize(target(), kind)
    for draft in (target(), early_exit(model, 1), model):  # unquantised, a part of it, itself
        plain = decode(model, PROMPTS, tokens=24)
        ours = decode(model, PROMPTS, ModelDrafter(draft, SamplingPolicy(), 64), tokens=24)
        for a, b in zip(plain, ours, strict=True):
            same_text(model, a.prompt, a.output, b.output)  # raises where rounding cannot explain a difference
        accepted = sum(record.accepted for request in ours for record in request.records)
        assert accepted > 0


@torch.inference_mode()
def test_early_exit_shares_the_packed_weights() -> None:
    model = quantize(target(), "int4")
    part = early_exit(model, 1)
    assert part.lm_head.packed is model.lm_head.packed
    first = model.model.layers[0].mlp.up_proj
    assert part.model.layers[0].mlp.up_proj.packed is first.packed
    assert torch.isfinite(part(torch.tensor(PROMPTS[:1])).logits).all()


def test_a_packed_head_is_not_cut() -> None:
    with pytest.raises(SpecDecError, match="no plain linear head to cut") as error:
        reduced_head(quantize(target(), "int8"), [1, 2, 3])
    one_line(error)


def test_a_draft_shares_the_embedding_of_a_quantised_target() -> None:
    model, draft = quantize(target(), "int8"), target(tie_word_embeddings=True)
    draft.set_input_embeddings(nn.Embedding.from_pretrained(model.get_input_embeddings().weight.clone()))
    share_embeddings(draft, model)
    assert draft.get_input_embeddings() is model.get_input_embeddings()
    assert draft.lm_head.weight is model.get_input_embeddings().weight


# --- pairs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of two tiny models with the same embedding."""
    folder = tmp_path_factory.mktemp("pair")
    refs = {role: str(tiny_folder(folder / role, vocab=16)) for role in ("target", "draft")}
    content = {"name": "tiny", **refs, "drafter": "model", "device": "cpu", "dtype": "bfloat16"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content))
    return folder / "tiny.yaml"


def test_a_pair_says_how_its_target_was_quantised_and_leaves_the_draft(pair_file: Path) -> None:
    plain, pair = load_pair(pair_file), load_pair(pair_file, quantize="int4")
    assert pair.draft is not None
    assert (plain.lineage["quantize"], pair.lineage["quantize"]) == ("none", "int4")
    assert {k: v for k, v in pair.lineage.items() if k != "quantize"} == {
        k: v for k, v in plain.lineage.items() if k != "quantize"
    }
    assert any(isinstance(m, Int4Linear) for m in pair.target.modules())
    assert not any(isinstance(m, PackedLinear) for m in pair.draft.modules())
    assert pair.draft.get_input_embeddings() is pair.target.get_input_embeddings()
    assert pair.draft.dtype == torch.bfloat16


def test_a_target_that_drafts_for_itself_is_quantised_in_both_roles(pair_file: Path) -> None:
    pair = load_pair(pair_file, quantize="int8", drafter="self")
    assert pair.draft is pair.target
    assert pair.lineage["draft_parameters"] == pair.lineage["target_parameters"] == tiny_model(16).num_parameters()


def test_a_draft_head_is_cut_beside_a_quantised_target(pair_file: Path) -> None:
    ids = pair_file.parent / "ids.json"
    ids.write_text("[1, 3, 5]")
    pair = load_pair(pair_file, quantize="int8", draft_head=str(ids))
    logits = pair.draft(torch.tensor([[1, 2]])).logits[0, -1]  # type: ignore[misc]
    assert torch.isfinite(logits).nonzero().flatten().tolist() == [1, 3, 5]


def test_a_quantised_draft_with_a_cut_head_changes_no_token_of_a_float32_target(pair_file: Path) -> None:
    ids = pair_file.parent / "some.json"
    ids.write_text("[1, 3, 5, 7]")
    pair = load_pair(pair_file, draft_quantize="int4", draft_head=str(ids), dtype="float32")
    assert pair.draft is not None
    assert (pair.lineage["dtype"], pair.lineage["quantize"], pair.lineage["draft_quantize"]) == (
        "float32",
        "none",
        "int4",
    )
    kinds = [type(m) for m in pair.draft.modules() if isinstance(m, PackedLinear)]
    assert kinds.count(Int8Linear) == 1  # the head
    assert kinds.count(Int4Linear) > 6
    logits = pair.draft(torch.tensor([[1, 2]])).logits[0, -1]  # type: ignore[operator]
    assert torch.isfinite(logits).nonzero().flatten().tolist() == [1, 3, 5, 7]
    options = {"max_new_tokens": 12, "eos": [], "gamma": 3}
    (said,) = generate_batch(pair, [[3, 1, 4]], drafter="model", **options)  # type: ignore[arg-type]
    (plain,) = generate_batch(pair, [[3, 1, 4]], speculate=False, **options)  # type: ignore[arg-type]
    assert said.tokens == plain.tokens
    assert any(r.drafted for r in said.records)


def test_a_pair_sets_options_that_a_call_may_override(pair_file: Path) -> None:
    pair = load_pair(pair_file, options={"gamma": 2, "control": "heuristic"}, dtype="float32")
    assert pair.lineage["options"] == {"gamma": 2, "control": "heuristic"}
    first = [
        next(r.gamma for r in generate(pair, [3, 1, 4], eos=[], **o).records if r.gamma) for o in ({}, {"gamma": 3})
    ]
    assert first == [2, 3]
    pair = load_pair(pair_file, options={"candidates": 2}, drafter="self", dtype="float32")
    with pytest.raises(SpecDecError, match="candidates"):
        generate(pair, [3, 1, 4], eos=[], drafter="suffix", candidates=2)
    for others in ({"drafter": "suffix"}, {"drafter": "self", "rule": "block", "temperature": 1.0}):
        generate(pair, [3, 1, 4], eos=[], max_new_tokens=4, **others)  # have one candidate a position
    lookup = load_pair(pair_file, options={"candidates": 2}, drafter="prompt_lookup", dtype="float32")
    assert generate(lookup, [3, 1, 4], eos=[], max_new_tokens=4).tokens, "the pair's own drafter has one candidate"
    with pytest.raises(
        SpecDecError,
        match=r"unknown key 'options.gama'; allowed are gamma, control, confidence, candidates, model_gamma",
    ):
        load_pair(pair_file, options={"gama": 2})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantize": "q4"}, "quantize: input should be 'int8' or 'int4', not 'q4'"),
        ({"quantize": "int8", "dtype": "float32"}, "bfloat16"),
    ],
)
def test_a_pair_that_cannot_be_quantised_is_refused_before_loading(
    changes: dict[str, str], words: str, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_models, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SpecDecError, match=words) as error:
        load_pair(pair_file, **changes)
    one_line(error)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_has_as_many_weights_as_before(kind: str, tied: bool) -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=64, num_attention_heads=2, tie_word_embeddings=tied).bfloat16()
    assert size(model) == model.num_parameters()
    assert size(quantize(model, kind)) == model.num_parameters()
