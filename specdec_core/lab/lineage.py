"""One MLflow run with all that produced it, however the notebook was started.

``open_run`` opens a run and is a context manager: leaving it normally ends the run FINISHED, an error FAILED,
an interruption KILLED. ``notebook_run`` is the same for a notebook's many cells: it attaches to the run that a
launcher opened (``MLFLOW_RUN_ID``), whose status is the launcher's business; else this kernel owns the run,
a failing cell ends it FAILED, and a kernel that stops before ``close()`` ends it KILLED. An owner that was
killed outright is found by the reaper (``store.reap``), which runs whenever a run is opened.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import io
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..errors import SpecDecError
from . import note, provenance
from .masking import mask, masked
from .store import Store, open_store, owner, reap, release_reserve, started_by

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from pydantic import BaseModel

    from ..api import Pair

_BATCH = 100


class Run:
    """A run that is being written. All texts are masked on their way in; ``id`` is MLflow's run id."""

    def __init__(self, store: Store, run_id: str, *, owns: bool, name: str):
        self.store = store
        self.id = run_id
        self.owns = owns
        self.name = mask(name)
        self.status: str | None = None  # set once, when the run ends

    # --- what happened ------------------------------------------------------------------------------------

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        entities = [RunTag(key, mask(str(value))) for key, value in tags.items()]
        for batch in _batches(entities, _BATCH):
            self.store.client.log_batch(self.id, tags=batch)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Parameters, once each. MLflow's are write-once: a changed value is refused."""
        from mlflow.entities import Param

        texts = {key: mask(str(value)) for key, value in params.items()}
        known = self.store.client.get_run(self.id).data.params
        for key in texts.keys() & known.keys():
            if texts[key][:6000] != known[key]:
                raise SpecDecError(
                    f"Parameter {key} was {known[key]} at first and is {texts[key]} now: start a new run."
                )
        for batch in _batches([Param(key, texts[key]) for key in texts.keys() - known.keys()], _BATCH):
            self.store.client.log_batch(self.id, params=batch)
        self.set_tags({"params.sha256": provenance.sha256_json(dict(params))})

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = [Metric(key, float(value), now, step or 0) for key, value in metrics.items()]
        for batch in _batches(entities, 1000):
            self.store.client.log_batch(self.id, metrics=batch)

    def log_figure(self, figure: Figure, name: str) -> None:
        """A PNG; its title, which states the finding, also stands in the run's note."""
        suptitle = figure.get_suptitle()
        title = suptitle or next((axes.get_title() for axes in figure.axes if axes.get_title()), name)
        path = f"figures/{name}.png"
        self.store.client.log_figure(self.id, figure, path, save_kwargs={"dpi": 144, "bbox_inches": "tight"})
        self.set_tags({f"figure.{name}": " ".join(title.split())})
        self._write_note()

    def log_table(self, table: pd.DataFrame, name: str) -> None:
        """CSV: the one table format that the UI shows as a table."""
        buffer = io.StringIO()
        table.to_csv(buffer, index=False)
        self.log_text(buffer.getvalue(), f"tables/{name}.csv")

    def log_text(self, text: str, path: str) -> None:
        self.store.client.log_text(self.id, mask(text), path)

    def log_dict(self, value: Mapping[str, Any], path: str) -> None:
        """Plain data as JSON."""
        self.log_text(json.dumps(masked(dict(value)), indent=1, default=str), path)

    def log_file(self, path: Path, folder: str) -> None:
        """A file as it is. Not masked: for files that hold no free text."""
        self.store.client.log_artifact(self.id, str(path), folder)

    def log_records(self, records: Iterable[Any], name: str) -> None:
        """``StepRecord``s as JSON lines, one step a line; synthetic ones mark the run (condition G7)."""
        rows = [dataclasses.asdict(record) for record in records]
        self.log_text("".join(json.dumps(row, default=str) + "\n" for row in rows), f"records/{name}.jsonl")
        if any(row.get("synthetic") for row in rows):
            self.set_tags({"synthetic": "true", f"synthetic.{name}": "acceptance was set, not earned"})

    # --- what went in -------------------------------------------------------------------------------------

    def log_prompts(self, table: pd.DataFrame, name: str, context: str = "prompts") -> str:
        """Register prompts as the run's input. Returns their SHA-256, which is of the table's rows as JSON.

        MLflow's digest column holds 36 characters, so it gets the digest's first 32; the whole is a tag.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        digest = provenance.sha256_bytes(table.to_json(orient="records", force_ascii=False).encode())
        columns = [{"name": str(column), "type": "string", "required": True} for column in table.columns]
        dataset = Dataset(
            mask(name),
            digest[:32],
            "code",
            source=json.dumps({"tags": {"sha256": digest}}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps({"num_rows": len(table), "num_elements": int(table.size)}),
        )
        tags = [InputTag("mlflow.data.context", context), InputTag("sha256", digest)]
        self.store.client.log_inputs(self.id, [DatasetInput(dataset, tags)])
        self.set_tags({f"prompts.{name}.sha256": digest, f"prompts.{name}.count": len(table)})
        return digest

    def log_models(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """``{"target": {"sha256": ..., "path": ..., "dtype": ...}}``: plain values become tags."""
        described = {
            role: {key: provenance.short_path(value) if key == "path" else value for key, value in facts.items()}
            for role, facts in models.items()
        }
        self.log_dict(described, "lineage/models.json")
        tags = {f"model.{role}.{key}": value for role, facts in described.items() for key, value in facts.items()}
        self.set_tags({key: value for key, value in tags.items() if isinstance(value, str | int | float)})
        self.set_tags(provenance.runtime_tags())

    def log_pair(self, pair: Pair) -> None:
        """Target and draft as :meth:`log_models` wants them, from what was noted when the pair was loaded."""
        noted = pair.lineage
        roles = {
            r: {k[len(r) + 1 :]: v for k, v in noted.items() if k.startswith(f"{r}_")} for r in ("target", "draft")
        }
        self.log_models({role: facts for role, facts in roles.items() if facts})
        self.set_tags(
            {key: noted[key] for key in ("dtype", "device", "attn_implementation", "threads") if key in noted}
        )

    def log_policy(self, policy: Mapping[str, Any]) -> None:
        """How tokens were chosen."""
        self.set_tags({"sampling": ", ".join(f"{key}={value}" for key, value in policy.items())})

    def log_tokens(self, tokens: Sequence[int] | Sequence[Sequence[int]]) -> str:
        """The output tokens by digest: "tokens identical" can then be checked between runs. Returns the SHA-256."""
        digest = provenance.sha256_json(_plain(tokens))
        self.set_tags({"tokens.sha256": digest})
        return digest

    # --- what it means ------------------------------------------------------------------------------------

    def finding(self, markdown: str) -> None:
        """Add to the note at the top of the run's page. The first line of the first finding also goes into tables."""
        text = markdown.strip()
        if "finding" not in self._tags():
            self.set_tags({"finding": re.sub(r"[*`#]", "", one_line(text)).strip()})
        self._write_note(text)

    def trace_request(self, output: Any, name: str = "request") -> str:
        """Write one request's records as an MLflow trace of this run. Returns the trace id."""
        from .traces import write_trace

        return write_trace(self.store, self.id, output, name)

    def _tags(self) -> dict[str, str]:
        return dict(self.store.client.get_run(self.id).data.tags)

    def _write_note(self, added: str = "", status: str = "") -> None:
        tags = self._tags()
        self.set_tags({note.TAG: note.compose(self.name, tags, status or "RUNNING", mask(added))})

    # --- how it ended -------------------------------------------------------------------------------------

    def close(self) -> None:
        """The last cell of a notebook. A run that has failed stays FAILED."""
        if self.status not in (None, "FINISHED"):
            print(f"This run has already ended {self.status}: run the notebook from the top for a new one.")
        self.set_tags(provenance.runtime_tags())  # by now torch is loaded and its threads are settled
        self.end("FINISHED")

    def end(self, status: str, error: str = "") -> None:
        """End the run once; later calls change nothing. Without ownership only the error is left for the owner."""
        if self.status is not None:
            return
        self.status = status
        try:
            self._write_end(status, error)
        except Exception as fault:
            if not _disk_full(fault):
                raise
            release_reserve(self.store.uri)
            self._write_end(status, error)

    def _write_end(self, status: str, error: str) -> None:
        if error:
            self.set_tags({"error": one_line(error)})
        if not self.owns:
            return
        self.store.client.set_terminated(self.id, status)  # first: the status matters more than the note
        self._write_note(status=status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end("FINISHED")
        else:
            self.end(*verdict(error))


def open_run(
    name: str,
    *,
    notebook: str | None = None,
    params: Mapping[str, Any] | None = None,
    kind: str = "notebook",
    pair: str | None = None,
    parent: Run | str | None = None,
    tags: Mapping[str, Any] | None = None,
    attach: str | None = None,
) -> Run:
    """Open a run with everything known at its start, or ``attach`` to the one that a launcher opened.

    Raises:
        SpecDecError: the store cannot be written, or there is no run to attach to.
    """
    store = open_store()
    reap(store)
    if attach:
        return _attached(store, attach, notebook)
    parent_id = parent.id if isinstance(parent, Run) else parent
    opening = {"owner": owner(), "kind": kind, **({"mlflow.parentRunId": parent_id} if parent_id else {})}
    created = store.client.create_run(store.experiment_id, tags=opening, run_name=mask(name))
    run = Run(store, created.info.run_id, owns=True, name=name)
    try:
        git, diff = provenance.git_state()
        run.set_tags(git | provenance.opening_tags(name, notebook, pair) | dict(tags or {}))
        if params:
            describe(run, params, notebook)
        _log_surroundings(run, diff)
        run._write_note()
    except BaseException as error:  # an opened run must end, whatever stops it
        run.end(*verdict(error))
        raise
    return run


def describe(run: Run, params: Mapping[str, Any], notebook: str | None = None) -> None:
    """Parameters, and the words by which a run is found in a table: pair, drafter, gamma."""
    run.log_params(params)
    params = masked(dict(params))  # before words are cut out of them: half a secret has no shape
    words = {"pair": Path(str(params["pair"])).stem} if "pair" in params else {}
    words |= {"drafter": str(params["drafter"])} if "drafter" in params else {}
    gamma = params.get("gamma", params.get("gammas"))
    words |= {"gamma": str(gamma).strip("[]").replace(" ", "")} if gamma is not None else {}
    seed = {"seed": params["seed"]} if "seed" in params else {}
    run.set_tags(words | seed)
    if policy := provenance.policy_of(params):
        run.log_policy(policy)
    if notebook:  # also from a kernel whose launcher did not know the defaults of the parameters cell
        shown = [words[k] if k != "gamma" else f"γ{words[k]}" for k in ("pair", "drafter", "gamma") if k in words]
        run.name = mask(" · ".join([Path(notebook).stem, *shown]))
        run.store.client.update_run(run.id, name=run.name)


def notebook_run(notebook: str, params: BaseModel | Mapping[str, Any]) -> Run:
    """The run of a notebook, used over its cells and closed by ``run.close()`` in the last one."""
    values = dict(params) if isinstance(params, Mapping) else params.model_dump()
    run = open_run(notebook, notebook=notebook, attach=os.environ.get("MLFLOW_RUN_ID"))
    if run.owns:
        _watch_kernel(run)
    describe(run, values, notebook)
    return run


def record_failure(notebook: str, error: SpecDecError) -> None:
    """Bad input before any run was opened: leave a FAILED run that says so."""
    run = open_run(notebook, notebook=notebook)
    run.end(*verdict(error))


def verdict(error: BaseException) -> tuple[str, str]:
    """Status and one-line reason for an error that ends a run."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return "KILLED", f"stopped ({error})" if str(error) else "interrupted"
    if _disk_full(error):
        return "FAILED", f"the disk is full ({error}): free some space and run again"
    text = one_line(str(error))
    return "FAILED", text if isinstance(error, SpecDecError) else f"{type(error).__name__}: {text}"


def one_line(text: str, limit: int = 500) -> str:
    """The first line that says something, masked."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return mask(line)[:limit]


# --- pieces -----------------------------------------------------------------------------------------------


def _attached(store: Store, run_id: str, notebook: str | None) -> Run:
    """The run that a launcher opened for this notebook; a variable left over from elsewhere is no such run."""
    from mlflow.exceptions import MlflowException

    try:
        found = store.client.get_run(run_id)
    except MlflowException:
        raise SpecDecError(
            f"MLFLOW_RUN_ID={run_id} is not in the store: unset it to let this kernel open a run."
        ) from None
    if found.info.status != "RUNNING":
        raise SpecDecError(f"MLFLOW_RUN_ID={run_id} has already ended {found.info.status}: unset it, or start again.")
    tags = found.data.tags
    if notebook and tags.get("notebook") != Path(notebook).stem and not started_by(tags.get("owner", "")):
        whose = f"of {tags['notebook']}" if tags.get("notebook") else "of no notebook"
        raise SpecDecError(f"MLFLOW_RUN_ID={run_id} is a run {whose}, not of {notebook}: unset it.")
    return Run(store, run_id, owns=False, name=str(found.info.run_name))


def _log_surroundings(run: Run, diff: str) -> None:
    run.log_text(diff or "clean: nothing uncommitted\n", "lineage/uncommitted.diff.txt")
    run.log_dict(provenance.packages(), "lineage/packages.json")
    run.log_dict(provenance.hardware(), "lineage/hardware.json")


_in_this_kernel: Run | None = None


def _watch_kernel(run: Run) -> None:
    """This kernel owns ``run``: end it when a cell fails, when the kernel stops, or when a newer run takes over."""
    global _in_this_kernel
    if _in_this_kernel is not None:
        _in_this_kernel.end("KILLED", "replaced: the notebook was started again in the same kernel")
    _in_this_kernel = run
    atexit.register(run.end, "KILLED", "the kernel stopped before run.close()")
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return

    def after_cell(result: Any) -> None:
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            run.end(*verdict(error))
        if run.status is not None:
            shell.events.unregister("post_run_cell", after_cell)

    shell.events.register("post_run_cell", after_cell)


def _disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    text = str(error).lower()
    return "no space left on device" in text or "disk is full" in text


def _plain(tokens: Any) -> Any:
    return [_plain(token) if isinstance(token, list | tuple) else int(token) for token in tokens]


def _batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
