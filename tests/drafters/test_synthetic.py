"""The synthetic drafter: the acceptance that was asked for, marked as what it is, and never a wrong output law."""

from __future__ import annotations

import pytest
import torch
from kit import TableModel, decode, tiny_llama
from laws import FALSE_ALARM, PROMPTS, as_alone, distance_from_target, samples_p_value
from scipy.stats import binomtest

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.drafters import ModelDrafter
from specdec_core.lab.synthetic import SyntheticDrafter
from specdec_core.lab.theory import acceptance_rate, random_law

GREEDY, WARM = SamplingPolicy(), SamplingPolicy(1.0)
COINS = torch.zeros(3, 16, dtype=torch.float64)
PROMPT, OUTPUT = (4, 5), [10, 11, 12, 13, 14, 15, 16, 17]
KNOWN = {PROMPT: OUTPUT, (4, 5, 10): [30, 31, 32], (9,): [1, 2]}


def told(rates, text, room=8, **options):
    drafter = SyntheticDrafter(rates, 64, texts=KNOWN, **options)
    drafter.start()
    drafter.join([text])
    return drafter.propose([text], [room], COINS[:1])


def test_at_rate_1_the_known_text_comes_and_at_rate_0_never_a_token_of_it():
    found = told([1.0], [4, 5, 10, 11], 3)
    assert found.tokens.tolist() == [[12, 13, 14]]
    assert found.q is None
    assert (found.note, found.drafted) == ("synthetic", [3])
    wrong = told([0.0], [4, 5, 10, 11], 6).tokens[0].tolist()
    assert all(0 <= w < 64 and w != t for w, t in zip(wrong, OUTPUT[2:], strict=True))


def test_the_rate_goes_by_position_in_the_block_and_the_last_one_holds_on():
    tokens = told([1.0, 0.0, 1.0], [4, 5, 10, 11], 5).tokens[0].tolist()
    assert [a == b for a, b in zip(tokens, OUTPUT[2:], strict=False)] == [True, False, True, True, True]


def test_the_longest_known_prompt_that_the_text_follows_counts_and_another_text_gets_nothing():
    assert told([1.0], [4, 5, 10, 30]).tokens.tolist() == [[31, 32]]
    assert told([1.0], [4, 5, 10]).tokens.tolist() == [[30, 31, 32]]
    assert told([1.0], [4, 5, 10, 11]).tokens.tolist() == [OUTPUT[2:]]
    for text in ([4, 5, 11], [8], [9, 1, 2], [4, 5, *OUTPUT, 1]):
        nothing = told([1.0], text)
        assert nothing.tokens.shape == (1, 0)
        assert nothing.note not in ("", "synthetic")


def test_a_rows_coins_depend_on_its_prompt_and_place_and_on_nothing_else():
    texts = {(n,): list(range(40)) for n in range(3)}
    make = lambda seed=0: SyntheticDrafter([0.5], 64, texts=texts, seed=seed)  # noqa: E731
    rows = [[n, *range(10)] for n in range(3)]
    together = make().propose(rows, [12, 5, 0], COINS).tokens
    assert torch.equal(together[0], make().propose([rows[0]], [12], COINS[:1]).tokens[0])
    assert torch.equal(together[1, :5], make().propose([rows[1]], [5], COINS[:1]).tokens[0])
    later = make().propose([[0, *range(14)]], [8], COINS[:1]).tokens
    assert torch.equal(together[0, 4:], later[0])
    assert not torch.equal(together[0, :5], together[1, :5])
    assert not torch.equal(together[0], make(1).propose([rows[0]], [12], COINS[:1]).tokens[0])


def test_the_share_of_true_tokens_is_the_rate():
    texts = {(0,): list(range(64)) * 32}
    drafter = SyntheticDrafter([0.7], 64, texts=texts)
    true = drafter.propose([[0]], [2048], COINS[:1]).tokens[0] == torch.tensor(texts[0,])
    assert binomtest(int(true.sum()), 2048, 0.7).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rate", [0.6, 1.0])
def test_greedy_decoding_with_known_texts_keeps_as_many_tokens_as_asked(rate):
    target = tiny_llama()
    plain = decode(target, PROMPTS, None, 40)
    texts = {tuple(p): r.output for p, r in zip(PROMPTS, plain, strict=True)}
    rows = as_alone(target, lambda: SyntheticDrafter([rate], 64, texts=texts), GREEDY, 40)
    records = [r for request in rows for r in request.records if r.kind == "speculative" and r.stop is None]
    tried = sum(min(r.accepted + 1, r.verified) for r in records)
    assert binomtest(sum(r.accepted for r in records), tried, rate).pvalue > FALSE_ALARM
    assert {r.reason for r in records} == {"synthetic"}


def blended(rates, policy, draft, vocab=64, **options):
    drafter = SyntheticDrafter(rates, vocab, model=draft, policy=policy, **options)
    drafter.start()
    return drafter


@pytest.mark.parametrize("policy", [WARM, SamplingPolicy(0.7, top_k=10), SamplingPolicy(1.0, top_p=0.8)])
def test_the_overlap_with_the_target_is_the_rate_at_each_position(policy):
    target, rates = tiny_llama(), [0.9, 0.5, 0.0]
    ours, whole = blended(rates, policy, target), ModelDrafter(target, policy, 64)
    for drafter in (ours, whole):
        drafter.join([[1, 2, 3]])
    coins = torch.rand(1, 4, dtype=torch.float64)
    with torch.inference_mode():
        found = ours.propose([[1, 2, 3, 4]], [4], coins)
        text = torch.tensor([[1, 2, 3, 4, *found.tokens[0].tolist()]])
        logits = target(text, use_cache=False).logits[:, 3:7]
    p = torch.stack([whole._laws(logits[:, i : i + 1], [[1, 2, 3, 4]], found.tokens[:, :i])[0] for i in range(4)], 1)
    least = p.amin(-1)
    want = torch.tensor([0.9, 0.5, 0.0, 0.0])
    assert torch.allclose(acceptance_rate(p, found.q), want + (1 - want) * least, atol=1e-5)
    assert torch.allclose(found.q.sum(-1), torch.ones(1, 4))
    assert (found.note, found.lengths.tolist()) == ("synthetic", [4])


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
def test_rows_equal_their_own_runs_with_the_target_as_model(policy):
    target = tiny_llama()
    rows = as_alone(target, lambda: blended([0.6], policy, target), policy, 40)
    records = [r for request in rows for r in request.records if r.kind == "speculative" and r.stop is None]
    tried = sum(min(r.accepted + 1, r.verified) for r in records)
    assert binomtest(sum(r.accepted for r in records), tried, 0.6).pvalue > FALSE_ALARM


def test_the_output_law_is_the_targets():
    table = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]], dtype=torch.float64)
    make = lambda: blended([0.8, 0.3], WARM, TableModel(table), 3)  # noqa: E731
    assert distance_from_target(make, random_law(3, 5), (0, 1), 2, 3) < 1e-6
    law = lambda text: table[text[-1] if text else 1]  # noqa: E731
    assert samples_p_value(TableModel(table), law, make, [0, 1]) > FALSE_ALARM


class Watched(ModelDrafter):
    """Says how often it proposed, and what it held after each commit."""

    proposals = 0

    def start(self):
        super().start()
        self.kept = []

    def propose(self, sequences, room, u):
        self.proposals += 1
        return super().propose(sequences, room, u)

    def commit(self, lengths):
        super().commit(lengths)
        self.kept.append(all(have <= n for have, n in zip(self.cache.lengths, lengths, strict=True)))


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_drafter_that_pays_is_run_and_its_tokens_are_thrown_away(candidates):
    pays = Watched(tiny_llama(4), WARM, 64, candidates=candidates)
    drafter = SyntheticDrafter([1.0], 64, texts={(1, 2): list(range(10, 20)), (3,): [7] * 10}, pays=pays)
    drafter.start()
    drafter.join([[1, 2], [3]])
    for done in (1, 4):
        texts = [[1, 2, *range(10, 10 + done)], [3, *[7] * done]]
        with torch.inference_mode():
            found = drafter.propose(texts, [3, 2], COINS[:2])
        assert found.tokens[0].tolist() == list(range(10 + done, 13 + done))
        assert pays.cache.lengths == [len(t) for t in texts]  # the text, and no drafted token
        drafter.commit([len(t) + 1 for t in texts])
    drafter.keep([1])
    assert pays.proposals == 2
    assert len(pays.cache.lengths) == 1
    assert all(pays.kept)
    assert SyntheticDrafter.synthetic


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"texts": KNOWN, "model": tiny_llama()},
        {"model": tiny_llama()},
        {"texts": KNOWN, "acceptance": []},
        {"texts": KNOWN, "acceptance": [1.2]},
        {"texts": KNOWN, "acceptance": [float("nan")]},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(SpecDecError, match=r"acceptance|texts"):
        SyntheticDrafter(**{"acceptance": [0.5], "vocab": 64, **options})
