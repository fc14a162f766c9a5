"""A store that exists already, for tests that are not about making one."""

from __future__ import annotations

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
