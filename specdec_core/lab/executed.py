"""The executed copy of a notebook: masked, exported to HTML, attached to its run, and asked what went wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .lineage import Run, one_line
from .masking import masked


def attach_executed(run: Run, executed: Path) -> None:
    """The executed copy and its HTML page as artifacts, masked; also of a notebook that failed half-way."""
    import nbformat
    from nbconvert import HTMLExporter

    if not executed.is_file():
        return
    try:
        book = nbformat.from_dict(masked(nbformat.read(executed, as_version=4)))
        executed.write_text(nbformat.writes(book), encoding="utf-8")
    except (ValueError, OSError) as error:  # half a file, after a kill or on a full disk
        run.set_tags({"executed_copy": f"unreadable: {one_line(str(error))}"})
        return
    run.log_file(executed, "notebook")
    page, _ = HTMLExporter().from_notebook_node(book)  # embed_images=True would break inline HTML such as <sup>
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / f"{executed.stem}.html"
        html.write_text(page, encoding="utf-8")
        run.log_file(html, "notebook")


def cell_error(book: Any) -> str:
    """The first error in an executed notebook as one line, or "" when there is none."""
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                name = "" if output.ename == "SpecDecError" else f"{output.ename}: "
                hint = " (free some disk and run again)" if "No space left" in output.evalue else ""
                return f"{name}{one_line(output.evalue)}{hint} (in cell [{cell.execution_count}])"
    return ""
