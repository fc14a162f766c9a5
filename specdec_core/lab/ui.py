"""``specdec ui``: the MLflow UI on this store, light, on this computer only, and the links worth opening."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

from ..errors import SpecDecError
from .store import TABLE_VIEW, Store, artifact_root, database_path, open_store, reap

HOST = "127.0.0.1"
PORT = 5000
_NEWEST = 6


def links(store: Store, port: int = PORT) -> Iterator[tuple[str, str]]:
    """(what, address) of the views of runs; MLflow itself would open its view for chats."""
    base = _base(store, port)
    runs = f"{base}/runs?workflowType=machine_learning"
    yield "all runs", f"{runs}&viewStateShareKey={TABLE_VIEW}"
    yield "charts", f"{runs}&compareRunsMode=CHART"
    yield "requests, stage by stage", f"{base}/traces"
    for run in store.client.search_runs([store.experiment_id], max_results=_NEWEST):
        yield f"{run.info.run_name} {run.info.status}", run_link(store, run.info.run_id, port)


def run_link(store: Store, run_id: str, port: int = PORT) -> str:
    """The page of one run."""
    return f"{_base(store, port)}/runs/{run_id}?workflowType=machine_learning"


def _base(store: Store, port: int) -> str:
    """Where the browser finds the experiment; a name and password in a server's address are left out."""
    scheme, _, rest = store.uri.rstrip("/").partition("://")
    server = f"http://{HOST}:{port}" if database_path(store.uri) else f"{scheme}://{rest.rpartition('@')[2]}"
    return f"{server}/#/experiments/{store.experiment_id}"


def prepare(port: int) -> Store:
    """The store to show, orphans marked. Raises SpecDecError when there is nothing to serve or the port is taken."""
    store = open_store()
    reap(store)
    if database_path(store.uri):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                raise SpecDecError(f"Port {port} is in use: give another one, specdec ui --port {port + 1}.") from None
    return store


def serve(store: Store, port: int) -> None:
    """Become the server (this process has loaded much that it need not hold). A store on a server needs no serving."""
    root = artifact_root(store.uri)
    if root is None:
        return
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "-w", "1"]
    command += ["--backend-store-uri", store.uri, "--default-artifact-root", root.as_uri()]
    # job execution would start seven more processes; nothing here uses it
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    os.execve(command[0], command, environment)
