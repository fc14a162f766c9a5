"""The note that MLflow shows first on a run's page: what was run, how it ended, what was found."""

from __future__ import annotations

from collections.abc import Mapping

from .provenance import hardware_line

TAG = "mlflow.note.content"
_RULE = "\n\n---\n\n"
_LIMIT = 7900  # characters; MLflow cuts tags at 8000


def compose(name: str, tags: Mapping[str, str], status: str, added: str = "") -> str:
    """The note anew: a header made from the run's tags, the findings so far, and ``added`` below them."""
    findings = tags.get(TAG, "").partition(_RULE)[2]
    body = "\n\n".join(part for part in (findings, added) if part)
    return (_header(name, tags, status) + _RULE + body)[:_LIMIT]


def _header(name: str, tags: Mapping[str, str], status: str) -> str:
    facts = [f"{key} `{tags[key]}`" for key in ("pair", "drafter", "gamma", "profile") if key in tags]
    lines = [f"**{name}** {status}", " · ".join([*facts, hardware_line()])]
    if "error" in tags:
        lines.append(f"**Why it ended so:** {tags['error']}")
    titles = {key.removeprefix("figure."): title for key, title in tags.items() if key.startswith("figure.")}
    figures = [f"- {title} (`figures/{figure}.png`)" for figure, title in titles.items()]
    return "\n\n".join(lines) + ("\n\n" + "\n".join(figures) if figures else "")
