"""The table of a bench as it is shown: on the screen, and in the README, where a test holds it to its run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from ..errors import SpecDecError
from .store import code_root, open_store

TABLES = ("speed", "aims", "candidates")
MARK = "<!-- bench: {} -->"
NONE = "No run is published yet."

COLUMNS = {  # of the table that is shown: key -> heading and format
    "arm": ("arm", "{}"),
    "ratio": ("over ordinary", "{}"),
    "worst": ("worst", "{:.2f}"),
    "worst_category": ("where", "{}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "tokens_per_pass": ("tokens a pass", "{:.2f}"),
    "draft_ms": ("draft ms", "{:.1f}"),
    "score_ms": ("score ms", "{:.1f}"),
    "rest_ms": ("rest ms", "{:.1f}"),
    "floor": ("× floor", "{:.1f}"),
    "prefill": ("prefill s", "{:.2f}"),
    "same": ("same text", "{}"),
}


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as texts; what an engine does not tell stays empty."""
    row = {**row, "same": f"{row['same_texts']}/{row['texts']}" if row["texts"] else None}
    known = ((row.get(key), form) for key, (_, form) in COLUMNS.items())
    return ["" if value is None or value != value else form.format(value) for value, form in known]


def screen(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A table for the console: of speeds, or of any plain rows."""
    speeds = "same_texts" in rows[0]
    shown = Table(*([heading for heading, _ in COLUMNS.values()] if speeds else rows[0]), title=title)
    for row in rows:
        shown.add_row(*(cells(row) if speeds else [str(value) for value in row.values()]))
    return shown


def markdown(record: Mapping[str, Any]) -> str:
    """The README's block: the table, the aims, and where they come from."""
    lines = ["| " + " | ".join(heading for heading, _ in COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in record["speed"]]
    lines += ["", "| aim, written before the run | at least | measured | |", "|---|---|---|---|"]
    lines += [f"| {a['aim']} | {a['least']:g} | {a['reached']} | {a['verdict']} |" for a in record["aims"]]
    return "\n".join([record["caption"], "", *lines])


def record_of(run_id: str) -> dict[str, Any]:
    """What is published of a finished bench run. Raises SpecDecError for a run that is none."""
    client = open_store().client
    try:
        run = client.get_run(run_id)
        paths = {name: client.download_artifacts(run_id, f"tables/{name}.csv") for name in TABLES}
    except Exception as error:  # MLflow raises several kinds
        raise SpecDecError(f"Run {run_id} is no finished bench ({str(error).splitlines()[0]}): give its id.") from None
    tags, params, metrics = run.data.tags, run.data.params, run.data.metrics
    commit = tags.get("mlflow.source.git.commit", "")[:7]
    longest = tags.get("tokens", params["tokens"])  # as they were, where they had to be shorter than was asked
    caption = (
        f"Run `{run_id[:12]}` at {commit}: {params['data']}, texts of at most {longest} tokens, "
        f"{tags['threads']} threads; chosen on the first half of the prompts: **{tags['chosen']}**. Memory is read at "
        f"{metrics['bandwidth_gb_s']:.0f} GB/s; peak of the whole run {metrics['peak_memory_gb']:.1f} GB."
    )
    tables = {name: json.loads(pd.read_csv(path).to_json(orient="records")) for name, path in paths.items()}
    return {"run": run_id, "caption": caption} | tables


def in_readme(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the two marks of ``name``."""
    begin, end = MARK.format(name), MARK.format("end " + name)
    found = re.subn(re.escape(begin) + ".*?" + re.escape(end), lambda _: f"{begin}\n{block}\n{end}", text, flags=re.S)
    if found[1] != 1:
        raise SpecDecError(f"The README has {found[1]} places for {name}: it needs one, from {begin} to {end}.")
    return found[0]


def publish(run_id: str, root: Path | None = None) -> None:
    """Keep a bench's table in ``results/`` and show it in the README."""
    root = root or code_root()
    record, readme = record_of(run_id), root / "README.md"
    text = in_readme(readme.read_text(encoding="utf-8"), "cpu", markdown(record))
    (root / "results").mkdir(exist_ok=True)
    (root / "results" / "bench_cpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    readme.write_text(text, encoding="utf-8")
