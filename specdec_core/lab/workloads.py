"""Prompts as one table, wherever they come from.

Columns: ``id`` (unique), ``turns`` (list of user messages), ``category``, ``kind``, ``language`` (ISO 639-1),
``split`` (calibration or evaluation, by hash), ``source``, ``sha256`` (of the turns).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import SpecDecError

COLUMNS = ("id", "turns", "category", "kind", "language", "split", "source", "sha256")
BUILTIN = "builtin"


def data_dir() -> Path | None:
    """Folder of the user's own data files (``SPECDEC_DATA``), or None."""
    given = os.environ.get("SPECDEC_DATA")
    return Path(given).expanduser() if given else None


def builtin() -> pd.DataFrame:
    """The 24 prompts written for this project.

    Answers to copying, extraction, summarising and most code prompts repeat the prompt, where lookup pays;
    answers to chat, mathematics and lists hardly do.
    """
    text = resources.files(__package__).joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    return _table([{"source": BUILTIN} | json.loads(line) for line in text.splitlines()])


def spec_bench(path: str | Path) -> pd.DataFrame:
    """Read JSONL as Spec-Bench and MT-Bench write it: ``question_id``, ``category``, ``turns`` and others.

    A bare file name is also looked for in `data_dir`. Raises SpecDecError naming file and line.
    """
    file = _find(path)
    rows, seen = [], dict[str, int]()
    for number, record in json_lines(file):
        row = _spec_bench_row(record, f"{file.name} line {number}")
        if row["id"] in seen:
            raise SpecDecError(
                f"{file.name} line {number}: question_id {row['id']} was used on line {seen[row['id']]}: "
                "make the ids unique."
            )
        seen[row["id"]] = number
        rows.append(row | {"source": file.name})
    if not rows:
        raise SpecDecError(f"{file.name} holds no questions: give a JSONL file with one question a line.")
    return _table(rows)


def prompts(
    source: str | Path = BUILTIN, limit: int | None = None, categories: Sequence[str] | None = None
) -> pd.DataFrame:
    """Prompts from ``builtin`` or a JSONL file, perhaps of some ``categories``, at most ``limit`` of them.

    A limit takes from each category in turn, so that a small sample is still mixed; the order of the table and
    the choice do not depend on chance. Raises SpecDecError for unknown sources and categories.
    """
    table = builtin() if str(source) == BUILTIN else spec_bench(source)
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
    return table.reset_index(drop=True)


def digest(table: pd.DataFrame) -> str:
    """SHA-256 of a workload: of its prompts' digests, in order."""
    return hashlib.sha256("\n".join(table["sha256"]).encode()).hexdigest()


def _table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows with id, turns, category and source become the table; the rest has defaults."""
    complete = []
    for row in rows:
        sha = hashlib.sha256(json.dumps(row["turns"], ensure_ascii=False).encode()).hexdigest()
        split = ("calibration", "evaluation")[int(sha[:8], 16) % 2]
        complete.append({"kind": "ordinary", "language": "en", "split": split, **row, "sha256": sha})
    return pd.DataFrame(complete, columns=list(COLUMNS))


def _find(path: str | Path) -> Path:
    given = Path(path).expanduser()
    places = [given] + ([data / given] if (data := data_dir()) and not given.is_absolute() else [])
    for place in places:
        if place.is_file():
            return place
    where = "its path is read from the current folder" + (" and SPECDEC_DATA" if len(places) > 1 else "")
    raise SpecDecError(f"There is no workload {str(path)!r}: give 'builtin' or a JSONL file ({where}).")


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) for every line that is not blank."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise SpecDecError(f"{file} cannot be read ({error.strerror}): check its permissions.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # not JSON, or not UTF-8
            raise SpecDecError(
                f"{file.name} line {number} is not JSON ({error}): give one JSON object a line."
            ) from None
        if not isinstance(record, dict):
            raise SpecDecError(f"{file.name} line {number} is a {type(record).__name__}: give one JSON object a line.")
        yield number, record


def _spec_bench_row(record: dict[str, Any], where: str) -> dict[str, Any]:
    missing = [name for name in ("question_id", "category", "turns") if name not in record]
    if missing:
        raise SpecDecError(f"{where} lacks {', '.join(missing)}: a question has question_id, category and turns.")
    identity, category, turns = record["question_id"], record["category"], record["turns"]
    if not isinstance(identity, (int, str)) or isinstance(identity, bool):
        raise SpecDecError(f"{where}: question_id is {identity!r}: give a number or a text.")
    if not isinstance(category, str) or not category:
        raise SpecDecError(f"{where}: category is {category!r}: give a text.")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise SpecDecError(f"{where}: turns must be a list of one or more texts that are not empty.")
    return {"id": str(identity), "turns": turns, "category": category}
