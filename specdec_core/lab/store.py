"""Where runs live: one SQLite store per project, made on first use, safe when many start at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sqlite3
import tomllib
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from ..errors import SpecDecError
from .masking import mask

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "specdec"
# MLflow's run table shows no result at first. It can be given a view by name, kept as a tag of the experiment.
TABLE_VIEW = "specdec"
_TABLE_COLUMNS = ("tags.`finding`", "metrics.`speed_ratio`", "tags.`profile`")
MIN_FREE_BYTES = 32 * 2**20
_RESERVE_BYTES = 4 * 2**20
_LOCK_SECONDS = 120.0
_PROBE_SECONDS = 5  # how long a server may take to answer for the first time
_BUSY_SECONDS = 60  # how long a writer waits for another one before SQLite says "locked"


@dataclass(frozen=True)
class Store:
    """An open store. ``experiment_id`` is passed on explicitly: the active experiment is global state that races."""

    client: MlflowClient
    experiment_id: str
    uri: str


def project_root() -> Path:
    """``SPECDEC_ROOT``, else the project around the working directory, else the project around this package."""
    if given := os.environ.get("SPECDEC_ROOT"):
        return Path(given).expanduser().resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if _is_project(folder):
            return folder
    return Path(__file__).resolve().parents[2]


def code_root() -> Path:
    """The checkout that the running code comes from; differs from the project only when ``SPECDEC_ROOT`` says so."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if _is_project(checkout) else project_root()


def _is_project(folder: Path) -> bool:
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        return bool(tomllib.loads(text).get("project", {}).get("name") == "specdec-core")
    except (OSError, ValueError):
        return False


def tracking_uri() -> str:
    """The address of the store with an absolute path, so that it means the same from every folder.

    Raises:
        SpecDecError: MLFLOW_TRACKING_URI is neither a SQLite file nor a server, or the path cannot be an address.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if not given:
        return _sqlite_uri(project_root() / "mlruns" / "mlflow.db")
    path, _, options = given.removeprefix("sqlite:///").partition("?")
    if given.startswith("sqlite:///") and path not in ("", ":memory:") and "/" not in options:
        return _sqlite_uri(Path(path).absolute())
    if _is_server(given):
        return given
    what = "names no store"
    if given.startswith("file:") or (":" not in given and given != "databricks"):
        what = "is a folder, which MLflow no longer takes"
    raise SpecDecError(
        f"MLFLOW_TRACKING_URI={mask(given)} {what}: "
        "give sqlite:///FOLDER/mlflow.db, the http(s):// address of an MLflow server, or unset it."
    )


def _is_server(uri: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(uri)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def _sqlite_uri(path: Path) -> str:
    """Refuses what SQLite's address cannot hold: quoting is of no use, for nobody unquotes it before opening."""
    for character in "%?":
        if character in str(path):
            raise SpecDecError(
                f"The run store {path} has '{character}' in its path, which its address cannot hold: rename "
                "the folder, or set MLFLOW_TRACKING_URI=sqlite:///OTHER/FOLDER/mlflow.db."
            )
    return f"sqlite:///{path}?timeout={_BUSY_SECONDS}"


def database_path(uri: str) -> Path | None:
    """The file behind ``uri``, or None for a server."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:") else None


def artifact_root(uri: str) -> Path | None:
    """Where artifacts of a SQLite store go: beside its database. None for a server, which decides itself."""
    database = database_path(uri)
    return database.parent / "artifacts" if database else None


def open_store() -> Store:
    """The store, created on first use.

    Raises:
        SpecDecError: it cannot be opened or written, a server does not answer, or the disk is full.
    """
    uri = tracking_uri()
    with _locked(uri):
        _prepare_database(uri)
        try:
            with _short_patience():
                client = _client(uri)
                return Store(client, _experiment(client, uri), uri)
        except Exception as error:
            raise _unusable(uri, error) from error


@contextlib.contextmanager
def _short_patience() -> Iterator[None]:
    """MLflow asks a server that is not there for minutes. Whether it is there must be known in seconds."""
    ours = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(_PROBE_SECONDS), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    added = {key: value for key, value in ours.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _unusable(uri: str, error: Exception) -> SpecDecError:
    """What MLflow says of a store that it cannot open, in one line."""
    reason = mask(" ".join(str(error).split()))[:200]
    database = database_path(uri)
    if database is None:
        return SpecDecError(
            f"The MLflow server {mask(uri)} does not answer as one ({reason}): start it, mend MLFLOW_TRACKING_URI, "
            f"or unset it. A server slower than {_PROBE_SECONDS} s needs MLFLOW_HTTP_REQUEST_TIMEOUT."
        )
    return SpecDecError(
        f"The run store {database} cannot be opened ({reason}): another version of MLflow may have written it; "
        "use that version, move the file away, or set MLFLOW_TRACKING_URI=sqlite:///OTHER/FOLDER/mlflow.db."
    )


@contextlib.contextmanager
def _locked(uri: str) -> Iterator[None]:
    """One process at a time: creating the client migrates the schema, and two migrations corrupt it."""
    database = database_path(uri)
    if database is None:
        yield
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(database.with_suffix(".lock"), timeout=_LOCK_SECONDS)
        lock.acquire()
    except Timeout:
        raise SpecDecError(
            f"The run store {database.parent} has been locked for {_LOCK_SECONDS:.0f} s: end the process that holds it."
        ) from None
    except OSError as error:
        raise _unwritable(database.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def _prepare_database(uri: str) -> None:
    """Find out here, at once, what MLflow would find out after minutes of retries; and switch on WAL."""
    database = database_path(uri)
    if database is None:
        return
    free = shutil.disk_usage(database.parent).free
    if free < MIN_FREE_BYTES:
        raise SpecDecError(
            f"No disk left for the run store {database.parent} ({free / 2**20:.0f} MiB free, "
            f"{MIN_FREE_BYTES / 2**20:.0f} needed): free some, or point MLFLOW_TRACKING_URI elsewhere."
        )
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        (database.parent / "artifacts").mkdir(exist_ok=True)
        reserve = database.parent / ".reserve"
        if not reserve.exists():
            reserve.write_bytes(b"\0" * _RESERVE_BYTES)
    except (OSError, sqlite3.Error) as error:
        raise _unwritable(database.parent, error) from error


def _unwritable(folder: Path, error: Exception) -> SpecDecError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SpecDecError(
        f"The run store {folder} cannot be written ({reason}): "
        "make it writable, or set MLFLOW_TRACKING_URI=sqlite:///OTHER/FOLDER/mlflow.db."
    )


def disk_is_full(uri: str) -> bool:
    """Whether the disk of a local store has nearly nothing left."""
    database = database_path(uri)
    return database is not None and shutil.disk_usage(database.parent).free < 2**20


def release_reserve(uri: str) -> None:
    """Give back the disk kept aside, so that a run that filled the disk can still be marked FAILED."""
    database = database_path(uri)
    if database is not None:
        (database.parent / ".reserve").unlink(missing_ok=True)


def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no calls home from a lab bench
    import logging

    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints what it raises as well
    client = MlflowClient(tracking_uri=uri)
    client.search_experiments(max_results=1)  # creates and migrates now, while the lock is held
    return client


def _view_tag() -> dict[str, str]:
    widths = {"tags.`finding`": 560}
    view = {"selectedColumns": list(_TABLE_COLUMNS), "columnOrder": list(_TABLE_COLUMNS), "columnWidths": widths}
    return {f"mlflow.sharedViewState.{TABLE_VIEW}": json.dumps(view)}


def _experiment(client: MlflowClient, uri: str) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        if _view_tag().items() - found.tags.items():
            client.set_experiment_tag(found.experiment_id, *next(iter(_view_tag().items())))
        if "MLFLOW_TRACKING_URI" not in os.environ:
            _follow_move(found.artifact_location, uri)
        return str(found.experiment_id)
    root = artifact_root(uri)
    # with this kind the UI opens on runs, not on its chat view
    tags = {"mlflow.experimentKind": "custom_model_development", **_view_tag()}
    return client.create_experiment(EXPERIMENT, artifact_location=root.as_uri() if root else None, tags=tags)


def _follow_move(stored: str | None, uri: str) -> None:
    """MLflow stores absolute artifact addresses. When the project folder was moved, move them along."""
    root, database = artifact_root(uri), database_path(uri)
    if root is None or database is None or not stored or stored == root.as_uri():
        return
    with contextlib.closing(sqlite3.connect(database, timeout=_BUSY_SECONDS)) as connection, connection:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (root.as_uri(), len(stored) + 1, len(stored), stored),
            )


# --- owners and orphans -----------------------------------------------------------------------------------


def owner() -> str:
    """Who answers for a run: host, process id and start time of this process. A reused pid does not match."""
    return f"{_host()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def _host() -> str:
    """The host as a digest: enough to tell hosts apart, and nobody's machine is named in the record."""
    machine = Path("/etc/machine-id")
    name = socket.gethostname() + (machine.read_text(encoding="ascii").strip() if machine.is_file() else "")
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _process_here(owner_tag: str) -> tuple[int, float] | None:
    """Number and start time of the owner, or None for another host's and for a tag that is no owner."""
    host, _, rest = owner_tag.partition(":")
    pid, _, created = rest.partition(":")
    return (int(pid), float(created)) if host == _host() and pid.isdigit() else None


def owner_is_gone(owner_tag: str) -> bool:
    """Whether the owner was a process of this host that no longer runs. Of other hosts we cannot know."""
    here = _process_here(owner_tag)
    if here is None:
        return False
    try:
        process = psutil.Process(here[0])
        return bool(abs(process.create_time() - here[1]) > 1 or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def started_by(owner_tag: str) -> bool:
    """Whether the owner is one of the processes that this one descends from."""
    here = _process_here(owner_tag)
    if here is None:
        return False
    try:
        ancestors = psutil.Process().parents()
        return any(each.pid == here[0] and abs(each.create_time() - here[1]) <= 1 for each in ancestors)
    except psutil.Error:
        return False


def reap(store: Store) -> list[str]:
    """Mark RUNNING runs whose owner died without a word as KILLED. Returns their ids."""
    running = store.client.search_runs([store.experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
    orphans = [run.info.run_id for run in running if owner_is_gone(run.data.tags.get("owner", ""))]
    for run_id in orphans:
        store.client.set_tag(run_id, "error", "its process died without a word (killed, or the machine went down)")
        store.client.set_terminated(run_id, "KILLED")
    return orphans
