"""What this machine can do, and what to mend. Nothing here changes anything or asks the network."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from ..errors import SpecDecError
from . import lock, store
from .convert import DEFAULT_MODEL, DISK_GB, cache_dir, check_folder, fetch_default, model_dir
from .models import read_pair

GB = 1e9
STORE_GB = 0.5  # room for a day of runs with their notebooks and figures


class Row(NamedTuple):
    """One finding. ``ok`` is None where there is nothing to judge; ``mend`` says what to do if it is False."""

    what: str
    value: str
    ok: bool | None = None
    mend: str = ""


def report(verify: bool = False) -> list[Row]:
    """Every finding, in the order of a first visit; ``verify`` reads the whole converted model again.

    A check that fails itself becomes a row that is not ok: a doctor must not fall ill.
    """
    checks: list[Callable[[], list[Row]]] = [
        _python,
        _torch,
        _gpus,
        _dtypes,
        _threads,
        _memory,
        _disk,
        lambda: _model(verify),
        _store,
        _lock,
        _hub,
    ]
    rows = []
    for check in checks:
        try:
            rows += check()
        except Exception as error:
            name = getattr(check, "__name__", "check").strip("_<>")
            rows.append(Row(name, f"could not be examined ({error})", False, "report this line"))
    return [row if row.ok is False else row._replace(mend="") for row in rows]


def _python() -> list[Row]:
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    return [Row("Python", f"{version} on {platform.platform(terse=True)}", ok, "install Python 3.11 or newer")]


def _torch() -> list[Row]:
    import torch
    import transformers

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return [Row("torch, transformers", f"{torch.__version__} ({build}), {transformers.__version__}", True)]


def _gpus() -> list[Row]:
    """GPUs by NVML, which also sees those that a CPU build of torch cannot use."""
    import torch

    found = _nvml()
    usable = torch.cuda.is_available()
    if not found:
        return [Row("GPU", "none" if not usable else torch.cuda.get_device_name(), None)]
    mend = (
        "torch is a CPU build: delete .venv and run `make install`"
        if not torch.version.cuda
        else "update the NVIDIA driver, or check CUDA_VISIBLE_DEVICES"
    )
    return [Row("GPU", text, usable, mend) for text in found]


def _nvml() -> list[str]:
    """``name, memory, driver`` of each NVIDIA GPU; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [f"{pynvml.nvmlDeviceGetName(h)}, {_nvml_memory(pynvml, h)}, driver {driver}" for h in handles]
    finally:
        pynvml.nvmlShutdown()


def _nvml_memory(pynvml: object, handle: object) -> str:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)  # type: ignore[attr-defined]
    return f"{memory.total / GB:.0f} GB, {memory.free / GB:.0f} free"


def _dtypes() -> list[Row]:
    """Speed of a matrix product in each number format against float32, measured on the device in use."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            times[dtype] = _product_seconds(dtype, device, size=512 if device.type == "cpu" else 4096)
        except RuntimeError:
            continue  # this format does not exist here
    parts = [f"{str(dtype)[6:]} {times[torch.float32] / seconds:.1f}x" for dtype, seconds in times.items()]
    capability = f", {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else ""
    return [
        Row(
            "number formats",
            f"{', '.join(parts)} (speed of a matrix product over float32, {device.type}{capability})",
            None,
        )
    ]


def _product_seconds(dtype: object, device: object, size: int, repeats: int = 5) -> float:
    """Fastest of a few products of two [size, size] matrices, in seconds."""
    import torch

    matrix = torch.ones(size, size, dtype=dtype, device=device)  # type: ignore[call-overload]
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # reading one number waits for a GPU
        best = min(best, time.perf_counter() - start)
    return best


def _threads() -> list[Row]:
    import torch

    cores = _usable_cores()
    threads = torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS")
    value = f"{threads} of {cores} usable cores, OMP_NUM_THREADS {asked or 'not set'}"
    mend = f"set OMP_NUM_THREADS={cores} or `threads: {cores}` in the pair file; more threads than cores slow it down"
    return [Row("threads", value, threads <= cores, mend)]


def _usable_cores() -> int:
    """Cores this process may use: its affinity, and the container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


def _memory() -> list[Row]:
    memory = psutil.virtual_memory()
    needs = read_pair("smollm2").needs
    need = needs.memory_gb if needs else 0.0
    value = f"{memory.total / GB:.1f} GB, {memory.available / GB:.1f} available; the default pair needs {need:g}"
    return [Row("memory", value, memory.available > need * GB, "close other programs, or take a smaller pair")]


def _disk() -> list[Row]:
    """Free space where models and runs go."""
    wanted = {"disk for models": (cache_dir(), 0.1 if model_dir().is_dir() else DISK_GB, "SPECDEC_CACHE")}
    database = None
    with contextlib.suppress(SpecDecError):  # which the row of the run store tells
        database = store.database_path(store.tracking_uri())
    if database:
        wanted["disk for runs"] = (database.parent, STORE_GB, "MLFLOW_TRACKING_URI")
    rows = []
    for what, (folder, need, variable) in wanted.items():
        free = shutil.disk_usage(_existing(folder)).free / GB
        mend = f"free {need:g} GB, or point {variable} to another disk"
        rows.append(Row(what, f"{free:.1f} GB free in {folder}", free > need, mend))
    return rows


def _model(verify: bool) -> list[Row]:
    """The converted default model: absent is no fault if it could be made, damaged is one."""
    if not model_dir().is_dir():
        reason = _unwritable(cache_dir())
        value = f"{DEFAULT_MODEL} not converted yet" + (f"; {reason}" if reason else "")
        mend = "point SPECDEC_CACHE to a folder you can write" if reason else "run `specdec model fetch`"
        return [Row("default model", value, False, mend)]
    try:
        manifest = check_folder(fetch_default(progress=False), verify)
    except SpecDecError as error:
        return [Row("default model", str(error), False, "run `specdec model fetch --force`")]
    digest = manifest["files"]["model.safetensors"]["sha256"]
    how = "read again and equal" if verify else "as written"
    return [Row("default model", f"{DEFAULT_MODEL}, weights {digest[:12]}, {how}", True)]


def _store() -> list[Row]:
    """Whether runs can be written, without making the store."""
    try:
        uri = store.tracking_uri()
    except SpecDecError as error:
        what, _, mend = str(error).rpartition(": ")
        return [Row("run store", what, False, mend)]
    database = store.database_path(uri)
    if database is None:
        return [Row("run store", "a server, not asked", None)]
    reason = _unwritable(database.parent)
    if reason is None and database.exists():
        try:
            with contextlib.closing(sqlite3.connect(database, timeout=2, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            reason = f"{database}: {error}"
    state = "writable" if database.exists() else "writable, made at the first run"
    mend = "make the folder writable, or set MLFLOW_TRACKING_URI=sqlite:///OTHER/FOLDER/mlflow.db"
    return [Row("run store", reason or f"{database.parent}, {state}", reason is None, mend)]


def _lock() -> list[Row]:
    differ = lock.installed_drift() + lock.drift()
    value = "; ".join(differ[:5]) + (f"; and {len(differ) - 5} more" if len(differ) > 5 else "")
    mend = "run `make install` after deleting .venv; after an edit of pyproject.toml first `make lock`"
    return [Row("versions", value or "as in requirements.lock", not differ, mend)]


def _hub() -> list[Row]:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    value = "offline (HF_HUB_OFFLINE is set): only models on this machine" if offline else "allowed, not asked"
    return [Row("model hub", value, None)]


def _existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in ``folder`` (or where it would be made), or None."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place} cannot be written ({error.strerror})"
