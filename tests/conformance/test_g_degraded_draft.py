"""Condition G5: whatever a draft does, output equals ordinary decoding, the record says why, and the run goes on."""

from __future__ import annotations

import time

import pytest
import torch
from kit import ScriptedDrafter, block, decode, tiny_llama

from specdec_core.drafters import Proposal
from specdec_core.loop import Settings

PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


def good(sequences, room):
    return block([1] * room[0])


def raises(step, sequences, room):
    if step == 3:
        raise RuntimeError("out of memory\nwith a second line")
    return good(sequences, room)


def empty(step, sequences, room):
    return block([]) if step == 3 else good(sequences, room)


def wrong_shape(step, sequences, room):
    proposal = good(sequences, room)
    return Proposal(proposal.tokens[0], proposal.lengths, None, [1]) if step == 3 else proposal


def wrong_q(step, sequences, room):
    proposal = good(sequences, room)
    if step == 3:
        proposal.q = torch.ones(1, 1, 5)
    return proposal


def floats(step, sequences, room):
    proposal = good(sequences, room)
    if step == 3:
        proposal.tokens = proposal.tokens.float()
    return proposal


def outside_vocabulary(step, sequences, room):
    proposal = good(sequences, room)
    if step == 3:
        proposal.tokens = proposal.tokens + 1000
    return proposal


def returns_none(step, sequences, room):
    return None if step == 3 else good(sequences, room)


FAULTS = {
    raises: ("draft raised: RuntimeError: out of memory", True),
    empty: ("draft returned an empty block", False),
    wrong_shape: ("draft returned tokens (4,)", True),
    wrong_q: ("draft returned q (1, 1, 5)", True),
    floats: ("float32", True),
    outside_vocabulary: ("is not a law over its token", False),
    returns_none: ("draft raised: AttributeError", True),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_g5_a_draft_that_breaks_changes_nothing_but_the_record(fault):
    reason, for_good = FAULTS[fault]
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    (ours,) = decode(target, [PROMPT], ScriptedDrafter(fault), 20, Settings(gamma=4))
    assert ours.output == base.output
    degraded = [r for r in ours.records if r.control == "degraded"]
    assert degraded[0].step == 3
    assert reason in degraded[0].reason
    assert "\n" not in degraded[0].reason
    after = [r for r in ours.records if r.step > 3 and r.gamma > 0]
    assert after
    assert all((r.control == "degraded") == for_good for r in after)


def test_g5_a_draft_that_takes_too_long_is_left_behind():
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)

    def slow(step, sequences, room):
        if step == 3:
            time.sleep(30)
        return good(sequences, room)

    begun = time.monotonic()
    (ours,) = decode(target, [PROMPT], ScriptedDrafter(slow), 20, Settings(gamma=4, draft_timeout=0.3))
    assert time.monotonic() - begun < 15
    assert ours.output == base.output
    assert "no block after" in next(r.reason for r in ours.records if r.control == "degraded")


@pytest.mark.parametrize("method", ["start", "commit"])
def test_g5_a_draft_that_raises_outside_propose_is_dropped_too(method):
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    drafter = ScriptedDrafter(lambda step, seqs, room: good(seqs, room))

    def broken(*args):
        raise OSError("gone")

    setattr(drafter, method, broken)
    (ours,) = decode(target, [PROMPT], drafter, 20, Settings(gamma=4))
    assert ours.output == base.output
    assert any("OSError: gone" in r.reason for r in ours.records)


def test_a_lookup_without_a_match_is_idle_and_not_degraded():
    from specdec_core.drafters import PromptLookupDrafter

    target = tiny_llama()
    (request,) = decode(target, [[1, 2, 3]], PromptLookupDrafter(), 3, Settings(gamma=4))
    assert {r.control for r in request.records[1:2]} <= {"idle", "speculate"}
    assert all(r.control != "degraded" for r in request.records)
