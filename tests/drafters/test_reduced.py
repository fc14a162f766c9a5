"""The reduced head: logits of the chosen rows alone, -inf elsewhere, on the weights of a model that stays as it was."""

from __future__ import annotations

import pytest
import torch
from kit import TableModel, iid, tiny_llama
from laws import FALSE_ALARM, as_alone, distance_from_target, samples_p_value
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
)

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.drafters import ModelDrafter
from specdec_core.drafters.reduced import most_frequent, reduced_head
from specdec_core.lab.theory import random_law

SIZE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SIZE, **IDS, intermediate_size=64),
    "llama_tied": LlamaConfig(**SIZE, **IDS, intermediate_size=64, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, **IDS),
    "opt": OPTConfig(**SIZE, **IDS, ffn_dim=64, word_embed_proj_dim=16),
    "phi_with_bias": PhiConfig(**SIZE, **IDS, intermediate_size=64),
    "cohere_scaled": CohereConfig(**SIZE, **IDS, intermediate_size=64),
}
TEXT = torch.tensor([[5, 9, 1, 3, 7, 40]])
SOME = [41, 3, 7, 11, 0]


def made(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        if getattr(model.lm_head, "bias", None) is not None:
            model.lm_head.bias.normal_()
    return model


@torch.inference_mode()
def logits(model):
    return model(TEXT, use_cache=False).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_chosen_logits_are_the_models_and_the_others_are_minus_infinity(kind):
    model = made(CONFIGS[kind])
    whole, some = logits(model), logits(reduced_head(model, SOME))
    assert some.shape == whole.shape
    assert torch.allclose(some[..., SOME], whole[..., SOME], atol=1e-6)
    others = [i for i in range(50) if i not in SOME]
    assert (some[..., others] == -torch.inf).all()


@pytest.mark.parametrize("kind", CONFIGS)
def test_all_but_the_rows_is_shared_and_the_model_stays_as_it_was(kind):
    model = made(CONFIGS[kind])
    before, names = logits(model), list(model.state_dict())
    reduced = reduced_head(model, SOME)
    own = {p.data_ptr() for p in model.parameters()}
    fresh = [p for p in reduced.parameters() if p.data_ptr() not in own]
    assert {len(p) for p in fresh} == {len(SOME)}
    assert reduced.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("ids", [[], [3, 3], [50], [-1], [True], [1.0]])
def test_ids_that_are_none_twice_there_or_out_of_range_are_refused(ids):
    with pytest.raises(SpecDecError, match="ids"):
        reduced_head(made(CONFIGS["llama"]), ids)


def test_models_whose_head_cannot_be_cut_are_refused_in_one_line():
    capped = Gemma2Config(**SIZE, **IDS, num_key_value_heads=2, intermediate_size=64, head_dim=8)
    with pytest.raises(SpecDecError, match="'gemma2' changes the logits behind its head"):
        reduced_head(made(capped), SOME)
    with pytest.raises(SpecDecError, match="'table' has no plain linear head"):
        reduced_head(iid([0.5, 0.5]), [0])


@pytest.mark.parametrize(
    "policy", [SamplingPolicy(), SamplingPolicy(0.7, top_k=9), SamplingPolicy(1.0, top_p=0.5, min_p=0.1)]
)
def test_nothing_else_is_ever_drafted(policy):
    drafter = ModelDrafter(reduced_head(tiny_llama(), SOME), policy, 64)
    drafter.join([[1, 2], [60, 61, 62]])
    with torch.inference_mode():
        found = drafter.propose([[1, 2, 50], [60, 61, 62, 63]], [6, 6], torch.rand(2, 6, dtype=torch.float64))
    assert set(found.tokens.flatten().tolist()) <= set(SOME)
    if found.q is not None:
        assert torch.allclose(found.q[..., SOME].sum(-1), torch.ones(2, 6))
        assert found.q[..., [i for i in range(64) if i not in SOME]].max() == 0


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("vocab", [64, 30, 80])
@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(1.0), SamplingPolicy(0.7, top_k=4)])
def test_laws_over_its_tokens_alone_give_what_laws_over_the_whole_vocabulary_do(policy, vocab, candidates):
    """``vocab``: the target's, which may be smaller than the draft's or larger."""
    u, found = torch.rand(2, 5 * candidates, dtype=torch.float64), []
    for columns in (True, False):
        drafter = ModelDrafter(reduced_head(tiny_llama(), SOME), policy, vocab, candidates=candidates)
        assert drafter.columns is not None
        if not columns:
            drafter.columns = None
        drafter.join([[1, 2], [6, 7, 8]])
        with torch.inference_mode():
            found.append(drafter.propose([[1, 2, 5], [6, 7, 8, 9]], [5, 5], u))
    ours, whole = found
    assert torch.equal(ours.tokens, whole.tokens)
    for name in ("q", "belief", "branches"):
        mine, theirs = getattr(ours, name), getattr(whole, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(0.8)])
def test_rows_equal_their_own_runs(policy):
    target = tiny_llama(vocab=16, scale=0.5)
    draft = reduced_head(target, [3, 4, 5, 6, 7, 8, 9, 11])
    rows = as_alone(target, lambda: ModelDrafter(draft, policy, 16), policy)
    assert sum(r.accepted for request in rows for r in request.records) > 0


def test_the_output_law_is_the_targets():
    draft = reduced_head(tiny_llama(vocab=4), [1, 3])
    make = lambda: ModelDrafter(draft, SamplingPolicy(1.0), 4)  # noqa: E731
    assert distance_from_target(make, random_law(4, 5), (0, 2), 2, 2) < 1e-6
    table = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.2, 0.2, 0.3, 0.3], [0.3] * 3 + [0.1], [0.1] * 3 + [0.7]]).double()
    law = lambda text: table[text[-1] if text else 2]  # noqa: E731
    assert samples_p_value(TableModel(table), law, make, [0, 2]) > FALSE_ALARM


def test_the_most_frequent_tokens_come_in_rising_order_ties_and_gaps_filled_with_the_lowest():
    text = [5, 5, 5, 9, 9, 2, 2, 7]
    assert most_frequent(text, 1, 12) == [5]
    assert most_frequent(iter(text), 2, 12) == [2, 5]
    assert most_frequent(text, 3, 12, always=[11]) == [2, 5, 11]
    assert most_frequent(text, 6, 12) == [0, 1, 2, 5, 7, 9]
    assert most_frequent([], 3, 12, always=(8, 8)) == [0, 1, 8]
    assert most_frequent([99], 2, 2) == [0, 1]


@pytest.mark.parametrize(("k", "always"), [(0, ()), (13, ()), (1, (1, 2)), (3, (12,)), (2.0, ())])
def test_an_impossible_selection_is_refused(k, always):
    with pytest.raises(SpecDecError):
        most_frequent([1, 2, 3], k, 12, always)


def test_a_head_cut_to_tokens_that_the_target_does_not_have_is_refused():
    draft = reduced_head(tiny_llama(vocab=30), [1, 25, 26])
    assert ModelDrafter(draft, SamplingPolicy(), 20).columns.tolist() == [1]
    with pytest.raises(SpecDecError, match="holds 1 of the target's tokens, fewer than 3"):
        ModelDrafter(draft, SamplingPolicy(), 20, candidates=3)
    with pytest.raises(SpecDecError, match="holds 0 of the target's tokens"):
        ModelDrafter(reduced_head(tiny_llama(vocab=30), [25, 26, 27]), SamplingPolicy(), 20)
