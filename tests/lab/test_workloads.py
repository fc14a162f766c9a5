"""Prompts as one table, and what a loader says about a broken file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from specdec_core import SpecDecError
from specdec_core.lab import workloads

GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_builtin_is_varied_and_complete() -> None:
    table = workloads.builtin()
    assert tuple(table.columns) == workloads.COLUMNS
    assert len(table) == 24
    assert table["id"].is_unique
    assert table["sha256"].is_unique
    assert not table.isna().to_numpy().any()
    assert set(table["category"]) == {
        "chat", "code", "mathematics", "translation", "summarising", "extraction", "copying", "lists"
    }  # fmt: skip
    assert set(table["split"]) == {"calibration", "evaluation"}
    assert all(isinstance(turn, str) and turn.strip() for turns in table["turns"] for turn in turns)
    first = table.iloc[0]
    assert first["sha256"] == hashlib.sha256(json.dumps(first["turns"], ensure_ascii=False).encode()).hexdigest()


def test_jsonl_is_read_with_blank_lines_extra_keys_and_two_turns(tmp_path: Path) -> None:
    second = {"question_id": "b", "category": "math", "turns": ["1+1?", "And 2+2?"], "reference": ["2", "4"]}
    table = workloads.spec_bench(write(tmp_path / "q.jsonl", GOOD, "", second))
    assert table["id"].tolist() == ["1", "b"]
    assert table["turns"].tolist() == [["Why?"], ["1+1?", "And 2+2?"]]
    assert set(table["source"]) == {"q.jsonl"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "is not JSON"),
        ("[1, 2]", "is a list"),
        ({"question_id": 2, "turns": ["a"]}, "lacks category"),
        (GOOD | {"question_id": None}, "question_id is None"),
        (GOOD | {"question_id": 2, "category": 7}, "category is 7"),
        (GOOD | {"question_id": 2, "turns": "Why?"}, "turns must be a list"),
        (GOOD | {"question_id": 2, "turns": [" "]}, "turns must be a list"),
        (GOOD | {"question_id": 2, "turns": []}, "turns must be a list"),
        (GOOD, "was used on line 1"),
    ],
)
def test_a_bad_line_is_named(line: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecDecError) as error:
        workloads.spec_bench(write(tmp_path / "q.jsonl", GOOD, "", line))
    assert "q.jsonl line 3" in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}\n")
    for name, words in (("absent.jsonl", "There is no workload"), ("binary.jsonl", "line 1 is not JSON")):
        with pytest.raises(SpecDecError, match=words):
            workloads.prompts(tmp_path / name)
    with pytest.raises(SpecDecError, match="holds no questions"):
        workloads.spec_bench(write(tmp_path / "empty.jsonl", ""))


def test_limits_and_categories() -> None:
    few = workloads.prompts(limit=8)
    assert few["category"].is_unique  # one of each
    assert few["id"].tolist() == workloads.prompts(limit=8)["id"].tolist()
    assert len(workloads.prompts(limit=1000)) == 24
    assert set(workloads.prompts(categories=["code", "chat"])["category"]) == {"code", "chat"}
    with pytest.raises(SpecDecError, match="no category 'chta': it has chat, code"):
        workloads.prompts(categories=["chta"])
    with pytest.raises(SpecDecError, match="limit is 0"):
        workloads.prompts(limit=0)


def test_the_digest_follows_content_and_order() -> None:
    table = workloads.builtin()
    assert workloads.digest(table) == workloads.digest(workloads.builtin())
    assert workloads.digest(table) != workloads.digest(table.iloc[::-1])


def test_data_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    assert workloads.data_dir() is None
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path))
    write(tmp_path / "mine.jsonl", GOOD)
    assert len(workloads.prompts("mine.jsonl")) == 1


def test_spec_bench_itself() -> None:
    data = workloads.data_dir()
    if data is None or not (data / "spec_bench_open.jsonl").is_file():
        pytest.skip("SPECDEC_DATA names no folder with spec_bench_open.jsonl")
    table = workloads.spec_bench("spec_bench_open.jsonl")
    assert len(table) == 240
    assert table["category"].nunique() == 13
    assert table["sha256"].nunique() == table["turns"].map(tuple).nunique()
