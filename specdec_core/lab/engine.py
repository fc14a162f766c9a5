"""``papermill --engine specdec``: the parameters checked first, full lineage, an ending that is true.

papermill loads this module while it is itself half imported (entry point), so papermill is imported inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecDecError

if TYPE_CHECKING:
    from .lineage import Run

IOPUB_SECONDS = 600  # papermill's 4 s are fatal to a cell that prints much
LAUNCHER = "SPECDEC_LAUNCHER"  # process id of the launcher, if one started us


class BadNotebookInput(SpecDecError, click.ClickException):
    """Bad input, in the form in which papermill's command line prints one line and exits 2."""

    exit_code = 2

    def __init__(self, message: str):
        click.ClickException.__init__(self, message)


class SpecdecEngine:
    """A papermill engine (``papermill.engine`` entry point)."""

    @classmethod
    def execute_notebook(
        cls, nb: Any, kernel_name: str, output_path: str | None = None, input_path: str | None = None, **options: Any
    ) -> Any:
        """Execute ``nb`` inside a run. papermill itself raises for a failed cell after this returns.

        Raises:
            BadNotebookInput: parameters that the notebook does not take, or a store that cannot be written.
        """
        name = Path(input_path or "notebook").stem
        try:
            with _stops_are_exceptions():
                if os.environ.get(LAUNCHER) == str(os.getppid()):  # it owns the run: it checked, and it will judge
                    _execute(nb, kernel_name, output_path, options)
                else:
                    _execute_in_own_run(nb, kernel_name, output_path, input_path or name, options)
        except SpecDecError as error:
            raise BadNotebookInput(str(error)) from None
        return nb

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> Any:
        from papermill.engines import NBClientEngine

        return NBClientEngine.nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> Any:
        from papermill.engines import NBClientEngine

        return NBClientEngine.nb_language(nb, language)


def _execute(nb: Any, kernel_name: str, output_path: str | None, options: dict[str, Any]) -> None:
    from papermill.engines import NBClientEngine

    with _ipc() as config:
        ours = {"iopub_timeout": IOPUB_SECONDS, "config": config}
        NBClientEngine.execute_notebook(nb, kernel_name, output_path=output_path, **ours | options)


def _execute_in_own_run(
    nb: Any, kernel_name: str, output_path: str | None, input_path: str, options: dict[str, Any]
) -> None:
    from .executed import cell_error
    from .lineage import open_run

    with open_run(Path(input_path).stem, notebook=input_path) as run, _attaching(run, nb, Path(input_path).stem):
        _check(run, Path(input_path).stem, nb)
        with _kernel_environment(run.id):
            _execute(nb, kernel_name, output_path, options)
        if error := cell_error(nb):
            run.end("FAILED", error)


def _check(run: Run, name: str, nb: Any) -> None:
    """What was injected, against the schema. A notebook without one (somebody's own) takes what it likes."""
    from .lineage import describe
    from .models import read_pair
    from .params import NOTEBOOKS, check

    given = dict(nb.metadata.get("papermill", {}).get("parameters", {}))
    if name in NOTEBOOKS:
        known = check(name, given).model_dump()
        read_pair(known["pair"])
        given = {key: known[key] for key in given}
    describe(run, given, name)


@contextlib.contextmanager
def _attaching(run: Run, nb: Any, name: str) -> Iterator[None]:
    """Attach the executed copy whatever happens."""
    import nbformat

    from .executed import attach_executed

    try:
        yield
    finally:
        if any(cell.get("execution_count") for cell in nb.cells):
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / f"{name}.ipynb"
                nbformat.write(nb, copy)
                attach_executed(run, copy)


@contextlib.contextmanager
def _kernel_environment(run_id: str) -> Iterator[None]:
    """What the kernel inherits: the run to attach to and the project it belongs to, from whichever folder."""
    from .store import project_root, tracking_uri

    given = {"MLFLOW_RUN_ID": run_id, "SPECDEC_ROOT": str(project_root()), "MLFLOW_DISABLE_TELEMETRY": "true"}
    if "MLFLOW_TRACKING_URI" in os.environ:
        given["MLFLOW_TRACKING_URI"] = tracking_uri()
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _ipc() -> Iterator[Any]:
    """Kernel configuration: Unix sockets in a folder of their own, where no other notebook can take the port."""
    from traitlets.config import Config

    with tempfile.TemporaryDirectory(prefix="sd-") as folder:
        config = Config()
        config.KernelManager.shutdown_wait_time = 2.0  # a cell that is being stopped does not answer
        if os.name == "posix" and len(folder) < 80:  # a socket's path holds about 100 characters
            config.KernelManager.transport = "ipc"
            config.KernelManager.connection_file = f"{folder}/k.json"
        yield config


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that whoever is stopped still ends its run. Signals reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _stops_are_exceptions() -> Iterator[None]:
    """A stop ends the run as an error does; so does the death of the launcher: nobody would end the run then."""
    with sigterm_interrupts():
        if os.environ.get(LAUNCHER) == str(os.getppid()):
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        yield


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
