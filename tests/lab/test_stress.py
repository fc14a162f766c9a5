"""Drafts that disagree leave the text alone, and signs, fallback and recovery are dated by hand-written records."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit import noisy_copy, pair_of, tiny_llama

from specdec_core import SamplingPolicy, SpecDecError, generate
from specdec_core.drafters import ModelDrafter, reduced_head
from specdec_core.lab import stress
from specdec_core.lab.stress import Disturbed
from specdec_core.record import alpha_hat

PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(3)
    return pair_of(target, noisy_copy(target))


def decoded(pair, drafter, **options):
    return generate(pair, PROMPT, max_new_tokens=48, eos=[], drafter=drafter, gamma=3, **options)


LADDER = {
    "noise 0": stress.noise(0),
    "noise 8": stress.noise(8),
    "shuffled": stress.shuffled(),
    "inverted": stress.inverted,
}


@pytest.mark.parametrize("kind", LADDER)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_whatever_the_draft_does_greedy_text_stays_and_every_record_is_called_synthetic(pair, kind, temperature):
    drafter = Disturbed(pair.draft, SamplingPolicy(temperature), 64, LADDER[kind])
    out = decoded(pair, drafter, temperature=temperature)
    assert all(r.synthetic for r in out.records if r.kind == "speculative")
    if temperature == 0:
        assert out.tokens == generate(pair, PROMPT, max_new_tokens=48, eos=[], speculate=False).tokens


def test_disagreement_grows_along_the_ladder(pair):
    alphas = [
        alpha_hat(decoded(pair, Disturbed(pair.target, SamplingPolicy(), 64, d)).records)
        for d in (stress.noise(0), stress.noise(0.5), stress.noise(4), stress.inverted)
    ]
    assert alphas[0] == 1
    assert alphas == sorted(alphas, reverse=True)
    assert alphas[-1] < 0.1


def test_another_temperature_shows_in_the_law_alone(pair):
    policy = SamplingPolicy(1.0)
    plain, hot = (ModelDrafter(pair.target, policy, 64), Disturbed(pair.target, policy, 64, stress.heat(8)))
    assert alpha_hat(decoded(pair, hot, temperature=1.0).records) < 0.9
    assert alpha_hat(decoded(pair, plain, temperature=1.0).records) == 1
    greedy = Disturbed(pair.target, SamplingPolicy(), 64, stress.heat(8))
    assert alpha_hat(decoded(pair, greedy).records) == 1


def test_a_cut_head_is_disturbed_within_its_own_tokens(pair):
    some = list(range(0, 64, 2))
    drafter = Disturbed(reduced_head(pair.target, some), SamplingPolicy(), 64, stress.inverted)
    out = decoded(pair, drafter)
    assert {t for r in out.records for t in r.draft_tokens} <= set(some)


def test_a_disturbance_of_a_stretch_leaves_what_is_before_and_behind_it_alone(pair):
    drafter = Disturbed(pair.target, SamplingPolicy(), 64, stress.inverted, during=(12, 24))
    written, kept, lost = 0, [], []
    for r in decoded(pair, drafter).records:
        if r.kind == "speculative":
            (lost if 12 <= written < 24 else kept).append(r.accepted / max(r.verified, 1))
        written += len(r.emitted)
    assert min(kept) == 1
    assert max(lost) < 1


def test_stale_weights_are_a_copy(pair):
    before = [w.clone() for w in pair.draft.parameters()]
    old = stress.stale(pair.draft, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.draft.parameters(), strict=True))
    assert not torch.equal(next(old.parameters()), next(pair.draft.parameters()))
    same = stress.stale(pair.draft, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), pair.draft.parameters(), strict=True))


@pytest.fixture(scope="module")
def record(pair):
    return next(r for r in decoded(pair, "model").records if r.kind == "speculative")


def passes(record, *outcomes):
    """A prefill and passes of (verified, accepted, control); each gives the accepted tokens and one more."""
    made = [replace(record, kind="prefill", emitted=(1,), accepted=0, verified=0)]
    for verified, accepted, control in outcomes:
        kind = "speculative" if verified else "ordinary"
        given = {"verified": verified, "accepted": accepted, "emitted": (1,) * (accepted + 1), "branch": None}
        made.append(replace(record, kind=kind, control=control, seconds={"score": 1.0}, **given))
    return made


def test_warning_fallback_and_recovery_are_counted_in_tokens(record):
    good, bad, off = (3, 3, "speculate"), (3, 0, "speculate"), (0, 0, "off")
    told = passes(record, good, good, bad, bad, bad, bad, off, off, good, off)
    sign = stress.Precursor("first_position", 0.0, True, stress.first_position, window=3)
    assert stress.until_warning(told, sign) == 1 + 4 + 4 + 3
    assert stress.until_warning(told, sign, start=9) == 3, "passes before the cause say nothing of it"
    assert stress.until_fallback(told) == 1 + 8 + 4 + 1
    assert stress.until_fallback(told, start=9) == 5
    assert stress.until_recovery(told, end=13) == 1 + 1 + 4
    assert stress.until_recovery(told[:-2], end=13) is None
    assert stress.until_fallback(passes(record, good, good)) is None
    assert stress.until_warning(passes(record, good, good, good), sign) is None
    assert stress.seconds_of(told) == (10.0, 8 + 4 + 2 + 4 + 1)
    assert stress.seconds_of(told, start=13) == (4.0, 1 + 1 + 4 + 1)


def test_precursors_say_what_they_see(record):
    good, bad = (3, 3, "speculate"), (3, 0, "speculate")
    assert stress.first_position(passes(record, good, bad)) == 0.5
    assert stress.first_position([]) is None
    low, high = stress.alpha_bound(passes(record, bad, bad, bad)), stress.alpha_bound(passes(record, good, good))
    assert low == pytest.approx(0.2 + 2 * (0.2 * 0.8 / 6) ** 0.5)
    assert high > 1
    assert stress.alpha_bound([]) is None
    apart = replace(record, p_entropy=(1.0, 9.0), q_entropy=(3.5,))
    assert stress.entropy_gap([apart, replace(apart, q_entropy=())]) == 2.5
    found = stress.precursors({"first_position": 0.2, "entropy_gap": 2.0, "alpha_bound": 0.3})
    assert [p.warns(passes(record, bad, bad, bad)) for p in found[:1]] == [True]
    assert found[1].warns([apart])
    with pytest.raises(SpecDecError, match="no precursor 'mood': give thresholds of first_position"):
        stress.precursors({"mood": 1.0})
