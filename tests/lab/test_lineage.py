"""What a run carries, what it must not carry, and how it ends when its owner does the ending."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from books import artifact_text, artifacts, runs, write_notebook

from specdec_core.errors import SpecDecError
from specdec_core.lab import lineage, store
from specdec_core.lab.executed import attach_executed
from specdec_core.lab.lineage import Run, describe, notebook_run, open_run
from specdec_core.lab.masking import mask, masked
from specdec_core.lab.store import open_store, project_root, reap

# Planted secrets, put together here so that no scanner takes this file for a leak.
SECRETS = {
    "hugging face": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx",
    "openai": "sk-" + "proj-abcdefghijklmnop1234",
    "github": "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "aws": "AKIA" + "ABCDEFGHIJKLMNOP",
}
PASSWORD = "hunter2-" + "correct-horse"


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, warm: Path) -> Path:
    """A project with a store that is already migrated, which is a copy: migrating takes seconds."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(warm / "mlruns", folder / "mlruns")
    monkeypatch.setenv("SPECDEC_ROOT", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.chdir(folder)
    return folder


@dataclass(frozen=True)
class Record:
    """The fields of a StepRecord that lineage reads."""

    step: int
    kind: str = "speculative"
    gamma: int = 4
    drafted: int = 4
    verified: int = 4
    accepted: int = 2
    emitted: tuple[int, ...] = (5, 6, 7)
    last: str = "resampled"
    stop: str | None = None
    draft_tokens: tuple[int, ...] = (5, 6, 8, 9)
    p: tuple[float, ...] = (0.9, 0.8, 0.1, 0.2)
    q: tuple[float, ...] = (0.9, 0.8, 0.5, 0.2)
    p_entropy: tuple[float, ...] = (0.1,)
    q_entropy: tuple[float, ...] = (0.1,)
    preferred: int | None = 7
    branch: int | None = None
    synthetic: bool = False
    control: str = "fixed"
    reason: str = ""
    context: int = 30
    started: float = 1_700_000_000.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "score", "accept"), 0.01))


@dataclass(frozen=True)
class Generated:
    prompt: str = "Why?"
    text: str = "Because."
    tokens: tuple[int, ...] = (5, 6, 7)
    records: tuple[Record, ...] = (Record(0), Record(1, started=1_700_000_000.1))
    metrics: dict[str, float] = field(default_factory=lambda: {"block_efficiency": 3.0})
    stop: str = "length"


def finished(run: Run) -> Any:
    return run.store.client.get_run(run.id)


# --- the store --------------------------------------------------------------------------------------------


def test_store_is_the_same_from_whichever_folder_it_is_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "pyproject.toml").write_text('[project]\nname = "specdec-core"\n', encoding="utf-8")
    (root / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.delenv("SPECDEC_ROOT")
    uris = set()
    for folder in (root, root / "notebooks", root / "notebooks" / "deep"):
        monkeypatch.chdir(folder)
        uris.add(store.tracking_uri())
    assert uris == {f"sqlite:///{root}/mlruns/mlflow.db?timeout=60"}


def test_outside_any_project_the_packages_own_project_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert project_root() == Path(store.__file__).resolve().parents[2]


def test_tracking_uri_of_the_environment_overrides_the_store(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "mlruns", tmp_path / "elsewhere")
    before = (root / "mlruns" / "mlflow.db").read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere/mlflow.db")
    with open_run("other"):
        pass
    assert [run.info.run_name for run in runs()] == ["other"]
    assert (root / "mlruns" / "mlflow.db").read_bytes() == before


def test_a_folder_as_tracking_uri_is_refused_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(root / "old"))
    with pytest.raises(SpecDecError, match="sqlite:///FOLDER"):
        open_store()


@pytest.mark.parametrize(
    "given",
    ["foo://bar", "databricks", "uc:xyz", "http://", "http://host:port", "postgresql://u:secretpw@127.0.0.1:1/x",
     "mysql://x", "sqlite:foo.db", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite:///x.db",
     "sqlite:///a?b/mlflow.db", "sqlite:///a%b/mlflow.db"],
)  # fmt: skip
def test_an_address_that_is_no_store_is_refused_in_one_line_and_leaves_no_file(
    root: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    before = sorted(root.rglob("*"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    with pytest.raises(SpecDecError, match=r"sqlite:///\w+/") as caught:
        open_store()
    assert "\n" not in str(caught.value)
    assert "secretpw" not in str(caught.value)
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_does_not_answer_is_said_in_seconds_without_its_password(
    root: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(store, "_PROBE_SECONDS", 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:  # connections are taken, and nothing is ever said
            listener.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secretpw@127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(SpecDecError, match=r"does not answer.*unset it") as caught:
            open_store()
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    assert "secretpw" not in str(caught.value)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ, "patience is short for the opening alone"


def test_a_store_of_another_mlflow_is_one_line(root: Path) -> None:
    with sqlite3.connect(root / "mlruns" / "mlflow.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    connection.close()
    with pytest.raises(SpecDecError, match=r"cannot be opened.*another version of MLflow") as caught:
        open_store()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("character", ["%", "?"])
def test_a_project_folder_that_no_address_can_hold_is_refused_by_its_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path / f"a{character}41b"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SpecDecError, match=rf"'\{character}' in its path.*rename"):
        open_store()
    assert list(tmp_path.iterdir()) == []


def test_a_project_folder_with_other_odd_characters_keeps_database_and_artifacts(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a b#c&d=é;'[x]"
    shutil.copytree(root / "mlruns", odd / "mlruns")
    monkeypatch.setenv("SPECDEC_ROOT", str(odd))
    with open_run("x") as run:
        run.log_text("here", "word.txt")
    assert (odd / "mlruns" / "artifacts" / run.id / "artifacts" / "word.txt").read_text(encoding="utf-8") == "here"


def test_unwritable_store_is_one_line_that_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlruns").write_text("a file where the folder should be", encoding="utf-8")
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    with pytest.raises(SpecDecError, match=r"cannot be written.*MLFLOW_TRACKING_URI") as caught:
        open_store()
    assert "\n" not in str(caught.value)


def test_damaged_store_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_bytes(b"not a database " * 100)
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    with pytest.raises(SpecDecError, match="cannot be written"):
        open_store()


def test_no_disk_is_said_before_anything_is_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(SpecDecError, match="No disk left"):
        open_run("x")


def test_a_moved_project_keeps_its_runs_and_artifacts(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run("old") as run:
        run.log_text("kept", "word.txt")
    moved = tmp_path / "moved"
    shutil.move(root / "mlruns", moved / "mlruns")
    monkeypatch.setenv("SPECDEC_ROOT", str(moved))
    client = open_store().client
    assert artifact_text(client, run.id, "word.txt") == "kept"
    with open_run("new") as newer:
        newer.log_text("here", "word.txt")
    assert (moved / "mlruns" / "artifacts" / newer.id / "artifacts" / "word.txt").is_file()


# --- what a run carries -----------------------------------------------------------------------------------


def test_a_run_carries_code_notebook_packages_hardware_and_parameters(root: Path) -> None:
    path = write_notebook(root)
    (root / "params").mkdir()
    (root / "params" / "decision.yaml").write_text("speedup: 1.2\n", encoding="utf-8")
    values = {"pair": "params/models/tiny.yaml", "drafter": "self", "gamma": 4, "temperature": 0.7, "seed": 3}
    with open_run("00_quickstart", notebook="00_quickstart", params=values, parent="abc") as run:
        pass
    data, info = finished(run).data, finished(run).info
    assert info.status == "FINISHED"
    assert info.run_name == "00_quickstart · tiny · self · γ4"
    assert data.params == {key: str(value) for key, value in values.items()}
    for tag in ("git.commit", "git.dirty", "notebook.sha256", "params.sha256", "decision.sha256", "hardware.cpu",
                "hardware.cores", "hardware.ram_gib", "hardware.gpu", "threads.omp", "version.torch", "version.mlflow",
                "version.specdec-core", "seed", "sampling", "owner"):  # fmt: skip
        assert data.tags.get(tag), tag
    assert data.tags["mlflow.source.name"] == "notebooks/00_quickstart.ipynb"
    assert data.tags["mlflow.source.type"] == "NOTEBOOK"
    assert data.tags["mlflow.parentRunId"] == "abc"
    assert path.is_file()
    assert {"lineage/packages.json", "lineage/hardware.json", "lineage/uncommitted.diff.txt"} <= set(
        artifacts(run.store.client, run.id)
    )


def test_notebook_hash_is_of_its_sources_alone(root: Path) -> None:
    from specdec_core.lab.provenance import notebook_sha256

    path = write_notebook(root)
    first = notebook_sha256(path)
    book = nbformat.read(path, as_version=4)
    book.cells[0].execution_count = 9
    book.cells[0].outputs = [nbformat.v4.new_output("stream", text="printed")]
    nbformat.write(book, path)
    assert notebook_sha256(path) == first
    book.cells[0].source += "\n"
    nbformat.write(book, path)
    assert notebook_sha256(path) != first


def test_figures_tables_records_prompts_models_and_tokens_are_kept(root: Path) -> None:
    figure, axes = plt.subplots()
    axes.set_title("Block length 4\nis best")
    prompts = pd.DataFrame({"id": ["a", "b"], "prompt": ["Why?", "How?"]})
    with open_run("everything") as run:
        run.log_figure(figure, "best")
        run.log_table(pd.DataFrame({"x": [1.5]}), "numbers")
        run.log_records([Record(0), Record(1)], "all")
        digest = run.log_prompts(prompts, "open")
        run.log_models({"target": {"sha256": "f00", "path": Path.home() / "models" / "t", "dtype": "float32"}})
        tokens = run.log_tokens([[1, 2], [3]])
        run.log_metrics({f"m{i}": i for i in range(1200)}, step=2)
        run.finding("**Four** is best.\n\nBy far.")
        run.finding("Second.")
    plt.close(figure)
    got, client = finished(run), run.store.client
    assert {"figures/best.png", "tables/numbers.csv", "records/all.jsonl", "lineage/models.json"} <= set(
        artifacts(client, run.id)
    )
    lines = artifact_text(client, run.id, "records/all.jsonl").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    inputs = got.inputs.dataset_inputs
    assert [(i.dataset.name, i.dataset.digest) for i in inputs] == [("open", digest[:32])]
    tags = got.data.tags
    assert tags["prompts.open.sha256"] == digest
    assert tags["tokens.sha256"] == tokens
    assert tags["model.target.sha256"] == "f00"
    assert tags["model.target.path"] == "~/models/t"
    assert len(got.data.metrics) == 1200
    note = tags["mlflow.note.content"]
    assert "FINISHED" in note
    assert "Block length 4 is best" in note
    assert "By far." in note
    assert "Second." in note
    assert tags["finding"] == "Four is best."
    assert note.startswith("**Four** is best."), "the UI folds a note: findings first"


def test_traces_hold_one_root_per_request_and_one_span_per_stage_and_belong_to_the_run(root: Path) -> None:
    with open_run("traced") as run:
        trace_id = run.trace_request(Generated())
    trace = run.store.client.get_trace(trace_id)
    names = [span.name for span in trace.data.spans]
    assert names.count("draft") == names.count("score") == names.count("accept") == 2
    assert "resample" not in names
    assert [span.name for span in trace.data.spans if span.parent_id is None] == ["request"]
    draft = next(span for span in trace.data.spans if span.name == "draft")
    assert draft.attributes["draft_tokens"] == [5, 6, 8, 9]
    assert draft.end_time_ns - draft.start_time_ns == 10_000_000
    assert trace.info.request_metadata["mlflow.sourceRun"] == run.id
    assert trace.info.experiment_id == run.store.experiment_id
    assert "MLFLOW_TRACKING_URI" not in os.environ, "MLflow sets it, and it would pass for the user's own override"


def test_a_changed_parameter_is_refused(root: Path) -> None:
    with open_run("x", params={"gamma": 4}) as run:
        describe(run, {"gamma": 4, "seed": 1})
        with pytest.raises(SpecDecError, match=r"gamma was 4 .* 5 now"):
            describe(run, {"gamma": 5})


# --- nothing secret ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *SECRETS.values(),
        f"https://user:{PASSWORD}@host/path",
        f"https://{SECRETS['github']}@github.com/a/b",
        f"Authorization: Bearer {PASSWORD}",
        f"password={PASSWORD}",
        f'"password": "{PASSWORD}"',
        f'\\"password\\": \\"{PASSWORD}\\"',
        f"aws_secret_access_key = {PASSWORD}/x+y",
        f"HF_TOKEN={SECRETS['hugging face']}",
        f"--api-key {PASSWORD}",
        "my_token: 0123456789abcdef0123",
    ],
)
def test_secret_is_masked(text: str) -> None:
    shown = mask(f"before {text} after")
    assert PASSWORD not in shown
    assert not any(secret in shown for secret in SECRETS.values())
    assert "0123456789abcdef0123" not in shown
    assert "***" in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize(
    "text",
    ["max_new_tokens: 96", "next_token = draw(p, u)", 'bos_token: "<s>"', "tokens.sha256 = " + "ab12" * 16,
     "git@github.com:a/b.git", "https://github.com/a/b", "sk-learn", "the secret of speed"],
)  # fmt: skip
def test_ordinary_text_is_left_as_it_is(text: str) -> None:
    assert mask(text) == text


def test_a_secret_inside_another_is_masked_with_the_whole_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    token = SECRETS["hugging face"]
    monkeypatch.setenv("A_PASSWORD", "abcdefgh")
    monkeypatch.setenv("B_PASSWORD", "abcdefghTAIL99")
    monkeypatch.setenv("C_PASSWORD", token[5:15])
    monkeypatch.setenv("D_PASSWORD", f"head {token} tail")
    assert mask("x abcdefghTAIL99") == "x ***"
    assert mask(f"x {token} y") == "x *** y"
    assert mask(f"x head {token} tail y") == "x *** y"
    assert mask("token=abcdefgh0123456789abcdef") == "token=***"


@pytest.mark.parametrize(
    "name",
    ["SECRET_KEY", "SECRET_KEY_BASE", "PRIVATE_KEY", "MY_PRIVATE_KEY_PEM", "OPENAI_KEY", "GITHUB_PAT", "MY_AUTH",
     "AUTH_HEADER", "AUTHORIZATION", "DB_PASS", "API_KEY_2"],
)  # fmt: skip
def test_variables_named_like_secrets_are_recognised(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, 'plain "words" only')
    assert mask('x plain "words" only y') == "x *** y"
    assert mask(json.dumps({"x": 'plain "words" only'})) == '{"x": "***"}'


@pytest.mark.parametrize(
    ("name", "value"),
    [("GIT_AUTHOR_NAME", "Some Body Else"), ("SSH_AUTH_SOCK", "/run/agent/socket"), ("MY_AUTH", "none"),
     ("KEYBOARD", "qwertyuiop"), ("OLDPWD", "/some/folder"), ("XAUTHORITY", "/run/x/authority")],
)  # fmt: skip
def test_harmless_variables_are_not_masked(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert mask(f"x {value} y") == f"x {value} y"


@pytest.mark.parametrize("unit", ["x", "-", "=", "a.", "eyJ", "token", "password-", "/9j/4AAQ", "--a", "s://"])
def test_megabytes_of_text_without_a_space_are_masked_in_linear_time(unit: str) -> None:
    began = time.process_time()
    mask(unit * (2_000_000 // len(unit)))
    assert time.process_time() - began < 5


def test_values_of_secret_environment_variables_are_masked_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plain-words-only")
    assert masked({"a": ["x plain-words-only y"]}) == {"a": ["x *** y"]}


def test_no_planted_secret_reaches_the_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_PASSWORD", PASSWORD)
    planted = " ".join([*SECRETS.values(), f"password={PASSWORD}", f"https://me:{PASSWORD}@host/x"])
    monkeypatch.setattr(lineage.provenance, "git_state", lambda: ({"git.commit": "c"}, f"+token {planted}\n"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"key = '{planted}'")])
    book.cells[0].outputs = [
        nbformat.v4.new_output("stream", text=planted),
        nbformat.v4.new_output("display_data", {"text/html": f"<b>{planted}</b>", "application/json": {"p": planted}}),
        nbformat.v4.new_output("error", ename="E", evalue=planted, traceback=[planted]),
    ]
    nbformat.write(book, root / "executed.ipynb")
    with (  # noqa: PT012
        pytest.raises(RuntimeError),
        open_run(f"n {planted}", params={"prompt": planted}, tags={"t": planted}) as run,
    ):
        run.log_text(planted, "a.txt")
        run.log_dict({"password": "short", "x": {"y": planted}}, "b.json")
        run.log_table(pd.DataFrame({"x": [planted]}), "t")
        run.log_models({"target": {"source": f"https://me:{PASSWORD}@host/x"}})
        run.log_records([Record(0, reason=planted)], "r")
        run.trace_request(Generated(prompt=planted, text=planted, records=(Record(0, reason=planted),)))
        run.finding(planted)
        attach_executed(run, root / "executed.ipynb")
        raise RuntimeError(planted)
    files = [path for path in (root / "mlruns").rglob("*") if path.is_file()] + [root / "executed.ipynb"]
    assert any(path.name == "executed.html" for path in files)
    for path in files:
        content = path.read_bytes()
        for secret in (*SECRETS.values(), PASSWORD):
            assert secret.encode() not in content, (path.name, secret[:4])


def test_no_secret_reaches_the_name_that_a_run_makes_of_its_parameters(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_PASSWORD", "left.right-half")
    values = {"pair": "left.right-half", "drafter": SECRETS["hugging face"]}
    with open_run("00_quickstart", notebook="00_quickstart", params=values) as run:
        pass
    assert finished(run).info.run_name == run.name == "00_quickstart · *** · ***"
    assert "left" not in str(finished(run).to_dictionary())


def test_the_environment_is_not_dumped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = secrets.token_hex(8)  # made here: the diff of this file is part of a run
    monkeypatch.setenv("SOME_HARMLESS_NAME", canary)
    with open_run("x"):
        pass
    assert not [p for p in (root / "mlruns").rglob("*") if p.is_file() and canary.encode() in p.read_bytes()]


# --- endings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("bad\nsecond line"), "FAILED", "ValueError: bad"),
        (SpecDecError("No such model: name another."), "FAILED", "No such model: name another."),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), "FAILED", "the disk is full"),
    ],
)
def test_an_error_ends_the_run_with_its_reason(root: Path, error: BaseException, status: str, words: str) -> None:
    with pytest.raises(type(error)), open_run("x") as run:
        raise error
    got = finished(run)
    assert got.info.status == status
    assert words in got.data.tags["error"]
    assert words in got.data.tags["mlflow.note.content"]
    assert status in got.data.tags["mlflow.note.content"]


def test_a_full_disk_while_logging_ends_the_run_failed_and_leaves_earlier_runs_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run("earlier") as earlier:
        earlier.log_text("kept", "word.txt")
    before = finished(earlier).to_dictionary()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = open_run("x")
    with pytest.raises(OSError, match="No space"), run:  # noqa: PT012
        monkeypatch.setattr(run.store.client, "log_text", full)
        run.log_text("text", "a.txt")
    assert finished(run).info.status == "FAILED"
    assert "disk is full" in finished(run).data.tags["error"]
    assert finished(earlier).to_dictionary() == before
    assert artifact_text(earlier.store.client, earlier.id, "word.txt") == "kept"


def test_when_the_database_itself_is_full_the_reserve_makes_room_for_the_status(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = open_run("x"), open_store().client.set_terminated

    def needs_room(*args: object) -> None:
        if (root / "mlruns" / ".reserve").exists():
            raise RuntimeError("(sqlite3.OperationalError) database or disk is full")
        real(*args)

    monkeypatch.setattr(run.store.client, "set_terminated", needs_room)
    run.end("FAILED", "why")
    assert finished(run).info.status == "FAILED"


def test_a_run_that_ended_stays_as_it_ended(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_run("x")
    run.end("FAILED", "why")
    run.close()
    assert finished(run).info.status == "FAILED"
    assert "from the top" in capsys.readouterr().out


def test_reaper_kills_orphans_and_spares_the_living_and_other_hosts(root: Path) -> None:
    code = (
        "import os; from specdec_core.lab.lineage import open_run; r = open_run('orphan'); print(r.id, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    orphan = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    alive, elsewhere = open_run("alive"), open_run("elsewhere")
    elsewhere.set_tags({"owner": "otherhost:1:1.0"})
    reap(open_store())
    statuses = {run.info.run_id: run.info.status for run in runs()}
    assert statuses == {orphan: "KILLED", alive.id: "RUNNING", elsewhere.id: "RUNNING"}


def test_under_a_launcher_the_notebook_attaches_and_never_sets_the_status(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run("launched", notebook="00_quickstart")
    monkeypatch.setenv("MLFLOW_RUN_ID", run.id)
    inner = notebook_run("00_quickstart", {"gamma": 2})
    inner.close()
    assert inner.id == run.id
    assert finished(run).info.status == "RUNNING"
    run.end("FINISHED")
    with pytest.raises(SpecDecError, match="already ended"):
        notebook_run("00_quickstart", {})


def test_stale_run_id_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(SpecDecError, match="not in the store"):
        notebook_run("00_quickstart", {})


@pytest.mark.parametrize("theirs", ["01_theory_proof", None])
def test_a_left_over_run_id_of_something_else_is_refused_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    run = open_run("theirs", notebook=theirs)
    monkeypatch.setenv("MLFLOW_RUN_ID", run.id)
    with pytest.raises(SpecDecError, match=r"not of 00_quickstart: unset it"):
        notebook_run("00_quickstart", {"gamma": 2})
    assert finished(run).data.params == {}
    assert finished(run).info.status == "RUNNING"


def test_a_renamed_copy_attaches_to_the_run_of_the_process_that_started_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run("my_copy", notebook="my_copy")
    code = "from specdec_core.lab.lineage import notebook_run; print(notebook_run('00_quickstart', {'gamma': 2}).id)"
    environment = os.environ | {"MLFLOW_RUN_ID": run.id}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == run.id, done.stderr


HAND = """
import os
import secrets
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
cells = ["from specdec_core.lab.lineage import notebook_run", "run = notebook_run('00_quickstart', {'gamma': 2})"]
def cell(text): shell.run_cell(text, store_history=True)
for text in cells: cell(text)
cell("1 / 0")                         # the user sees it fail, mends it, runs from the top
for text in cells: cell(text)
cell("run.close()")
for text in cells: cell(text)         # and leaves this one open ...
for text in cells: cell(text)         # ... to start again, and then stops the kernel
"""


def test_by_hand_a_failing_cell_fails_the_run_and_a_new_pass_is_a_new_run(root: Path) -> None:
    environment = os.environ | {"IPYTHONDIR": str(root / "ipython")}
    done = subprocess.run([sys.executable, "-c", HAND], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ended = [(run.info.status, run.data.tags.get("error", "")) for run in reversed(runs())]
    assert [status for status, _ in ended] == ["FAILED", "FINISHED", "KILLED", "KILLED"]
    assert "ZeroDivisionError" in ended[0][1]
    assert "replaced" in ended[2][1]
    assert "kernel stopped" in ended[3][1]
