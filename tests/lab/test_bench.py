"""The bench's order, arithmetic and verdicts on a clock that ticks once a look; no time is measured here."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from books import artifact_text, artifacts, runs
from kit import ScriptedDrafter, Words, block, decode, pair_of, tiny_llama

from specdec_core.errors import SpecDecError
from specdec_core.lab import bench, models
from specdec_core.lab.bench import ARMS, QUESTIONS, Bench, Wrong, finding, forwards_timed, plan, table
from specdec_core.lab.stats import Interval
from specdec_core.lab.store import open_store

ARM = {arm.key: arm for arm in ARMS}
SYNTHETIC = {arm.key for arm in ARMS if "synthetic" in arm.draft}


def ticking() -> Bench:
    ticks = itertools.count()
    return Bench(pair_of(tiny_llama()), 20, lambda: float(next(ticks)))


def times(**seconds: list[float]) -> pd.DataFrame:
    """Times of every arm in groups 0, 1, ..., of 10 tokens each; 1 second where nothing else is said."""
    groups = len(next(iter(seconds.values())))
    rows = []
    for arm, group in itertools.product(ARMS, range(groups)):
        spent = seconds.get(arm.key.replace(".", "_"), [1.0] * groups)[group]
        row = {
            "batch": 2,
            "prompt": "ab"[group],
            "arm": arm.key,
            "seconds": spent,
            "forward_seconds": 1.0,
            "tokens": 10,
        }
        rows.append(row | {"drafted": 20, "accepted": 5, "draft_seconds": 0.5})
    return pd.DataFrame(rows[::-1])  # whatever the order


def row_of(rows: list[dict[str, object]], arm: str) -> dict[str, object]:
    return next(row for row in rows if row["arm"] == arm)


# --- order ------------------------------------------------------------------------------------------------


def test_all_arms_of_a_group_run_together_and_mirrored_in_the_next() -> None:
    steps = plan({f"p{i:02}": [i] for i in range(12)}, [1, 8], 6)
    groups = [steps[i : i + len(ARMS)] for i in range(0, len(steps), len(ARMS))]
    names = ["", "p00", "p02", "p04", "p06", "p08", "p10", "", "p00", "p04", "p08"]
    assert [{name for _, _, name in group} for group in groups] == [{name} for name in names]
    for i, group in enumerate(groups):
        mirrored = i in (0, 2, 4, 6, 7, 9)
        assert [arm for arm, _, _ in group] == list(ARMS[::-1] if mirrored else ARMS)
        assert len({str(rows) for _, rows, _ in group}) == 1
    assert [group[0][1] for group in groups[:7]] == [[[i]] for i in (0, 0, 2, 4, 6, 8, 10)]
    assert groups[-1][0][1] == [[i] for i in (8, 9, 10, 11, 0, 1, 2, 3)]


def test_groups_are_at_least_three_unless_fewer_are_asked() -> None:
    for asked, batch, count in ((6, 1, 6), (6, 2, 3), (6, 8, 3), (20, 4, 5), (2, 1, 2), (2, 8, 2), (1, 4, 1)):
        steps = plan({"a": [1], "b": [2], "c": [3]}, [batch], asked)
        assert len(steps) == (count + 1) * len(ARMS)


def test_every_arm_runs_beside_the_ordinary_decoding_it_is_compared_with() -> None:
    keys = [arm.key for arm in ARMS]
    for arm in ARMS:
        question = QUESTIONS.get(arm.key.partition(".")[0])
        if question and question.baseline:
            assert abs(keys.index(arm.key) - keys.index(question.baseline)) <= 2
    assert [arm.draft for arm in ARMS if arm.key.startswith("ordinary")] == ["", ""]


# --- arms -------------------------------------------------------------------------------------------------


def test_the_wrong_drafter_lets_its_worker_work_and_fills_every_place() -> None:
    worker = ScriptedDrafter(lambda step, sequences, room: block([7] * room[0], [7] * room[1]))
    drafter = Wrong(worker, 1000)
    got = drafter.propose([[3], [5, 9]], [4, 2], torch.zeros(2, 4))
    assert worker.step == 1
    assert got.drafted == [4, 2]
    assert got.q is None
    assert int(got.tokens.max()) < 1000
    assert got.tokens[0].tolist() != [7] * 4
    drafter.commit([1, 2])
    assert worker.committed == [[1, 2]]


def test_the_wrong_drafter_leaves_the_text_alone_and_marks_its_records() -> None:
    target = tiny_llama()
    plain = decode(target, [[1, 2, 3]])
    marked = decode(target, [[1, 2, 3]], Wrong(ScriptedDrafter(lambda *_: block([1])), 64))
    assert marked[0].output == plain[0].output
    assert all(r.synthetic for r in marked[0].records if r.kind != "prefill")


def test_forwards_are_timed_while_asked_and_no_longer() -> None:
    model, ticks = tiny_llama(), itertools.count()
    decode(model, [[1, 2]], tokens=1)  # the cache's self-check runs the model too, once
    with forwards_timed(model, lambda: float(next(ticks))) as marks:
        decode(model, [[1, 2]], tokens=4)
    assert sum(marks) == 4.0
    decode(model, [[1, 2]], tokens=4)
    assert next(ticks) == 8
    with pytest.raises(RuntimeError), forwards_timed(model, lambda: 0.0):
        raise RuntimeError
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_the_overhead_counts_target_and_draft_forwards_behind_the_prefills() -> None:
    run = ticking()
    run.run(ARM["overhead.self"], [[1, 2, 3]], "a")
    (row,) = run.rows
    assert (row["tokens"], row["drafted"], row["accepted"]) == (10, 8, 8)  # 16 but for the prefill's and one block
    assert row["forward_seconds"] == 10.0  # four drafts and a target pass, twice
    assert row["seconds"] == 21.0  # two looks at the clock a forward, and one at the end


def test_arms_do_what_they_are_called() -> None:
    run = ticking()
    for name, arm in itertools.product("ab", ARMS):
        run.run(arm, [[1, 2, 3], [4, 5]], name)
    assert [row["prompt"] for row in run.rows] == ["a"] * len(ARMS) + ["b"] * len(ARMS)
    kinds = {row["arm"]: row for row in run.rows}
    assert set(kinds) == set(ARM)
    assert {key for key, row in kinds.items() if row["synthetic"]} == SYNTHETIC
    for key, row in kinds.items():
        whole = key.startswith("control") or key == "ordinary.whole"
        off = key.startswith(("off", "ordinary"))
        assert (row["drafted"] == 0) == off or key.startswith("control"), key
        assert math.isnan(row["forward_seconds"]) == (not key.startswith("overhead")), key
        records = run.records[f"{key}.b2"]
        assert {r.request for r in records} == {0, 1, 2, 3}
        assert sum(len(r.emitted) for r in records) == 4 * (20 if whole else 16), key
        assert any(r.p for r in records if r.kind != "prefill") == key.endswith("diagnostics") or off, key
        assert any(r.synthetic for r in records) == (key in SYNTHETIC), key
    assert len(run.texts) == 4
    for texts in run.texts.values():  # lossless: all arms wrote one text
        assert len(texts) == len(ARMS)
        assert all(text == max(texts, key=len)[: len(text)] for text in texts)


def test_a_warm_up_is_short_and_leaves_only_what_controls_learned() -> None:
    run = ticking()
    for key in ("control.synthetic_lookup_fresh", "control.synthetic_lookup_carried"):
        run.run(ARM[key], [[1, 2, 3]], "")
    assert (run.rows, run.records, run.texts) == ([], {}, {})
    control = run.carried["control.synthetic_lookup_carried", 1]
    run.run(ARM["control.synthetic_lookup_carried"], [[1, 2, 3]], "a")
    assert run.carried["control.synthetic_lookup_carried", 1] is control
    assert control.inner.costs.seen
    assert not run.carried["control.synthetic_lookup_fresh", 1].inner.costs.seen
    run.run(ARM["control.synthetic_lookup_carried"], [[1], [2]], "a")
    assert run.carried["control.synthetic_lookup_carried", 2] is not control


# --- arithmetic -------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_group_and_averaged_geometrically() -> None:
    rows = table(
        times(
            overhead_self=[1.0, 1.21],
            ordinary_steady=[2.0, 8.0],
            off_lookup=[4.0, 4.0],
            ordinary_whole=[3.0, 3.0],
            control_synthetic_model_fresh=[3.0, 12.0],
        )
    )
    assert len(rows) == len(ARMS) - 2
    overhead = row_of(rows, "overhead.self")
    assert overhead["value"] == pytest.approx(1.1)
    assert (overhead["low"], overhead["high"]) == (pytest.approx(1.0), pytest.approx(1.21))
    assert (overhead["worst"], overhead["worst_group"], overhead["groups"]) == (pytest.approx(1.21), "b", 2)
    off = row_of(rows, "off.lookup")
    assert off["value"] == pytest.approx(1.0)
    assert (off["worst"], off["worst_group"]) == (pytest.approx(0.5), "a")
    control = row_of(rows, "control.synthetic_model_fresh")
    assert control["value"] == pytest.approx(0.5)
    assert (control["worst"], control["worst_group"], control["synthetic"]) == (pytest.approx(0.25), "b", True)
    assert (control["accepted"], control["drafted"]) == (10, 40)
    assert control["draft_cost"] == pytest.approx((1.0 / 40) / (10.0 / 20))


@pytest.mark.parametrize(
    ("question", "interval", "said"),
    [
        ("overhead", (1.02, 1.01, 1.05), "meets"),
        ("overhead", (1.04, 1.01, 1.06), "may meet"),
        ("overhead", (1.2, 1.06, 1.3), "does not meet"),
        ("off", (0.98, 0.97, 1.0), "meets"),
        ("off", (0.98, 0.96, 1.0), "may meet"),
        ("control", (0.9, 0.8, 0.94), "does not meet"),
        ("control", (0.9, -math.inf, math.inf), "may meet"),
        ("uncontrolled", (0.5, 0.4, 0.6), ""),
    ],
)
def test_a_verdict_rests_on_the_whole_interval(question: str, interval: tuple[float, ...], said: str) -> None:
    assert QUESTIONS[question].verdict(Interval(*interval)) == said


def test_the_finding_is_that_of_the_worst_row() -> None:
    text = finding(table(times(overhead_self=[1.2, 1.2], off_self=[1.0, 1.1])))
    first, _, rest = text.partition("\n\n")
    assert first == "Overhead does not meet its aim; off may meet its aim; control meets its aim."
    assert "3 of 4 rows meet it; worst overhead.self at batch 2, 1.2 [1.2, 1.2]" in rest
    assert "1 of 2 rows meet it; worst off.self at batch 2, 0.953 [0.909, 1]" in rest
    assert "(synthetic) and no control: worst uncontrolled.synthetic_lookup at batch 2, 1 [1, 1]" in rest


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_keeps_a_run_with_its_lineage(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = pair_of(tiny_llama())
    pair.tokenizer, pair.lineage = Words(), {"target_weights_sha256": "f" * 64, "dtype": "float32"}  # type: ignore[assignment]
    asked: dict[str, object] = {}
    monkeypatch.setattr(models, "load_pair", lambda name, **options: asked.update(name=name, **options) or pair)
    bench.command("mine", batches="1,2", prompts=1, tokens=18, dtype="float32")
    assert asked == {"name": "mine", "dtype": "float32"}
    (run,) = runs()
    tags, client = run.data.tags, open_store().client
    assert (run.info.status, run.info.run_name) == ("FINISHED", "bench mine")
    assert (tags["kind"], tags["pair"]) == ("bench", "mine")
    assert run.data.params["batches"] == "1,2"
    assert tags["model.target.weights_sha256"] == "f" * 64
    assert len(tags["tokens.sha256"]) == len(tags["prompts.builtin.sha256"]) == 64
    assert tags["synthetic"] == "true"
    assert {key for key in tags if key.startswith("synthetic.")} == {
        f"synthetic.{k}.b{b}" for k in SYNTHETIC for b in (1, 2)
    }
    assert {f"{key}.b{b}{end}" for key in ARM if "ordinary" not in key for b in (1, 2) for end in ("", "_low")} <= set(
        run.data.metrics
    )
    files = artifacts(client, run.info.run_id)
    assert {"tables/bench.csv", "tables/times.csv", *(f"records/{key}.b2.jsonl" for key in ARM)} <= set(files)
    lines = artifact_text(client, run.info.run_id, "records/uncontrolled.synthetic_model.b2.jsonl").splitlines()
    assert any(json.loads(line)["synthetic"] for line in lines)
    kept = pd.read_csv(client.download_artifacts(run.info.run_id, "tables/bench.csv"))
    assert set(kept["worst_group"]) == {"chat-3"}
    assert tags["prompts.builtin.count"] == "12"
    assert not kept["verdict"].isin(["meets", "does not meet"]).any()  # of one prompt nothing can be said
    said = capsys.readouterr().out
    for words in ("overhead.self_diagnostics", "control.synthetic_model_carried", "its aim", run.info.run_id):
        assert words in said
    assert f"0 of {3 * len(ARMS)} texts part" in said  # batches of 1 and 2


@pytest.mark.parametrize("given", ["", "0", "1,x", "1,,2", "-1"])
def test_batches_that_are_none_are_one_line_and_leave_no_run(project: Path, given: str) -> None:
    with pytest.raises(SpecDecError, match="whole numbers"):
        bench.command(batches=given)
    assert runs() == []
