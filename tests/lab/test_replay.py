"""Replay against the loop: pass for pass where nothing is left to chance, within its interval where something is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from kit import noisy_copy, pair_of, tiny_llama

from specdec_core import SamplingPolicy, SpecDecError, generate
from specdec_core.control import Costs
from specdec_core.lab.replay import Meeting, Replay, predict
from specdec_core.record import target_passes

PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]
GREEDY = SamplingPolicy()


def greedy_pair(seed=3):
    target = tiny_llama(seed)
    return pair_of(target, noisy_copy(target))


def counted(records):
    """(passes, those that verified, drafted, accepted, rejected) of the loop, prefill aside."""
    own = [r for r in records if r.kind != "prefill"]
    sums = [sum(getattr(r, name) for r in own) for name in ("drafted", "accepted", "rejected")]
    return [len(own), sum(r.verified > 0 for r in own), *sums]


@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix", "model", "composite", "self"])
def test_greedy_replay_is_the_loop_pass_for_pass(drafter, gamma):
    pair = greedy_pair(11 if drafter in ("prompt_lookup", "suffix") else 3)
    options = {"max_new_tokens": 60, "eos": []}
    text = generate(pair, PROMPT, speculate=False, **options)
    out = generate(pair, PROMPT, drafter=drafter, gamma=gamma, **options)
    assert out.tokens == text.tokens
    told = Meeting(pair, text, GREEDY).replay(drafter, gamma).walk()
    assert [told.passes, told.drafting, told.drafted, told.accepted, told.rejected] == counted(out.records)
    assert told.passes < 59, "something was accepted"
    for i in range(gamma):
        judged = [r for r in out.records if r.accepted + r.rejected > i]
        assert told.reached[i] == len(judged)
        assert told.kept[i] == sum(r.accepted > i for r in judged)


@pytest.mark.parametrize("drafter", ["prompt_lookup", "model", "composite"])
def test_a_text_that_stops_by_itself_is_replayed_to_its_last_token(drafter):
    pair = greedy_pair()
    whole = generate(pair, PROMPT, speculate=False, max_new_tokens=60, eos=[]).tokens
    end = next(t for t in whole[20:] if t not in whole[:20])
    for gamma in (3, 6):
        options = {"max_new_tokens": 60, "eos": [end]}
        text = generate(pair, PROMPT, speculate=False, **options)
        out = generate(pair, PROMPT, drafter=drafter, gamma=gamma, **options)
        assert (text.stop, len(text.tokens) < 60) == ("eos", True)
        told = Meeting(pair, text, GREEDY, budget=60).replay(drafter, gamma).walk()
        assert [told.passes, told.drafting, told.drafted, told.accepted, told.rejected] == counted(out.records)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", ["model", "prompt_lookup", "composite"])
def test_sampled_replay_is_the_loops_mean(drafter, rule):
    """Two halves: texts of ordinary decoding, and the loop with other coins. Their means may differ by chance, by
    four standard errors at most; what is compared is a mean over 150 texts, whose spread the texts themselves show."""
    target, draft = tiny_llama(0, vocab=12, scale=0.1), tiny_llama(5, vocab=12, scale=0.1)
    pair, policy = pair_of(target, draft), SamplingPolicy(0.9)
    options = {"max_new_tokens": 24, "temperature": 0.9, "eos": []}
    texts = [generate(pair, PROMPT, speculate=False, seed=s, **options) for s in range(150)]
    outs = [generate(pair, PROMPT, drafter=drafter, gamma=4, rule=rule, seed=1000 + s, **options) for s in range(150)]
    walks = [Meeting(pair, t, policy).replay(drafter, 4).walk(rule) for t in texts]
    for told, seen in (
        ([w.passes for w in walks], [target_passes(o.records) for o in outs]),
        ([w.accepted for w in walks], [sum(r.accepted for r in o.records) for o in outs]),
    ):
        error = np.hypot(np.std(told), np.std(seen)) / np.sqrt(len(texts))
        assert abs(np.mean(told) - np.mean(seen)) < 4 * error
    assert sum(w.accepted for w in walks) > 100


def test_block_verification_never_accepts_less_and_here_accepts_more():
    random = np.random.default_rng(0)
    more = []
    for _ in range(50):
        told = Replay(random.lognormal(-0.5, 1, (30, 5)), np.minimum(5, 29 - np.arange(30)))
        token, block = told.walk("token"), told.walk("block")
        assert (told.chances("block") >= told.chances("token") - 1e-12).all()
        more.append(token.passes - block.passes)
    assert np.mean(more) > 0.1


def test_the_chances_of_a_block_are_those_written_down_by_hand():
    told = Replay(np.array([[0, 0], [0.5, 4.0], [2.0, 0.25], [0.8, 0]]), np.array([0, 2, 1, 0]))
    assert np.allclose(told.chances("token"), [[1, 0, 0, 0], [1, 0.5, 0.5, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    told = Replay(np.array([[0, 0], [2.0, 0.25], [0.5, 4.0]]), np.array([0, 2, 1]))
    assert np.allclose(told.chances("token")[1], [1, 1, 0.25, 0])
    assert np.allclose(told.chances("block")[1], [1, 1, 0.5, 0]), "what the first token had to spare is kept"


def test_a_shorter_block_is_the_same_text_met_anew_by_a_model():
    pair = greedy_pair()
    text = generate(pair, PROMPT, speculate=False, max_new_tokens=40)
    met = Meeting(pair, text, GREEDY)
    assert met.replay("model", 6).at(2).walk().passes == met.replay("model", 2).walk().passes


def test_sampled_predictions_hold_the_loops_alpha():
    target, draft = tiny_llama(0, scale=0.1), tiny_llama(5, scale=0.1)
    pair, policy = pair_of(target, draft), SamplingPolicy(1.0)
    options = {"max_new_tokens": 40, "temperature": 1.0}
    texts = [generate(pair, PROMPT, speculate=False, seed=s, **options) for s in range(60)]
    outs = [generate(pair, PROMPT, drafter="model", gamma=3, seed=1000 + s, **options) for s in range(60)]
    told = predict([Meeting(pair, t, policy).replay("model", 3) for t in texts])
    seen = 60 * 39 / sum(target_passes(o.records) for o in outs)
    assert told["along_the_text"] == pytest.approx(seen, rel=0.06)  # about three standard errors of 60 short texts
    alphas = sum(r.accepted for o in outs for r in o.records) / sum(
        r.accepted + r.rejected for o in outs for r in o.records
    )
    assert told["alpha"] == pytest.approx(alphas, abs=0.04)


def test_predictions_of_texts_without_any_match_are_ordinary_decoding():
    empty = Replay(np.zeros((20, 4)), np.zeros(20, dtype=int))
    assert predict([empty])["along_the_text"] == 1
    assert predict([empty])["constant_alpha"] == 1


def test_what_cannot_be_replayed_is_refused_in_one_line():
    pair = pair_of(tiny_llama())
    text = generate(pair, PROMPT, speculate=False, max_new_tokens=8)
    with pytest.raises(SpecDecError, match="has no draft model in the target's own tokens"):
        Meeting(pair, text, GREEDY).replay("model", 2)
    with pytest.raises(SpecDecError, match=r"drafter='early_exit' .* for a replay"):
        Meeting(pair, text, GREEDY).replay("early_exit", 2)
    with pytest.raises(SpecDecError, match="rule='typical'"):
        Meeting(pair, text, GREEDY).replay("suffix", 2).walk("typical")


def test_what_passes_take_is_counted_by_their_sizes_and_lookups_are_free():
    pair = greedy_pair()
    text = generate(pair, PROMPT, speculate=False, max_new_tokens=60, eos=[])
    costs = Costs({("target", 1, n): 1.0 + n for n in range(1, 6)} | {("draft", 1, n): 10.0 * n for n in range(1, 5)})
    for drafter, paid in (("prompt_lookup", False), ("model", True), ("composite", None)):
        told = Meeting(pair, text, GREEDY).replay(drafter, 4).walk()
        assert told.sizes.sum() == told.passes
        assert told.sizes.sum(0) @ np.arange(5) == told.drafted
        assert paid is None or told.sizes[0 if paid else 1, 1:].sum() == 0
        by_hand = sum(told.sizes[k, n] * (2 + n + 10 * n * k) for k in (0, 1) for n in range(5))
        assert told.seconds(costs) == pytest.approx(by_hand)
    assert told.sizes[0, 1:].sum() > 0
    assert told.sizes[1, 1:].sum() > 0


def test_processors_of_the_target_are_refused():
    pair = greedy_pair()
    text = generate(pair, PROMPT, speculate=False, max_new_tokens=8)
    pair.target.generation_config = SimpleNamespace(eos_token_id=None, repetition_penalty=1.3)
    with pytest.raises(SpecDecError, match="asks for penalties or other processors"):
        Meeting(pair, text, GREEDY)


@pytest.mark.parametrize("drafter", ["model", "composite", "self"])
@pytest.mark.parametrize(("context", "short"), [(256, 20), (256, 33), (40, 256), (40, 24)])
def test_contexts_of_target_and_draft_end_blocks_as_in_the_loop(drafter, context, short):
    target = tiny_llama(3, context=context)
    pair = pair_of(target, noisy_copy(target))
    pair.draft.config.max_position_embeddings = short
    options = {"max_new_tokens": 60, "eos": []}
    text = generate(pair, PROMPT, speculate=False, **options)
    for gamma in (1, 3, 7):
        out = generate(pair, PROMPT, drafter=drafter, gamma=gamma, **options)
        assert out.tokens == text.tokens
        told = Meeting(pair, text, GREEDY, budget=60).replay(drafter, gamma).walk()
        assert [told.passes, told.drafting, told.drafted, told.accepted, told.rejected] == counted(out.records)


def test_a_text_beyond_the_drafts_vocabulary_is_refused():
    pair = pair_of(tiny_llama(3), tiny_llama(3, vocab=12))
    text = generate(pair, [3, 4, 5, 60], speculate=False, max_new_tokens=8)
    with pytest.raises(SpecDecError, match="a token beyond the draft's 12"):
        Meeting(pair, text, GREEDY).replay("model", 2)
