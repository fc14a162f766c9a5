"""What the doctor sees and how it says what to mend. Nothing it looks at is changed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import psutil
import pytest
import torch

from specdec_core.lab import doctor, lock


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs/mlflow.db")
    return tmp_path


def row(what: str) -> doctor.Row:
    return next(row for row in doctor.report() if row.what == what)


def test_report_covers_the_machine_and_changes_nothing(own_folders: Path) -> None:
    rows = {row.what: row for row in doctor.report()}
    wanted = "Python|torch, transformers|GPU|number formats|threads|memory|disk for models|disk for runs"
    assert set(wanted.split("|")) | {"default model", "run store", "versions", "model hub"} == set(rows)
    assert all(bool(row.mend) == (row.ok is False) for row in rows.values())
    assert list(own_folders.iterdir()) == []
    assert "float32 1.0x" in rows["number formats"].value


def test_a_model_that_is_absent_or_damaged() -> None:
    assert "specdec model fetch" in row("default model").mend
    folder = doctor.model_dir()
    folder.mkdir(parents=True)
    assert row("default model").ok is False
    assert "--force" in row("default model").mend


def test_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert "OMP_NUM_THREADS=" in row("threads").mend


def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, usage = psutil.virtual_memory(), shutil.disk_usage("/")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10**8))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**7))
    assert row("memory").ok is False
    assert "SPECDEC_CACHE" in row("disk for models").mend
    assert "MLFLOW_TRACKING_URI" in row("disk for runs").mend


def test_an_address_that_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "foo://bar")
    assert row("run store").ok is False
    assert "foo://bar" in row("run store").value
    assert "sqlite:///FOLDER" in row("run store").mend
    assert row("disk for models")


def test_a_store_that_cannot_be_written(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert row("run store").ok
    (own_folders / "runs").mkdir()
    (own_folders / "runs" / "mlflow.db").write_bytes(b"no database" * 100)
    assert "not a database" in row("run store").value
    (own_folders / "runs" / "mlflow.db").unlink()
    sqlite3.connect(own_folders / "runs" / "mlflow.db").close()
    assert row("run store").ok
    (own_folders / "file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{own_folders}/file/mlflow.db")
    assert "cannot be written" in row("run store").value


def test_versions_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "installed_drift", lambda: ["numpy 2.3 (lock: 2.4.6)"])
    assert "numpy 2.3" in row("versions").value
    assert "make install" in row("versions").mend


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvml", lambda: ["Some GPU, 80 GB, 79 free, driver 1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU build" in row("GPU").mend


def test_a_check_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise RuntimeError("driver says no")

    monkeypatch.setattr(doctor, "_nvml", broken)
    assert "driver says no" in row("gpus").value
