"""A store that exists already, for tests that are not about making one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specdec_core.lab.store import open_store


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_ROOT", str(folder))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        open_store()
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Path) -> Path:
    """A project folder with a store of its own, and a wide terminal."""
    shutil.copytree(warm / "mlruns", tmp_path / "mlruns")
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    return tmp_path
