"""Prompts and traffic from files as others write them. Every complaint names the file and the line."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import SpecDecError

FORMS = "JSONL (Spec-Bench, MT-Bench or one prompt a line), JSON (ShareGPT), CSV, Parquet, or hf:OWNER/NAME:SPLIT"
TEXT = ("prompt", "question", "instruction", "text")  # columns of a single turn, the first that is there
TALK = ("conversations", "messages")  # columns of a whole conversation
KNOWN = ("category", "kind", "language")  # copied where they are given
HUB = "hf:"

Row = dict[str, Any]


def rows(source: str, file: Path | None) -> list[Row]:
    """The prompts of ``file``, or of ``source`` where that is a dataset of the hub: id, turns, category and what else
    is known. Raises SpecDecError naming file and line."""
    name, found = file.name if file else source, list[Row]()
    lines = dict[str, str]()
    for where, record in _records(source, file):
        row = _row(record, f"{name} {where}", default_id=where.split()[-1])
        if row["id"] in lines:
            raise SpecDecError(
                f"{name} {where}: the id {row['id']} was used on {lines[row['id']]}: make the ids unique."
            )
        lines[row["id"]] = where
        found.append(row | {"source": name})
    if not found:
        raise SpecDecError(f"{name} holds no questions: give {FORMS}.")
    return found


def _records(source: str, file: Path | None) -> Iterator[tuple[str, Row]]:
    """(where it stands, record)"""
    if file is None:
        yield from ((f"row {i}", dict(row)) for i, row in enumerate(_hub(source), start=1))
    elif file.suffix == ".json":
        yield from ((f"entry {i}", record) for i, record in enumerate(_json(file), start=1))
    elif file.suffix == ".csv":
        yield from ((f"line {number}", record) for number, record in csv_lines(file))
    elif file.suffix == ".parquet":
        table = _parquet(file)
        yield from ((f"row {i}", _plain(row)) for i, row in enumerate(table.to_dict("records"), start=1))
    else:
        yield from ((f"line {number}", record) for number, record in json_lines(file))


# --- what a record says -----------------------------------------------------------------------------------


def _row(record: Row, where: str, default_id: str) -> Row:
    if "question_id" in record:
        missing = [name for name in ("category", "turns") if name not in record]
        if missing:
            raise SpecDecError(f"{where} lacks {', '.join(missing)}: a question has question_id, category and turns.")
    identity, category = record.get("question_id", record.get("id", default_id)), record.get("category", "all")
    if not isinstance(identity, (int, str)) or isinstance(identity, bool) or identity == "":
        raise SpecDecError(f"{where}: question_id is {identity!r}: give a number or a text.")
    if not isinstance(category, str) or not category:
        raise SpecDecError(f"{where}: category is {category!r}: give a text.")
    others = {
        name: value for name in KNOWN if (value := record.get(name)) not in (None, "") and value == value
    }  # no NaN
    if bad := [name for name, value in others.items() if not isinstance(value, str)]:
        raise SpecDecError(f"{where}: {bad[0]} is {others[bad[0]]!r}: give a text.")
    return {"category": category} | others | {"id": str(identity), "turns": _turns(record, where)}


def _turns(record: Row, where: str) -> list[str]:
    talk = next((name for name in TALK if name in record), None)
    text = next((name for name in TEXT if name in record), None)
    if "turns" in record:
        turns = record["turns"]
    elif talk:
        turns = _asked(record[talk], f"{where}: {talk}")
    elif text:
        turns = [record[text]]
    else:
        allowed = ", ".join(("turns", *TALK, *TEXT))
        raise SpecDecError(f"{where} holds no prompt: give one of the keys {allowed}.")
    if isinstance(turns, list) and any(isinstance(t, str) and _broken(t) for t in turns):
        raise SpecDecError(f"{where} holds half a character (a lone surrogate): mend its text.")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise SpecDecError(f"{where}: turns must be a list of one or more texts that are not empty.")
    return turns


def _broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _asked(talk: Any, where: str) -> list[Any]:
    """What the user said in a conversation of {from, value} or {role, content}."""
    if not isinstance(talk, list) or not all(isinstance(said, Mapping) for said in talk):
        raise SpecDecError(f"{where} is no list of messages: give {{from, value}} or {{role, content}} each.")
    who = [(said.get("from", said.get("role")), said.get("value", said.get("content"))) for said in talk]
    turns = [text for speaker, text in who if speaker in ("human", "user")]
    if not turns:
        raise SpecDecError(f"{where} holds nothing that a human or user said.")
    return turns


# --- files ------------------------------------------------------------------------------------------------


def json_lines(file: Path) -> Iterator[tuple[int, Row]]:
    """(line number from 1, object) for every line that is not blank."""
    for number, line in enumerate(_bytes(file).splitlines(), start=1):
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


def _json(file: Path) -> list[Row]:
    try:
        held = json.loads(_bytes(file).decode("utf-8-sig"))
    except ValueError as error:
        raise SpecDecError(f"{file.name} is not JSON ({error}): give a list of objects, as ShareGPT's.") from None
    if not isinstance(held, list) or not all(isinstance(record, dict) for record in held):
        raise SpecDecError(f"{file.name} is no list of objects: give what ShareGPT holds, or JSONL.")
    return held


def csv_lines(file: Path) -> Iterator[tuple[int, Row]]:
    """(line number from 1, record) below the header."""
    try:
        text = _bytes(file).decode("utf-8-sig")
    except ValueError as error:
        raise SpecDecError(f"{file.name} is not UTF-8 ({error}): save it as UTF-8.") from None
    reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
    try:
        for record in reader:
            if None in record or None in record.values():
                wide = len(reader.fieldnames or ())
                raise SpecDecError(f"{file.name} line {reader.line_num} has not {wide} fields, as the header has.")
            yield reader.line_num, record
    except csv.Error as error:
        raise SpecDecError(f"{file.name} line {reader.line_num} is not CSV ({error}): mend its quotes.") from None


def _parquet(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except Exception as error:  # pyarrow raises many kinds
        line = str(error).splitlines()[0][:120]
        raise SpecDecError(f"{file.name} is no Parquet file ({line}): export it again.") from None


def _plain(row: Mapping[Any, Any]) -> Row:
    """Arrays, as Parquet gives lists, become lists."""
    return {str(key): value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()}


def _hub(source: str) -> Any:
    """``hf:OWNER/NAME`` or ``hf:OWNER/NAME:SPLIT`` through the package ``datasets``."""
    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        way = "pip install datasets, or export it as JSONL"
        raise SpecDecError(f"{source} needs the package datasets, which is not installed: {way}.") from None
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # datasets and the hub raise many kinds
        line = next(iter(str(error).splitlines()), type(error).__name__)[:160]
        raise SpecDecError(f"{source} cannot be loaded ({line}): check its name and split, or export it.") from None


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SpecDecError(f"{file} cannot be read ({error.strerror}): check its permissions.") from None


# --- traffic ----------------------------------------------------------------------------------------------

TRACE = {  # column -> names that others give it
    "seconds": ("timestamp", "arrival_time", "arrived_at"),
    "input_tokens": ("contexttokens", "input_length", "input_tokens", "num_prefill_tokens"),
    "output_tokens": ("generatedtokens", "output_length", "output_tokens", "num_decode_tokens"),
}


def trace(path: str | Path) -> pd.DataFrame:
    """Requests of a production trace: ``seconds`` since the first, ``input_tokens``, ``output_tokens``. No text is in
    it, so whatever is made to stand for it is synthetic and has to say so.

    CSV with a time (ISO 8601, or seconds) and two lengths, under the names of Azure's traces or those in `TRACE`.
    """
    file, found = Path(path).expanduser(), []
    if not file.is_file():
        raise SpecDecError(f"There is no trace {str(path)!r}: give a CSV file of timestamp, input and output length.")
    for number, record in csv_lines(file):
        lower = {key.strip().lower(): value for key, value in record.items()}
        columns = {name: next((c for c in names if c in lower), None) for name, names in TRACE.items()}
        if missing := [name for name, column in columns.items() if column is None]:
            raise SpecDecError(f"{file.name} has no column for {missing[0]}: name it {' or '.join(TRACE[missing[0]])}.")
        found.append({name: _number(name, lower[str(c)], f"{file.name} line {number}") for name, c in columns.items()})
    if not found:
        raise SpecDecError(f"{file.name} holds no requests: give a CSV file with a line for each.")
    table = pd.DataFrame(found).sort_values("seconds", kind="stable").reset_index(drop=True)
    table["seconds"] -= table["seconds"].iloc[0]
    return table.astype({"input_tokens": int, "output_tokens": int})


def _number(name: str, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        if name != "seconds":
            raise SpecDecError(f"{where}: {name} is {text!r}: give a whole number.") from None
        try:
            return datetime.fromisoformat(text[:26]).timestamp()
        except ValueError:
            raise SpecDecError(f"{where}: the time is {text!r}: give ISO 8601 or seconds.") from None
    if name != "seconds" and (value < 0 or value != int(value)):
        raise SpecDecError(f"{where}: {name} is {text}: give a whole number from 0.")
    return value
