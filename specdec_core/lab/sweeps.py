"""``specdec sweep FILE``: a grid of parameters as executions of a notebook, each a run under one parent run.

What is done is known by keys: the digest of code, notebook, parameters and inputs. A cell whose key belongs to a
finished run is not run again, whatever ended the sweep before: Ctrl-C, SIGKILL or a power cut. Each cell is a process
of its own, which ends when the sweep does; its run is then marked KILLED by whoever opens the store next
(`store.reap`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import SpecDecError
from . import provenance, workloads
from .engine import sigterm_interrupts
from .lineage import Run, open_run
from .models import ModelRef, hashes, locate, read_pair
from .params import load_profile, read_yaml
from .run import find_notebook, run_notebook
from .store import Store, open_store, owner, owner_is_gone, project_root, reap

LEFTOVER_SECONDS = 30.0  # for cells of a sweep that was killed to notice it and end


class SweepFile(BaseModel):
    """``params/sweeps/NAME.yaml``: which notebook, on which profile, with which values of which parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    notebook: str = Field(min_length=1)
    profile: str = Field("cpu", min_length=1)
    grid: dict[str, list[Any]] = Field(min_length=1)
    fixed: dict[str, Any] = Field(default_factory=dict)
    workers: int = Field(1, ge=1, le=1024)
    minutes: float | None = Field(None, gt=0)  # limit of a cell


@dataclass(frozen=True)
class Cell:
    """One point of the grid: what it sets, all its parameters, and the key by which its run is known."""

    values: dict[str, Any]
    overrides: tuple[str, ...]
    key: str

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items())


def read_sweep(path: str | Path) -> tuple[SweepFile, Path]:
    """The file, looked for as given and in ``params/sweeps``. Raises SpecDecError that names the key."""
    given = Path(path).expanduser()
    places = [given, project_root() / given, project_root() / "params" / "sweeps" / f"{given.stem}.yaml"]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        there = sorted(p.stem for p in (project_root() / "params" / "sweeps").glob("*.yaml"))
        names = ", ".join(there) or "none"
        raise SpecDecError(f"There is no sweep {str(path)!r}: give a YAML file, or one of {names}.")
    try:
        return SweepFile.model_validate(read_yaml(found)), found
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        allowed = ", ".join(SweepFile.model_fields)
        raise SpecDecError(f"{found.name}: {where}: {first['msg']}; allowed keys: {allowed}.") from None


def cells_of(sweep: SweepFile) -> list[Cell]:
    """Every combination, checked against the notebook's schema before anything is run."""
    notebook = find_notebook(sweep.notebook)
    if empty := [key for key, values in sweep.grid.items() if not values]:
        raise SpecDecError(f"grid.{empty[0]} is empty: give at least one value.")
    if both := set(sweep.grid) & set(sweep.fixed):
        raise SpecDecError(f"{sorted(both)[0]} stands in grid and in fixed: take it out of one of them.")
    code, found = code_digest(notebook), list[Cell]()
    for values in itertools.product(*sweep.grid.values()):
        own = dict(zip(sweep.grid, values, strict=True))
        overrides = tuple(f"{key}={_typed(value)}" for key, value in (sweep.fixed | own).items())
        params = load_profile(sweep.notebook, sweep.profile, overrides)
        found.append(Cell(own, overrides, provenance.sha256_json([code, params, _inputs(params)])))
    if len({cell.key for cell in found}) < len(found):
        raise SpecDecError("Two cells of the grid are the same: name each value once.")
    return found


def _typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def code_digest(notebook: Path) -> str:
    """SHA-256 over the package's own code and the notebook's source."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(provenance.notebook_sha256(notebook).encode())
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".yaml", ".jsonl")):
        digest.update(f"{path.relative_to(package)} {provenance.sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _inputs(params: Mapping[str, Any]) -> list[Any]:
    """Digests of what the parameters name: models and workload."""
    pair, found = read_pair(params["pair"]), list[Any]()
    found.append(provenance.sha256_json(pair.model_dump()))
    for ref in (pair.target, pair.draft):
        if isinstance(ref, ModelRef):
            found.append(hashes(locate(ref.ref, ref.revision).folder))
    if file := workloads.file_of(params["workload"]):
        found.append(provenance.sha256_file(file))
    return found


# --- the parent run, and what is done ---------------------------------------------------------------------


@dataclass
class Sweep:
    """A sweep under way: its parent run and the cells that are left."""

    spec: SweepFile
    cells: list[Cell]
    run: Run

    def done(self) -> dict[str, Any]:
        """Finished runs under this parent by key."""
        runs = children(self.run.store, self.run.id, "FINISHED")
        return {run.data.tags["sweep.key"]: run for run in runs if "sweep.key" in run.data.tags}


def children(store: Store, parent: str, status: str) -> list[Any]:
    found, token = list[Any](), None
    wanted = f"tags.`mlflow.parentRunId` = '{parent}' and attributes.status = '{status}'"
    while True:
        page = store.client.search_runs([store.experiment_id], wanted, max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def open_sweep(path: str | Path) -> Sweep:
    """Open the sweep's parent run, or go on with the one that did not end well.

    Raises:
        SpecDecError: a bad file or cell, or the same sweep is running in another process.
    """
    spec, file = read_sweep(path)
    cells = cells_of(spec)
    identity = provenance.sha256_json([spec.notebook, spec.profile, *sorted(cell.key for cell in cells)])
    store = open_store()
    reap(store)
    wanted = f"tags.`sweep.sha256` = '{identity}'"
    before = store.client.search_runs([store.experiment_id], wanted, order_by=["attributes.start_time DESC"])
    for run in before:
        if run.info.status == "RUNNING":
            raise SpecDecError(f"This sweep is running already (run {run.info.run_id}): let it end, or stop it.")
    unfinished = next((run for run in before if run.info.status != "FINISHED"), None)
    if unfinished is None:
        params = {"sweep": file.stem, "notebook": spec.notebook, "profile": spec.profile, "cells": len(cells)}
        named = f"sweep {file.stem} · {len(cells)} cells"
        return Sweep(spec, cells, open_run(named, kind="sweep", params=params, tags={"sweep.sha256": identity}))
    store.client.update_run(unfinished.info.run_id, status="RUNNING")
    again = Run(store, unfinished.info.run_id, owns=True, name=str(unfinished.info.run_name))
    again.set_tags({"owner": owner(), "error": ""})
    _wait_for_leftovers(store, again.id)
    return Sweep(spec, cells, again)


def _wait_for_leftovers(store: Store, parent: str) -> None:
    """Cells of a sweep that was killed notice it within seconds and end; until then they could finish a second time."""
    until = time.monotonic() + LEFTOVER_SECONDS
    while time.monotonic() < until:
        reap(store)
        alive = [r for r in children(store, parent, "RUNNING") if not owner_is_gone(r.data.tags.get("owner", ""))]
        if not alive:
            return
        time.sleep(0.5)
    raise SpecDecError(f"A cell of this sweep still runs (run {alive[0].info.run_id}): end its process, then resume.")


# --- running ----------------------------------------------------------------------------------------------

Command = Callable[[Sweep, Cell], list[str]]


def cell_command(sweep: Sweep, cell: Cell) -> list[str]:
    """The process that executes one cell."""
    task: dict[str, Any] = {"notebook": sweep.spec.notebook, "profile": sweep.spec.profile}
    task |= {"overrides": cell.overrides, "minutes": sweep.spec.minutes}
    task |= {"parent": sweep.run.id, "key": cell.key, "launcher": os.getpid()}
    return [sys.executable, "-m", "specdec_core.lab.sweeps", json.dumps(task)]


def run_cells(sweep: Sweep, workers: int, command: Command = cell_command, progress: Progress | None = None) -> None:
    """Run what is left, ``workers`` processes at a time. A cell that fails does not stop the others."""
    finished = sweep.done()
    left = [cell for cell in sweep.cells if cell.key not in finished]
    bar = None
    if progress:
        bar = progress.add_task("cells", total=len(sweep.cells), completed=len(sweep.cells) - len(left))
    running: dict[subprocess.Popen[bytes], Cell] = {}
    try:
        while left or running:
            while left and len(running) < workers:
                cell = left.pop(0)
                running[subprocess.Popen(command(sweep, cell), stdout=subprocess.DEVNULL)] = cell
            ended = [process for process in running if process.poll() is not None]
            for process in ended:
                cell = running.pop(process)
                if progress and bar is not None:
                    progress.update(bar, advance=1, description=f"{cell.name}: exit {process.returncode}")
            if not ended:
                time.sleep(0.1)
    finally:
        _end(running)


def _end(running: Mapping[subprocess.Popen[bytes], Cell]) -> None:
    """Ask cells that still run to end, so that each ends its run KILLED; then wait."""
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LEFTOVER_SECONDS)
        if process.poll() is None:
            process.kill()


def conclude(sweep: Sweep) -> int:
    """The parent's table and status: FINISHED where every cell is, else FAILED with the first that is not."""
    import pandas as pd

    done, rows = sweep.done(), list[dict[str, Any]]()
    for cell in sweep.cells:
        run = done.get(cell.key)
        row = cell.values | {"status": "FINISHED" if run else "not finished", "run": run.info.run_id if run else ""}
        rows.append(row | ({"finding": run.data.tags.get("finding", ""), **run.data.metrics} if run else {}))
    sweep.run.log_table(pd.DataFrame(rows), "cells")
    missing = [cell for cell in sweep.cells if cell.key not in done]
    sweep.run.log_metrics({"cells.finished": len(done), "cells": len(sweep.cells)})
    said = f"{len(done)} of {len(sweep.cells)} cells finished."
    sweep.run.finding(said)
    if missing:
        sweep.run.end("FAILED", f"{said} First of the others: {missing[0].name} (its run says why).")
    else:
        sweep.run.end("FINISHED")
    return int(bool(missing))


def command(path: str, workers: int | None = None) -> int:
    """Run or resume a sweep; 0 where every cell has finished."""
    with sigterm_interrupts():
        sweep = open_sweep(path)
        columns = (*Progress.get_default_columns()[:2], TextColumn("{task.completed}/{task.total}"))
        with sweep.run, Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
            run_cells(sweep, workers or sweep.spec.workers, progress=progress)
            code = conclude(sweep)
    print(f"{len(sweep.done())} of {len(sweep.cells)} cells finished; parent run {sweep.run.id}")
    return code


# --- one cell, in its own process -------------------------------------------------------------------------


def end_with(launcher: int) -> None:
    """SIGTERM to ourselves once the process that started us is gone, were it before we looked: nobody would wait for
    this cell any more, and a resumed sweep runs it again."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    task = json.loads(arguments[0])
    seconds = task["minutes"] * 60 if task["minutes"] else None
    tags = {"sweep.key": task["key"]}
    end_with(task["launcher"])
    result = run_notebook(
        task["notebook"], task["profile"], task["overrides"], timeout_s=seconds, parent=task["parent"], tags=tags
    )
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
