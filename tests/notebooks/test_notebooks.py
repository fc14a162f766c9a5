"""The notebooks themselves: in order as committed, and executed on the smoke profile with the real pair."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from specdec_core.lab.params import NOTEBOOKS
from specdec_core.lab.run import run_notebook
from specdec_core.lab.store import open_store

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
BOOKS = sorted(NOTEBOOKS)


def cells(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells


def test_every_notebook_has_a_schema_and_every_schema_a_notebook():
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == BOOKS


@pytest.mark.parametrize("name", BOOKS)
def test_the_parameters_cell_holds_the_defaults_of_the_schema(name):
    tagged = [c for c in cells(name) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    namespace: dict = {}
    exec(tagged[0].source, namespace)
    namespace.pop("__builtins__")
    assert namespace == NOTEBOOKS[name]().model_dump()


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_checks_its_parameters_first_and_closes_its_run_last(name):
    code = [c.source for c in cells(name) if c.cell_type == "code"]
    assert f'validated("{name}", globals())' in code[1]
    assert code[-1] == "run.close()"


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_opens_with_a_title_and_its_question_and_has_a_finding_that_is_computed(name):
    all_cells = cells(name)
    assert all_cells[0].cell_type == "markdown"
    assert all_cells[0].source.startswith("# ")
    assert "**Question" in all_cells[0].source
    assert any("run.finding(finding)" in c.source for c in all_cells if c.cell_type == "code")


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_holds_no_logic_of_its_own(name):
    """Definitions belong in the package; a notebook may hand small callbacks over."""
    code = "\n".join(c.source for c in cells(name) if c.cell_type == "code")
    assert "class " not in code
    assert len(re.findall(r"^\s*def ", code, re.MULTILINE)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_on_the_smoke_profile_and_logs_its_figures_records_and_finding(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    result = run_notebook(name, "smoke", timeout_s=1200)  # how fast is no matter here
    assert (result.status, result.exit_code) == ("FINISHED", 0), result.note
    store = open_store()
    run = store.client.get_run(result.run_id)
    tags = run.data.tags
    figures = [t for t in tags if t.startswith("figure.")]
    assert len(figures) >= 3
    assert all(tags[f] for f in figures), "every figure states a finding"
    assert tags["finding"]
    assert len(tags["tokens.sha256"]) == 64
    assert len(tags["model.target.weights_sha256"]) == 64
    assert any(t.startswith("prompts.") for t in tags)
    assert run.inputs.dataset_inputs
    assert run.data.metrics
    folder = tmp_path / "artifacts" / result.run_id / "artifacts"
    assert (folder / "notebook" / f"{name}.ipynb").is_file()
    page = (folder / "notebook" / f"{name}.html").read_text()
    assert "Traceback" not in page
    book = (folder / "notebook" / f"{name}.ipynb").read_text()
    assert "OutputModel" not in book, "nbclient may wait for ever for a cell with an Output widget (its issue 312)"
    records = list((folder / "records").glob("*.jsonl"))
    assert records
    steps = [json.loads(line) for path in records for line in path.read_text().splitlines()]
    assert {"prefill", "speculative"} <= {s["kind"] for s in steps}
    if name == "00_quickstart":
        traces = store.client.search_traces(locations=[store.experiment_id])
        assert len(traces) == 1
        spans = {s.name for s in traces[0].data.spans}
        assert {"draft", "score", "accept", "resample", "repeat"} <= spans
