"""Conditions C: rows of a batch do not touch one another, and caches hold what is committed."""

from __future__ import annotations

import pytest
import torch
from kit import ScriptedDrafter, block, decode, tiny_llama
from transformers import AutoModelForCausalLM, GPTNeoConfig, MambaConfig, MistralConfig

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.caches import ModelCache, context_limit
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter
from specdec_core.loop import Settings
from specdec_core.stops import Stops

GREEDY = SamplingPolicy()
SHORT, LONG = [7, 8, 9], [3, 3, 4, 5, 6, 7, 8, 9, 10]


def test_c1_one_row_accepts_all_and_its_neighbour_nothing_and_each_equals_its_own_run():
    target = tiny_llama()
    alone = [decode(target, [p], tokens=40)[0].output for p in (SHORT, LONG)]
    texts = [p + o for p, o in zip((SHORT, LONG), alone, strict=True)]

    def script(step, sequences, room):
        good = texts[0][len(sequences[0]) :][: room[0]]
        right = texts[1][len(sequences[1]) :][: room[1]]
        return block(good, [(t + 1) % 64 for t in right])

    rows = decode(target, [SHORT, LONG], ScriptedDrafter(script), 40, Settings(gamma=4))
    assert [r.output for r in rows] == alone
    assert sum(r.rejected for r in rows[0].records) == 0
    assert sum(r.accepted for r in rows[1].records) == 0


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
def test_c1_ragged_rows_equal_their_own_runs_for_every_drafter(policy):
    target, other = tiny_llama(), tiny_llama(4)
    prompts = [SHORT, LONG, [1, 2], [5] * 20]
    settings = Settings(gamma=3, policy=policy)
    for make in (
        lambda: ModelDrafter(other, policy, 64),
        lambda: ModelDrafter(target, policy, 64),
        PromptLookupDrafter,
    ):
        together = decode(target, prompts, make(), 24, settings)
        for row, prompt in enumerate(prompts):
            (alone,) = decode(target, [prompt], make(), 24, settings, first_id=row)
            assert together[row].output == alone.output


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_c2_the_bonus_token_reaches_the_drafts_cache(gamma):
    """A draft equal to the target that misses one token would be rejected soon after the first whole block."""
    target = tiny_llama(2)
    (request,) = decode(target, [LONG], ModelDrafter(target, GREEDY, 64), 60, Settings(gamma=gamma))
    assert sum(r.rejected for r in request.records) == 0
    assert sum(r.accepted for r in request.records) == sum(r.verified for r in request.records) > 0


class WrongOnce(ModelDrafter):
    """The target itself as draft, with the first token of one block replaced."""

    steps = 0

    def propose(self, sequences, room, u):
        self.steps += 1
        proposal = super().propose(sequences, room, u)
        if self.steps == 3:
            proposal.tokens[:, 0] = (proposal.tokens[:, 0] + 1) % 64
        return proposal


def test_c3_after_one_forced_rejection_acceptance_returns_to_1_and_caches_hold_what_is_committed(monkeypatch):
    target = tiny_llama()
    drafter = WrongOnce(target, GREEDY, 64)
    held = []
    commit = WrongOnce.commit

    def spy(self, lengths):
        commit(self, lengths)
        held.append((list(lengths), self.cache.lengths))

    monkeypatch.setattr(WrongOnce, "commit", spy)
    (request,) = decode(target, [LONG], drafter, 60, Settings(gamma=4))
    (base,) = decode(target, [LONG], tokens=60)
    assert request.output == base.output
    assert [r.rejected for r in request.records] == [0, 0, 0, 1] + [0] * (len(request.records) - 4)
    for record, (committed, cached) in zip(request.records[1:], held, strict=True):
        assert committed == [record.context + len(record.emitted)]
        # all but the pending token; after a block kept whole the draft also lacks the last drafted one
        assert cached == [
            committed[0] - (2 if record.last in ("bonus", "accepted") and record.verified == record.accepted else 1)
        ]


def test_c3_the_targets_cache_holds_all_committed_tokens_but_the_last(monkeypatch):
    target = tiny_llama()
    seen = []
    rewind = ModelCache.rewind
    monkeypatch.setattr(ModelCache, "rewind", lambda self, lengths: (rewind(self, lengths), seen.append(self.lengths)))
    requests = decode(target, [SHORT, LONG], PromptLookupDrafter(), 30, Settings(gamma=4))
    assert seen[-1] == [len(r.committed) - 1 for r in requests]


def test_c3_a_cache_gives_after_rewinds_the_logits_of_one_plain_pass():
    target = tiny_llama()
    ids = torch.tensor([LONG])
    cache = ModelCache(target, 1)
    with torch.inference_mode():
        plain = target(input_ids=ids).logits
        cache.extend(ids[:, :5])
        cache.rewind([2])
        cache.extend(torch.tensor([[60, 61, 62, 63, 60, 61]]))
        cache.rewind([2])
        got = cache.extend(ids[:, 2:])
    assert torch.allclose(got, plain[:, 2:], atol=1e-5)
    with pytest.raises(ValueError, match="cannot be rewound"):
        cache.rewind([100])


def test_c5_a_cache_that_cannot_be_rewound_is_refused_before_the_first_token_and_the_type_is_named():
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    mamba = AutoModelForCausalLM.from_config(MambaConfig(state_size=4, **small))
    sliding = AutoModelForCausalLM.from_config(
        MistralConfig(num_attention_heads=2, num_key_value_heads=1, sliding_window=4, **small)
    )
    for model in (mamba.eval(), sliding.eval()):
        with pytest.raises(SpecDecError, match=model.config.model_type):
            decode(model, [[1, 2, 3]], PromptLookupDrafter(), 5)


def test_c5_a_window_that_hides_inside_the_layers_is_refused():
    shape = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    config = GPTNeoConfig(window_size=16, attention_types=[[["global", "local"], 1]], **shape)
    with pytest.raises(SpecDecError, match="gpt_neo"):
        decode(AutoModelForCausalLM.from_config(config).eval(), [[1, 2, 3]], PromptLookupDrafter(), 5)


def test_c5_rotary_frequencies_that_follow_the_longest_position_end_the_context_where_they_would_change():
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    target = tiny_llama(0, context=192, rope_parameters=rope)
    assert context_limit(target) == 24
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10], [4] * 15]
    settings = Settings(gamma=4, stops=Stops(context=context_limit(target)))
    rows = decode(target, prompts, ModelDrafter(target, GREEDY, 64), 60, settings)
    for row, prompt in zip(rows, prompts, strict=True):
        theirs = target.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24 - len(prompt), pad_token_id=0
        )
        assert row.output == theirs[0, len(prompt) :].tolist()
        assert sum(r.rejected for r in row.records) == 0


@pytest.mark.parametrize("seed", range(20))
def test_c8_block_of_one_whose_candidate_is_rejected(seed):
    target, draft = tiny_llama(0, scale=0.05), tiny_llama(9, scale=1.0)
    policy = SamplingPolicy(1.0)
    (request,) = decode(target, [SHORT], ModelDrafter(draft, policy, 64), 12, Settings(gamma=1, policy=policy), seed)
    assert len(request.output) == 12
    last = [r for r in request.records if r.kind == "speculative"]
    assert all(len(r.emitted) == r.accepted + 1 for r in last if not r.stop)
    assert any(r.rejected for r in last)
