"""The launcher: one operating-system process per notebook, a limit in time, and a run that ends truthfully.

The launcher owns the run. It opens it before anything is checked, hands ``MLFLOW_RUN_ID`` to the process that
executes the notebook (papermill with our engine), and sets the final status itself, so neither a dead kernel
nor a killed process can leave a run FINISHED that was not, or RUNNING for ever.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from ..errors import SpecDecError
from .engine import LAUNCHER, sigterm_interrupts
from .executed import attach_executed, cell_error
from .lineage import Run, describe, one_line, open_run, verdict
from .masking import mask
from .models import read_pair
from .params import NOTEBOOKS, load_profile
from .store import Store, database_path, disk_is_full, project_root, release_reserve, tracking_uri

TIMEOUT_MINUTES = {"smoke": 5.0, "cpu": 20.0, "gpu": 60.0, "full": 12 * 60.0}
_GRACE_SECONDS = 8.0  # for papermill to save the cell that is running, before the process is killed
_DEAD_KERNEL = 138  # papermill's exit code


@dataclass(frozen=True)
class RunResult:
    """How a notebook's run ended. ``note`` is its finding, or in one line why it failed."""

    notebook: str
    run_id: str
    status: str
    seconds: float
    note: str
    exit_code: int
    store: Store | None = None  # where it is recorded, if it is


class NotebookFailed(Exception):
    """The notebook ran and ended badly; the message is the one line that the run keeps."""


def run_notebook(
    name: str,
    profile: str = "cpu",
    overrides: Sequence[str] = (),
    out: Path | None = None,
    timeout_s: float | None = None,
    parent: Run | str | None = None,
    tags: Mapping[str, Any] | None = None,
) -> RunResult:
    """Execute a notebook in a process of its own. The executed copy also goes to ``out`` if given.

    Raises:
        SpecDecError: there is no such notebook, or the store cannot be written: nothing could be recorded then.
    """
    source = find_notebook(name)
    began, exit_code = time.monotonic(), 0
    with sigterm_interrupts():
        said = {"profile": profile, "arguments": " ".join(overrides), **(tags or {})}
        run = open_run(name, notebook=name, parent=parent, tags=said)
        executed = _executed_folder(run) / f"{name}.ipynb"
        status, error = "FINISHED", ""
        try:
            params = load_profile(name, profile, overrides)
            describe(run, params, name)
            with contextlib.chdir(source.parent):  # where the notebook will look for it
                read_pair(params["pair"])
            if out is not None:
                _check_out(out, source)
            limit = timeout_s or TIMEOUT_MINUTES.get(profile, 20.0) * 60
            _execute(run, source, executed, params, limit)
        except (Exception, KeyboardInterrupt) as fault:
            status, error = ("FAILED", str(fault)) if isinstance(fault, NotebookFailed) else verdict(fault)
            exit_code = 2 if isinstance(fault, SpecDecError) else 130 if status == "KILLED" else 1
        with _uninterrupted():
            status, error = _conclude(run, executed, out, status, error)
            exit_code = exit_code or int(status != "FINISHED")
    note = error
    if not note:
        with contextlib.suppress(Exception):  # it is recorded: a store that is gone by now takes nothing away
            note = run.store.client.get_run(run.id).data.tags.get("finding", "")
    return RunResult(name, run.id, status, time.monotonic() - began, note, exit_code, run.store)


def run_all(profile: str = "cpu", timeout_s: float | None = None) -> list[RunResult]:
    """Every notebook in number order, each with its own limit in time. A failure does not stop the next; Ctrl-C does.

    Raises:
        SpecDecError: there are no notebooks, or the store cannot be written.
    """
    names = available()
    if not names:
        raise SpecDecError(f"No notebooks in {project_root() / 'notebooks'}: run this inside the project.")
    results: list[RunResult] = []
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name} ({profile}) ...", flush=True)
        try:
            results.append(run_notebook(name, profile, timeout_s=timeout_s))
        except SpecDecError as error:  # no run could be opened; what ran before is still told
            if not results:
                raise
            results.append(RunResult(name, "", "FAILED", 0.0, str(error), 2))
        print(f"      {results[-1].status} after {results[-1].seconds:.0f} s", flush=True)
        if results[-1].status == "KILLED":
            break
    return results


def find_notebook(name: str) -> Path:
    """The notebook's file; the message of the error lists the notebooks that there are."""
    path = project_root() / "notebooks" / f"{name}.ipynb"
    if name in NOTEBOOKS and path.is_file():
        return path
    known = ", ".join(available()) or f"none in {project_root() / 'notebooks'}"
    raise SpecDecError(f"Unknown notebook '{name}'; there are: {known}.")


def available() -> list[str]:
    """Notebooks that can be run, in number order."""
    return sorted(n for n in NOTEBOOKS if (project_root() / "notebooks" / f"{n}.ipynb").is_file())


def _check_out(out: Path, source: Path) -> None:
    """Find out before minutes of work whether the copy can be written."""
    if out.resolve() == source.resolve():
        raise SpecDecError(f"--out {out} is the notebook itself: give another file.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists():
            out.open("r+b").close()
        else:
            out.touch()
            out.unlink()
    except OSError as error:
        raise SpecDecError(f"--out {out} cannot be written ({error.strerror}): give another file.") from None


def _executed_folder(run: Run) -> Path:
    database = database_path(run.store.uri)
    base = database.parent if database else project_root() / "mlruns"
    folder = base / "executed" / run.id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _execute(run: Run, source: Path, executed: Path, params: dict[str, Any], limit: float) -> None:
    """Run papermill and wait. Raises NotebookFailed, or KeyboardInterrupt after everything it started is dead."""
    arguments = executed.with_name("params.yaml")
    arguments.touch(mode=0o600)  # as given, secrets and all; deleted as soon as the notebook has ended
    arguments.write_text(yaml.safe_dump(params, allow_unicode=True), encoding="utf-8")
    command = [sys.executable, "-m", "papermill", "--engine", "specdec", "--no-progress-bar"]
    command += ["-f", str(arguments), "--cwd", str(source.parent), str(source), str(executed)]
    environment = os.environ | {
        "MLFLOW_RUN_ID": run.id,
        "SPECDEC_ROOT": str(project_root()),
        LAUNCHER: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    if "MLFLOW_TRACKING_URI" in os.environ:
        environment["MLFLOW_TRACKING_URI"] = tracking_uri()
    with executed.with_name("log.txt").open("wb") as log:
        # a session of its own: Ctrl-C reaches the launcher alone, which then ends the notebook in order
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            reason = f"time-out: not done after {limit / 60:.3g} min (--timeout MIN gives it longer)"
            raise NotebookFailed(reason) from None
        finally:
            with _uninterrupted():
                _end_tree(process)
                arguments.unlink(missing_ok=True)
    if code != 0:
        raise NotebookFailed(_reason(run, executed, code))


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """End the process, its kernel (which has a session of its own) and all that they started."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_SECONDS)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()  # psutil compares start times, so a reused pid is safe
        psutil.wait_procs(family, timeout=5)
    process.wait()


def _reason(run: Run, executed: Path, code: int) -> str:
    """Why the process ended with ``code``, from the most to the least exact source."""
    import nbformat

    if code == _DEAD_KERNEL:
        return "the kernel died (killed, or out of memory)"
    if code < 0:
        return f"the notebook's process was killed by {signal.Signals(-code).name}"
    with contextlib.suppress(ValueError, OSError):
        if executed.is_file() and (error := cell_error(nbformat.read(executed, as_version=4))):
            return error
    if told := run.store.client.get_run(run.id).data.tags.get("error"):
        return told
    if disk_is_full(run.store.uri):
        return "the disk is full: free some space and run again"
    lines = executed.with_name("log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else f"exit code {code}"


def _conclude(run: Run, executed: Path, out: Path | None, status: str, error: str) -> tuple[str, str]:
    """Attach what there is, then set the status. A fault in attaching is told, and never costs the status."""
    try:
        if disk_is_full(run.store.uri):
            release_reserve(run.store.uri)  # room for the last words
        attach_executed(run, executed)
        log = executed.with_name("log.txt")
        if log.is_file():
            run.log_text(log.read_text(encoding="utf-8", errors="replace"), "notebook/log.txt")
            log.write_text(mask(log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    except Exception as fault:
        if status == "FINISHED":
            status, error = verdict(fault)
    if out is not None and executed.is_file():
        try:
            shutil.copyfile(executed, out)
        except OSError as fault:  # the run itself is none the worse
            print(f"--out {out} could not be written ({fault.strerror})", file=sys.stderr)
    try:
        run.end(status, error)
    except Exception as fault:
        status = "FAILED" if status == "FINISHED" else status
        error = error or f"its end could not be recorded ({one_line(str(fault))})"
    return status, error


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ending a run takes a second or two; a second Ctrl-C must not cut it in half."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
