"""Weights in oneDNN's order: the same products, the same texts, and models that can still be taken apart."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kit import pair_of, tiny_llama
from torch import nn

from specdec_core import generate_batch
from specdec_core.drafters import early_exit, reduced_head
from specdec_core.lab import packing, quantize

WIDTHS = [(576, 192), (64, 1536)]


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 33])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_in_bfloat16_are_the_same_to_its_last_bit(rows: int, widths: tuple[int, int], bias: bool) -> None:
    linear = nn.Linear(*widths, bias=bias, dtype=torch.bfloat16)
    hidden = torch.randn(2, rows, widths[0], dtype=torch.bfloat16)
    with torch.inference_mode():
        got, want = packing.BlockedLinear(linear)(hidden), linear(hidden)
    assert torch.allclose(got, want, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_products_in_float32_are_the_same_to_rounding(rows: int) -> None:
    linear, hidden = nn.Linear(576, 1536), torch.randn(1, rows, 576)
    with torch.inference_mode():
        assert torch.allclose(packing.BlockedLinear(linear)(hidden), linear(hidden), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_says_the_same_and_the_plain_one_stays_as_it_was(dtype: torch.dtype) -> None:
    plain = tiny_llama().to(dtype)
    packed = packing.pack(plain)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        want, got = plain(ids).logits, packed(ids).logits
    assert torch.allclose(got, want, rtol=0, atol=1e-5)
    assert not any(isinstance(m, packing.BlockedLinear) for m in plain.modules())
    assert sum(isinstance(m, packing.BlockedLinear) for m in packed.modules()) == 7 * len(packed.model.layers) + 1
    assert {id(w) for w in packed.parameters()} == {id(w) for w in plain.parameters()}, "no weight is copied twice"
    assert packed.state_dict().keys() == plain.state_dict().keys()


def test_greedy_texts_of_a_packed_pair_are_those_of_ordinary_decoding() -> None:
    target = packing.pack(tiny_llama())
    pair = pair_of(target, target)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    ordinary = generate_batch(pair, prompts, max_new_tokens=24, speculate=False)
    blocks = generate_batch(pair, prompts, max_new_tokens=24, drafter="model", gamma=4)
    assert [o.tokens for o in blocks] == [o.tokens for o in ordinary]
    plain = generate_batch(pair_of(tiny_llama()), prompts, max_new_tokens=24, speculate=False)
    assert [o.tokens for o in plain] == [o.tokens for o in ordinary]


def test_a_packed_model_can_be_cut_and_given_a_smaller_head() -> None:
    packed = packing.pack(tiny_llama())
    short = early_exit(packed, 1)
    assert len(short.model.layers) == 1
    assert short.model.layers[0].mlp.up_proj.blocked is packed.model.layers[0].mlp.up_proj.blocked
    assert len(packed.model.layers) > 1
    assert reduced_head(packed, [1, 2, 3]).get_output_embeddings().linear.out_features == 3
    small, ids = packing.pack(reduced_head(tiny_llama(), [1, 2, 3])), torch.arange(12)[None]
    assert isinstance(small.get_output_embeddings().linear, packing.BlockedLinear)
    with torch.inference_mode():
        assert torch.allclose(small(ids).logits[..., 1:4], tiny_llama()(ids).logits[..., 1:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_in_float32_are_the_plain_product_bit_for_bit(rows: int) -> None:
    """They are faster so: on some machines by a third."""
    linear, hidden = nn.Linear(576, 1536), torch.randn(1, rows, 576)
    with torch.inference_mode():
        assert torch.equal(packing.BlockedLinear(linear)(hidden), linear(hidden))


def test_integer_weights_stay_integers() -> None:
    packed = quantize.quantize(tiny_llama(hidden_size=64, intermediate_size=64).bfloat16(), "int8")
    assert not any(isinstance(m, packing.BlockedLinear) for m in packing.pack(packed).modules())


def test_where_it_is_not_possible_the_model_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    assert packing.pack(model.half()) is model
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packing.pack(model.float()) is model


def test_weights_that_change_later_are_the_ones_that_count() -> None:
    plain, ids = tiny_llama(), torch.arange(12)[None]
    packed = packing.pack(plain)
    noisy = copy.deepcopy(packed)
    with torch.no_grad():
        before = packed(ids).logits
        for weight in noisy.parameters():
            weight += 0.1
        assert torch.equal(packed(ids).logits, before), "a deep copy has weights of its own"
        assert not torch.allclose(noisy(ids).logits, before)
        plain.model.layers[0].mlp.up_proj.weight.zero_()  # shared with the packed one
        assert torch.allclose(packed(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
        packed.bfloat16()
        assert packed(ids).logits.dtype == torch.bfloat16
        packed.half()
        assert packed(ids).logits.dtype == torch.float16


def test_a_packed_model_still_has_gradients() -> None:
    packed = packing.pack(tiny_llama())
    packed(torch.arange(12)[None]).logits.sum().backward()
    assert all(weight.grad is not None for weight in packed.parameters())


def test_a_cast_there_and_back_reads_the_weights_anew() -> None:
    for size in (64, 256):
        packed, plain = (tiny_llama(hidden_size=size, intermediate_size=2 * size) for _ in range(2))
        packed, ids = packing.pack(packed), torch.arange(12)[None]
        with torch.inference_mode():
            packed(ids)
        for model in (packed, plain):
            model.to(torch.bfloat16).to(torch.float32)
        with torch.inference_mode():
            assert torch.allclose(packed(ids).logits, plain(ids).logits, rtol=0, atol=1e-4)


def test_it_runs_under_autocast_and_is_stored_without_its_second_copy(tmp_path: Path) -> None:
    packed, ids = packing.pack(tiny_llama()), torch.arange(12)[None]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(ids).logits, tiny_llama()(ids).logits)
    torch.save(packed, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, packed(ids).logits)


def test_hooks_of_a_copy_are_its_own() -> None:
    packed, seen = packing.pack(tiny_llama()), list[int]()
    other = copy.deepcopy(packed)
    other.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    packed(torch.arange(4)[None])
    assert not seen
    other(torch.arange(4)[None])
    assert seen == [1]
