"""One set of texts gives every cell: sums that add up, the loop's own numbers, and honest intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from kit import noisy_copy, pair_of, tiny_llama

from specdec_core.control import Costs
from specdec_core.lab import acceptance
from specdec_core.lab.acceptance import Grid

TARGET = {("target", 1, n): 1.0 + 0.05 * n for n in range(1, 10)}
COSTS = Costs(TARGET | {("draft", 1, n): 0.1 * n for n in range(1, 9)})


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(3)
    return pair_of(target, noisy_copy(target))


@pytest.fixture(scope="module")
def asked():
    turns = [[[3, 3, 4, 5, 6, 7 + i, 8, 9, 10]] for i in range(6)]
    frame = pd.DataFrame({"id": [f"p{i}" for i in range(6)], "turns": turns})
    return frame.assign(category=["a", "b"] * 3, kind="ordinary", language="en")


@pytest.fixture(scope="module")
def swept(pair, asked):
    grid = Grid(gammas=(1, 2, 4), temperatures=(0.0, 0.8))
    texts = acceptance.write(pair, asked, grid.policies(), tokens=32)
    rows, _ = acceptance.meet(pair, texts, grid)
    return grid, texts, rows


def test_there_is_a_row_for_every_prompt_and_cell(swept):
    grid, texts, rows = swept
    assert len(rows) == grid.cells * len(texts.asked)
    assert not rows.duplicated([*acceptance.KEYS, "prompt"]).any()
    assert set(rows.loc[rows["temperature"] == 0, "rule"]) == {"greedy"}
    assert set(rows.loc[rows["temperature"] > 0, "rule"]) == {"token", "block"}


def test_every_pass_gives_what_it_accepted_and_one_token_more(swept):
    _, _, rows = swept
    assert np.allclose(rows["tokens"], rows["passes"] + rows["accepted"])


def test_cells_hold_the_loops_own_numbers_when_greedy(pair, swept):
    _, texts, rows = swept
    for drafter, gamma in (("model", 4), ("composite", 2), ("prompt_lookup", 4)):
        one = rows[(rows["temperature"] == 0) & (rows["drafter"] == drafter) & (rows["gamma"] == gamma)]
        cell = acceptance.cells(one, COSTS).iloc[0]
        seen = acceptance.looped(pair, texts, cell)
        found = acceptance.agreement(one, seen, greedy=True)
        assert found == {"prompts": 6, "equal": 6, "holds": True}
        assert cell["block_efficiency"] == pytest.approx(seen["tokens"].sum() / seen["passes"].sum())
        judged = seen["accepted"].sum() + seen["rejected"].sum()
        assert cell["alpha"] == pytest.approx(seen["accepted"].sum() / judged)


def test_a_replay_that_is_wrong_does_not_agree_with_the_loop(pair, swept):
    _, texts, rows = swept
    one = rows[(rows["temperature"] == 0) & (rows["drafter"] == "model") & (rows["gamma"] == 4)]
    seen = acceptance.looped(pair, texts, one.iloc[0])
    shorter = rows[(rows["temperature"] == 0) & (rows["drafter"] == "model") & (rows["gamma"] == 2)]
    assert not acceptance.agreement(shorter, seen, greedy=True)["holds"]
    many = pd.concat([seen.assign(prompt=seen["prompt"] + f"-{i}") for i in range(3)])
    told = pd.concat([shorter.assign(prompt=shorter["prompt"] + f"-{i}") for i in range(3)])
    assert not acceptance.agreement(told, many, greedy=False)["holds"]


def test_sampled_cells_agree_with_the_loop_within_their_interval(pair, swept):
    _, texts, rows = swept
    one = rows[(rows["temperature"] > 0) & (rows["drafter"] == "model") & (rows["gamma"] == 4)]
    one = one[one["rule"] == "block"]
    found = acceptance.agreement(one, acceptance.looped(pair, texts, one.iloc[0]), greedy=False)
    assert found["holds"]
    assert found["apart_low"] < found["apart"] < found["apart_high"]


def test_predicted_speed_is_what_the_passes_cost_by_hand(swept):
    _, _, rows = swept
    one = rows[(rows["temperature"] == 0) & (rows["drafter"] == "model") & (rows["gamma"] == 2)]
    spent = one["alone"] * 1.05 + one["paid_1"] * (1.1 + 0.1) + one["paid_2"] * (1.15 + 0.2)
    cell = acceptance.cells(one, COSTS).iloc[0]
    assert cell["speed"] == pytest.approx(one["tokens"].sum() * 1.05 / spent.sum())
    assert cell["speed_low"] <= cell["speed"] <= cell["speed_high"]


def test_subgroups_are_sums_of_the_same_rows(swept):
    _, _, rows = swept
    one = rows[(rows["temperature"] == 0) & (rows["drafter"] == "composite") & (rows["gamma"] == 4)]
    by = acceptance.cells(one, COSTS, by=["category"])
    assert list(by["category"]) == ["a", "b"]
    assert list(by["prompts"]) == [3, 3]


def test_survival_is_the_product_of_conditional_acceptance(swept):
    _, _, rows = swept
    one = rows[(rows["temperature"] == 0) & (rows["drafter"] == "model") & (rows["gamma"] == 4)]
    table = acceptance.by_position(one)
    assert np.allclose(table["joint"], table["conditional"].cumprod())
    assert table["judged"].is_monotonic_decreasing


def made(alphas: list[float], prompts: int = 40, blocks: int = 30) -> pd.DataFrame:
    """SYNTHETIC rows with these conditional acceptances by position."""
    random, rows = np.random.default_rng(0), []
    for i in range(prompts):
        row, alive = {"prompt": str(i), "free_1": 0.0}, blocks
        for position, alpha in enumerate(alphas, start=1):
            kept = random.binomial(alive, alpha)
            row |= {f"reached_{position}": alive, f"kept_{position}": kept, f"free_{position}": 0.0}
            alive = kept
        rows.append(row)
    return pd.DataFrame(rows)


def test_a_constant_alpha_is_not_called_changing_and_a_changing_one_is():
    same, changing = acceptance.constant_alpha(made([0.6] * 4)), acceptance.constant_alpha(made([0.5, 0.7, 0.8, 0.8]))
    assert same.p_value > 0.01
    assert same.later_minus_first.low < 0 < same.later_minus_first.high
    assert "may be constant" in str(same)
    assert changing.p_value < 1e-6
    assert changing.later_minus_first.low > 0.1
    assert "is not constant" in str(changing)
