"""Files as others write them become the same rows; what is wrong with one is said with its line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from specdec_core import SpecDecError
from specdec_core.lab import loaders, workloads


def read(path: Path) -> list[loaders.Row]:
    return loaders.rows(str(path), path)


def test_sharegpt_gives_what_the_human_said(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}, {"from": "human", "value": "Really?"}]
    other = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When?"}]}
    (tmp_path / "share.json").write_text(json.dumps([{"id": "a1", "conversations": talk}, other]))
    first, second = read(tmp_path / "share.json")
    assert (first["id"], first["turns"], first["category"]) == ("a1", ["Why?", "Really?"], "all")
    assert (second["id"], second["turns"]) == ("2", ["When?"])


def test_csv_gives_a_prompt_a_line_with_quoted_line_breaks(tmp_path: Path) -> None:
    text = 'id,prompt,category,language\n7,"Say\n""hi""",chat,en\n8,Hej,chat,sv\n'
    (tmp_path / "p.csv").write_text(text, encoding="utf-8-sig")
    first, second = read(tmp_path / "p.csv")
    assert first == {"id": "7", "turns": ['Say\n"hi"'], "category": "chat", "language": "en", "source": "p.csv"}
    assert second["language"] == "sv"


def test_parquet_gives_lists_of_turns(tmp_path: Path) -> None:
    pd.DataFrame({"turns": [["a", "b"], ["c"]], "kind": ["difficult", None]}).to_parquet(tmp_path / "p.parquet")
    first, second = read(tmp_path / "p.parquet")
    assert (first["turns"], first["kind"], first["id"]) == (["a", "b"], "difficult", "1")
    assert (second["turns"], "kind" in second) == (["c"], False)


def test_jsonl_with_a_prompt_a_line_takes_line_numbers_as_ids(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"question": "b", "category": "qa"}\n')
    assert [(r["id"], r["turns"], r["category"]) for r in read(tmp_path / "p.jsonl")] == [
        ("1", ["a"], "all"),
        ("3", ["b"], "qa"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.csv", "prompt\n\n", "holds no questions"),
        ("p.csv", "title\nx\n", "p.csv line 2 holds no prompt: give one of the keys turns, conversations"),
        ("p.csv", "prompt,category\na,b\nc\n", "p.csv line 3 has not 2 fields"),
        ("p.csv", "prompt,category\na,b,c\n", "p.csv line 2 has not 2 fields"),
        ("p.csv", 'prompt\n"a\n', "is not CSV"),
        ("p.csv", "prompt\n  \n", "p.csv line 2: turns must be a list of one or more texts"),
        ("p.json", "{}", "is no list of objects"),
        ("p.json", "[1]", "is no list of objects"),
        ("p.json", "[", "is not JSON"),
        ("p.json", '[{"conversations": "x"}]', "p.json entry 1: conversations is no list of messages"),
        ("p.json", '[{"messages": [{"role": "system", "content": "x"}]}]', "nothing that a human or user said"),
        ("p.json", '[{"messages": [{"role": "user", "content": 3}]}]', "p.json entry 1: turns must be"),
        ("p.parquet", "no", "is no Parquet file"),
        ("p.jsonl", '{"prompt": "a\\ud800"}', "p.jsonl line 1 holds half a character"),
        ("p.jsonl", '{"prompt": "a", "language": 3}', "p.jsonl line 1: language is 3"),
        ("p.jsonl", '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "the id x was used on line 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_that_names_its_place(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecDecError) as error:
        read(tmp_path / name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_dataset_of_the_hub_is_asked_for_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        if name == "no/such":
            raise FileNotFoundError("Couldn't find it\nanywhere")
        return [{"instruction": str(i)} for i in range(30)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    table = workloads.prompts("hf:some/one:test")
    assert 10 < len(table) < 30, "without the sealed ones"
    workloads.prompts("hf:some/one")
    assert asked == [("some/one", "test"), ("some/one", "train")]
    with pytest.raises(SpecDecError, match=r"hf:no/such cannot be loaded \(Couldn't find it\): check its name"):
        workloads.prompts("hf:no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SpecDecError, match="needs the package datasets, which is not installed"):
        workloads.prompts("hf:some/one")


def test_a_trace_gives_seconds_and_lengths_in_order_of_time(tmp_path: Path) -> None:
    azure = "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + azure)
    table = loaders.trace(tmp_path / "a.csv")
    assert table["seconds"].tolist() == pytest.approx([0, 4.314579])
    assert table[["input_tokens", "output_tokens"]].to_numpy().tolist() == [[374, 44], [396, 109]]
    (tmp_path / "b.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n10.5,3,4\n12,5,6\n")
    assert loaders.trace(tmp_path / "b.csv")["seconds"].tolist() == [0, 1.5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("timestamp,input_length\n1,2\n", "t.csv has no column for output_tokens"),
        ("timestamp,input_length,output_length\n1,2,3\nx,2,3\n", "t.csv line 3: the time is 'x'"),
        ("timestamp,input_length,output_length\n1,2.5,3\n", "t.csv line 2: input_tokens is 2.5"),
        ("timestamp,input_length,output_length\n1,2,many\n", "t.csv line 2: output_tokens is 'many'"),
        ("timestamp,input_length,output_length\n", "holds no requests"),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(SpecDecError) as error:
        loaders.trace(tmp_path / "t.csv")
    assert words in str(error.value)
    with pytest.raises(SpecDecError, match="There is no trace"):
        loaders.trace(tmp_path / "nowhere.csv")
