"""One source for the environment: pyproject.toml. ``python -m specdec_core.lab.lock`` writes requirements.lock from it.

The lock is used as constraints (``-c``), so it may name packages that a machine does not need.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..errors import SpecDecError
from .store import code_root

LOCK = "requirements.lock"
HEADER = "# pyproject: sha256 "
PIP_LINES = [f"-c {LOCK}", "-e .[dev]"]
MEND = "run `make lock`"


def dependency_hash(root: Path | None = None) -> str:
    """SHA-256 of what pyproject.toml asks for: Python, dependencies, extras. Comments and order do not count."""
    project = _project(root)
    extras = project.get("optional-dependencies", {})
    tables = {
        "python": project["requires-python"],
        "dependencies": sorted(str(Requirement(line)) for line in project["dependencies"]),
        "extras": {name: sorted(str(Requirement(line)) for line in lines) for name, lines in extras.items()},
    }
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def pins(root: Path | None = None) -> dict[str, list[Requirement]]:
    """Pins of requirements.lock by canonical name; several where platforms differ."""
    found: dict[str, list[Requirement]] = defaultdict(list)
    for line in ((root or code_root()) / LOCK).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith(("#", " ")):
            pin = Requirement(line)
            found[canonicalize_name(pin.name)].append(pin)
    return dict(found)


def drift(root: Path | None = None) -> list[str]:
    """How requirements.lock and environment.yml differ from pyproject.toml, a sentence each; empty if they agree."""
    root = root or code_root()
    return _lock_drift(root) + _conda_drift(root)


def _lock_drift(root: Path) -> list[str]:
    words = []
    first = (root / LOCK).read_text(encoding="utf-8").splitlines()[:1]
    if first != [HEADER + dependency_hash(root)]:
        words.append(f"{LOCK} was made from another pyproject.toml: {MEND}.")
    locked = pins(root)
    for need in _requirements(root):
        found = locked.get(canonicalize_name(need.name), [])
        if not found:
            words.append(f"{LOCK} has no pin for {need.name}: {MEND}.")
        for pin in found:
            version = _version(pin)
            if not need.specifier.contains(version, prereleases=True):
                words.append(f"{LOCK} pins {need.name} to {version}, pyproject.toml wants {need.specifier}: {MEND}.")
    return words


def _conda_drift(root: Path) -> list[str]:
    """environment.yml may say only which Python, and then hand over to pip."""
    try:
        dependencies = yaml.safe_load((root / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
        lines = [line for line in dependencies if isinstance(line, str)]
        pip_lines = [line for entry in dependencies if isinstance(entry, dict) for line in entry["pip"]]
    except (OSError, TypeError, KeyError, yaml.YAMLError) as error:
        return [f"environment.yml cannot be read ({type(error).__name__}): restore it."]
    words = []
    wanted = _project(root)["requires-python"].removeprefix(">=")
    if sorted(lines) != ["pip", f"python={wanted}"]:
        words.append(f"environment.yml lists {', '.join(lines)}; it should list python={wanted} and pip only.")
    if pip_lines != PIP_LINES:
        words.append(f"environment.yml hands pip {pip_lines}; it should hand it {PIP_LINES}.")
    return words


def installed_drift(root: Path | None = None) -> list[str]:
    """Installed packages whose version is not the lock's, as ``name 1.2 (lock: 1.3)``.

    A build's local part (``+cpu``) does not count. A package that is only locked is missed only if it is asked for.
    """
    words = []
    asked = {canonicalize_name(need.name) for need in _requirements(root, extras=False)}
    for name, candidates in pins(root).items():
        versions = {str(_version(pin)) for pin in candidates if pin.marker is None or pin.marker.evaluate()}
        try:
            installed = Version(importlib.metadata.version(name)).public
        except importlib.metadata.PackageNotFoundError:
            if name in asked and versions:
                words.append(f"{name} is not installed (lock: {', '.join(sorted(versions))})")
            continue
        if versions and installed not in versions:
            words.append(f"{name} {installed} (lock: {', '.join(sorted(versions))})")
    return words


def write_lock(root: Path | None = None, options: Sequence[str] = ()) -> None:
    """Resolve pyproject.toml into requirements.lock with uv, keeping pins that still fit; ``--upgrade`` renews them.

    Raises SpecDecError if uv is missing or finds no solution; the old lock stays as it was.
    """
    root = root or code_root()
    old = root / LOCK
    with tempfile.TemporaryDirectory(dir=root, prefix=".lock-") as folder:
        new = Path(folder) / LOCK
        if old.exists():
            new.write_bytes(old.read_bytes())  # uv starts from the versions it finds there
        command = [_uv(), "pip", "compile", "pyproject.toml", "--universal", "--python-version", "3.11"]
        command += ["--all-extras", "--no-annotate", "--custom-compile-command", "make lock", "-q", "-o", str(new)]
        result = subprocess.run([*command, *options], cwd=root, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = " ".join(result.stderr.split())[:300]
            raise SpecDecError(f"uv cannot resolve pyproject.toml: {reason}")
        new.write_text(f"{HEADER}{dependency_hash(root)}\n" + new.read_text(encoding="utf-8"), encoding="utf-8")
        os.replace(new, old)


def _uv() -> str:
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        raise SpecDecError("uv is not installed: install the dev extra with `make install`.") from None


def _project(root: Path | None) -> dict[str, Any]:
    with ((root or code_root()) / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def _requirements(root: Path | None, extras: bool = True) -> list[Requirement]:
    project = _project(root)
    groups = [project["dependencies"], *(project.get("optional-dependencies", {}).values() if extras else ())]
    return [Requirement(line) for group in groups for line in group]


def _version(pin: Requirement) -> Version:
    return Version(next(iter(pin.specifier)).version)


def main() -> None:
    try:
        write_lock(options=sys.argv[1:])
    except SpecDecError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
