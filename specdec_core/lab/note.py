"""The note that MLflow shows first on a run's page: what was run, how it ended, what was found."""

from __future__ import annotations

from collections.abc import Mapping

from .provenance import hardware_line

TAG = "mlflow.note.content"
_RULE = "\n\n---\n\n"
_LIMIT = 7900  # characters; MLflow cuts tags at 8000


def compose(name: str, tags: Mapping[str, str], status: str, added: str = "") -> str:
    """The note anew: the findings so far with ``added`` below them, then facts made from the run's tags.

    The UI folds a note after a few lines, so what was found stands first.
    """
    findings, rule, _ = tags.get(TAG, "").partition(_RULE)
    body = "\n\n".join(part for part in (findings if rule else "", added) if part)
    return (body + _RULE + _facts(name, tags, status))[:_LIMIT]


def _facts(name: str, tags: Mapping[str, str], status: str) -> str:
    facts = [f"{key} `{tags[key]}`" for key in ("pair", "drafter", "gamma", "profile") if key in tags]
    lines = [f"**{name}** {status}", " · ".join([*facts, hardware_line()])]
    if "error" in tags:
        lines.append(f"**Why it ended so:** {tags['error']}")
    titles = {key.removeprefix("figure."): title for key, title in tags.items() if key.startswith("figure.")}
    figures = [f"- {title} (`figures/{figure}.png`)" for figure, title in titles.items()]
    return "\n\n".join(lines) + ("\n\n" + "\n".join(figures) if figures else "")
