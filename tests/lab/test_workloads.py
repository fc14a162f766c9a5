"""Prompts as one table, and what a loader says about a broken file."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pandas as pd
import pytest

from specdec_core import SpecDecError
from specdec_core.lab import workloads

GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def everything(source: str | Path = workloads.BUILTIN) -> pd.DataFrame:
    return workloads._read(source)


def test_builtin_is_varied_and_complete() -> None:
    table = everything()
    assert tuple(table.columns) == workloads.COLUMNS
    assert len(table) >= 240
    assert table["id"].is_unique
    assert table["sha256"].is_unique
    assert not table.isna().to_numpy().any()
    assert set(table["category"]) == {
        "chat", "code", "mathematics", "translation", "summarising", "extraction", "copying", "lists", "retrieval",
        "longcontext",
    }  # fmt: skip
    kinds = table.groupby(["category", "kind"]).size().unstack()
    assert (kinds[["ordinary", "difficult", "misleading"]] >= 4).all(axis=None)
    assert (table["language"].value_counts()[["en", "sv", "de", "es", "zh", "hi"]] >= 14).all()
    assert all(isinstance(turn, str) and turn.strip() for turns in table["turns"] for turn in turns)
    first = table.iloc[0]
    assert first["sha256"] == hashlib.sha256(json.dumps(first["turns"], ensure_ascii=False).encode()).hexdigest()


def test_no_two_builtin_prompts_share_most_of_their_words() -> None:
    texts = [" ".join(turns).lower().split() for turns in everything()["turns"]]
    grams = [set(zip(words, words[1:], words[2:], strict=False)) for words in texts]
    pairs = itertools.combinations([g for g in grams if len(g) > 8], 2)
    assert max(len(a & b) / min(len(a), len(b)) for a, b in pairs) < 0.6


def test_confirmation_is_sealed_by_hash_and_never_comes_through_the_ordinary_loader() -> None:
    whole, open_ones, kept = everything(), workloads.prompts(), workloads.sealed()
    assert set(open_ones["split"]) == {"calibration", "evaluation"}
    assert set(kept["split"]) == {"confirmation"}
    assert len(open_ones) + len(kept) == len(whole)
    assert 0.12 < len(kept) / len(whole) < 0.28
    for way in ({"limit": 10_000}, {"split": "calibration"}, {"categories": list(whole["category"].unique())}):
        assert not set(workloads.prompts(**way)["id"]) & set(kept["id"])  # type: ignore[arg-type]
    with pytest.raises(SpecDecError, match="confirmation is sealed"):
        workloads.prompts(split="confirmation")


def test_where_everything_is_sealed_one_line_says_so(tmp_path: Path) -> None:
    turn = next(t for t in map(str, range(99)) if _split([t]) == "confirmation")
    file = write(tmp_path / "q.jsonl", GOOD | {"turns": [turn]})
    with pytest.raises(SpecDecError, match="no prompt that is not sealed"):
        workloads.prompts(file)
    assert workloads.sealed(file)["turns"].tolist() == [[turn]]


def _split(turns: list[str]) -> str:
    return workloads.SPLITS[int(hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:8], 16) % 10]


def test_jsonl_is_read_with_blank_lines_extra_keys_and_two_turns(tmp_path: Path) -> None:
    second = {"question_id": "b", "category": "math", "turns": ["1+1?", "And 2+2?"], "reference": ["2", "4"]}
    table = everything(write(tmp_path / "q.jsonl", GOOD, "", second))
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
        everything(write(tmp_path / "q.jsonl", GOOD, "", line))
    assert "q.jsonl line 3" in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}\n")
    for name, words in (("absent.jsonl", "There is no workload"), ("binary.jsonl", "line 1 is not JSON")):
        with pytest.raises(SpecDecError, match=words):
            workloads.prompts(tmp_path / name)
    with pytest.raises(SpecDecError, match="holds no questions"):
        everything(write(tmp_path / "empty.jsonl", ""))


def test_limits_and_categories() -> None:
    few = workloads.prompts(limit=10)
    assert few["category"].is_unique  # one of each
    assert few["id"].tolist() == workloads.prompts(limit=10)["id"].tolist()
    assert len(workloads.prompts(limit=1000)) == len(workloads.prompts())
    assert set(workloads.prompts(categories=["code", "chat"])["category"]) == {"code", "chat"}
    with pytest.raises(SpecDecError, match="no category 'chta': it has chat, code"):
        workloads.prompts(categories=["chta"])
    with pytest.raises(SpecDecError, match="limit is 0"):
        workloads.prompts(limit=0)


def test_the_digest_follows_content_and_order() -> None:
    table = workloads.prompts()
    assert workloads.digest(table) == workloads.digest(workloads.prompts())
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
    table = everything("spec_bench_open.jsonl")
    assert len(table) == 240
    assert table["category"].nunique() == 13
    assert table["sha256"].nunique() == table["turns"].map(tuple).nunique()
