"""One source of truth for the environment, one direction of imports, nothing private in what is committed."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_core.lab import lock

ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", lock.LOCK, "environment.yml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def tracked() -> list[Path]:
    """Files that are, or on the next commit would be, in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_lock_and_conda_file_agree_with_pyproject() -> None:
    assert lock.drift() == []


def test_a_new_dependency_is_seen(copy: Path) -> None:
    replace(copy / "pyproject.toml", '"psutil>=', '"einops>=0.8",\n  "psutil>=')
    words = " ".join(lock.drift(copy))
    assert "another pyproject.toml" in words
    assert "no pin for einops" in words


def test_an_extra_is_seen(copy: Path) -> None:
    replace(copy / "pyproject.toml", "dev = [", 'more = ["einops"]\ndev = [')
    assert "no pin for einops" in " ".join(lock.drift(copy))


def test_an_altered_pin_is_seen(copy: Path) -> None:
    pin = next(line for line in (copy / lock.LOCK).read_text().splitlines() if line.startswith("numpy=="))
    replace(copy / lock.LOCK, pin, "numpy==1.26.4")
    assert lock.drift(copy) == [f"requirements.lock pins numpy to 1.26.4, pyproject.toml wants <3,>=2.4: {lock.MEND}."]


def test_comments_and_order_are_no_drift(copy: Path) -> None:
    replace(copy / "pyproject.toml", "dependencies = [", "dependencies = [ # what it needs")
    replace(copy / "pyproject.toml", "[project]", "# the project\n[project]")
    assert lock.drift(copy) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python=3.11\n  - pip\n", "python=3.12\n  - pip\n"),
        ("  - pip\n", "  - pip\n  - scipy\n"),
        ("- -c requirements.lock\n", "- -r requirements.lock\n"),
        ("-e .[dev]\n", "-e .\n"),
        ("dependencies:\n", "dependency:\n"),
    ],
)
def test_an_edited_conda_file_is_seen(old: str, new: str, copy: Path) -> None:
    path = copy / "environment.yml"
    head, _, tail = path.read_text().rpartition("\nname: ")  # leave the comments alone
    path.write_text(head + "\nname: " + tail.replace(old, new, 1))
    assert old in tail
    assert len(lock.drift(copy)) == 1


def test_another_installed_version_is_named(copy: Path) -> None:
    pin = next(line for line in (copy / lock.LOCK).read_text().splitlines() if line.startswith("packaging=="))
    replace(copy / lock.LOCK, pin, "packaging==1.0")
    words = lock.installed_drift(copy)
    assert any(word.startswith("packaging ") and word.endswith("(lock: 1.0)") for word in words)


def test_the_core_imports_nothing_of_lab() -> None:
    """At no depth, so not inside a function either; the package's lazy `load_pair` is the one door."""
    core = [*(ROOT / "specdec_core").glob("*.py"), *(ROOT / "specdec_core" / "drafters").glob("*.py")]
    core = [path for path in core if path != ROOT / "specdec_core" / "__init__.py"]
    assert len(core) > 5
    guilty = [path.name for path in core if any("lab" in name.split(".") for name in imported(path))]
    assert guilty == []


def imported(path: Path) -> set[str]:
    """Every dotted name that a file imports anywhere, by statement or by `import_module` with a literal."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module or ''}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return names


@pytest.mark.parametrize(
    "line",
    [
        "from .lab import models",
        "from . import lab",
        "from ..lab.models import load_pair",
        "def f():\n    import specdec_core.lab.models",
        "import importlib\nimportlib.import_module('specdec_core.lab')",
    ],
)
def test_every_way_to_import_lab_is_seen(line: str, tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text(line)
    assert any("lab" in name.split(".") for name in imported(tmp_path / "core.py"))


def test_importing_the_core_loads_nothing_of_lab() -> None:
    code = "import sys, specdec_core; sys.exit(any(name.startswith('specdec_core.lab') for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_committed_notebooks_have_no_outputs() -> None:
    full = []
    for path in tracked():
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            if any(cell.get("outputs") or cell.get("execution_count") for cell in cells):
                full.append(path.name)
    assert full == []


def test_no_file_holds_a_home_folder() -> None:
    home = re.compile(rb"/(home|Users)/(?!alice/|someone/|user/)[a-z][\w.-]*/|/root/|[A-Z]:\\\\?Users\\\\?\w")
    guilty = []
    for path in tracked():
        content = path.read_bytes()
        if b"\0" not in content[:8000] and path != Path(__file__) and home.search(content):
            guilty.append(str(path.relative_to(ROOT)))
    assert guilty == []
