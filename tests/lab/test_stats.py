"""Intervals cover, tests have the power they claim."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from specdec_core.lab.measure import speed_ratio
from specdec_core.lab.stats import bootstrap, detectable_distance, law_test, power_against


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        rows = [[x, 1.0] for x in rng.normal(3.0, 1.0, 30)]
        interval = bootstrap(rows, lambda s: s[0] / s[1], draws=400, seed=trial)
        hits += interval.low <= 3.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_bootstrap_of_one_prompt_claims_nothing():
    interval = bootstrap([[3.0, 1.0]], lambda s: s[0] / s[1])
    assert interval.value == 3
    assert interval.low == -math.inf
    assert interval.high == math.inf


def test_a_token_of_probability_zero_fails_the_law_test_outright():
    assert law_test([5, 4, 1], [0.5, 0.5, 0.0]) == 0
    assert law_test([5, 5, 0], [0.5, 0.5, 0.0]) == 1


def test_stated_power_is_the_share_of_samples_that_are_caught():
    p, r, n, level = [0.5, 0.3, 0.2], [0.46, 0.33, 0.21], 1000, 0.01
    rng = np.random.default_rng(1)
    caught = np.mean([law_test(rng.multinomial(n, r).tolist(), p) < level for _ in range(800)])
    assert caught == pytest.approx(power_against(p, r, n, level), abs=0.05)
    false_alarms = np.mean([law_test(rng.multinomial(n, p).tolist(), p) < level for _ in range(2000)])
    assert false_alarms < 0.02


def test_detectable_distance_shrinks_with_the_root_of_the_sample():
    small, large = (detectable_distance([0.5, 0.3, 0.2], n, 1e-6) for n in (1000, 16000))
    assert small / large == pytest.approx(4, rel=0.1)
    assert math.isnan(detectable_distance([0.5, 0.5], 2, 1e-6))


def test_speed_ratio_is_the_geometric_mean_of_ratios_by_prompt():
    rows = [("a", 0, 1.0), ("b", 0, 2.0), ("a", 1, 1.0), ("b", 1, 8.0)]
    times = pd.DataFrame([{"arm": a, "prompt": p, "seconds": s, "tokens": 10} for a, p, s in rows])
    assert speed_ratio(times, "a", "b").value == pytest.approx(4.0)
    assert speed_ratio(times, "b", "a").value == pytest.approx(0.25)
