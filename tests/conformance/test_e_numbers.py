"""Conditions E and F4: what is counted, and under which name."""

from __future__ import annotations

import pytest
from kit import ScriptedDrafter, block, decode, tiny_llama

from specdec_core import SamplingPolicy, record
from specdec_core.drafters import ModelDrafter
from specdec_core.loop import Settings
from specdec_core.record import StepRecord
from specdec_core.stops import Stops

GREEDY = SamplingPolicy()
PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


def step(request, emitted, accepted=0, verified=0, drafted=0, kind="speculative"):
    return StepRecord(
        request=request, step=0, kind=kind, gamma=5, drafted=drafted, verified=verified, accepted=accepted,
        emitted=tuple(range(emitted)), last="bonus", stop=None, draft_tokens=(), p=(), q=(), p_entropy=(), q_entropy=(),
        preferred=(), seconds=dict.fromkeys(record.STAGES, 0.1), started=0.0, control="speculate", reason="", context=0,
        batch=1,
    )  # fmt: skip


def test_e1_a_stop_inside_the_block_counts_three_tokens_everywhere():
    target = tiny_llama(8)
    (base,) = decode(target, [PROMPT], tokens=20)
    eos = base.output[3]
    assert eos not in base.output[:3]
    drafter = ScriptedDrafter(lambda step, seqs, room: block(base.output[len(seqs[0]) - len(PROMPT) :][: room[0]]))
    (request,) = decode(target, [PROMPT], drafter, 20, Settings(gamma=5, stops=Stops(eos=frozenset({eos}))))
    assert request.output == base.output[:4]  # one from the prefill, three from the block [d1, d2, EOS, d4, d5]
    prefill, spec = request.records
    assert prefill.kind == "prefill"
    assert spec.drafted == 5
    assert (spec.verified, spec.accepted, spec.rejected) == (3, 3, 0)
    assert len(spec.emitted) == 3
    assert (spec.last, spec.stop) == ("accepted", "eos")
    numbers = record.summary(request.records)
    assert numbers["tokens_emitted"] == 4
    assert numbers["block_efficiency"] == numbers["acceptance_length_pooled"] == 3
    assert numbers["accepted_per_pass"] == 3
    assert numbers["alpha_hat"] == 1
    assert numbers["accepted_over_drafted"] == 3 / 5
    assert record.acceptance_by_position(request.records, "conditional") == [1, 1, 1]


def test_e2_drafted_verified_and_accepted_differ_under_a_confidence_stop_and_output_is_unchanged():
    target, draft = tiny_llama(), tiny_llama(0, scale=0.25)
    (base,) = decode(target, [PROMPT], tokens=40)
    drafter = ModelDrafter(draft, GREEDY, 64, confidence=0.3)
    (request,) = decode(target, [PROMPT], drafter, 40, Settings(gamma=6))
    assert request.output == base.output
    drafted, verified, accepted = (
        sum(getattr(r, n) for r in request.records) for n in ("drafted", "verified", "accepted")
    )
    assert drafted > verified > 0
    assert verified >= accepted
    numbers = record.summary(request.records)
    assert (numbers["drafted"], numbers["verified"], numbers["accepted"]) == (drafted, verified, accepted)


def test_e2_confidence_stop_with_an_unsure_draft_has_three_different_numbers():
    target, draft = tiny_llama(), tiny_llama(8, scale=0.3)
    policy = SamplingPolicy(1.0)
    settings = Settings(gamma=6, policy=policy)
    requests = decode(target, [PROMPT] * 20, ModelDrafter(draft, policy, 64, confidence=0.15), 30, settings)
    totals = [sum(getattr(r, n) for q in requests for r in q.records) for n in ("drafted", "verified", "accepted")]
    assert totals[0] > totals[1] > totals[2] > 0


def test_e4_pooled_and_per_request_acceptance_length_both_by_name():
    records = [step(0, 1)] * 10 + [step(0, 2)] + [step(1, 5)] * 4
    assert record.acceptance_length_pooled(records) == pytest.approx(2.133, abs=5e-4)
    assert record.acceptance_length_per_request(records) == pytest.approx(3.045, abs=5e-4)


def test_e5_one_token_gives_no_rates_and_no_division_by_zero():
    target = tiny_llama()
    for drafter in (None, ModelDrafter(target, GREEDY, 64)):
        (request,) = decode(target, [PROMPT], drafter, 1, Settings(gamma=4))
        numbers = record.summary(request.records)
        assert numbers["tokens_emitted"] == 1
        assert numbers["target_passes"] == 0
        counts = {"tokens_emitted", "target_passes", "drafted", "verified", "accepted", "degraded_passes"}
        assert all(numbers[rate] is None for rate in numbers.keys() - counts)
        assert record.acceptance_by_position(request.records, "joint") == []
    assert all(v in (None, 0) for v in record.summary([]).values())


@pytest.mark.parametrize(
    "name", ["block_efficiency", "acceptance_length_pooled", "acceptance_length_per_request", "accepted_per_pass"]
)
def test_e6_docstrings_say_whether_the_bonus_token_counts(name):
    doc = getattr(record, name).__doc__
    assert "bonus" in doc or "acceptance_length_pooled" in doc


def test_e6_accepted_over_drafted_says_that_it_is_not_alpha():
    assert "**Not** α" in record.accepted_over_drafted.__doc__


def test_alpha_hat_is_censored_at_the_end_of_a_block_and_at_a_rejection():
    records = [step(0, 6, accepted=5, verified=5, drafted=5), step(0, 3, accepted=2, verified=5, drafted=5)]
    assert record.alpha_hat(records) == 7 / 8
    assert record.accepted_over_drafted(records) == 7 / 10
    assert record.acceptance_by_position(records, "conditional") == [1, 1, 0.5, 1, 1]
    assert record.acceptance_by_position(records, "joint") == [1, 1, 0.5, 0.5, 0.5]


def test_joint_acceptance_counts_a_rejected_block_at_every_position_it_had_whether_or_not_a_stop_followed():
    rejected_at_1 = StepRecord(
        **{**step(0, 1, accepted=0, verified=4, drafted=4).__dict__, "draft_tokens": (1, 2, 3, 4)}
    )
    then_eos = StepRecord(**{**rejected_at_1.__dict__, "verified": 1, "stop": "eos"})
    for record_ in (rejected_at_1, then_eos):
        assert record.acceptance_by_position([record_], "joint") == [0, 0, 0, 0]
    stopped_inside = StepRecord(
        **{**step(0, 2, accepted=2, verified=2, drafted=4).__dict__, "draft_tokens": (1, 2, 3, 4)}
    )
    assert record.acceptance_by_position([stopped_inside, rejected_at_1], "joint") == [0.5, 0.5, 0, 0]


def test_a_block_cut_at_an_unsound_row_ends_with_the_targets_own_token_and_not_with_a_bonus():
    import torch

    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)

    def script(step, seqs, room):
        proposal = block(base.output[len(seqs[0]) - len(PROMPT) :][: room[0]])
        proposal.q = torch.nn.functional.one_hot(proposal.tokens, 64).float()
        proposal.q[:, 1:] = torch.nan
        return proposal

    (ours,) = decode(target, [PROMPT], ScriptedDrafter(script), 20, Settings(gamma=4))
    assert ours.output == base.output
    cut = [r for r in ours.records if r.control == "degraded"]
    assert cut
    assert {(r.verified, r.accepted, r.last) for r in cut} == {(1, 1, "ordinary")}


def test_stage_seconds_of_a_batch_are_counted_once():
    records = [step(0, 1), step(1, 1)]
    shared = [StepRecord(**{**r.__dict__, "batch": 2}) for r in records]
    assert record.seconds_by_stage(shared)["score"] == pytest.approx(0.1)


def test_f4_the_token_after_a_fully_accepted_block_is_counted_once():
    target = tiny_llama()
    (request,) = decode(target, [PROMPT], ModelDrafter(target, GREEDY, 64), 26, Settings(gamma=4))
    assert [len(r.emitted) for r in request.records] == [1, 5, 5, 5, 5, 5]
    assert [r.context for r in request.records] == [9, 10, 15, 20, 25, 30]
    assert [t for r in request.records for t in r.emitted] == request.output
    assert len(request.output) == 26
    assert [r.last for r in request.records[1:]] == ["bonus"] * 5


def test_f5_seeded_rows_are_the_same_in_any_batch():
    from kit import pair_of

    from specdec_core import generate_batch

    pair = pair_of(tiny_llama(), tiny_llama(4))
    options = {"max_new_tokens": 20, "temperature": 1.0, "gamma": 3}
    a = generate_batch(pair, [PROMPT, PROMPT, PROMPT], seed=[1, None, 2], **options)
    b = generate_batch(pair, [[1, 2, 3], PROMPT, PROMPT], seed=[7, 2, 1], **options)
    assert a[0].tokens == b[2].tokens
    assert a[2].tokens == b[1].tokens
    assert a[0].tokens != a[2].tokens
