"""Early exit: the first layers of the target with its own norm and head, on the target's own weights."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from kit import iid, tiny_llama
from laws import FALSE_ALARM, as_alone, distance_from_target, samples_p_value
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
)

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.drafters.early_exit import EarlyExitDrafter, early_exit

SIZE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FEW = {"num_key_value_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "llama": LlamaConfig(**SIZE, **IDS, **FEW),
    "llama_tied": LlamaConfig(**SIZE, **IDS, **FEW, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=4, n_head=4, n_positions=64, **IDS),
    "gpt_neox": GPTNeoXConfig(**SIZE, **IDS, intermediate_size=64),
    "opt": OPTConfig(**SIZE, **IDS, ffn_dim=64, word_embed_proj_dim=16),
    "qwen2": Qwen2Config(**SIZE, **IDS, **FEW, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "gemma3": Gemma3TextConfig(**SIZE, **IDS, **FEW, head_dim=8, sliding_window=8, sliding_window_pattern=2),
}
TEXT = torch.tensor([[5, 9, 1, 3, 7, 40, 5, 9, 8, 8, 31]])


def made(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


@torch.inference_mode()
def logits(model):
    return model(TEXT, use_cache=False).logits


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layers", [1, 3])
def test_the_shell_is_the_model_that_has_only_these_layers(kind, layers):
    model = made(kind)
    shell = early_exit(model, layers)
    fewer = model.config.to_dict() | {"num_hidden_layers": layers}
    if kinds := fewer.get("layer_types"):
        fewer["layer_types"] = kinds[:layers]
        assert shell.config.layer_types == kinds[:layers]
    alike = AutoModelForCausalLM.from_config(type(model.config).from_dict(fewer)).eval()
    missing, _ = alike.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert torch.equal(logits(shell), logits(alike))
    assert not torch.equal(logits(shell), logits(model))
    assert shell.config.num_hidden_layers == layers


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_shared_and_the_model_stays_as_it_was(kind):
    model = made(kind)
    before, config = logits(model), model.config.to_dict()
    shell = early_exit(model, 2)
    own = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in own for p in shell.parameters())
    assert sum(1 for _ in shell.parameters()) < sum(1 for _ in model.parameters())
    shell.config.vocab_size = 7
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config


@pytest.mark.parametrize("layers", [0, 4, -1, True, 1.5])
def test_layers_that_leave_out_none_or_all_are_refused(layers):
    with pytest.raises(SpecDecError, match=r"layers=.* from 1 to 3"):
        early_exit(made("llama"), layers)


def test_models_that_cannot_be_cut_are_refused_in_one_line():
    with pytest.raises(SpecDecError, match="'table' is no plain stack"):
        early_exit(iid([0.5, 0.5]), 1)
    with pytest.raises(SpecDecError, match="no plain stack"):
        early_exit(tiny_llama(num_hidden_layers=1), 1)
    model = tiny_llama()
    model.forward = partial(model.forward)  # as what compiles or spreads a model does
    with pytest.raises(SpecDecError, match="wrapped"):
        early_exit(model, 1)


def test_proposals_come_from_the_shells_own_law():
    model = tiny_llama(num_hidden_layers=3)
    shell = early_exit(model, 2)
    policy = SamplingPolicy(0.7, top_k=5)
    drafter = EarlyExitDrafter(model, 2, policy, 64)
    drafter.start()
    drafter.join([[4, 5, 6]])
    with torch.inference_mode():
        block = drafter.propose([[4, 5, 6, 7]], [3], torch.rand(1, 3, dtype=torch.float64))
        x = shell(torch.tensor([[4, 5, 6, 7, *block.tokens[0].tolist()]]), use_cache=False).logits[0, 3:6] / 0.7
    want = x.masked_fill(x < x.topk(5).values[:, -1:], -torch.inf).softmax(-1)
    assert torch.allclose(block.q[0], want, atol=1e-5)
    assert drafter.name == "early_exit"


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(0.8)])
def test_rows_equal_their_own_runs(policy):
    target = tiny_llama(num_hidden_layers=3, scale=0.15)
    rows = as_alone(target, lambda: EarlyExitDrafter(target, 2, policy, 64), policy)
    assert sum(r.accepted for request in rows for r in request.records) > 0


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma3"])
def test_greedy_rows_equal_ordinary_decoding_in_other_architectures(kind):
    target = made(kind)
    as_alone(target, lambda: EarlyExitDrafter(target, 2, SamplingPolicy(), 50), SamplingPolicy(), 8)


def test_the_output_law_is_the_targets():
    target = tiny_llama(vocab=4, scale=0.4)

    @cache
    def law(text):
        with torch.inference_mode():
            return target(torch.tensor([[0, 2, *text]]), use_cache=False).logits[0, -1].double().softmax(-1)

    make = lambda: EarlyExitDrafter(target, 1, SamplingPolicy(1.0), 4)  # noqa: E731
    assert distance_from_target(make, law, (0, 2), 2, 2) < 1e-6
    assert samples_p_value(target, law, make, [0, 2]) > FALSE_ALARM
