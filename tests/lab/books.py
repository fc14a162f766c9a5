"""Tiny notebooks and a project folder of their own, for the tests of lineage and launcher."""

from __future__ import annotations

from pathlib import Path

import nbformat
from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun

from specdec_core.lab.store import EXPERIMENT, Store, open_store

PARAMETERS = "gamma = 4\nseed = 0"
CHECK = 'from specdec_core.lab.params import validated\nP = validated("00_quickstart", globals())'
OPEN = 'from specdec_core.lab.lineage import notebook_run\nrun = notebook_run("00_quickstart", P)'
CLOSE = 'run.log_metrics({"answer": 42.0})\nrun.finding("Forty-two tokens.")\nrun.close()'


def write_notebook(root: Path, *cells: str, name: str = "00_quickstart", bare: bool = False) -> Path:
    """A notebook with parameters, check and run opened, then ``cells`` (by default one that closes the run).

    ``bare`` leaves check and run out: that kernel starts seconds sooner.
    """
    codes = [PARAMETERS, *(() if bare else (CHECK, OPEN)), *(cells or (CLOSE,))]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    book.cells[0].metadata["tags"] = ["parameters"]
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


def write_profile(root: Path, text: str = "gamma: 2\n", name: str = "00_quickstart", profile: str = "smoke") -> Path:
    path = root / "params" / name / f"{profile}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def runs(store: Store | None = None) -> list[MlflowRun]:
    """Every run of the store, newest first."""
    store = store or open_store()
    return list(store.client.search_runs([store.experiment_id]))


def artifacts(client: MlflowClient, run_id: str, folder: str = "") -> list[str]:
    """Paths of all artifacts of a run."""
    found: list[str] = []
    for item in client.list_artifacts(run_id, folder or None):
        found += artifacts(client, run_id, item.path) if item.is_dir else [item.path]
    return found


def artifact_text(client: MlflowClient, run_id: str, path: str) -> str:
    return Path(client.download_artifacts(run_id, path)).read_text(encoding="utf-8")


__all__ = [
    "CHECK",
    "CLOSE",
    "EXPERIMENT",
    "OPEN",
    "PARAMETERS",
    "artifact_text",
    "artifacts",
    "runs",
    "write_notebook",
    "write_profile",
]
