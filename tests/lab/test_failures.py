"""Each case breaks one thing; its row says whether the text held, what was lost, and who noticed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from kit import noisy_copy, pair_of, tiny_llama

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.control import Costs
from specdec_core.lab import failures, stress
from specdec_core.lab.failures import Bench, Case

GREEDY = SamplingPolicy()
LIMITS = {"first_position": 0.2, "entropy_gap": 2.5, "alpha_bound": 0.35}


def bench_of(pair, tokens=32, policy=GREEDY, prompts=2):
    costs = Costs(
        {("target", 1, n): 1.0 + 0.1 * n for n in range(1, 6)} | {("draft", 1, n): 0.1 * n for n in range(1, 5)}
    )
    turns = [[[3, 3, 4, 5, 6, 7 + i, 8, 9, 10]] for i in range(4)]
    asked = pd.DataFrame({"turns": turns, "kind": ["ordinary", "misleading"] * 2, "language": ["en", "en", "hi", "en"]})
    return Bench(pair, asked, tokens, 3, costs, stress.precursors(LIMITS), prompts, policy)


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(3)
    return pair_of(target, noisy_copy(target))


def test_along_the_ladder_the_text_stays_while_acceptance_falls_and_the_control_acts(pair):
    pair = pair_of(pair.target, pair.target)
    table, outputs = failures.run_cases(bench_of(pair, 48), failures.ladder(pair, GREEDY))
    assert table["case"].iloc[0] == "faithful"
    assert table["case"].iloc[-1] == "hostile"
    assert table["exact"].all()
    assert table["alpha"].iloc[0] > 0.8 > 0.2 > table["alpha"].iloc[-1]
    hostile = table.iloc[-1]
    assert hostile["fell_back"] == hostile["prompts"] == 2
    assert hostile["until_fallback"] < 24
    assert hostile["until_first_position"] < 16
    assert set(outputs["hostile"]) == {"ordinary", "alone", "controlled"}
    assert all(r.synthetic for o in outputs["hostile"]["alone"] for r in o.records if r.kind == "speculative")


def test_an_episode_is_dated_from_its_begin_and_its_end(pair):
    pair = pair_of(pair.target, pair.target)
    table, outputs = failures.run_cases(bench_of(pair, 64), [failures.episode(pair, GREEDY, 16, 40)])
    row = table.iloc[0]
    assert row["exact"]
    assert 0 < row["until_fallback"] <= 24
    assert row["until_recovery"] > 0
    assert any(r.control == "off" for o in outputs["episode"]["controlled"] for r in o.records)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_that_breaks_is_dropped_with_its_reason(pair, temperature):
    policy = SamplingPolicy(temperature)
    table, _ = failures.run_cases(bench_of(pair, policy=policy), failures.faults(pair, policy, timeout=0.3))
    reasons = table.set_index("case")["degraded"]
    assert "RuntimeError: the draft lost its weights" in reasons["raises"]
    assert "no answer after 0.3 s" in reasons["stalls"]
    assert "tokens" in reasons["returns a wrong shape"]
    if temperature:
        assert "not a law" in reasons["returns NaN"]
        assert table["exact"].isna().all()
    else:
        assert table["exact"].all()


def test_changed_assumptions_choose_their_own_prompts_and_lengths(pair):
    cases = {c.name: c for c in failures.assumptions(pair, GREEDY, "model")}
    text = "one two three four"
    assert cases["input removed"].change(text) == "one two t"
    assert cases["conflicting signal"].change(text).startswith(text)
    some = [
        cases[name]
        for name in ("as it is", "misleading prompts", "other users", "abstention", "one token", "long text")
    ]
    table, outputs = failures.run_cases(bench_of(pair, 12), some)
    assert table["exact"].all()
    assert list(table["prompts"]) == [2, 2, 1, 2, 2, 2]
    assert {len(o.tokens) for o in outputs["long text"]["controlled"]} == {48}
    assert {len(o.tokens) for o in outputs["one token"]["alone"]} == {1}
    assert table.set_index("case")["alone"].isna()["one token"], "nothing to time"


def test_after_the_control_acted_the_worst_request_counts_from_there(pair):
    record = next(
        r
        for r in failures.run_case(bench_of(pair), failures.ladder(pair, GREEDY)[0])[1]["alone"][0].records
        if r.kind == "speculative"
    )
    from dataclasses import replace

    def output(*passes):
        made = [replace(record, kind="prefill", emitted=(1,), seconds={})]
        made += [replace(record, control=c, emitted=(1,), seconds={"score": s}) for c, s in passes]
        return type("Text", (), {"records": made})()

    slow, off, plain = ("speculate", 5.0), ("off", 2.0), ("baseline", 1.0)
    found = failures._after({"controlled": [output(*[slow] * 3, *[off] * 12)], "ordinary": [output(*[plain] * 15)]}, 0)
    assert found == pytest.approx(0.5), "what was spent before does not count"
    assert failures._after({"controlled": [output(slow)], "ordinary": [output(plain)]}, 0) is None


def test_threads_are_put_back_and_a_pair_without_a_draft_is_refused(pair):
    import torch

    before = torch.get_num_threads()
    with failures._threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(SpecDecError, match="names no draft model to be disturbed"):
        failures.ladder(pair_of(tiny_llama()), GREEDY)


def test_every_control_names_cases_that_exist(pair):
    cases = [*failures.ladder(pair, GREEDY), failures.episode(pair, GREEDY, 1, 2)]
    cases += [*failures.faults(pair, GREEDY), *failures.assumptions(pair, GREEDY, "model")]
    names = {c.name for c in cases}
    assert len(names) == len(cases)
    table = failures.controls(LIMITS)
    assert {name for told in table["tested by"] for name in told.split(", ")} <= names
    assert not table.isna().to_numpy().any()
    assert np.all(table["threshold"].str.len() > 0)
    assert Case("x", "y", "z", lambda: None).longer == 1
