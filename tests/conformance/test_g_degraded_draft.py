"""Condition G5: whatever a draft does, output equals ordinary decoding, the record says why, and the run goes on."""

from __future__ import annotations

import math
import time

import pytest
import torch
from kit import ScriptedDrafter, block, decode, tiny_llama

from specdec_core import Processing, SamplingPolicy, SpecDecError
from specdec_core.drafters import ModelDrafter, Proposal
from specdec_core.loop import Settings
from specdec_core.sampling import entropy

PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


def good(sequences, room):
    return block([1] * room[0])


def raises(proposal, room):
    raise RuntimeError("out of memory\nwith a second line")


def changed(**fields):
    """A fault that sets fields of the proposal to what the functions say."""

    def fault(proposal, room):
        for name, change in fields.items():
            setattr(proposal, name, change(getattr(proposal, name)))
        return proposal

    return fault


def mutates_room(proposal, room):
    room[0] = 1000
    return proposal


# name: (fault at step 3, words of the reason, out of service for good)
FAULTS = {
    "raises": (raises, "draft raised in propose: RuntimeError: out of memory", True),
    "returns nothing": (lambda p, room: None, "draft returned NoneType", True),
    "returns a list": (lambda p, room: [1, 2], "draft returned list", True),
    "empty block": (lambda p, room: block([]), "draft returned an empty block", False),
    "flat tokens": (changed(tokens=lambda t: t[0]), "tokens (4,) torch.int64 on cpu, (1, 4) torch.int64", True),
    "too many tokens": (changed(tokens=lambda t: t.repeat(1, 3)), "tokens (1, 12)", True),
    "float tokens": (changed(tokens=lambda t: t.float()), "tokens (1, 4) torch.float32", True),
    "list of tokens": (changed(tokens=lambda t: t.tolist()), "tokens of type list", True),
    "tokens elsewhere": (changed(tokens=lambda t: t.to("meta")), "tokens (1, 4) torch.int64 on meta", True),
    "tokens outside the vocabulary": (changed(tokens=lambda t: t + 1000), "is not a law over its token", False),
    "float lengths": (changed(lengths=lambda n: n.float()), "lengths (1,) torch.float32", True),
    "lengths of another batch": (changed(lengths=lambda n: n.repeat(2)), "lengths (2,)", True),
    "negative lengths": (changed(lengths=lambda n: n - 9), "", False),
    "lengths beyond the block": (changed(lengths=lambda n: n + 9), "", False),
    "q of another shape": (changed(q=lambda q: torch.ones(1, 1, 5)), "q (1, 1, 5) torch.float32", True),
    "complex q": (changed(q=lambda q: torch.ones(1, 4, 64) + 0j), "q (1, 4, 64) torch.complex64", True),
    "sparse q": (changed(q=lambda q: torch.ones(1, 4, 64).to_sparse()), "a dense tensor was asked", True),
    "q that does not sum to 1": (changed(q=lambda q: torch.ones(1, 4, 64)), "is not a law over its token", False),
    "belief that is a list": (changed(belief=lambda b: [1]), "belief of type list", True),
    "no counts": (changed(drafted=lambda d: []), "drafted=[]", True),
    "negative counts": (changed(drafted=lambda d: [-3]), "drafted=[-3]", True),
    "fractional counts": (changed(drafted=lambda d: [1.5]), "drafted=[1.5]", True),
    "note that is no text": (changed(note=lambda n: None), "note=None", True),
    "room changed under the loop": (mutates_room, "", False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_g5_a_draft_that_breaks_changes_nothing_but_the_record(name):
    fault, reason, for_good = FAULTS[name]
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    drafter = ScriptedDrafter(lambda step, seqs, room: fault(good(seqs, room), room) if step == 3 else good(seqs, room))
    (ours,) = decode(target, [PROMPT], drafter, 20, Settings(gamma=4))
    assert ours.output == base.output
    assert all(0 <= r.accepted <= r.verified <= r.drafted <= 4 and r.gamma <= 4 for r in ours.records)
    degraded = [r for r in ours.records if r.control == "degraded"]
    if not reason:
        assert not degraded
        return
    assert degraded[0].step == 3
    assert reason in degraded[0].reason
    assert "\n" not in degraded[0].reason
    after = [r for r in ours.records if r.step > 3 and r.gamma > 0]
    assert after
    assert all((r.control == "degraded") == for_good for r in after)
    assert all(r.control == "idle" for r in ours.records if r.step and r.gamma == 0), (
        "nothing could have been drafted there"
    )


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
    assert "no answer after" in next(r.reason for r in ours.records if r.control == "degraded")


@pytest.mark.parametrize("method", ["start", "commit"])
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_g5_a_draft_that_fails_outside_propose_is_dropped_too(method, how):
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    drafter = ScriptedDrafter(lambda step, seqs, room: good(seqs, room))

    def broken(*args):
        if how == "hangs":
            time.sleep(30)
        raise OSError("gone")

    setattr(drafter, method, broken)
    begun = time.monotonic()
    (ours,) = decode(target, [PROMPT], drafter, 20, Settings(gamma=4, draft_timeout=0.3 if how == "hangs" else None))
    assert time.monotonic() - begun < 15
    assert ours.output == base.output
    assert any(("OSError: gone" if how == "raises" else "no answer after") in r.reason for r in ours.records)


def test_a_lookup_without_a_match_is_idle_and_not_degraded():
    from specdec_core.drafters import PromptLookupDrafter

    target = tiny_llama()
    (request,) = decode(target, [[1, 2, 3]], PromptLookupDrafter(), 3, Settings(gamma=4))
    assert {r.control for r in request.records[1:2]} <= {"idle", "speculate"}
    assert all(r.control != "degraded" for r in request.records)


def test_g7_what_is_synthetic_is_labelled_in_every_record_and_in_the_run(tmp_path, monkeypatch):
    from specdec_core.drafters import CompositeDrafter, PromptLookupDrafter
    from specdec_core.lab.lineage import open_run
    from specdec_core.lab.synthetic import SyntheticDrafter

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=20)
    make = lambda: SyntheticDrafter([0.7], 64, texts={tuple(PROMPT): base.output})  # noqa: E731
    for drafter in (make(), CompositeDrafter(PromptLookupDrafter(), make())):
        (ours,) = decode(target, [PROMPT], drafter, 20)
        assert ours.output == base.output
        assert all(r.synthetic for r in ours.records if r.step)
    assert not any(r.synthetic for r in base.records)
    for records, labelled in ((ours.records, True), (base.records, False)):
        with open_run("labels") as run:
            run.log_records(records, "all")
        tags = run.store.client.get_run(run.id).data.tags
        assert (tags.get("synthetic") == "true") == labelled


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def several(**changes):
    """A sound proposal of two candidates a position, with one thing changed."""

    def propose(step, sequences, room):
        width = max(room)
        sound = {
            "tokens": torch.ones(1, width, dtype=torch.int64),
            "lengths": torch.tensor([width]),
            "q": torch.full((1, width, 64), 1 / 64),
            "drafted": [width],
            "branches": torch.full((1, width, 1), 2),
        }
        return Proposal(**(sound | {k: v(width) for k, v in changes.items()}))

    return propose


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        {"branches": lambda g: torch.full((1, g, 1), 999)},
        {"branches": lambda g: torch.full((1, g, 1), -1)},
        {"branches": lambda g: torch.ones(1, g, 0, dtype=torch.int64)},
        {"branches": lambda g: torch.ones(1, g, 3, dtype=torch.int64)},
        {"branches": lambda g: torch.ones(1, g, 1)},
        {
            "tokens": lambda g: torch.ones(1, 0, dtype=torch.int64),
            "lengths": lambda g: torch.tensor([0]),
            "q": lambda g: None,
            "branches": lambda g: torch.ones(1, 0, 1, dtype=torch.int64),
        },
        {"q": lambda g: torch.full((1, g, 64), 1 / 64).to(torch.float8_e4m3fn)},
        {"drafted": lambda g: [0]},
    ],
)
def test_g5_branches_and_laws_of_the_wrong_kind_change_nothing_but_the_record(change, temperature):
    target, settings = tiny_llama(), Settings(gamma=3, policy=SamplingPolicy(temperature))
    drafter = ScriptedDrafter(several(**change))
    drafter.candidates = 2
    (ours,) = decode(target, [PROMPT], drafter, 15, settings)
    assert len(ours.output) == 15
    assert all(r.accepted <= r.verified <= r.drafted for r in ours.records)
    if temperature == 0:
        assert ours.output == decode(target, [PROMPT], tokens=15)[0].output


@pytest.mark.parametrize("error", [Unspeakable, SystemExit, GeneratorExit])
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_g5_whatever_a_draft_raises_the_run_goes_on(error, timeout):
    def script(step, sequences, room):
        raise error

    target = tiny_llama()
    (ours,) = decode(target, [PROMPT], ScriptedDrafter(script), 15, Settings(gamma=3, draft_timeout=timeout))
    assert ours.output == decode(target, [PROMPT], tokens=15)[0].output
    assert any(error.__name__ in r.reason for r in ours.records)


@pytest.mark.parametrize("candidates", [0, -2, 1.5, None, "2", 10**6])
def test_a_number_of_candidates_that_is_none_is_refused_by_name(candidates):
    drafter = ScriptedDrafter(several())
    drafter.candidates = candidates
    with pytest.raises(SpecDecError, match="candidates"):
        decode(tiny_llama(), [PROMPT], drafter, 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_stops_behind_a_token_that_it_does_not_know_or_where_processors_leave_it_none(temperature):
    target, policy = tiny_llama(), SamplingPolicy(temperature)
    for processing in (Processing(forced=((3, 60),)), Processing(suppress=tuple(range(48)))):
        small = tiny_llama(0, vocab=48)
        drafter = ModelDrafter(small, policy, 64, processing=processing)
        settings = Settings(gamma=4, policy=policy, processing=processing)
        (ours,) = decode(target, [PROMPT], drafter, 15, settings)  # decode() refuses a shipped drafter that breaks
        (base,) = decode(target, [PROMPT], None, 15, settings)
        assert ours.output == base.output or temperature


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_g5_a_law_in_16_bits_is_verified_and_its_entropy_is_recorded_in_full(dtype, temperature):
    target = tiny_llama(1, scale=0.3)

    def halves(step, sequences, room):
        q = torch.zeros(1, max(room), 64)
        q[..., 5] = q[..., 0] = 0.5
        law = q.to(dtype)
        return Proposal(torch.full((1, max(room)), 5), torch.tensor(room), law, list(room), law)

    settings = Settings(4, SamplingPolicy(temperature))
    (ours,) = decode(target, [PROMPT], ScriptedDrafter(halves), 12, settings)
    entropies = [h for r in ours.records for h in r.q_entropy]
    assert entropies == pytest.approx([math.log(2)] * len(entropies), abs=1e-6)
    assert entropies


def test_g5_a_draft_of_nan_says_why_nothing_was_verified():
    target, broken = tiny_llama(0), tiny_llama(0)
    with torch.no_grad():
        broken.lm_head.weight[3] = torch.nan
    (ours,) = decode(target, [PROMPT], ModelDrafter(broken, SamplingPolicy(), 64), 9, Settings(4))
    drafted = [r for r in ours.records if r.drafted]
    assert drafted
    assert all(r.verified == 0 and "draft kept its block back" in r.reason for r in drafted)


def test_an_entropy_of_a_certain_law_is_zero_and_of_an_impossible_token_nothing():
    law = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]).log()
    assert [str(h) for h in entropy(law).tolist()] == ["0.0", str(float(torch.tensor(2.0).log()))]
