"""However a notebook is started and however it ends, its run says so."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from books import CLOSE, artifact_text, artifacts, runs, write_notebook, write_profile

from specdec_core.errors import SpecDecError
from specdec_core.lab import lineage
from specdec_core.lab import run as launcher
from specdec_core.lab.run import RunResult, run_all, run_notebook
from specdec_core.lab.store import EXPERIMENT, open_store, reap

SLEEPER = "import os, pathlib, time\npathlib.Path('../pid').write_text(str(os.getpid()))\ntime.sleep(300)"
LAUNCH = [sys.executable, "-m", "specdec_core.lab.cli", "run", "00_quickstart", "--profile", "smoke"]
pytestmark = pytest.mark.slow  # each starts processes and kernels


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, warm: Path) -> Path:
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(warm / "mlruns", folder / "mlruns")
    _isolate(folder, monkeypatch)
    return folder


def _isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(folder)
    monkeypatch.setenv("SPECDEC_ROOT", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.chdir(folder)


def status(run_id: str) -> str:
    return str(open_store().client.get_run(run_id).info.status)


def papermill(root: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    book = str(root / "notebooks" / "00_quickstart.ipynb")
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", book, str(root / "out.ipynb"), *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=cwd or root, timeout=120
    )


def wait_for(path: Path, seconds: float = 60) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and path.read_text(encoding="utf-8"):
            return path.read_text(encoding="utf-8")
        time.sleep(0.05)
    raise AssertionError(f"{path.name} did not appear")


def wait_until_dead(pid: int, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as dead: its parent has yet to notice
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "a process of the notebook is still alive"
            time.sleep(0.1)


# --- the launcher -----------------------------------------------------------------------------------------


def test_eight_notebooks_started_at_once_on_no_store_all_finish_in_the_right_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _isolate(tmp_path, monkeypatch)
    write_notebook(tmp_path)
    book = str(tmp_path / "notebooks" / "00_quickstart.ipynb")
    plain = [
        [sys.executable, "-m", "papermill", "--no-progress-bar", book, str(tmp_path / f"{i}.ipynb")] for i in range(4)
    ]
    started = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in [LAUNCH, *plain, LAUNCH, LAUNCH, LAUNCH]
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 8, said
    store = open_store()
    found = runs(store)
    assert [run.info.status for run in found] == ["FINISHED"] * 8
    assert {run.info.experiment_id for run in found} == {store.client.get_experiment_by_name(EXPERIMENT).experiment_id}
    assert all(run.data.metrics == {"answer": 42.0} for run in found)
    assert store.client.search_runs(["0"]) == [], "nothing slipped into the default experiment"


def test_a_finished_notebook_has_its_parameters_finding_executed_copy_and_page(root: Path) -> None:
    write_notebook(root)
    result = run_notebook("00_quickstart", "smoke", ["prompt=123", "temperature=1e-3"], out=root / "copy.ipynb")
    assert (result.status, result.note, result.exit_code) == ("FINISHED", "Forty-two tokens.", 0)
    client = open_store().client
    run = client.get_run(result.run_id)
    assert run.data.params["prompt"] == "123"
    assert run.data.params["gamma"] == "2"
    assert run.data.tags["profile"] == "smoke"
    assert {"notebook/00_quickstart.ipynb", "notebook/00_quickstart.html"} <= set(artifacts(client, result.run_id))
    assert "notebook_run" in artifact_text(client, result.run_id, "notebook/00_quickstart.html"), "inputs are shown"
    assert (root / "copy.ipynb").is_file()
    assert (root / "mlruns" / "executed" / result.run_id / "00_quickstart.ipynb").is_file()


def test_a_failing_cell_fails_the_run_with_lineage_and_executed_copy(root: Path) -> None:
    write_notebook(root, "run.log_metrics({'before': 1})", "raise ValueError('no such thing\\nmore')", CLOSE)
    result = run_notebook("00_quickstart", "smoke")
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert result.note == "ValueError: no such thing (in cell [6])"
    client = open_store().client
    run = client.get_run(result.run_id)
    assert run.data.metrics == {"before": 1.0}
    assert run.data.tags["notebook.sha256"]
    assert "no such thing" in run.data.tags["mlflow.note.content"]
    assert "ValueError" in artifact_text(client, result.run_id, "notebook/00_quickstart.html")


def test_a_killed_kernel_fails_the_run(root: Path) -> None:
    write_notebook(root, "import os\nos.kill(os.getpid(), 9)", bare=True)
    result = run_notebook("00_quickstart", "smoke")
    assert (result.status, status(result.run_id)) == ("FAILED", "FAILED")
    assert "kernel died" in result.note


def test_a_time_out_fails_the_run_and_leaves_no_process_behind(root: Path) -> None:
    write_notebook(
        root,
        "import os, pathlib, subprocess, time\nchild = subprocess.Popen(['sleep', '300'], start_new_session=True)",
        "pathlib.Path('../pids').write_text(f'{os.getpid()} {child.pid}')\ntime.sleep(300)",
        bare=True,
    )
    began = time.monotonic()
    result = run_notebook("00_quickstart", "smoke", timeout_s=12)
    assert (result.status, status(result.run_id)) == ("FAILED", "FAILED")
    assert result.note.startswith("time-out")
    assert time.monotonic() - began < 60
    for pid in wait_for(root / "pids").split():
        wait_until_dead(int(pid))
    assert "notebook/00_quickstart.ipynb" in artifacts(open_store().client, result.run_id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_launcher_marks_its_run_killed(root: Path, number: signal.Signals) -> None:
    write_notebook(root, SLEEPER, bare=True)
    # a test suite that runs in the background has SIGINT ignored, and its children would inherit that
    process = subprocess.Popen(LAUNCH, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    kernel = int(wait_for(root / "pid"))
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    assert [run.info.status for run in runs()] == ["KILLED"]
    wait_until_dead(kernel)


def test_a_launcher_killed_outright_takes_its_notebook_with_it_and_is_reaped(root: Path) -> None:
    write_notebook(root, SLEEPER, bare=True)
    process = subprocess.Popen(LAUNCH)
    kernel = int(wait_for(root / "pid"))
    process.kill()
    process.wait()
    wait_until_dead(kernel)
    run_notebook("00_quickstart", "smoke", ["gama=1"])  # any next use of the launcher reaps, even one that is refused
    assert sorted(run.info.status for run in runs()) == ["FAILED", "KILLED"]


@pytest.mark.parametrize(
    ("yaml", "overrides", "words"),
    [
        ("gama: 2\n", [], "did you mean 'gamma'"),
        ("gamma: 2\n", ["gamma=four"], "a whole number"),
        ("x", [], "key: value"),
        ("gamma: 2\n", ["pair=nope"], "There is no pair 'nope'"),
    ],
)
def test_bad_parameters_leave_a_failed_run_and_no_kernel_is_started(
    root: Path, monkeypatch: pytest.MonkeyPatch, yaml: str, overrides: list[str], words: str
) -> None:
    write_notebook(root)
    write_profile(root, yaml)
    monkeypatch.setattr(launcher, "_execute", lambda *_: pytest.fail("executed"))
    result = run_notebook("00_quickstart", "smoke", overrides)
    assert (result.status, result.exit_code, status(result.run_id)) == ("FAILED", 2, "FAILED")
    assert words in result.note
    assert runs()[0].data.tags["notebook.sha256"]


@pytest.mark.parametrize("bad", ["file/copy.ipynb", "folder", "notebooks/00_quickstart.ipynb"])
def test_an_impossible_out_is_found_before_anything_is_executed(
    root: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    source = write_notebook(root).read_bytes()
    (root / "file").touch()
    (root / "folder").mkdir()
    monkeypatch.setattr(launcher, "_execute", lambda *_: pytest.fail("executed"))
    result = run_notebook("00_quickstart", "smoke", out=root / bad)
    assert (result.status, result.exit_code, status(result.run_id)) == ("FAILED", 2, "FAILED")
    assert "--out" in result.note
    assert (root / "notebooks" / "00_quickstart.ipynb").read_bytes() == source


def test_out_makes_its_folder_and_a_copy_that_fails_late_costs_no_good_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(root)

    def execute(run: object, source: Path, executed: Path, *_: object) -> None:
        shutil.copyfile(source, executed)

    monkeypatch.setattr(launcher, "_execute", execute)
    out = root / "new" / "deep" / "copy.ipynb"
    assert run_notebook("00_quickstart", "smoke", out=out).status == "FINISHED"
    assert out.is_file()
    monkeypatch.setattr(launcher, "_check_out", lambda *_: out.unlink() or out.mkdir())
    result = run_notebook("00_quickstart", "smoke", out=out)
    assert (result.status, result.exit_code, status(result.run_id)) == ("FINISHED", 0, "FINISHED")
    assert "--out" in capsys.readouterr().err


def test_a_store_that_is_gone_at_the_end_loses_no_result(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_notebook(root)

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("connection refused")

    def execute(run: lineage.Run, *_: object) -> None:
        monkeypatch.setattr(run.store.client, "set_terminated", gone)
        monkeypatch.setattr(run.store.client, "get_run", gone)

    monkeypatch.setattr(launcher, "_execute", execute)
    result = run_notebook("00_quickstart", "smoke")
    assert (result.status, result.exit_code) == ("FAILED", 1)
    assert "connection refused" in result.note


def test_parameters_as_given_do_not_stay_on_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx"
    write_notebook(root, "raise SystemExit(1)", bare=True)
    result = run_notebook("00_quickstart", "smoke", [f"prompt={secret}"], out=root / "copy.ipynb")
    folder = root / "mlruns" / "executed" / result.run_id
    assert (folder / "00_quickstart.ipynb").is_file()
    assert not (folder / "params.yaml").exists()
    for path in root.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path.name


def test_a_full_disk_fails_the_run_and_leaves_earlier_runs_untouched(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_notebook(root)
    monkeypatch.setattr(launcher, "_execute", lambda *_: None)
    earlier = run_notebook("00_quickstart", "smoke")
    before = open_store().client.get_run(earlier.run_id).to_dictionary()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher, "_execute", full)
    result = run_notebook("00_quickstart", "smoke")
    assert (result.status, status(result.run_id)) == ("FAILED", "FAILED")
    assert "disk is full" in result.note
    assert open_store().client.get_run(earlier.run_id).to_dictionary() == before


def test_a_page_that_cannot_be_attached_costs_the_success_and_never_the_ending(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_notebook(root)
    monkeypatch.setattr(launcher, "_execute", lambda *_: None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher, "attach_executed", full)
    result = run_notebook("00_quickstart", "smoke")
    assert (result.status, status(result.run_id)) == ("FAILED", "FAILED")


def test_unknown_notebook_names_those_there_are_and_makes_no_run(root: Path) -> None:
    write_notebook(root)
    with pytest.raises(SpecDecError, match="there are: 00_quickstart"):
        run_notebook("quickstart")
    assert runs() == []


def test_run_all_goes_in_order_and_on_after_a_failure_but_not_after_a_stop(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("01_theory_proof", "00_quickstart"):
        write_notebook(root, name=name)
    ends = {"00_quickstart": "FAILED", "01_theory_proof": "FINISHED"}
    monkeypatch.setattr(launcher, "run_notebook", lambda name, *_, **__: RunResult(name, "", ends[name], 1.0, "", 0))
    assert [result.notebook for result in run_all("smoke")] == ["00_quickstart", "01_theory_proof"]
    ends["00_quickstart"] = "KILLED"
    assert [result.status for result in run_all("smoke")] == ["KILLED"]


# --- papermill with our engine ----------------------------------------------------------------------------


def test_engine_finishes_with_executed_copy_and_page_from_any_folder(root: Path, tmp_path: Path) -> None:
    write_notebook(root)
    profile = root / "params" / "00_quickstart" / "smoke.yaml"
    done = papermill(root, "--engine", "specdec", "-f", str(profile), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = runs()
    assert (run.info.status, run.data.params["gamma"], run.data.params["seed"]) == ("FINISHED", "2", "0")
    assert run.data.metrics == {"answer": 42.0}
    kept = artifacts(open_store().client, run.info.run_id)
    assert {"notebook/00_quickstart.ipynb", "notebook/00_quickstart.html"} <= set(kept)


def test_engine_refuses_a_pair_that_is_not_there_before_executing(root: Path) -> None:
    write_notebook(root, "import pathlib; pathlib.Path('reached').touch()")
    done = papermill(root, "--engine", "specdec", "--log-level", "ERROR", "-p", "pair", "nope")
    assert done.returncode == 2
    assert "There is no pair 'nope'" in done.stderr
    assert [run.info.status for run in runs()] == ["FAILED"]
    assert not (root / "reached").exists()


def test_engine_fails_the_run_for_a_failing_cell(root: Path) -> None:
    write_notebook(root, "1 / 0")
    assert papermill(root, "--engine", "specdec").returncode != 0
    (run,) = runs()
    assert run.info.status == "FAILED"
    assert "ZeroDivisionError" in run.data.tags["error"]
    assert "notebook/00_quickstart.html" in artifacts(open_store().client, run.info.run_id)


def test_engine_refuses_a_misspelt_parameter_in_one_line_before_executing(root: Path) -> None:
    write_notebook(root)
    done = papermill(root, "--engine", "specdec", "--log-level", "ERROR", "-p", "gama", "5")
    assert done.returncode == 2
    assert "did you mean 'gamma'" in done.stderr
    assert "Traceback" not in done.stderr
    assert [run.info.status for run in runs()] == ["FAILED"]


# --- plain papermill --------------------------------------------------------------------------------------


def test_plain_papermill_failing_cell_fails_the_run_from_any_folder(root: Path, tmp_path: Path) -> None:
    write_notebook(root, "1 / 0")
    assert papermill(root, cwd=tmp_path).returncode != 0
    (run,) = runs()
    assert run.info.status == "FAILED"
    assert "ZeroDivisionError" in run.data.tags["error"]


def test_plain_papermill_bad_parameters_fail_in_the_first_cell_and_leave_a_failed_run(root: Path) -> None:
    write_notebook(root, "import pathlib; pathlib.Path('reached').touch()")
    done = papermill(root, "-p", "gama", "5", "-p", "gamma", "four")
    assert done.returncode != 0
    assert "did you mean 'gamma'" in done.stderr
    assert "gamma = 'four'" in done.stderr
    (run,) = runs()
    assert run.info.status == "FAILED"
    assert "'gama'" in run.data.tags["error"]
    assert not (root / "reached").exists()


def test_plain_papermill_killed_kernel_is_reaped_as_killed(root: Path) -> None:
    write_notebook(root, "import os\nos.kill(os.getpid(), 9)")
    assert papermill(root).returncode != 0
    store = open_store()
    assert [run.info.status for run in runs(store)] == ["RUNNING"]
    reap(store)
    assert [run.info.status for run in runs(store)] == ["KILLED"]


def test_launcher_follows_a_tracking_uri_of_the_environment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "mlruns", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere/mlflow.db")  # relative: the kernel has another cwd
    write_notebook(root)
    result = run_notebook("00_quickstart", "smoke")
    assert result.status == "FINISHED", result.note
    assert [run.data.metrics for run in runs()] == [{"answer": 42.0}]
    assert os.environ["MLFLOW_TRACKING_URI"] == "sqlite:///elsewhere/mlflow.db"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert runs() == []
