"""One set of texts gives every cell: sums that add up, the loop's own numbers, and honest intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from kit import noisy_copy, pair_of, tiny_llama

from specdec_core.control import Costs
from specdec_core.lab import acceptance
from specdec_core.lab.acceptance import Grid
from specdec_core.record import acceptance_length_pooled, alpha_hat, block_efficiency

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


def chosen_of(rows, *cells):
    names = ["temperature", "top_p", "drafter", "rule", "gamma"]
    wanted = pd.DataFrame([dict(zip(names, cell, strict=True)) for cell in cells])
    return acceptance.cells(rows, COSTS).merge(wanted, on=names)


@pytest.fixture(scope="module")
def checked(pair, swept):
    """Four cells in the loop itself."""
    _, texts, rows = swept
    cells = [(0.0, 1.0, "model", "greedy", 4), (0.0, 1.0, "composite", "greedy", 2)]
    cells += [(0.0, 1.0, "prompt_lookup", "greedy", 4), (0.8, 1.0, "model", "block", 4)]
    chosen = chosen_of(rows, *cells)
    times, outputs = acceptance.run_cells(pair, texts, chosen, prompts=6)
    return chosen, times, outputs


def test_cells_hold_the_loops_own_numbers(swept, checked):
    _, texts, rows = swept
    chosen, times, outputs = checked
    assert {f"ordinary, T {t}" for t in ("0", "0.8")} < set(times["arm"])
    found = acceptance.compare(rows, COSTS, texts, chosen, times, outputs)
    assert found["holds"].all(), found.to_string()
    greedy, sampled = found[found["temperature"] == 0], found[found["temperature"] > 0].iloc[0]
    assert (greedy["equal"] == 6).all()
    assert sampled["apart_low"] < sampled["apart"] < sampled["apart_high"]
    for cell in chosen[chosen["temperature"] == 0].to_dict("records"):
        records = [r for o in outputs[acceptance.name_of(cell)] for r in o.records]
        assert cell["alpha"] == pytest.approx(alpha_hat(records))
        assert cell["block_efficiency"] == pytest.approx(block_efficiency(records))
        assert cell["length"] == pytest.approx(acceptance_length_pooled(records))


def test_a_replay_that_is_wrong_does_not_agree_with_the_loop(swept, checked):
    _, texts, rows = swept
    chosen, times, outputs = checked
    swapped = rows.assign(gamma=rows["gamma"].map({1: 2, 2: 4, 4: 1}))
    found = acceptance.compare(swapped, COSTS, texts, chosen, times, outputs)
    models = found[found["drafter"] != "prompt_lookup"]  # of which nothing is accepted here, at any γ
    assert not models["holds"].any(), found.to_string()


def test_cells_to_run_hold_the_best_the_worst_and_some_of_chance(swept):
    _, _, rows = swept
    cells = acceptance.cells(rows, COSTS)
    picked = acceptance.drawn(cells, 5)
    assert len(picked) == 5
    assert not picked.index.duplicated().any()
    assert {cells["speed"].idxmax(), cells["speed"].idxmin()} <= set(picked.index)
    assert list(acceptance.drawn(cells, 5).index) == list(picked.index)
    assert len(acceptance.drawn(cells[:1], 5)) == 1


def test_prompts_come_slowest_first_with_their_first_words(swept):
    _, texts, rows = swept
    one = acceptance.only(rows, {"temperature": 0.0, "drafter": "model", "gamma": 4})
    asked = texts.asked.assign(turns=[["first words\n" + "x" * 200]] * 6)
    table = acceptance.by_prompt(one, COSTS, asked)
    assert len(table) == 6
    assert table["speed"].is_monotonic_increasing
    assert table["begins"].iloc[0].startswith("first words xxx")
    assert len(table["begins"].iloc[0]) == 90


def test_a_subgroup_is_sure_at_a_level_that_all_of_them_share(swept):
    _, _, rows = swept
    one = acceptance.only(rows, {"temperature": 0.0, "drafter": "model", "gamma": 4})
    table = acceptance.subgroups(one, COSTS)
    assert list(table["of"]) == ["category", "category", "kind", "language"]
    assert list(table["prompts"]) == [3, 3, 6, 6]
    cheap = Costs({("target", 1, n): 1.0 for n in range(1, 10)})
    assert acceptance.subgroups(one, cheap)["sure"].all(), "drafting costs nothing, so every prompt gains"


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
    assert "α may be constant" in same.sentence
    assert changing.p_value < 1e-6
    assert changing.later_minus_first.low > 0.1
    assert "α is not constant" in changing.sentence
    assert "p = " in str(changing)
