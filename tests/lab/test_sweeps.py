"""A sweep stopped at any moment ends, resumed, with every cell finished once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from specdec_core import SpecDecError
from specdec_core.lab import sweeps
from specdec_core.lab.store import open_store

GRID = {"gamma": [1, 2], "temperature": [0.0, 0.7], "drafter": ["prompt_lookup", "model"]}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def written(root: Path, **changes: object) -> Path:
    import yaml

    held = {"notebook": "00_quickstart", "profile": "smoke", "grid": GRID, **changes}
    (root / "mine.yaml").write_text(yaml.safe_dump(held))
    return root / "mine.yaml"


# Stands for a notebook: a run under the parent that takes a moment and ends as it should.
FAKE = textwrap.dedent("""
    import json, sys, time
    from specdec_core.lab import sweeps
    from specdec_core.lab.lineage import open_run
    from specdec_core.lab.engine import sigterm_interrupts

    task = json.loads(sys.argv[1])
    with sigterm_interrupts():
        sweeps.end_with(task["launcher"])
        with open_run("cell", parent=task["parent"], tags={"sweep.key": task["key"]}):
            time.sleep(0.5)
            if task["fail"]:
                raise RuntimeError("this cell is ill")
""")
DRIVER = textwrap.dedent("""
    import json, os, sys
    from specdec_core.lab import sweeps

    def command(sweep, cell):
        task = {"parent": sweep.run.id, "key": cell.key, "launcher": os.getpid(), "fail": cell.name in sys.argv[4:]}
        return [sys.executable, sys.argv[2], json.dumps(task)]

    sweep = sweeps.open_sweep(sys.argv[1])
    with sweep.run:
        sweeps.run_cells(sweep, int(sys.argv[3]), command)
        code = sweeps.conclude(sweep)
    sys.exit(code)
""")


def start(root: Path, file: Path, workers: int = 2, *ill: str) -> subprocess.Popen[bytes]:
    (root / "fake.py").write_text(FAKE)
    (root / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(root / "driver.py"), str(file), str(root / "fake.py"), str(workers), *ill]
    return subprocess.Popen(command, env=os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{root}/mlflow.db"})


def found() -> tuple[list[object], list[object]]:
    store = open_store()
    runs = store.client.search_runs([store.experiment_id], max_results=1000)
    parents = [r for r in runs if "sweep.sha256" in r.data.tags]
    return parents, [r for r in runs if "sweep.key" in r.data.tags]


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_every_cell_is_finished_once(root: Path) -> None:
    file, moments = written(root), random.Random(0)
    for _ in range(3):
        process = start(root, file)
        time.sleep(moments.uniform(3, 8))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(root, file).wait() == 0
    (parent,), cells = found()
    assert parent.info.status == "FINISHED"  # type: ignore[attr-defined]
    done = Counter(c.data.tags["sweep.key"] for c in cells if c.info.status == "FINISHED")  # type: ignore[attr-defined]
    assert set(done) == {cell.key for cell in sweeps.cells_of(sweeps.read_sweep(file)[0])}
    assert set(done.values()) == {1}
    assert {c.info.status for c in cells} <= {"FINISHED", "KILLED"}  # type: ignore[attr-defined]
    before = len(cells)
    assert start(root, file).wait() == 0
    assert len(found()[0]) == 2, "a sweep that has finished may be measured again, under a parent of its own"
    assert len(found()[1]) == 2 * len(done) + before - len(done)


@pytest.mark.slow
def test_a_failed_cell_does_not_stop_the_others_and_is_run_again_when_resumed(root: Path) -> None:
    file = written(root, grid={"gamma": [1, 2, 3]})
    assert start(root, file, 1, "gamma=2").wait() == 1
    (parent,), cells = found()
    assert Counter(c.info.status for c in cells) == {"FINISHED": 2, "FAILED": 1}  # type: ignore[attr-defined]
    assert parent.info.status == "FAILED"  # type: ignore[attr-defined]
    assert "2 of 3 cells finished. First of the others: gamma=2" in parent.data.tags["error"]  # type: ignore[attr-defined]
    assert start(root, file, 1).wait() == 0
    (parent,), cells = found()
    assert Counter(c.info.status for c in cells) == {"FINISHED": 3, "FAILED": 1}  # type: ignore[attr-defined]
    assert parent.info.status == "FINISHED"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"notebook": "09_nothing"}, "Unknown notebook '09_nothing'"),
        ({"profile": "huge"}, "has no profile 'huge'"),
        ({"grid": {"gama": [1]}}, "did you mean 'gamma'"),
        ({"grid": {"gamma": [0]}}, "gamma = 0 does not fit"),
        ({"grid": {"gamma": []}}, "grid.gamma is empty"),
        ({"grid": {}}, "mine.yaml: grid: "),
        ({"grid": {"gamma": [1, 1]}}, "Two cells of the grid are the same"),
        ({"fixed": {"gamma": 2}}, "gamma stands in grid and in fixed"),
        ({"worker": 2}, "mine.yaml: worker: "),
        ({"workers": 0}, "mine.yaml: workers: "),
    ],
)
def test_a_bad_sweep_is_refused_in_one_line_before_anything_is_run(
    root: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(SpecDecError) as error:
        sweeps.open_sweep(written(root, **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sweep_that_is_not_there_names_those_that_are(root: Path) -> None:
    with pytest.raises(SpecDecError, match=r"There is no sweep 'nope': give a YAML file, or one of .*quickstart"):
        sweeps.open_sweep("nope")
    spec, _ = sweeps.read_sweep("quickstart")
    assert len(sweeps.cells_of(spec)) == 24


def test_a_key_follows_code_parameters_and_inputs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "p.jsonl").write_text('{"prompt": "a"}\n')
    fixed = {"workload": str(root / "p.jsonl")}
    spec, _ = sweeps.read_sweep(written(root, fixed=fixed))
    first = [cell.key for cell in sweeps.cells_of(spec)]
    assert first == [cell.key for cell in sweeps.cells_of(spec)]
    (root / "p.jsonl").write_text('{"prompt": "b"}\n')
    second = [cell.key for cell in sweeps.cells_of(spec)]
    assert not set(first) & set(second), "other prompts are other cells"
    monkeypatch.setattr(sweeps, "code_digest", lambda notebook: "other code")
    assert not set(second) & {cell.key for cell in sweeps.cells_of(spec)}


def test_a_sweep_that_runs_is_not_started_twice(root: Path) -> None:
    file = written(root)
    first = sweeps.open_sweep(file)
    with pytest.raises(SpecDecError, match="is running already"):
        sweeps.open_sweep(file)
    first.run.end("KILLED", "stopped")
    again = sweeps.open_sweep(file)
    assert again.run.id == first.run.id
    again.run.end("KILLED", "stopped")
