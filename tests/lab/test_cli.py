"""The command line: one line for what a user can mend, an exit code that tells, and a fast --help."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from books import write_notebook, write_profile

from specdec_core.errors import SpecDecError
from specdec_core.lab import cli, ui
from specdec_core.lab import run as launcher
from specdec_core.lab import store as store_module
from specdec_core.lab.lineage import open_run
from specdec_core.lab.run import RunResult
from specdec_core.lab.store import open_store


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Path) -> Path:
    shutil.copytree(warm / "mlruns", tmp_path / "mlruns")
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    write_notebook(tmp_path)
    write_profile(tmp_path)
    return tmp_path


def specdec(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the entry point."""
    monkeypatch.setattr(sys, "argv", ["specdec", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def plant(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Stand-ins for modules that other tests cover."""
    monkeypatch.setitem(sys.modules, f"specdec_core.lab.{module}", SimpleNamespace(**functions))


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, specdec_core.lab.cli; print([m for m in ('torch', 'mlflow', 'papermill') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_generate_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}
    plant(monkeypatch, "show", show_generate=lambda prompt, **options: got.update(prompt=prompt, **options))
    options = ("--gamma", "3", "--temperature", "0.5", "--top-k", "9", "--drafter", "self", "--no-baseline")
    assert specdec(monkeypatch, "generate", "Why?", *options) == 0
    assert got["prompt"] == "Why?"
    assert (got["gamma"], got["temperature"], got["top_k"], got["drafter"]) == (3, 0.5, 9, "self")
    assert got["baseline"] is False
    assert set(got) == {
        *("prompt", "pair", "drafter", "gamma", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed"),
        *("rule", "candidates", "model_gamma", "confidence", "control", "baseline"),
    }


def test_an_error_to_mend_is_one_line_on_stderr_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SpecDecError("No such model 'x[1]': name a folder or an id." + " long" * 60)

    plant(monkeypatch, "show", show_generate=refuse)
    assert specdec(monkeypatch, "generate", "Why?") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("No such model 'x[1]'")
    assert said.err.count("\n") == 1, "one line, however narrow the terminal"


def test_ctrl_c_is_exit_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    plant(monkeypatch, "show", show_generate=interrupted)
    assert specdec(monkeypatch, "generate", "Why?") == 130


def test_unknown_option_gets_the_usual_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert specdec(monkeypatch, "run", "00_quickstart", "--bogus") == 2
    said = capsys.readouterr().err
    assert "--bogus" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "there are: 00_quickstart"),
        ([], "--all"),
        (["00_quickstart", "--all"], "--all"),
        (["--all", "-p", "gamma=1"], "one notebook"),
    ],
)
def test_run_says_what_it_needs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert specdec(monkeypatch, "run", *arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("bad", "words"), [("gama=3", "did you mean 'gamma'"), ("gamma=x", "a whole number"), ("gamma", "key=value")]
)
def test_run_with_a_bad_parameter_exits_2_with_one_line_and_leaves_a_failed_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: str, words: str
) -> None:
    assert specdec(monkeypatch, "run", "00_quickstart", "--profile", "smoke", "-p", bad) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    store = open_store()
    assert [run.info.status for run in store.client.search_runs([store.experiment_id])] == ["FAILED"]


def test_run_all_ends_with_a_table_where_to_look_and_non_zero_if_one_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(root, name="01_theory_proof")
    here = open_store()
    ends = {
        "00_quickstart": RunResult("00_quickstart", "a" * 32, "FAILED", 60.0, "ValueError: why", 1, here),
        "01_theory_proof": RunResult("01_theory_proof", "b" * 32, "FINISHED", 90.0, "The law is unchanged.", 0, here),
    }
    monkeypatch.setattr(launcher, "run_notebook", lambda name, *_, **__: ends[name])
    monkeypatch.setattr(store_module, "open_store", lambda: pytest.fail("opened again: the table could be lost"))
    assert specdec(monkeypatch, "run", "--all", "--profile", "smoke") == 1
    said = capsys.readouterr()
    for word in (
        "FAILED",
        "FINISHED",
        "1.5",
        "The law is unchanged.",
        "make ui",
        "workflowType=machine_learning",
        "b" * 32,
    ):
        assert word in said.out
    assert said.err == "00_quickstart FAILED: ValueError: why\n"


def test_run_all_keeps_its_table_when_the_store_is_lost_half_way(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(root, name="01_theory_proof")
    here = open_store()

    def lost(name: str, *_: object, **__: object) -> RunResult:
        if name == "01_theory_proof":
            raise SpecDecError("The run store is gone: bring it back.")
        return RunResult(name, "a" * 32, "FINISHED", 60.0, "Found.", 0, here)

    monkeypatch.setattr(launcher, "run_notebook", lost)
    assert specdec(monkeypatch, "run", "--all", "--profile", "smoke") == 2
    said = capsys.readouterr()
    assert "Found." in said.out
    assert "a" * 32 in said.out
    assert said.err == "01_theory_proof FAILED: The run store is gone: bring it back.\n"


@pytest.mark.parametrize("arguments", [["generate", "a\udcffb"], ["run", "00_quickstart", "-p", "prompt=\udcff"]])
def test_text_that_is_not_utf_8_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    plant(monkeypatch, "show", show_generate=lambda *_, **__: pytest.fail("started"))
    assert specdec(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert "UTF-8" in said
    assert said.count("\n") == 1


def test_ui_leaves_a_servers_password_out_of_its_links() -> None:
    server = store_module.Store(None, "7", "http://user:secretpw@host:5000/")  # type: ignore[arg-type]
    assert ui.run_link(server, "abc") == "http://host:5000/#/experiments/7/runs/abc?workflowType=machine_learning"


def test_doctor_keeps_its_table_when_the_store_cannot_be_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, "doctor", report=lambda: [("gpu", "none", True, "")])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "foo://bar")
    assert specdec(monkeypatch, "doctor") == 1
    said = capsys.readouterr()
    assert "gpu" in said.out
    assert said.err.count("\n") == 1


def test_unwritable_store_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(tmp_path)
    (tmp_path / "mlruns").write_text("", encoding="utf-8")
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    assert specdec(monkeypatch, "run", "00_quickstart") == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert said.count("\n") == 1


def test_ui_prints_the_views_and_the_newest_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run("mine") as run:
        pass
    assert specdec(monkeypatch, "ui", "--print", "--port", "5055") == 0
    said = capsys.readouterr().out
    base = f"http://127.0.0.1:5055/#/experiments/{run.store.experiment_id}"
    assert f"{base}/runs?workflowType=machine_learning&viewStateShareKey=specdec\n" in said
    tags = run.store.client.get_experiment(run.store.experiment_id).tags
    assert "tags.`finding`" in tags["mlflow.sharedViewState.specdec"], "the view that the link names exists"
    assert "compareRunsMode=CHART" in said
    assert f"{base}/runs/{run.id}" in said


def test_ui_names_a_free_port_when_its_own_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert specdec(monkeypatch, "ui", "--port", str(taken.getsockname()[1])) == 2
    assert "in use" in capsys.readouterr().err


def test_ui_serves_this_store_on_this_computer_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        seen.update(command=" ".join(command), env=environment)

    monkeypatch.setattr(ui.os, "execve", become)
    assert specdec(monkeypatch, "ui", "--port", "5056") == 0
    assert f"--backend-store-uri sqlite:///{root}/mlruns/mlflow.db" in seen["command"]
    assert "--host 127.0.0.1" in seen["command"]
    assert "-w 1" in seen["command"]
    assert seen["env"]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (None, 0), (False, 1)])
def test_doctor_exits_1_if_something_is_to_be_mended(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool | None, code: int
) -> None:
    plant(monkeypatch, "doctor", report=lambda: [("gpu", "none", ok, "install a driver")])
    assert specdec(monkeypatch, "doctor") == code
    assert "gpu" in capsys.readouterr().out


def test_model_fetch_says_where_the_model_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, "models", fetch_default=lambda: Path("cache/smollm2"))
    assert specdec(monkeypatch, "model", "fetch") == 0
    assert "cache/smollm2" in capsys.readouterr().out
