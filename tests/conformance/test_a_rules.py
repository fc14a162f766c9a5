"""Conditions A over every rule, every kind of draft and every chain of processors: the law by exact enumeration."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from kit import decode, iid
from scipy.stats import chisquare

from specdec_core import Processing, SamplingPolicy
from specdec_core.drafters import Drafter, ModelDrafter, Proposal
from specdec_core.lab.theory import (
    chosen_candidates,
    constant_law,
    drawn_candidates,
    law_distance,
    mean_accepted,
    output_law,
    random_law,
    step_law,
    target_law,
)
from specdec_core.loop import Settings
from specdec_core.sampling import distribution
from specdec_core.verify import BLOCK, GREEDY, TOKEN, accept, branch_chances, next_law, try_branches

EXACT = 1e-12
FALSE_ALARM = 1e-6


def one_hot_of(law):
    return lambda prefix: torch.nn.functional.one_hot(law(prefix).argmax(), len(law(prefix))).double()


def restricted(law, keep):
    def cut(prefix):
        kept = law(prefix) * torch.tensor([float(t in keep) for t in range(len(law(prefix)))])
        return kept / kept.sum()

    return cut


# How each drafter's law looks to the rule: what it draws from after a text, and where it stops.
KINDS = {
    "model, early exit": (lambda p, q: q, None),
    "prompt lookup, suffix": (lambda p, q: one_hot_of(q), lambda text: len(text) % 3 == 2),
    "reduced head, other tokenizer": (lambda p, q: restricted(q, {0, 1}), None),
    "composite": (lambda p, q: lambda text: (one_hot_of(q) if sum(text) % 2 else q)(text), None),
    "confidence stop": (lambda p, q: q, lambda text: float(random_law(2, 99)(text)[0]) < 0.4),
    "synthetic": (lambda p, q: lambda text: 0.7 * p(text) + 0.3 * one_hot_of(q)(text), None),
    "the target itself": (lambda p, q: p, None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=lambda r: r.name)
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 1), (2, 4), (3, 2), (3, 3), (4, 3), (5, 1), (5, 2)])
def test_every_exact_rule_keeps_the_law_of_every_kind_of_draft(kind, rule, vocab, gamma):
    make, ends = KINDS[kind]
    for seed in range(3):
        p, q = random_law(vocab, seed, 1.5), random_law(vocab, 100 + seed, 1.5)
        how = {"ends": ends} if ends else {}
        got = output_law(p, make(p, q), rule, gamma, 2, **how)
        assert law_distance(got, target_law(p, 2)) < EXACT


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=lambda r: r.name)
def test_every_exact_rule_keeps_the_law_at_the_largest_block_and_vocabulary(rule):
    p, q = random_law(5, 1, 1.5), random_law(5, 2, 1.5)
    assert law_distance(output_law(p, q, rule, 4, 2), target_law(p, 2)) < EXACT


CHAINS = {
    "temperature": (Processing(), SamplingPolicy(0.7)),
    "top-k": (Processing(), SamplingPolicy(1.0, top_k=2)),
    "top-p": (Processing(), SamplingPolicy(1.3, top_p=0.7)),
    "min-p": (Processing(), SamplingPolicy(1.0, min_p=0.3)),
    "penalties": (Processing(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5), SamplingPolicy(1.0)),
    "bad words": (Processing(bad_words=((1, 2),), suppress=(3,)), SamplingPolicy(0.9)),
    "forced and minimum length": (Processing(forced=((1, 2),), min_new_tokens=3, eos=(0,)), SamplingPolicy(1.0)),
    "all together": (
        Processing(repetition_penalty=1.2, frequency_penalty=0.2, no_repeat_ngram=3, min_new_tokens=2, eos=(0,)),
        SamplingPolicy(0.8, top_k=3, top_p=0.95, min_p=0.02),
    ),
}


def chained(raw, chain):
    """The law after processors and filters, made by the functions that the loop uses."""
    processing, policy = chain

    def law(prefix):
        logits = raw(prefix).log().unsqueeze(0)
        if processing.active:
            logits = processing.process(logits, [torch.tensor(prefix, dtype=torch.int64)], [0])
        return distribution(logits.double(), policy)[0]

    return law


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=lambda r: r.name)
def test_every_exact_rule_keeps_the_law_behind_every_chain_of_processors(chain, rule):
    for seed, gamma in enumerate((1, 2, 3)):
        p, q = (chained(random_law(4, s, 1.5), CHAINS[chain]) for s in (seed, 50 + seed))
        assert law_distance(output_law(p, q, rule, gamma, 3), target_law(p, 3)) < EXACT
        # A draft that leaves the processors out is less often right, and the law is the same.
        plain = random_law(4, 50 + seed, 1.5)
        assert law_distance(output_law(p, plain, rule, gamma, 3), target_law(p, 3)) < EXACT


@pytest.mark.parametrize(("vocab", "gamma", "k"), [(2, 2, 2), (3, 2, 2), (3, 2, 3), (4, 2, 3), (5, 1, 4), (3, 4, 2)])
def test_several_candidates_keep_the_law_drawn_or_chosen(vocab, gamma, k):
    for seed in range(2):
        p, q = random_law(vocab, seed, 1.5), random_law(vocab, 60 + seed, 1.5)
        drawn = output_law(p, q, TOKEN, gamma, 2, candidates=drawn_candidates(q, k))
        assert law_distance(drawn, target_law(p, 2)) < EXACT
        pick = lambda text: q(text).topk(min(k, vocab)).indices.tolist()  # noqa: B023, E731
        chosen = output_law(p, one_hot_of(q), TOKEN, gamma, 2, candidates=chosen_candidates(pick))
        assert law_distance(chosen, target_law(p, 2)) < EXACT
        narrow = restricted(q, {0, 1})  # fewer tokens than candidates: the missing ones count for nothing
        assert (
            law_distance(
                output_law(p, narrow, TOKEN, gamma, 2, candidates=drawn_candidates(narrow, k)), target_law(p, 2)
            )
            < EXACT
        )


def test_several_candidates_are_kept_more_often_than_one():
    p, q = constant_law([0.5, 0.3, 0.2]), constant_law([0.2, 0.3, 0.5])
    length = [
        sum(
            len(x) * v
            for x, v in step_law(p, q, TOKEN, 2, candidates=drawn_candidates(q, k) if k > 1 else None).items()
        )
        for k in (1, 2, 3)
    ]
    assert length[0] == pytest.approx(1 + 0.7 + 0.49)
    assert length[0] + 0.2 < length[1] < length[2]
    # With all three tokens as candidates one is always kept, so a pass gives at least two.
    assert all(len(x) >= 2 or v < EXACT for x, v in step_law(p, q, TOKEN, 2, candidates=drawn_candidates(q, 3)).items())


@pytest.mark.parametrize(
    ("p", "q", "gamma", "token", "block"),
    [
        ([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2, 10 / 9, 11 / 9),
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 3, 1.533, 1.695),
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 5, 1.941, 2.373),
    ],
)
def test_a9_the_block_rule_accepts_more_at_the_same_law(p, q, gamma, token, block):
    p, q = constant_law(p), constant_law(q)
    for rule, want in ((TOKEN, token), (BLOCK, block)):
        assert mean_accepted(step_law(p, q, rule, gamma)) == pytest.approx(want, abs=5e-4)
        assert law_distance(output_law(p, q, rule, min(gamma, 3), 3), target_law(p, 3)) < EXACT


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_a9_both_rules_accept_alike_where_q_is_one_hot(gamma):
    p, hot = random_law(4, 3, 1.5), one_hot_of(random_law(4, 4, 1.5))
    a, b = (step_law(p, hot, rule, gamma) for rule in (TOKEN, BLOCK))
    assert law_distance(a, b) < EXACT


def test_a9_the_block_rule_never_accepts_less():
    for seed in range(20):
        p, q = random_law(3, seed, 2.0), random_law(3, 500 + seed, 2.0)
        for gamma in (1, 2, 3):
            token, block = (mean_accepted(step_law(p, q, rule, gamma)) for rule in (TOKEN, BLOCK))
            assert block >= token - EXACT


def test_a9_the_loop_reaches_the_block_rules_mean_and_law():
    p, q, rows = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 4000
    policy = SamplingPolicy(1.0)
    means = {}
    for rule in (TOKEN, BLOCK):
        settings = Settings(gamma=3, policy=policy, rule=rule, diagnostics=False)
        requests = decode(iid(p), [[0]] * rows, ModelDrafter(iid(q), policy, 3), 6, settings, seed=5)
        first = [r.records[1] for r in requests]
        means[rule.name] = sum(r.accepted for r in first) / rows
        for position in (1, 2, 3):
            seen = Counter(r.output[position] for r in requests)
            assert chisquare([seen[t] for t in range(3)], [x * rows for x in p]).pvalue > FALSE_ALARM
    # Standard deviation of one block's accepted length is at most 1.5: five of them over 4,000 rows are 0.12.
    assert means["token"] == pytest.approx(1.533, abs=0.12)
    assert means["block"] == pytest.approx(1.695, abs=0.12)


class TopTwo(Drafter):
    """The draft's two likeliest tokens for each position; ``told`` says whether it admits that they were chosen."""

    candidates = 2

    def __init__(self, q, told):
        self.q, self.told = torch.tensor(q), told

    def propose(self, sequences, room, u):
        top = self.q.topk(2).indices
        batch, width = len(room), max(room)
        tokens = top[0].expand(batch, width).clone()
        q = None if self.told else self.q.expand(batch, width, -1)
        return Proposal(tokens, torch.tensor(room), q, list(room), branches=top[1].expand(batch, width, 1).clone())


def second_tokens(p, drafter, rows=4000):
    settings = Settings(gamma=1, policy=SamplingPolicy(1.0), diagnostics=False)
    seen = Counter(r.output[1] for r in decode(iid(p), [[0]] * rows, drafter, 4, settings, seed=2))
    return [seen[t] for t in range(len(p))]


def test_a10_the_top_two_as_candidates_keep_the_law_when_told_and_are_caught_when_verified_as_if_sampled():
    law = [0.51, 0.49]
    p = constant_law(law)
    pick = lambda text: [0, 1]  # noqa: E731
    hot = constant_law([1.0, 0.0])
    told = output_law(p, hot, TOKEN, 1, 1, candidates=chosen_candidates(pick))
    lie = output_law(p, p, TOKEN, 1, 1, drawn=hot, candidates=chosen_candidates(pick, told=False))
    assert law_distance(told, target_law(p, 1)) < EXACT
    assert lie[(0,)] == pytest.approx(1.0), "p = q accepts the first candidate always"

    right, wrong = (second_tokens(law, TopTwo(law, told)) for told in (True, False))
    want = [x * 4000 for x in law]
    assert chisquare(wrong, want).pvalue < FALSE_ALARM < chisquare(right, want).pvalue


def test_candidates_drawn_by_the_shipped_drafter_keep_the_law_in_the_loop():
    p, q, policy = [0.5, 0.3, 0.2], [0.1, 0.3, 0.6], SamplingPolicy(1.0)
    for k in (2, 3):
        settings = Settings(gamma=2, policy=policy, diagnostics=False)
        requests = decode(iid(p), [[0]] * 4000, ModelDrafter(iid(q), policy, 3, candidates=k), 6, settings, seed=k)
        for position in (1, 2, 3):
            seen = Counter(r.output[position] for r in requests)
            assert chisquare([seen[t] for t in range(3)], [x * 4000 for x in p]).pvalue > FALSE_ALARM


def test_rules_read_nothing_behind_a_rows_length():
    """What lies in the padding, be it NaN, changes neither the kept prefix nor the law after it."""
    torch.manual_seed(0)
    p, q = torch.rand(2, 4, 5).softmax(-1), torch.rand(2, 3, 5).softmax(-1)
    tokens, lengths = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
    dirty_p, dirty_q, dirty_tokens = p.clone(), q.clone(), tokens.clone()
    dirty_p[1, 2:], dirty_q[1, 1:], dirty_tokens[1, 1:] = torch.nan, torch.nan, 3
    for rule in (TOKEN, BLOCK, GREEDY):
        for u in (0.0, 0.3, 0.6, 0.999):
            coin = torch.full((2,), u, dtype=torch.float64)
            clean = accept(rule, p, q, tokens, lengths, coin)
            dirty = accept(rule, dirty_p, dirty_q, dirty_tokens, lengths, coin)
            assert clean.tolist() == dirty.tolist()
            a = next_law(rule, p, q, tokens, lengths, clean)
            b = next_law(rule, dirty_p, dirty_q, dirty_tokens, lengths, dirty)
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_chances_of_branches_are_a_law_whatever_the_dtype(dtype):
    torch.manual_seed(1)
    law = torch.rand(3, 6).softmax(-1).to(dtype)
    q = torch.rand(3, 6).softmax(-1).to(dtype)
    rejected, branches = torch.tensor([0, 1, 2]), torch.tensor([[1, 2], [3, 0], [5, 4]])
    chances, left = branch_chances(TOKEN, law, q, rejected, branches)
    assert chances.dtype == torch.float64
    assert ((chances >= 0) & (chances.sum(1, keepdim=True) <= 1 + 1e-9)).all()
    assert torch.isfinite(left).all()
    kept, _ = try_branches(TOKEN, law, q, rejected, branches, torch.tensor([0.0, 0.5, 1 - 1e-12], dtype=torch.float64))
    assert kept[0] == 0
    assert kept[2] == 2 or float(chances[2].sum()) > 1 - 1e-9


def test_greedy_candidates_are_kept_where_they_are_what_the_target_prefers():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 3)
    branches = torch.tensor([[1, 2], [2, 1], [2, 3]])
    kept, left = try_branches(GREEDY, logits, None, torch.tensor([0, 0, 0]), branches, torch.full((3,), 0.99))
    assert kept.tolist() == [0, 1, 2]
    assert left.argmax(-1).tolist() == [1, 1, 1]
