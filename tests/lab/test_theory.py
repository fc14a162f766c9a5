"""Closed forms against published figures, and what notebook 01 shows of them."""

from __future__ import annotations

import pytest
import torch

from specdec_core.lab import proof
from specdec_core.lab.theory import (
    acceptance_rate,
    accepted_over_drafted,
    best_gamma,
    constant_law,
    expected_tokens,
    expected_tokens_mixture,
    mean_accepted,
    operations_factor,
    step_law,
    total_variation,
    walltime_factor,
)
from specdec_core.verify import TOKEN

PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), proof.LEVIATHAN_TABLE_1)
def test_leviathan_table_1(alpha, gamma, operations, speed):
    assert operations_factor(alpha, gamma, 0) == pytest.approx(operations, abs=0.005)
    assert walltime_factor(alpha, gamma, 0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "speed"),
    [(0.6, 0.05, 4, 1.92), (0.6, 0.1, 3, 1.67), (0.6, 0.5, 1, 1.07), (0.8, 0.05, 8, 3.09), (0.8, 0.1, 6, 2.47),
     (0.8, 0.5, 2, 1.22), (0.9, 0.05, 13, 4.67), (0.9, 0.1, 10, 3.43)],
)  # fmt: skip
def test_best_block_length(alpha, c, gamma, speed):
    best, factor = best_gamma(alpha, c)
    assert best == gamma
    assert factor == pytest.approx(speed, abs=0.005)


def test_a_mixture_of_prompts_is_not_its_mean_alpha():
    assert expected_tokens_mixture([0.5, 0.9], 5) == pytest.approx(3.327, abs=5e-4)
    assert expected_tokens(0.7, 5) == pytest.approx(2.941, abs=5e-4)


def test_accepted_over_drafted_is_not_alpha():
    assert accepted_over_drafted(0.8, 5) == pytest.approx(0.538, abs=5e-4)


def test_alpha_is_one_minus_total_variation():
    p, q = (torch.rand(7, 50, dtype=torch.float64).softmax(-1) for _ in range(2))
    assert torch.allclose(acceptance_rate(p, q), 1 - total_variation(p, q))


def test_there_is_no_gain_when_alpha_is_below_c():
    assert best_gamma(0.3, 0.31)[1] < 1 < best_gamma(0.3, 0.29)[1]


def test_expected_tokens_is_what_the_oracle_counts():
    p, q = constant_law([0.5, 0.3, 0.2]), constant_law([0.2, 0.3, 0.5])
    alpha = float(acceptance_rate(p(()), q(())))
    for gamma in (1, 2, 4):
        assert mean_accepted(step_law(p, q, TOKEN, gamma)) == pytest.approx(expected_tokens(alpha, gamma) - 1)


def test_a9_mean_accepted_of_the_token_rule():
    assert mean_accepted(
        step_law(constant_law([1 / 3, 2 / 3]), constant_law([2 / 3, 1 / 3]), TOKEN, 2)
    ) == pytest.approx(10 / 9)
    p, q = constant_law([0.5, 0.3, 0.2]), constant_law([0.2, 0.3, 0.5])
    assert mean_accepted(step_law(p, q, TOKEN, 3)) == pytest.approx(1.533, abs=5e-4)
    assert mean_accepted(step_law(p, q, TOKEN, 5)) == pytest.approx(1.941, abs=5e-4)


def test_every_planted_loop_is_caught_and_the_right_one_is_not():
    table = proof.sample_laws(2000, seed=4)
    assert (table["caught"] == table["should be caught"]).all(), table.to_string()
    assert (table.loc[table["should be caught"], "power"] > 0.99).all()


def test_enumeration_tells_right_from_wrong_by_many_orders_of_magnitude():
    table = proof.enumerate_laws(vocab_max=4, gamma_max=2, laws=6)
    assert table.loc[table.exact, "error"].max() < 1e-12
    assert table.loc[~table.exact, "error"].min() > 1e-4
