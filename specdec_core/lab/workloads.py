"""Prompts as one table, wherever they come from.

Columns: ``id`` (unique), ``turns`` (list of user messages), ``category``, ``kind``, ``language`` (ISO 639-1),
``split`` (by hash), ``source``, ``sha256`` (of the turns).

Three in ten prompts are for calibration, five for evaluation and two for confirmation, whoever wrote them. The last are
sealed: `prompts` never gives them out, so that whatever is tuned is tuned without them; `sealed` does, and is for the
decision alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import SpecDecError, choice
from . import loaders

COLUMNS = ("id", "turns", "category", "kind", "language", "split", "source", "sha256")
BUILTIN = "builtin"
SPLITS = ("calibration",) * 3 + ("evaluation",) * 5 + ("confirmation",) * 2  # by the last digit of the hash


def data_dir() -> Path | None:
    """Folder of the user's own data files (``SPECDEC_DATA``), or None."""
    given = os.environ.get("SPECDEC_DATA")
    return Path(given).expanduser() if given else None


def _read(source: str | Path) -> pd.DataFrame:
    """Every prompt of ``source``, the sealed ones too."""
    if str(source) == BUILTIN:
        text = resources.files(__package__).joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
        return _table([{"source": BUILTIN} | json.loads(line) for line in text.splitlines()])
    return _table(loaders.rows(str(source), file_of(source)))


def file_of(source: str | Path) -> Path | None:
    """The file behind a workload; None for the built-in one and for a dataset of the hub."""
    return None if str(source) == BUILTIN or str(source).startswith(loaders.HUB) else _find(source)


def sealed(source: str | Path = BUILTIN) -> pd.DataFrame:
    """The prompts kept for confirmation: to be read once, by the decision, in a run that says so."""
    table = _read(source)
    return table[table["split"] == "confirmation"].reset_index(drop=True)


def prompts(
    source: str | Path = BUILTIN,
    limit: int | None = None,
    categories: Sequence[str] | None = None,
    split: str | None = None,
) -> pd.DataFrame:
    """Prompts of ``builtin`` (written for this project), of a file in one of the forms of `loaders`, or of a dataset of
    the hub (``hf:OWNER/NAME:SPLIT``), perhaps of some ``categories`` or one ``split``, at most ``limit`` of them; never
    the sealed ones.

    A bare file name is also looked for in `data_dir`. A limit takes from each category in turn, so that a small sample
    is still mixed; the order of the table and the choice do not depend on chance. Raises SpecDecError for unknown
    sources and categories.
    """
    table = _read(source)
    table = table[table["split"] != "confirmation"]
    if split is not None:
        choice("split", split, ("calibration", "evaluation"), " (confirmation is sealed)")
        table = table[table["split"] == split]
    if categories:
        known = sorted(table["category"].unique())
        unknown = [name for name in categories if name not in known]
        if unknown:
            raise SpecDecError(f"Workload {source} has no category {unknown[0]!r}: it has {', '.join(known)}.")
        table = table[table["category"].isin(list(categories))]
    if limit is not None:
        if limit < 1:
            raise SpecDecError(f"limit is {limit}: give 1 or more prompts.")
        turn = table.groupby("category").cumcount()
        table = table.loc[turn.sort_values(kind="stable").index[:limit]].sort_index()
    if table.empty:
        raise SpecDecError(f"Workload {source} has no prompt that is not sealed for confirmation: give more prompts.")
    return table.reset_index(drop=True)


def digest(table: pd.DataFrame) -> str:
    """SHA-256 of a workload: of its prompts' digests, in order."""
    return hashlib.sha256("\n".join(table["sha256"]).encode()).hexdigest()


def _table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows with id, turns, category and source become the table; the rest has defaults."""
    complete = []
    for row in rows:
        sha = hashlib.sha256(json.dumps(row["turns"], ensure_ascii=False).encode()).hexdigest()
        split = SPLITS[int(sha[:8], 16) % len(SPLITS)]
        complete.append({"kind": "ordinary", "language": "en", "split": split, **row, "sha256": sha})
    return pd.DataFrame(complete, columns=list(COLUMNS))


def _find(path: str | Path) -> Path:
    given = Path(path).expanduser()
    places = [given] + ([data / given] if (data := data_dir()) and not given.is_absolute() else [])
    for place in places:
        if place.is_file():
            return place
    where = "its path is read from the current folder" + (" and SPECDEC_DATA" if len(places) > 1 else "")
    raise SpecDecError(f"There is no workload {str(path)!r}: give 'builtin', {loaders.FORMS} ({where}).")
