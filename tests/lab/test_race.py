"""Ratios, halves, aims and the published table, on numbers made by hand; no time is measured here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from kit import Words, pair_of, tiny_llama

from specdec_core.errors import SpecDecError
from specdec_core.lab import publish, speed, workloads
from specdec_core.lab.peers import Timed
from specdec_core.lab.race import Aim, Arm, Race, by_category, means, overall, table


def times(**paces: list[float]) -> pd.DataFrame:
    """Seconds a token of each arm on prompts p0, p1 (category a) and p2 (category b); ten tokens each."""
    rows = []
    for arm, each in paces.items():
        for i, pace in enumerate(each):
            rows.append({"prompt": f"p{i}", "category": "aab"[i], "arm": arm, "seconds": 10 * pace, "tokens": 10})
    return pd.DataFrame(rows[::-1])  # whatever the order


def test_a_ratio_is_the_geometric_mean_by_category_so_that_a_large_one_counts_no_more() -> None:
    found = by_category(times(ours=[1.0, 1.0, 1.0], ordinary=[2.0, 8.0, 1.0]), "ours", "ordinary")
    assert found.to_dict() == pytest.approx({"a": 4.0, "b": 1.0})
    assert overall(found).value == pytest.approx(2.0)


def test_a_text_with_nothing_to_time_is_left_out_for_both_arms() -> None:
    seen = times(ours=[1.0, 1.0, 1.0], ordinary=[2.0, 8.0, 1.0])
    seen.loc[(seen["arm"] == "ours") & (seen["prompt"] == "p1"), "tokens"] = 1
    assert by_category(seen, "ours", "ordinary").to_dict() == pytest.approx({"a": 2.0, "b": 1.0})


def test_the_candidate_with_the_highest_mean_comes_first_with_its_worst_category() -> None:
    found = means(times(ordinary=[1.0] * 3, slow=[2.0] * 3, mixed=[0.25, 0.25, 2.0], even=[0.8] * 3), "ordinary")
    assert [row["arm"] for row in found] == ["mixed", "even", "slow"]
    assert (found[0]["worst"], found[0]["worst_category"]) == (pytest.approx(0.5), "b")


@pytest.mark.parametrize(
    ("least", "worst", "verdict"),
    [(1.9, False, "reached, within the noise"), (0.9, False, "reached"), (4.1, False, "missed"), (1.0, True, "reached"),
     (1.1, True, "missed"), (2.1, False, "missed, within the noise")],
)  # fmt: skip
def test_an_aim_is_judged_by_the_mean_or_by_the_worst_category(least: float, worst: bool, verdict: str) -> None:
    seen = times(ours=[1.0] * 3, ordinary=[4.0, 4.0, 1.0])
    judged = Aim("title", "ours", "ordinary", least, worst).judge(seen)
    assert judged is not None
    assert judged["verdict"] == verdict
    assert judged["reached"].startswith("1.00 (b)" if worst else "2.00 [1.00, 4.00]")


def test_an_aim_about_an_engine_that_was_not_there_is_left_out() -> None:
    assert Aim("title", "ours", "llama.cpp", 1.0).judge(times(ours=[1.0] * 3)) is None


def asked(*categories: str) -> pd.DataFrame:
    rows = [{"id": f"{c}{i}", "category": c, "ids": [i + 1]} for i, c in enumerate(categories)]
    return pd.DataFrame(rows)


def test_arms_take_turns_at_being_first_and_no_prompt_is_run_twice_by_one() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> Arm:
        def run(prompt: list[int], seed: int) -> Timed:
            calls.append((name, prompt[0]))
            return Timed([7, 8, 9], [(1.0, 1), (3.0, 3)])

        return Arm(run, "x", "bf16")  # type: ignore[arg-type]

    race = Race({"x": arm("x"), "y": arm("y")})
    said: list[str] = []
    race.run(asked("a", "b"), said.append)
    assert calls == [("x", 1), ("y", 1), ("y", 2), ("x", 2)]
    assert said == ["x, a", "y, a", "y, b", "x, b"]
    (row, *_) = race.rows
    assert (row["prefill"], row["seconds"], row["tokens"], row["length"]) == (1.0, 2.0, 2, 3)
    rows = table(race, bandwidth=1.0)
    assert [(r["arm"], r["ratio"], r["same_texts"], r["texts"]) for r in rows] == [
        ("x", "1.00 [1.00, 1.00]", 2, 2),
        ("y", "1.00 [1.00, 1.00]", 2, 2),
    ]
    assert rows[0]["tokens_per_second"] == 1.0


def test_texts_are_compared_where_greedy_and_told_and_nowhere_else() -> None:
    def arm(tokens: list[int], temperature: float = 0.0) -> Arm:
        return Arm(lambda prompt, seed: Timed(tokens, [(1.0, 1), (3.0, 3)]), "x", "bf16", temperature)

    race = Race({"x": arm([1, 2, 3]), "other": arm([1, 2, 4]), "silent": arm([]), "sampled": arm([1, 2, 3], 0.7)})
    race.run(asked("a", "b"), lambda said: None)
    rows = {r["arm"]: r for r in table(race, bandwidth=1.0)}
    counts = {name: (r["same_texts"], r["texts"]) for name, r in rows.items()}
    assert counts == {"x": (2, 2), "other": (0, 2), "silent": (0, 0), "sampled": (0, 0)}
    assert [publish.cells(rows[name])[-1] for name in ("other", "silent", "sampled")] == ["0/2", "", ""]


def test_halves_share_no_prompt_and_hold_every_category_equally_often() -> None:
    pair, prompts = pair_of(tiny_llama()), workloads.prompts()
    pair.tokenizer = Words()  # type: ignore[assignment]
    first, second = speed.halves(prompts, pair, 1)
    assert sorted(first["category"]) == sorted(second["category"]) == sorted(prompts["category"].unique())
    assert not set(first["id"]) & set(second["id"])
    again, _ = speed.halves(prompts.sample(frac=1.0, random_state=1), pair, 1)
    assert list(again["id"]) == list(first["id"])


def test_a_prompt_whose_prefill_would_be_most_of_the_run_is_left_out() -> None:
    pair = pair_of(tiny_llama())
    pair.tokenizer = Words()  # type: ignore[assignment]
    rows = [(f"p{i}", ["one two three four"[: 4 * (i + 1)]], "a", str(i)) for i in range(4)]
    prompts = pd.DataFrame(rows, columns=["id", "turns", "category", "sha256"])
    first, second = speed.halves(prompts, pair, 1, longest=2)
    assert [list(half["ids"].map(len)) for half in (first, second)] == [[1], [2]]


def test_weights_are_counted_once_and_an_embedding_only_where_it_is_the_head() -> None:
    tied, apart = tiny_llama(tie_word_embeddings=True), tiny_llama(tie_word_embeddings=False)
    embedding = 64 * 32 * 4
    layers = sum(p.nbytes for n, p in apart.named_parameters() if "embed" not in n and "lm_head" not in n)
    buffers = sum(b.nbytes for b in apart.buffers())
    assert speed.weight_bytes(tied) == speed.weight_bytes(apart) == layers + embedding + buffers


# --- what is published ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_table_of_the_run_that_is_kept_and_no_other() -> None:
    kept, readme = ROOT / "results" / "bench_cpu.json", (ROOT / "README.md").read_text(encoding="utf-8")
    block = publish.markdown(json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else publish.NONE
    assert publish.in_readme(readme, "cpu", block) == readme


def test_what_an_engine_does_not_tell_stays_empty_in_the_table() -> None:
    row = {"arm": "x", "ratio": "1.00", "worst": 1.0, "worst_category": "a", "tokens_per_second": 3.2, "prefill": 0.5}
    shown = publish.cells(row | {"same_texts": 1, "texts": 2, "draft_ms": math.nan})
    assert shown == ["x", "1.00", "1.00", "a", "3", "", "", "", "", "", "0.50", "1/2"]


@pytest.mark.parametrize("text", ["none", 2 * "<!-- bench: cpu -->a<!-- bench: end cpu -->"])
def test_a_readme_without_one_place_for_the_table_is_refused(text: str) -> None:
    with pytest.raises(SpecDecError, match="it needs one"):
        publish.in_readme(text, "cpu", "table")


def test_a_run_that_is_no_bench_cannot_be_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    with pytest.raises(SpecDecError, match="is no finished bench"):
        publish.publish("0" * 32, tmp_path)
