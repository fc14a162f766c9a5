"""Conditions C: rows of a batch do not touch one another, and caches hold what is committed."""

from __future__ import annotations

import pytest
import torch
from kit import ScriptedDrafter, block, decode, noisy_copy, tiny_llama
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    RecurrentGemmaConfig,
)

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.caches import ModelCache, branch_error, context_limit, rewind_error
from specdec_core.control import Adaptive, Fallback, Fixed, Heuristic
from specdec_core.drafters import CompositeDrafter, Drafter, ModelDrafter, PromptLookupDrafter, Proposal, reduced_head
from specdec_core.lab.architectures import VOCAB, tiny
from specdec_core.loop import Request, Settings, capacity, ordinary_decoding, speculative_decoding
from specdec_core.sampling import RequestRandom
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
        kept = record.context + record.accepted
        assert committed == [kept] or record.stop
        # all that was kept; after a block kept whole the draft lacks the last drafted token, which it never fed itself
        assert cached == [kept - (record.verified == record.accepted)] or record.stop


def test_c3_the_targets_cache_holds_all_committed_tokens_but_the_last(monkeypatch):
    target = tiny_llama()
    seen = []
    rewind = ModelCache.rewind

    def spy(self, lengths):
        rewind(self, lengths)
        if len(lengths) == 2 and requests[0].output:  # not the self-check that comes before
            seen.append((self.lengths, [len(r.committed) - 1 for r in requests]))

    requests = [Request(i, p, 30, RequestRandom(0, i)) for i, p in enumerate((SHORT, LONG))]
    monkeypatch.setattr(ModelCache, "rewind", spy)
    for _ in speculative_decoding(target, requests, PromptLookupDrafter(), Settings(gamma=4)):
        pass
    assert len(seen) > 10
    assert all(held == committed for held, committed in seen)


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


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def of(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def test_c5_a_state_that_a_block_cannot_go_on_from_is_refused_before_the_first_token_and_the_type_is_named():
    config = RecurrentGemmaConfig(lru_width=32, attention_window_size=8, head_dim=16, **HEADS, **SMALL)
    with pytest.raises(SpecDecError, match="recurrent_gemma"):
        decode(of(config), [[1, 2, 3]], PromptLookupDrafter(), 5)


def test_c5_a_window_that_the_models_code_may_not_apply_is_refused():
    class Mine(MistralForCausalLM):
        """A model of somebody's own: whether it cuts its attention where its configuration says nobody has seen."""

    torch.manual_seed(0)
    model = Mine(MistralConfig(sliding_window=8, **HEADS, **SMALL)).eval()
    with pytest.raises(SpecDecError, match="not known to be applied"):
        decode(model, [[1, 2, 3]], PromptLookupDrafter(), 5)


WINDOWED = {
    "sliding": lambda: of(MistralConfig(sliding_window=8, **HEADS, **SMALL)),
    "sliding and full": lambda: of(Gemma2Config(sliding_window=8, head_dim=16, **HEADS, **SMALL)),
    "recurrent, one token at a time": lambda: of(MambaConfig(state_size=4, **SMALL)),
    "recurrent": lambda: of(
        Mamba2Config(state_size=8, num_heads=4, head_dim=16, expand=2, n_groups=1, **{**SMALL, "intermediate_size": 64})
    ),
}


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
def test_c5_windows_are_crossed_and_states_restored_exactly(kind, policy):
    """Against plain passes with no cache of ours, well past a window of 8; alone, ragged, and with rows joining."""
    target = WINDOWED[kind]()
    prompts = [SHORT, LONG, [5, 6] * 10]
    settings = Settings(gamma=3, policy=policy)
    base = [decode(target, [p], tokens=30, settings=settings, first_id=i)[0] for i, p in enumerate(prompts)]
    if policy.greedy:
        for request in base:
            text = list(request.prompt)
            for token in request.output:
                logits = target(torch.tensor([text]), use_cache=False).logits[0, -1]
                assert logits.max() - logits[token] < 1e-3 * logits.abs().max()
                text.append(token)
    for drafter in (PromptLookupDrafter(), ModelDrafter(target, policy, 64), ModelDrafter(tiny_llama(4), policy, 64)):
        rows = decode(target, prompts, drafter, 30, Settings(gamma=3, policy=policy, max_batch=2))
        alone = [decode(target, [p], drafter, 30, settings, first_id=i)[0].output for i, p in enumerate(prompts)]
        assert [r.output for r in rows] == alone
        if policy.greedy:
            assert alone == [r.output for r in base]
        if drafter.__class__ is ModelDrafter and drafter.model is target:
            assert sum(r.rejected for row in rows for r in row.records) == 0


def test_c5_a_state_is_rewound_to_what_a_plain_pass_gives():
    target = WINDOWED["recurrent"]()
    ids = torch.tensor([LONG])
    with torch.inference_mode():
        plain = target(ids, use_cache=False).logits
        cache = ModelCache(target, 2)
        cache.extend(ids[:, :4].expand(2, -1))
        cache.extend(torch.tensor([[6, 60, 61], [6, 7, 62]]))
        cache.rewind([5, 6])
        got = cache.extend(torch.stack([ids[0, 5:7], ids[0, 6:8]]))
    assert torch.allclose(got[0], plain[0, 5:7], atol=1e-4)
    assert torch.allclose(got[1], plain[0, 6:8], atol=1e-4)
    with pytest.raises(ValueError, match="recurrent"):
        cache.rewind([1, 1]), cache.rewind([0, 0])


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_finished_rows_free_their_place_and_waiting_ones_join_without_a_change_to_any(policy, most):
    target, other = tiny_llama(), noisy_copy(tiny_llama())
    prompts = [SHORT, LONG, [1, 2], [5] * 20, [9, 8, 7, 6]]
    for make in (lambda: ModelDrafter(other, policy, 64), PromptLookupDrafter, lambda: None):
        settings = Settings(gamma=3, policy=policy, max_batch=most)
        requests = [
            Request(i, p, n, RequestRandom(0, i))
            for i, (p, n) in enumerate(zip(prompts, (5, 30, 12, 1, 20), strict=True))
        ]
        drafter = make()
        steps = (
            ordinary_decoding(target, requests, settings)
            if drafter is None
            else speculative_decoding(target, requests, drafter, settings)
        )
        widths = [len(records) for records in steps]
        assert max(widths) == most
        for i, r in enumerate(requests):
            (alone,) = decode(
                target, [r.prompt], make(), r.max_new_tokens, Settings(gamma=3, policy=policy), first_id=i
            )
            assert r.output == alone.output
            assert len(r.output) == r.max_new_tokens


def test_a_place_that_is_free_costs_nothing_the_batch_of_a_pass_is_the_rows_that_run():
    target = tiny_llama()
    requests = [Request(i, SHORT, n, RequestRandom(0, i)) for i, n in enumerate((3, 20))]
    for _ in speculative_decoding(target, requests, PromptLookupDrafter(), Settings(gamma=2)):
        pass
    assert {r.batch for r in requests[0].records} == {2}
    assert requests[1].records[-1].batch == 1


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
@pytest.mark.parametrize("shapes", [False, True])
def test_c9_a_row_cancelled_in_the_middle_of_a_batch_leaves_the_others_unchanged(policy, shapes):
    target = tiny_llama()
    prompts = [SHORT, LONG, [1, 2]]
    draft = noisy_copy(target)
    drafter = lambda: ModelDrafter(draft, policy, 64)  # noqa: E731
    alone = [
        decode(target, [p], drafter(), 24, Settings(3, policy), first_id=i)[0].output for i, p in enumerate(prompts)
    ]
    requests = [Request(i, p, 24, RequestRandom(0, i)) for i, p in enumerate(prompts)]
    settings = Settings(gamma=3, policy=policy, fixed_shapes=shapes)
    for n, _ in enumerate(speculative_decoding(target, requests, drafter(), settings)):
        if n == 4:
            requests[1].cancel()
    assert requests[1].stop == "cancelled"
    assert 4 < len(requests[1].output) < 24
    assert requests[1].output == alone[1][: len(requests[1].output)]
    assert [requests[0].output, requests[2].output] == [alone[0], alone[2]]


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
def test_fixed_shapes_give_the_same_tokens(policy):
    target, other = tiny_llama(), noisy_copy(tiny_llama())
    prompts = [SHORT, LONG, [1, 2], [5] * 20]
    plain = decode(target, prompts, ModelDrafter(other, policy, 64), 24, Settings(gamma=3, policy=policy))
    for most in (None, 2, 3):  # 3: the last row runs alone, in another shape
        settings = Settings(gamma=3, policy=policy, fixed_shapes=True, max_batch=most)
        fixed = decode(target, prompts, ModelDrafter(other, policy, 64, capacity=64), 24, settings)
        assert [r.output for r in fixed] == [r.output for r in plain]
        assert all(r.control != "degraded" for row in fixed for r in row.records)


@pytest.mark.parametrize("candidates", [2, 3])
@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
def test_c1_with_several_candidates_a_position_rows_still_equal_their_own_runs(policy, candidates):
    target = tiny_llama()
    draft = noisy_copy(target)
    prompts = [SHORT, LONG, [1, 2], [5] * 20]
    make = lambda: ModelDrafter(draft, policy, 64, candidates=candidates)  # noqa: E731
    together = decode(target, prompts, make(), 24, Settings(gamma=3, policy=policy, max_batch=3))
    for i, prompt in enumerate(prompts):
        (alone,) = decode(target, [prompt], make(), 24, Settings(gamma=3, policy=policy), first_id=i)
        assert together[i].output == alone.output
        if policy.greedy:
            assert alone.output == decode(target, [prompt], tokens=24)[0].output
    joined = [r for row in together for r in row.records if r.branch is not None]
    assert joined
    assert all(r.branch in r.emitted and r.accepted >= 1 and not r.rejected for r in joined)


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


def test_with_fixed_shapes_a_row_that_catches_up_beside_one_near_its_end_does_not_overrun_the_capacity():
    """A composite's model skips the rows that the lookup serves, and reads what it missed when it runs again."""
    target, policy = tiny_llama(), GREEDY
    prompts = [[7, 8] * 12, LONG, SHORT]
    base = [decode(target, [p], tokens=40)[0].output for p in prompts]
    for seed in range(4):
        draft = noisy_copy(target, 0.05, seed)
        drafter = CompositeDrafter(PromptLookupDrafter(), ModelDrafter(draft, policy, 64, capacity=70))
        rows = decode(target, prompts, drafter, 40, Settings(gamma=4, fixed_shapes=True))
        assert [r.output for r in rows] == base
        assert all(r.control != "degraded" for row in rows for r in row.records)


def test_a_head_that_is_cut_passes_the_self_check_on_what_is_left_of_it():
    draft = reduced_head(tiny_llama(), range(32))
    with torch.inference_mode():
        assert rewind_error(draft) < 1e-4

    class Forgetful(LlamaForCausalLM):
        """Looks at the cache and then at the first position again."""

        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, position_ids=None if position_ids is None else position_ids * 0, **kwargs)

    broken = reduced_head(Forgetful(tiny_llama().config).eval(), range(32))
    with pytest.raises(SpecDecError, match="after a rewind"):
        ModelCache(broken, 1)


def test_c5_a_model_that_takes_one_position_for_all_rows_runs_alone_and_is_refused_in_a_batch():
    """Llama 4 scales attention by a position read off the cache; with real settings only behind 8,192 tokens."""
    target = tiny("llama4_text")
    (alone,) = decode(target, [LONG], PromptLookupDrafter(), 24)
    text = list(LONG)
    with torch.inference_mode():
        for token in alone.output:
            assert int(target(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()) == token
            text.append(token)
    for requests, settings, drafter in (
        ([LONG, SHORT], Settings(), PromptLookupDrafter()),
        ([LONG], Settings(fixed_shapes=True), PromptLookupDrafter()),
        ([LONG], Settings(), ModelDrafter(tiny_llama(), GREEDY, 64, candidates=2)),
    ):
        with pytest.raises(SpecDecError, match="llama4_text"):
            decode(target, requests, drafter, 5, settings)


class SecondIsRight(Drafter):
    """At one position of the block the first candidate is wrong and a branch is the truth; all others are right."""

    def __init__(self, truth, gamma, k, bad, at):
        self.truth, self.gamma, self.candidates, self.bad, self.at = truth, gamma, k, bad, at

    def propose(self, sequences, room, u):
        (text,), (r,) = sequences, room
        true = self.truth[len(text) : len(text) + r]
        spine = torch.tensor([[(t + 1) % 64 if i == self.bad else t for i, t in enumerate(true)]])
        branches = (spine.unsqueeze(-1) + 2 + torch.arange(self.candidates - 1)) % 64
        if self.bad < len(true):
            branches[0, self.bad, self.at] = true[self.bad]
        return Proposal(spine, torch.tensor([len(true)]), None, [len(true)], branches=branches)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("gamma", "k"), [(3, 2), (3, 4), (4, 4), (5, 3), (8, 5)])
def test_a_branch_joins_the_text_with_its_own_keys_also_where_shapes_are_fixed(fixed, gamma, k):
    target = tiny_llama()
    (base,) = decode(target, [SHORT], tokens=14)
    truth = base.committed
    for bad in range(0, gamma, 2):
        for at in {0, k - 2}:
            drafter = SecondIsRight(truth, gamma, k, bad, at)
            (ours,) = decode(target, [SHORT], drafter, 14, Settings(gamma=gamma, fixed_shapes=fixed))
            assert ours.output == base.output
            assert sum(r.rejected for r in ours.records) == 0
            assert all(r.control in ("baseline", "speculate", "idle") for r in ours.records)


@pytest.mark.parametrize("control", [Heuristic(4), Adaptive(most=6), Fallback(Adaptive(most=6))])
def test_fixed_shapes_make_room_for_the_widest_block_that_a_control_may_ask_for(control):
    target = tiny_llama()
    (base,) = decode(target, [SHORT], tokens=40)
    drafter = ModelDrafter(target, GREEDY, 64, candidates=2)
    (ours,) = decode(target, [SHORT], drafter, 40, Settings(control=control, fixed_shapes=True))
    assert ours.output == base.output


def test_fixed_shapes_are_no_longer_than_the_context_and_an_empty_list_needs_none():
    request = Request(0, [1, 2], 10**9, RequestRandom(0))
    assert capacity([request], Fixed(4), 1, 256) == 256 + 4 + 2
    assert capacity([], Fixed(4), 1, None) == 6


def test_a_model_whose_bias_follows_the_place_in_the_cache_does_not_branch():
    mpt = tiny("mpt")
    (base,) = decode(mpt, [LONG], tokens=20)
    assert decode(mpt, [LONG], ModelDrafter(mpt, GREEDY, VOCAB), 20)[0].output == base.output
    with pytest.raises(SpecDecError, match="mpt"):
        decode(mpt, [LONG], ModelDrafter(mpt, GREEDY, VOCAB, candidates=2), 20)
    assert branch_error(tiny_llama()) < 1e-5


def test_a_drafter_that_writes_into_what_it_is_given_does_not_change_the_text():
    class Scribbler(Drafter):
        def join(self, sequences):
            self.kept = sequences

        def propose(self, sequences, room, u):
            for text in [*self.kept, *sequences]:
                text.append(3)
            u.fill_(0.5)
            room[:] = [0] * len(room)
            return block([1], [1])

    target = tiny_llama(scale=0.05)
    for policy in (GREEDY, SamplingPolicy(1.0)):
        requests = decode(target, [SHORT, LONG], Scribbler(), 12, Settings(gamma=1, policy=policy))
        assert [r.prompt for r in requests] == [SHORT, LONG]
        if policy.greedy:
            assert [r.output for r in requests] == [decode(target, [p], tokens=12)[0].output for p in (SHORT, LONG)]
