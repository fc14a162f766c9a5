"""Replaying policies on recorded acceptance: the walk, the true optimum, what files are refused, the logged run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from books import artifact_text, artifacts, runs
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.control import BlockLength, Costs, Fallback, Fixed, Observation, Plan
from specdec_core.errors import SpecDecError
from specdec_core.lab import policies as module
from specdec_core.lab.policies import CURVES, Curve, Recorded, best_fixed, compare, curve, known, oracle, policies, walk
from specdec_core.lab.store import open_store
from specdec_core.lab.workloads import data_dir

TENTHS = Curve("a block of n costs 1 + n / 5", 1, lambda n: 1 + (n - 1) / 10, lambda n: n / 10)
kept_lists = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def text(*kept: int) -> Recorded:
    return Recorded("text", tuple(kept))


class Watching(BlockLength):
    """Plans a given list of block lengths and keeps what it is told."""

    def __init__(self, gammas: list[int]):
        self.gammas = gammas
        self.seen: list[Observation] = []

    def plan(self, batch: int) -> Plan:
        return Plan(self.gammas[len(self.seen)])

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


def seconds(way: module.Walk) -> float:
    return way.totals()[3]


# --- the walk ---------------------------------------------------------------------------------------------


def test_a_pass_keeps_what_was_recorded_up_to_its_block_and_the_end_of_the_text() -> None:
    watching = Watching([2, 0, 3])
    done = walk(text(5, 0, 0, 4, 3, 9), watching, known([TENTHS], 3))
    assert [entry[:3] for entry in done.log] == [(0, 2, 3), (3, 0, 1), (4, 3, 2)]
    assert [seen.rows[0] for seen in watching.seen] == [(2, 2, 3, False), (0, 0, 1, False), (3, 1, 2, True)]
    assert [(seen.drafted, seen.columns, seen.batch) for seen in watching.seen] == [(2, 3, 1), (0, 1, 1), (3, 4, 1)]
    assert [entry[3] for entry in done.log] == pytest.approx([1.4, 1.0, 1.6])
    assert done.totals() == (3, 2, 6, pytest.approx(4.0))
    assert done.totals(3) == (2, 1, 3, pytest.approx(2.6))


@settings(max_examples=40, deadline=None)
@given(kept=kept_lists, most=st.integers(1, 6))
def test_every_policy_emits_the_whole_text_and_none_beats_the_oracle(kept: list[int], most: int) -> None:
    recorded, costs = text(*kept), known([TENTHS], most)
    least = seconds(oracle(recorded, TENTHS, most))
    arms: list[Callable[[], BlockLength]] = [
        *policies(costs, most).values(),
        *(lambda g=g: Fixed(g) for g in range(most + 1)),
    ]
    for make in arms:
        done = walk(recorded, make(), costs)
        assert done.totals()[2] == len(kept)
        assert [at for at, *_ in done.log] == [sum(x[2] for x in done.log[:i]) for i in range(len(done.log))]
        assert seconds(done) >= least - 1e-9


@given(kept=kept_lists)
def test_block_length_0_is_ordinary_decoding(kept: list[int]) -> None:
    done = walk(text(*kept), Fixed(0), known([TENTHS], 1))
    assert done.log == [(at, 0, 1, TENTHS.target(1)) for at in range(len(kept))]


def test_fallback_stops_where_nothing_is_kept_and_the_walk_keeps_its_reason() -> None:
    done = walk(text(*[3] * 40, *[0] * 60), Fallback(), known([TENTHS], 8), 1)
    assert {control for _, control, _ in done.changes} >= {"off"}
    at, control, reason = next(change for change in done.changes if change[0] >= 40)
    assert (control, at < 60) == ("off", True)
    assert "of ordinary speed" in reason


def test_the_batch_may_change_and_unknown_costs_are_refused() -> None:
    crowd = Curve("crowd", 9, lambda n: 5.0 * n, lambda n: 1.0)
    done = walk(text(0, 0, 0), Fixed(1), known([TENTHS, crowd], 1), [1, 9, 9])
    assert [entry[3] for entry in done.log] == pytest.approx([1.2, 11.0, 11.0])
    with pytest.raises(SpecDecError, match=r"target passes with 4 rows: give a curve"):
        walk(text(0), Fixed(0), Costs({("target", 1, 1): 1.0}), 4)


# --- the optimum ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "log", "least"),
    [
        ((3, 0, 0, 0, 0), [(0, 3, 4), (4, 0, 1)], 2.6),
        ((1, 3, 0, 0, 0), [(0, 0, 1), (1, 3, 4)], 2.6),  # taking what is offered at once would cost 4.2
        ((0, 0, 0), [(0, 0, 1), (1, 0, 1), (2, 0, 1)], 3.0),
        ((9, 9, 9), [(0, 2, 3)], 1.4),  # drafting beyond the end is wasted
    ],
)
def test_the_known_optimum(kept: tuple[int, ...], log: list[tuple[int, int, int]], least: float) -> None:
    way = oracle(text(*kept), TENTHS, 4)
    assert [entry[:3] for entry in way.log] == log
    assert seconds(way) == pytest.approx(least)


@settings(max_examples=150, deadline=None)
@given(
    kept=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    prices=st.lists(st.floats(0.1, 9), min_size=4, max_size=4),
)
def test_dynamic_programming_finds_what_trying_everything_finds(kept: list[int], prices: list[float]) -> None:
    def tried(at: int) -> float:
        if at == len(kept):
            return 0.0
        return min(prices[g] + tried(at + 1 + min(g, kept[at], len(kept) - at - 1)) for g in range(4))

    odd = Curve("any prices, also falling ones", 1, lambda n: prices[n - 1], lambda n: 0.0)
    assert seconds(oracle(text(*kept), odd, 3)) == pytest.approx(tried(0))


# --- the table --------------------------------------------------------------------------------------------


def test_the_table_compares_with_ordinary_decoding_the_best_fixed_length_and_the_oracle() -> None:
    recorded = [text(2, 1, 0, 2, 1, 0), text(0, 2, 1, 0, 0, 0)]
    table = compare(recorded, TENTHS, 4).set_index("policy")
    assert best_fixed(recorded, TENTHS, 4) == 2
    assert table.index[table["best fixed"]].tolist() == ["fixed 2"]
    assert (
        table.loc["fixed 0", "speed"] == table.loc["fixed 2", "of best fixed"] == table.loc["oracle", "of oracle"] == 1
    )
    assert table.loc["fixed 2", "speed"] == pytest.approx(12 / (2 * 1.4 + 3 * 1.4 + 1.4))
    assert table.loc["oracle", "speed"] == pytest.approx(12 / (2 * 1.4 + 1 + 1.4 + 2))
    assert table.loc["oracle", "speculated"] == pytest.approx(3 / 6)
    assert (table["of oracle"] <= 1 + 1e-9).all()
    assert (table["speed, low"] <= table["speed"]).all()
    assert compare(recorded, TENTHS, 4).equals(table.reset_index())


def test_stress_changes_the_second_half_only_and_says_that_it_is_synthetic() -> None:
    table = module.stress([text(*[2, 1, 0] * 40)], "eagle3, as published", 4)
    assert "synthetic change" in table
    assert set(table["synthetic change"].str[-4:]) == {"(G4)", "(G3)"}
    lost = table[table["policy"].str.startswith("fixed")].set_index("synthetic change")
    assert (lost["noticed"] == 0).all()
    assert lost.loc["nothing kept (G4)", "time"] > 1
    found = table[(table["policy"] == "fallback") & (table["synthetic change"] == "nothing kept (G4)")]
    assert found["noticed"].item() == 1
    assert 0 < found["delay"].item() < 20
    assert 1 < found["time"].item() < lost.loc["nothing kept (G4)", "time"] + 1e-9


def test_curves_are_the_published_ones() -> None:
    assert set(CURVES) == {"eagle3, as published", "eagle3, by token", "ngram, as published"}
    flat, by_token = curve("eagle3, as published", 1), curve("eagle3, by token", 1)
    assert flat.draft(3) == pytest.approx(by_token.draft(3))
    assert flat.target(1) == pytest.approx(7.12e-3, rel=0.01)
    assert curve("ngram, as published", 32).draft(3) / curve("ngram, as published", 32).target(4) < 0.006


# --- files ------------------------------------------------------------------------------------------------


def line(eagle: Any = (1, 3), ngram: Any = (1, 1)) -> str:
    return json.dumps({"id": "7", "acc_eagle": {"acc_len": eagle}, "acc_ngram": {"acc_len": ngram}})


def test_lengths_count_the_targets_own_token(tmp_path: Path) -> None:
    file = tmp_path / "acceptance_x.jsonl"
    file.write_text(line([1, 4, 2]) + "\n\n" + line([2]) + "\n", encoding="utf-8")
    assert module.load_recorded(file, "eagle3") == [Recorded("7", (0, 3, 1)), Recorded("7", (1,))]
    assert module.load_recorded(file, "ngram")[0].kept == (0, 0)


@pytest.mark.parametrize(
    "bad", ["{", "[1]", "{}", '{"acc_eagle": 3}', line([]), line("111"), line([1, 0]), line([1, True]), line([1.5])]
)
def test_a_malformed_line_is_refused_by_its_number(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "acceptance_x.jsonl"
    file.write_text(line() + "\n" + bad + "\n", encoding="utf-8")
    with pytest.raises(SpecDecError, match=r"^acceptance_x\.jsonl line 2.*: give ") as caught:
        module.load_recorded(file, "eagle3")
    assert "\n" not in str(caught.value)


def test_an_empty_file_a_missing_one_and_an_unknown_drafter_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(SpecDecError, match=r"empty\.jsonl holds no requests"):
        module.load_recorded(tmp_path / "empty.jsonl", "ngram")
    with pytest.raises(SpecDecError, match=r"none\.jsonl cannot be read"):
        module.load_recorded(tmp_path / "none.jsonl", "ngram")
    with pytest.raises(SpecDecError, match="give one of eagle3, ngram"):
        module.load_recorded(tmp_path / "empty.jsonl", "medusa")


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_logs_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(warm / "mlruns", tmp_path / "mlruns")
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "my" / "data"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    with pytest.raises(SpecDecError, match=r"name their folder with --data or SPECDEC_DATA"):
        module.command()
    (tmp_path / "my" / "data").mkdir(parents=True)
    (tmp_path / "my" / "data" / "acceptance_tiny.jsonl").write_text(
        (line([1, 3, 2, 1] * 9) + "\n") * 3, encoding="utf-8"
    )
    module.command(most=3, requests=2)
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["data"] == "acceptance_tiny.jsonl"
    assert len(run.data.tags["data.acceptance_tiny.jsonl.sha256"]) == 64
    assert "2601.11580" in run.data.tags["costs"]
    assert str(tmp_path) not in json.dumps([run.data.tags, run.data.params])
    printed = capsys.readouterr().out
    assert run.data.tags["finding"].split(":")[0] in printed
    client = open_store().client
    assert {"tables/policies.csv", "tables/synthetic_changes.csv"} <= set(artifacts(client, run.info.run_id))
    header, *rows = artifact_text(client, run.info.run_id, "tables/policies.csv").splitlines()
    assert header.startswith("policy,best fixed,speed")
    assert len(rows) == 3 * 3 * (4 + 2 * 4 + 1)


# --- the recorded files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "speeds"),  # read off Figure 10 of the paper's web page: GSM8K, batch 1, k = 1, 3, 5
    [("eagle3, as published", (1.29, 1.81, 2.01))],
)
def test_the_replay_agrees_with_the_papers_own_simulation(name: str, speeds: tuple[float, ...]) -> None:
    file = (data_dir() or Path()) / "acceptance_llama31_8b_gsm8k.jsonl"
    if not file.is_file():
        pytest.skip("SPECDEC_DATA names no folder with acceptance_llama31_8b_gsm8k.jsonl")
    recorded = module.load_recorded(file, name.split(",")[0])
    costs = known([curve(name, 1)], 5)
    times = {g: sum(seconds(walk(r, Fixed(g), costs)) for r in recorded) for g in (0, 1, 3, 5)}
    assert [times[0] / times[g] for g in (1, 3, 5)] == pytest.approx(speeds, rel=0.03)
