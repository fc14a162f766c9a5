"""Conditions D: where a text ends, and what happens at the edge of a context."""

from __future__ import annotations

import pytest
from kit import NoTokenizer, ScriptedDrafter, block, decode, pair_of, tiny_llama

from specdec_core import SamplingPolicy, SpecDecError, generate
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter
from specdec_core.loop import Settings
from specdec_core.stops import Stops

GREEDY = SamplingPolicy()
PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


def test_d1_output_ends_at_the_third_token_declared_eos():
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    eos = base.output[2]
    assert eos not in base.output[:2]
    stops = Stops(eos=frozenset({eos}))
    for drafter in (None, ModelDrafter(target, GREEDY, 64), PromptLookupDrafter()):
        (request,) = decode(target, [PROMPT], drafter, 20, Settings(gamma=5, stops=stops))
        assert request.output == base.output[:3]
        assert request.stop == "eos"


def test_d1_any_of_several_eos_ids_ends_the_text():
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    stops = Stops(eos=frozenset({base.output[4], base.output[2], 62}))
    (request,) = decode(target, [PROMPT], ModelDrafter(target, GREEDY, 64), 20, Settings(gamma=5, stops=stops))
    assert request.output == base.output[:3]


def test_d2_prompt_lookup_without_any_eos():
    target = tiny_llama()
    prompt = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    proposal = PromptLookupDrafter().propose([prompt], [4], None)
    assert proposal.tokens.tolist() == [[9, 10, 11, 7]]
    (base,) = decode(target, [prompt], tokens=30)
    (ours,) = decode(target, [prompt], PromptLookupDrafter(), 30, Settings(gamma=4))
    assert ours.output == base.output
    assert len(ours.output) == 30


@pytest.mark.parametrize(
    ("text", "want"), [([1], []), ([1, 2], []), ([1, 1], [1]), ([4, 5, 4, 5], [4, 5]), ([9, 1, 2, 9], [1, 2, 9])]
)
def test_d2_lookup_on_the_shortest_texts(text, want):
    proposal = PromptLookupDrafter().propose([text], [3], None)
    assert proposal.tokens[0].tolist() == want
    assert proposal.lengths.tolist() == [len(want)]
    assert want or "no earlier match" in proposal.note


@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5, 9])
def test_d4_exactly_the_budget_is_emitted(budget):
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    for drafter in (None, ModelDrafter(target, GREEDY, 64), PromptLookupDrafter()):
        (request,) = decode(target, [PROMPT], drafter, budget, Settings(gamma=4))
        assert request.output == base.output[:budget]
        assert request.stop == "budget"
        assert sum(len(r.emitted) for r in request.records) == budget


def test_d4_rows_of_a_batch_have_their_own_budget():
    from specdec_core.loop import Request, speculative_decoding
    from specdec_core.sampling import RequestRandom

    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    requests = [Request(i, PROMPT, n, RequestRandom(0, i)) for i, n in enumerate((0, 1, 7, 20))]
    list(speculative_decoding(target, requests, ModelDrafter(target, GREEDY, 64), Settings(gamma=4)))
    assert [r.output for r in requests] == [base.output[:n] for n in (0, 1, 7, 20)]


def test_d5_decoding_goes_on_without_the_draft_when_its_context_is_full():
    target = tiny_llama(context=64)
    draft = tiny_llama(context=32)
    prompt = [(7 * i) % 64 for i in range(30)]
    (base,) = decode(target, [prompt], tokens=34, settings=Settings(stops=Stops(context=64)))
    (ours,) = decode(target, [prompt], ModelDrafter(draft, GREEDY, 64), 40, Settings(gamma=4, stops=Stops(context=64)))
    assert ours.output == base.output
    assert len(prompt) + len(ours.output) == 64, "total length is exactly the target's limit"
    assert ours.stop == "context"
    assert all(r.drafted <= max(0, 32 - r.context + 1) for r in ours.records)
    without = [r for r in ours.records if r.kind == "ordinary"]
    assert any("context of 32 tokens is full" in r.reason for r in without)
    assert all(r.control == "idle" for r in without)


def test_d5_prompt_longer_than_the_drafts_context():
    target, draft = tiny_llama(context=64), tiny_llama(context=16)
    prompt = [(7 * i) % 64 for i in range(30)]
    (base,) = decode(target, [prompt], tokens=10)
    (ours,) = decode(target, [prompt], ModelDrafter(draft, GREEDY, 64), 10, Settings(gamma=4))
    assert ours.output == base.output


def test_d5_a_ragged_batch_at_the_edge_of_the_context():
    target = tiny_llama(context=40)
    prompts = [[(7 * i) % 64 for i in range(n)] for n in (36, 10, 39)]
    settings = Settings(gamma=4, stops=Stops(context=40))
    rows = decode(target, prompts, ModelDrafter(target, GREEDY, 64), 20, settings)
    for row, prompt in zip(rows, prompts, strict=True):
        (base,) = decode(target, [prompt], tokens=20, settings=settings)
        assert row.output == base.output
        assert len(row.output) == min(20, 40 - len(prompt))


def test_d5_a_prompt_that_leaves_no_room_is_refused_in_one_line():
    pair = pair_of(tiny_llama(context=16))
    with pytest.raises(SpecDecError, match="17 tokens, the target holds 16: shorten it to at most 15"):
        generate(pair, list(range(17)))


def test_d7_a_stop_string_across_two_tokens_of_one_block_ends_the_text_before_it():
    target = tiny_llama()
    pair = pair_of(target)
    whole = generate(pair, PROMPT, max_new_tokens=20, speculate=False)
    stop = NoTokenizer().decode(whole.tokens[3:5])
    assert whole.text.find(stop) == 3
    for options in ({"speculate": False}, {"drafter": "self", "gamma": 7}, {"drafter": "prompt_lookup", "gamma": 3}):
        out = generate(pair, PROMPT, max_new_tokens=20, stop=stop, **options)
        assert out.text == whole.text[:3]
        assert out.tokens == whole.tokens[:5], "the tokens that complete the string are emitted and counted"
        assert out.stop == "stop_string"
        assert out.metrics["tokens_emitted"] == len(out.tokens) == sum(len(r.emitted) for r in out.records)


def test_d7_of_two_stop_strings_the_one_completed_first_ends_the_text():
    target = tiny_llama()
    pair = pair_of(target)
    whole = generate(pair, PROMPT, max_new_tokens=20, speculate=False)
    late, early = whole.text[8:11], whole.text[4:6]
    out = generate(pair, PROMPT, max_new_tokens=20, stop=[late, early], drafter="self", gamma=7)
    assert out.text == whole.text[:4]


def test_a_scripted_block_longer_than_its_room_cannot_overrun_the_budget():
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    drafter = ScriptedDrafter(lambda step, seqs, room: block(base.output[len(seqs[0]) - len(PROMPT) :][: room[0]]))
    (ours,) = decode(target, [PROMPT], drafter, 7, Settings(gamma=20))
    assert ours.output == base.output[:7]
