"""Llama layers with joined products: the same numbers, bit for bit, and whatever is no such layer is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import pair_of, tiny_llama

from specdec_core import SpecDecError, generate_batch
from specdec_core.caches import ModelCache
from specdec_core.drafters import early_exit
from specdec_core.lab import distill, packing, quantize
from specdec_core.lab.lean import LeanLayer, lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_the_plain_model_to_the_last_bit(dtype: torch.dtype, bias: bool) -> None:
    plain = tiny_llama(attention_bias=bias, mlp_bias=bias).to(dtype)
    if bias:
        for name, weight in plain.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
    slim, ids = lean(plain), torch.arange(12)[None]
    assert sum(isinstance(m, LeanLayer) for m in slim.modules()) == len(plain.model.layers)
    assert not any(isinstance(m, LeanLayer) for m in plain.modules())
    with torch.inference_mode():
        assert torch.equal(slim(ids).logits, plain(ids).logits)
        ours, theirs = ModelCache(slim, 2), ModelCache(plain, 2)
        for cache in (ours, theirs):
            cache.extend(torch.stack([ids[0], ids[0].flip(0)])[:, :8], counts=[8, 5])
        block = ids[:, 3:7].expand(2, -1)
        assert torch.equal(ours.extend(block), theirs.extend(block)), "ragged rows, a mask of ours"
        padded = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
        asked = {"input_ids": torch.stack([ids[0, :4], ids[0, 4:8]]), "attention_mask": padded}
        assert torch.equal(slim(**asked).logits, plain(**asked).logits)


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
def test_positions_are_turned_as_the_model_says(scaling: str) -> None:
    rope = {"rope_type": scaling, "rope_theta": 10_000.0}
    if scaling != "default":
        rope |= {"factor": 4.0}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    plain, ids = tiny_llama(rope_parameters=rope), torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(lean(plain)(ids).logits, plain(ids).logits)


def test_it_generates_as_transformers_does() -> None:
    plain, ids = tiny_llama(), torch.arange(5)[None]
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(lean(plain).generate(ids, **how), plain.generate(ids, **how))


def test_greedy_texts_of_a_lean_pair_are_those_of_ordinary_decoding() -> None:
    plain = tiny_llama()
    slim = packing.pack(lean(plain))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    want = generate_batch(pair_of(plain), prompts, max_new_tokens=24, speculate=False)
    for options in ({"gamma": 4}, {"gamma": 3, "candidates": 3}):
        blocks = generate_batch(pair_of(slim, slim), prompts, max_new_tokens=24, drafter="model", **options)
        assert [o.tokens for o in blocks] == [o.tokens for o in want]


def test_joined_weights_are_packed_quantised_and_cut_like_any_other() -> None:
    plain = tiny_llama(hidden_size=64, intermediate_size=64).bfloat16()
    blocked = packing.pack(lean(plain))
    assert sum(isinstance(m, packing.BlockedLinear) for m in blocked.modules()) == 4 * len(plain.model.layers) + 1
    assert len(early_exit(blocked, 1).model.layers) == 1
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        want = quantize.quantize(plain, "int8")(ids).logits
        assert torch.equal(quantize.quantize(lean(plain), "int8")(ids).logits, want), "a scale for each row, as before"


def test_what_is_no_plain_layer_on_a_cpu_comes_back_as_it_was() -> None:
    for model in (
        tiny_llama(attn_implementation="eager"),
        lean(tiny_llama()),
        quantize.quantize(tiny_llama(hidden_size=64, intermediate_size=64).bfloat16(), "int8"),
        packing.pack(tiny_llama()),
    ):
        assert lean(model) is model


def test_a_student_of_joined_weights_is_refused_in_one_line() -> None:
    with pytest.raises(SpecDecError, match="load its pair with pack=False"):
        distill.student(lean(tiny_llama()), [0])


def test_a_joined_model_is_not_saved_under_names_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="save the model as it was before"):
        packing.pack(lean(tiny_llama())).save_pretrained(tmp_path)
    tiny_llama().save_pretrained(tmp_path)


def test_hidden_states_are_there_when_asked_for() -> None:
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        got, want = (m(ids, output_hidden_states=True).hidden_states for m in (lean(tiny_llama()), tiny_llama()))
    assert len(got) == len(want) == 3
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
