"""What produced a run: code, notebook, packages, hardware. Collected once, when the run is opened."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from .store import code_root, project_root

_DIFF_LIMIT = 1_000_000  # characters of uncommitted diff that are kept
_HASH_LIMIT = 16 * 2**20  # bytes: larger untracked files are named, not hashed
_SHOWN = ("torch", "transformers", "mlflow", "papermill", "numpy", "specdec-core")


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Digest of plain data, whatever the order of its keys."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode())


def notebook_path(notebook: str) -> Path:
    """``notebook`` is a path, or the name of one in ``notebooks/``."""
    path = Path(notebook)
    return path if path.suffix == ".ipynb" else project_root() / "notebooks" / f"{notebook}.ipynb"


def notebook_sha256(path: Path) -> str:
    """Digest of the cells' sources alone: outputs, counters and metadata change without the notebook changing."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return sha256_json([[cell["cell_type"], "".join(cell["source"])] for cell in cells])


def git_state() -> tuple[dict[str, str], str]:
    """Tags for commit and dirtiness, and the uncommitted diff followed by untracked files with their digests."""
    root = code_root()
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=all")
    if status is None:
        return {"git.commit": "unknown", "git.dirty": "unknown"}, "not a git checkout\n"
    tags = {"git.commit": commit or "none yet", "git.dirty": str(bool(status)).lower()}
    if commit:
        tags["mlflow.source.git.commit"] = commit
    diff = _git(root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD" if commit else "--cached") or ""
    if len(diff) > _DIFF_LIMIT:
        digest = sha256_bytes(diff.encode())
        diff = f"{diff[:_DIFF_LIMIT]}\n[cut: the diff has {len(diff)} characters, SHA-256 {digest}]"
    diff += "\n" if diff else ""
    untracked = [line[3:].strip('"') for line in status.splitlines() if line.startswith("??")]
    return tags, diff + "".join(f"untracked: {name} {_digest_or_size(root / name)}\n" for name in untracked)


def _digest_or_size(path: Path) -> str:
    try:
        size = path.stat().st_size
        return f"sha256={sha256_file(path)}" if size <= _HASH_LIMIT else f"{size} bytes"
    except OSError:
        return "unreadable"


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None: no git, no checkout, no such object."""
    command = ["git", "-C", str(root), *arguments]
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # looking must not collide with the user's own git command
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip() if done.returncode == 0 else None


@cache
def packages() -> dict[str, str]:
    """Name and version of every installed distribution."""
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {name: found[name] for name in sorted((n for n in found if n), key=str.lower)}


def package_tags() -> dict[str, str]:
    return {f"version.{name}": packages().get(name, "not installed") for name in _SHOWN}


@cache
def hardware() -> dict[str, str]:
    """CPU, cores, memory (GiB), GPU and driver, by asking the system: torch need not be loaded for it."""
    facts = {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "ram_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpu": "none",
    }
    return facts | _gpu()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpu() -> dict[str, str]:
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return {}
    return {"gpu": ", ".join(names) or "none", "gpu_driver": driver}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def hardware_line() -> str:
    """One line for people."""
    facts = hardware()
    gpu = "no GPU" if facts["gpu"] == "none" else facts["gpu"]
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['ram_gib']} GiB, {gpu}"


def runtime_tags() -> dict[str, str]:
    """Threads as this process will use them. From torch if it is loaded; never loads it."""
    tags = {"threads.omp": os.environ.get("OMP_NUM_THREADS", "unset")}
    torch = sys.modules.get("torch")
    if torch is not None:
        tags["threads.torch"] = str(torch.get_num_threads())
        tags["torch.cuda"] = str(torch.version.cuda or "none")
    return tags


def decision_tags() -> dict[str, str]:
    """The thresholds in force, by digest: whether they were moved after the fact can then be seen."""
    path = project_root() / "params" / "decision.yaml"
    return {"decision.sha256": sha256_file(path)} if path.is_file() else {}


def short_path(path: str | Path) -> str:
    """A path that says where a thing is without saying whose machine it is on."""
    full = Path(path).absolute()
    for root, shown in ((project_root(), ""), (Path.home(), "~/")):
        if full.is_relative_to(root):
            return shown + full.relative_to(root).as_posix()
    return full.name


def policy_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling policy among a notebook's parameters."""
    return {key: params[key] for key in ("temperature", "top_k", "top_p", "min_p") if key in params}


def opening_tags(name: str, notebook: str | None, pair: str | None) -> dict[str, str]:
    """What is known when a run opens, but for git: packages, threads, thresholds, hardware, notebook."""
    tags = {**package_tags(), **runtime_tags(), **decision_tags()}
    tags |= {f"hardware.{key}": value for key, value in hardware().items()}
    tags |= {"mlflow.source.name": name, "mlflow.source.type": "LOCAL"}
    if pair:
        tags["pair"] = Path(pair).stem
    if notebook:
        path = notebook_path(notebook)
        tags |= {"notebook": path.stem, "mlflow.source.type": "NOTEBOOK"}
        tags["mlflow.source.name"] = short_path(path)
        if path.is_file():
            tags["notebook.sha256"] = notebook_sha256(path)
    return tags
