"""Conditions A: at temperature above 0 the law of the output is the target's.

Laws are added up exactly (``lab.theory.output_law`` runs the verification functions themselves); the loop as a whole is
then run on thousands of rows and held against the exact law by a test whose power is stated.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from kit import ScriptedDrafter, TableModel, decode, iid
from scipy.stats import chisquare

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.drafters import ModelDrafter, Proposal
from specdec_core.lab.lossy import LOSSY
from specdec_core.lab.theory import constant_law, law_distance, output_law, random_law, step_law, target_law
from specdec_core.loop import Settings
from specdec_core.sampling import distribution, draw
from specdec_core.verify import GREEDY, TOKEN, accept, first_invalid, next_law

EXACT = 1e-12
FALSE_ALARM = 1e-6  # per test; with 4,000 rows a law off by 0.06 in total variation is then missed less than 1 in 1,000


class LyingDrafter(ModelDrafter):
    """Draws from one law and reports another."""

    def __init__(self, drawn, reported, vocab):
        super().__init__(iid(drawn), SamplingPolicy(1.0), vocab)
        self.reported = torch.tensor(reported)

    def propose(self, sequences, room, u):
        proposal = super().propose(sequences, room, u)
        proposal.q = self.reported.expand(*proposal.tokens.shape, -1)
        return proposal


def counts_of_second_token(target, drafter, gamma, vocab, rows=4000, seed=1, rule=None):
    """The loop's first drafted position is the second output token (the first comes with the prefill)."""
    settings = Settings(gamma=gamma, policy=SamplingPolicy(1.0), rule=rule, diagnostics=False)
    requests = decode(target, [[0]] * rows, drafter, tokens=gamma + 3, settings=settings, seed=seed)
    seen = Counter(r.output[1] for r in requests)
    return [seen[t] for t in range(vocab)]


def p_value(counts, law):
    possible = [(c, x) for c, x in zip(counts, law, strict=True) if x > 0]
    assert sum(counts) == sum(c for c, _ in possible), "a token of probability 0 was emitted"
    total = sum(counts)
    if len(possible) == 1:
        return 1.0
    return chisquare([c for c, _ in possible], [x * total for _, x in possible]).pvalue


def test_a1_argmax_draft_verified_with_its_softmax_is_caught_and_the_truth_passes():
    p, q, hot = constant_law([0.6, 0.4]), constant_law([0.8, 0.2]), constant_law([1.0, 0.0])
    wrong = output_law(p, q, TOKEN, 1, 1, drawn=hot)
    assert wrong[(0,)] == pytest.approx(0.75, abs=EXACT)
    assert law_distance(output_law(p, hot, TOKEN, 1, 1), target_law(p, 1)) < EXACT

    target = iid([0.6, 0.4])
    lie = counts_of_second_token(target, LyingDrafter([1.0, 0.0], [0.8, 0.2], 2), 1, 2)
    truth = counts_of_second_token(target, LyingDrafter([1.0, 0.0], [1.0, 0.0], 2), 1, 2)
    assert p_value(lie, [0.6, 0.4]) < FALSE_ALARM < p_value(truth, [0.6, 0.4])
    assert p_value(lie, [0.75, 0.25]) > FALSE_ALARM


def test_a2_draft_law_before_its_top_k_is_caught_and_the_law_after_it_passes():
    p, raw, drawn = constant_law([0.625, 0.375, 0]), constant_law([0.2, 0.6, 0.2]), constant_law([0.25, 0.75, 0])
    wrong = output_law(p, raw, TOKEN, 1, 1, drawn=drawn)
    assert wrong[(0,)] == pytest.approx(0.53125, abs=EXACT)
    assert law_distance(output_law(p, drawn, TOKEN, 1, 1), target_law(p, 1)) < EXACT
    # The shipped drafter reports the filtered law, because one function makes the law and the token.
    policy = SamplingPolicy(1.0, top_k=2)
    logits = torch.tensor([[0.2, 0.6, 0.2001]]).log()
    law = distribution(logits, policy)
    assert law[0, 0] == 0
    drafter = ModelDrafter(iid([0.2, 0.6, 0.2001]), policy, 3)
    drafter.join([[0]])
    proposal = drafter.propose([[0]], [2], torch.tensor([[0.1, 0.9]]))
    assert torch.allclose(proposal.q, law.expand(1, 2, -1))


def test_a4_a_deterministic_draft_lowers_acceptance_and_leaves_the_law():
    p, hot = constant_law([0.5, 0.3, 0.2]), constant_law([0.0, 1.0, 0.0])
    assert law_distance(output_law(p, hot, TOKEN, 3, 3), target_law(p, 3)) < EXACT
    accepted = sum(v for x, v in step_law(p, hot, TOKEN, 1).items() if len(x) == 2)
    assert accepted == pytest.approx(0.3, abs=EXACT)

    target = iid([0.5, 0.3, 0.2])
    always_one = ScriptedDrafter(lambda step, seqs, room: one_hot_block(seqs, room, 1))
    assert p_value(counts_of_second_token(target, always_one, 3, 3), [0.5, 0.3, 0.2]) > FALSE_ALARM


def one_hot_block(sequences, room, token):
    width = max(room)
    return Proposal(torch.full((len(room), width), token), torch.tensor(room), None, list(room))


def test_a5_at_temperature_0_the_less_likely_token_is_never_emitted():
    target, draft = iid([0.4, 0.6]), iid([0.8, 0.2])
    policy = SamplingPolicy(0.0)
    (request,) = decode(target, [[0]], ModelDrafter(draft, policy, 2), 50, Settings(gamma=3, policy=policy))
    assert request.output == [1] * 50
    assert sum(r.accepted for r in request.records) == 0
    # The token rule on one-hot laws says the same.
    p, q = constant_law([0.0, 1.0]), constant_law([1.0, 0.0])
    assert output_law(p, q, TOKEN, 2, 2) == {(1, 1): 1.0}


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a6_equal_laws_accept_everything_even_with_the_largest_coin(u):
    p = torch.tensor([[[0.1, 0.2, 0.7]] * 4])
    tokens, lengths, coin = torch.tensor([[0, 1, 2]]), torch.tensor([3]), torch.tensor([u], dtype=torch.float64)
    count = accept(TOKEN, p, p[:, :3], tokens, lengths, coin)
    law = next_law(TOKEN, p, p[:, :3], tokens, lengths, count)
    assert count.tolist() == [3]
    assert torch.isfinite(law).all()
    assert draw(law, coin).item() in (0, 1, 2)


def test_a6_a_draw_never_returns_a_token_of_weight_zero():
    weights = torch.tensor([[0.0, 0.1, 0.2, 0.7, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0]])
    for u in (0.0, 1e-300, 0.5, 1 - 2**-53):
        tokens = draw(weights, torch.full((2,), u, dtype=torch.float64))
        assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("speculative", [True, False])
def test_a6_a_broken_target_row_raises_and_names_the_position(temperature, bad, speculative):
    rows = torch.full((16, 3), 1 / 3, dtype=torch.float64)
    target = TableModel(by_position=rows)
    if bad != bad:
        target.logits_of[5, 1] = bad  # one NaN is enough
    else:
        target.logits_of[5] = bad
    policy = SamplingPolicy(temperature)
    drafter = ModelDrafter(iid([1 / 3] * 3), policy, 3) if speculative else None
    with pytest.raises(SpecDecError, match="position 6 of request 0"):
        decode(target, [[0, 1]], drafter, 12, Settings(gamma=4, policy=policy))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a7_a_draft_row_of_nan_emits_from_the_target_and_is_recorded(temperature):
    target = iid([0.5, 0.3, 0.2])

    def script(step, sequences, room):
        proposal = one_hot_block(sequences, room, 2)
        proposal.q = torch.nn.functional.one_hot(proposal.tokens, 3).float()
        if proposal.q.shape[1] > 1:
            proposal.q[:, 1] = torch.nan
        return proposal

    policy = SamplingPolicy(temperature)
    settings = Settings(gamma=3, policy=policy)
    requests = decode(target, [[0]] * 3000, ScriptedDrafter(script), 6, settings, seed=3)
    second = Counter(r.output[1] for r in requests)
    law = [0.5, 0.3, 0.2] if temperature else [1.0, 0.0, 0.0]
    assert p_value([second[t] for t in range(3)], law) > FALSE_ALARM
    degraded = [r for r in requests[0].records if r.control == "degraded"]
    assert degraded
    assert "is not a law" in degraded[0].reason
    assert all(r.verified <= 1 for r in degraded)


def test_a7_after_a_nan_row_the_third_token_has_the_targets_law():
    """The rejected token of a NaN row must not come out: positions behind the first follow p too."""
    q = torch.tensor([[[0.2, 0.3, 0.5], [torch.nan] * 3]])
    assert first_invalid(q, torch.tensor([[2, 2]]), torch.tensor([2])).tolist() == [1]
    assert first_invalid(q.nan_to_num(0.0), torch.tensor([[2, 2]]), torch.tensor([2])).tolist() == [1]
    ok = torch.tensor([[[0.2, 0.3, 0.5]] * 2])
    assert first_invalid(ok, torch.tensor([[2, 7]]), torch.tensor([2])).tolist() == [1]
    assert first_invalid(ok, torch.tensor([[2, -1]]), torch.tensor([2])).tolist() == [1]
    assert first_invalid(ok, torch.tensor([[2, 0]]), torch.tensor([2])).tolist() == [2]


def test_a11_a_residual_as_if_q_were_one_hot_is_caught():
    p, q = random_law(4, 1), random_law(4, 2)
    assert law_distance(output_law(p, q, TOKEN, 2, 2), target_law(p, 2)) < EXACT
    assert law_distance(output_law(p, q, LOSSY["one_hot_residual"], 2, 2), target_law(p, 2)) > 1e-3
    target, draft = iid([0.5, 0.3, 0.2]), iid([0.1, 0.3, 0.6])
    policy = SamplingPolicy(1.0)
    wrong = counts_of_second_token(target, ModelDrafter(draft, policy, 3), 2, 3, rule=LOSSY["one_hot_residual"])
    right = counts_of_second_token(target, ModelDrafter(draft, policy, 3), 2, 3)
    assert p_value(wrong, [0.5, 0.3, 0.2]) < FALSE_ALARM < p_value(right, [0.5, 0.3, 0.2])


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
def test_a12_the_law_is_softmax_of_logits_over_temperature(temperature):
    law = torch.tensor([0.45, 0.3, 0.15, 0.1], dtype=torch.float64)
    target, draft = iid(law.tolist()), iid([0.1, 0.2, 0.3, 0.4])
    policy = SamplingPolicy(temperature)
    settings = Settings(gamma=2, policy=policy, diagnostics=False)
    want = (law.log() / temperature).softmax(-1).tolist()
    for drafter in (ModelDrafter(draft, policy, 4), None):
        requests = decode(target, [[0]] * 4000, drafter, 4, settings, seed=9)
        for position in range(3):
            seen = Counter(r.output[position] for r in requests)
            assert p_value([seen[t] for t in range(4)], want) > FALSE_ALARM


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.0},
    ],
)
def test_a12_an_impossible_sampling_option_raises_and_names_itself(option):
    with pytest.raises(SpecDecError, match=next(iter(option))):
        SamplingPolicy(**{"temperature": 1.0, **option})


@pytest.mark.parametrize("vocab", [2, 3, 4, 5])
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_token_rule_keeps_the_law_on_random_p_and_q_and_every_wrong_rule_is_caught(vocab, gamma):
    horizon = 2
    worst = dict.fromkeys(LOSSY, 0.0)
    for seed in range(5):
        p, q = random_law(vocab, seed, 1.5), random_law(vocab, 100 + seed, 1.5)
        want = target_law(p, horizon)
        assert law_distance(output_law(p, q, TOKEN, gamma, horizon), want) < EXACT
        for name, rule in LOSSY.items():
            worst[name] = max(worst[name], law_distance(output_law(p, q, rule, gamma, horizon), want))
    if vocab == 2:  # with two tokens every residual is the other token: nothing to get wrong
        worst.pop("one_hot_residual")
    assert min(worst.values()) > 1e-3, worst


@pytest.mark.parametrize(
    "policy",
    [SamplingPolicy(0.7), SamplingPolicy(1.0, top_k=2), SamplingPolicy(1.3, top_p=0.8), SamplingPolicy(0.9, min_p=0.3)],
)
def test_the_law_is_kept_under_every_filter(policy):
    raw_p, raw_q = random_law(4, 11), random_law(4, 12)
    p = lambda x: distribution(raw_p(x).log(), policy)  # noqa: E731
    q = lambda x: distribution(raw_q(x).log(), policy)  # noqa: E731
    assert law_distance(output_law(p, q, TOKEN, 3, 2), target_law(p, 2)) < EXACT


def test_greedy_rule_emits_the_targets_argmax_whatever_is_drafted():
    p, q = random_law(4, 21), random_law(4, 22)
    hot = lambda x: distribution(p(x).log(), SamplingPolicy(0.0))  # noqa: E731
    assert output_law(hot, q, GREEDY, 3, 3) == pytest.approx(target_law(hot, 3))


def test_accept_counts_follow_survival_when_the_coin_is_swept():
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]])
    q = torch.tensor([[[0.8, 0.1, 0.1], [0.4, 0.3, 0.3]]])
    tokens, lengths = torch.tensor([[0, 0]]), torch.tensor([2])
    coins = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    big = [x.expand(8000, *x.shape[1:]) for x in (p, q, tokens)]
    count = accept(TOKEN, *big, lengths.expand(8000), coins)
    share = [(count >= n).double().mean().item() for n in (1, 2)]
    assert share == pytest.approx([0.625, 0.625 * 0.5], abs=2e-4)


def test_a7_a_draft_row_with_negative_entries_is_no_law():
    q = torch.tensor([[[2.0, -1.0, 0.0]]])
    assert first_invalid(q, torch.tensor([[0]]), torch.tensor([1])).tolist() == [0]

    def script(step, sequences, room):
        proposal = one_hot_block(sequences, room, 0)
        proposal.q = torch.tensor([2.0, -1.0, 0.0]).expand(*proposal.tokens.shape, 3)
        return proposal

    target = iid([0.5, 0.3, 0.2])
    assert p_value(counts_of_second_token(target, ScriptedDrafter(script), 2, 3), [0.5, 0.3, 0.2]) > FALSE_ALARM


@pytest.mark.parametrize("confidence", [0.45, 0.6])
def test_a_confidence_stop_leaves_the_law(confidence):
    """Stopping may look at the draft's law, not at the token drawn: then the law is the target's."""
    target, draft = (
        iid([0.5, 0.3, 0.2]),
        TableModel(torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.34, 0.33, 0.33]])),
    )
    drafter = ModelDrafter(draft, SamplingPolicy(1.0), 3, confidence=confidence)
    assert p_value(counts_of_second_token(target, drafter, 3, 3), [0.5, 0.3, 0.2]) > FALSE_ALARM


@pytest.mark.parametrize("vocab", [2, 5])
def test_a_draft_with_another_vocabulary_size_leaves_the_law(vocab):
    target = iid([0.5, 0.3, 0.2])
    draft = iid([1 / vocab] * vocab)
    drafter = ModelDrafter(draft, SamplingPolicy(1.0), 3)
    assert p_value(counts_of_second_token(target, drafter, 3, 3), [0.5, 0.3, 0.2]) > FALSE_ALARM
