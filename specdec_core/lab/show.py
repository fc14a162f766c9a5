"""A generation for people to read: every token with what became of it. Shared by terminal, notebook and figures."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from pandas.io.formats.style import Styler
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..api import Output, Pair, generate
from ..record import STAGES, seconds_by_stage

Kind = Literal["target", "accepted", "rejected", "resampled", "bonus"]

# Okabe-Ito colours: told apart by colour-blind readers too.
COLOURS: dict[Kind, str] = {
    "target": "#555555",
    "accepted": "#009E73",
    "rejected": "#D55E00",
    "resampled": "#E69F00",
    "bonus": "#0072B2",
}
MEANING: dict[Kind, str] = {
    "target": "target alone",
    "accepted": "drafted, accepted",
    "rejected": "drafted, rejected",
    "resampled": "from the target after a rejection",
    "bonus": "bonus after a whole block",
}


@dataclass(frozen=True)
class Piece:
    """One token of the story of a generation. ``instead`` is what the target preferred to a rejected token."""

    step: int
    text: str
    kind: Kind
    instead: str = ""


def story(output: Output, pair: Pair) -> list[Piece]:
    """Every token that was emitted, and the first rejected one of each block, in order."""
    decode = lambda token: str(pair.tokenizer.decode([token]))  # noqa: E731
    pieces = []
    for r in output.records:
        pieces += [Piece(r.step, decode(t), "accepted") for t in r.emitted[: r.accepted]]
        if r.rejected:
            preferred = decode(r.preferred[r.accepted]) if r.preferred else ""
            pieces.append(Piece(r.step, decode(r.draft_tokens[r.accepted]), "rejected", preferred))
        if len(r.emitted) > r.accepted:
            kind: Kind = "resampled" if r.last == "resampled" else "bonus" if r.last == "bonus" else "target"
            pieces.append(Piece(r.step, decode(r.emitted[-1]), kind))
    return pieces


def facts(pair: Pair) -> str:
    """A pair in one Markdown line."""
    known = pair.lineage
    words = [f"target `{known.get('target_ref', type(pair.target).__name__)}`"]
    if pair.draft is not None:
        words.append(f"draft `{known.get('draft_ref', type(pair.draft).__name__)}`")
    words += [f"{key} `{known[key]}`" for key in ("dtype", "device", "attn_implementation", "threads") if key in known]
    return f"**{pair.name}**: " + ", ".join(words).replace("attn_implementation", "attention")


def table(rows: pd.DataFrame, **formats: Any) -> Styler:
    """A table for a notebook: text to the left, no index, numbers in the given formats."""
    words = pd.Index([c for c in rows.columns if not pd.api.types.is_numeric_dtype(rows[c])])
    styled = rows.style.hide(axis="index").set_properties(subset=words, **{"text-align": "left"})
    styled = styled.set_table_styles([{"selector": "th", "props": "text-align: left"}])  # type: ignore[list-item]
    return styled.format(precision=3, na_rep="–").format(formats, na_rep="–")


def as_html(pieces: list[Piece]) -> str:
    """The story as one HTML paragraph with its legend."""
    spans = []
    for piece in pieces:
        text = html.escape(piece.text).replace("\n", "⏎<br>")
        style = f"color:{COLOURS[piece.kind]}" + (";text-decoration:line-through" if piece.kind == "rejected" else "")
        hint = f"pass {piece.step}: {MEANING[piece.kind]}" + (
            f"; target preferred {piece.instead!r}" if piece.instead else ""
        )
        spans.append(f'<span style="{style}" title="{html.escape(hint)}">{text}</span>')
    legend = " · ".join(f'<b style="color:{COLOURS[k]}">{m}</b>' for k, m in MEANING.items())
    body = "".join(spans)
    return f'<div style="font-size:0.85em">{legend}</div><p style="white-space:pre-wrap;line-height:1.5">{body}</p>'


def as_rich(pieces: list[Piece]) -> Text:
    """The story as coloured terminal text."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, style=COLOURS[piece.kind] + (" strike" if piece.kind == "rejected" else ""))
    return text


def legend() -> Text:
    """One line that names the colours."""
    text = Text()
    for kind, meaning in MEANING.items():
        text.append(f"■ {meaning}  ", style=COLOURS[kind])
    return text


def show_generate(
    prompt: str,
    *,
    pair: str,
    drafter: str | None = None,
    gamma: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    rule: str | None = None,
    candidates: int | None = None,
    model_gamma: int | None = None,
    confidence: float | None = None,
    control: str | None = None,
    baseline: bool = True,
    console: Console | None = None,
) -> None:
    """``specdec generate``: the text in colours, its numbers, and ordinary decoding beside it. Options that are None
    are the pair's own."""
    from .models import load_pair

    console = console or Console()
    with console.status("loading the models"):
        models = load_pair(pair)
    common: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    given: dict[str, Any] = {
        "drafter": drafter,
        "gamma": gamma,
        "rule": rule,
        "candidates": candidates,
        "control": control,
    }
    given |= {"model_gamma": model_gamma, "confidence": confidence}
    how: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    speculative = generate(models, prompt, max_new_tokens=max_new_tokens, **how, **common)
    known = {"drafter": models.drafter, "gamma": 4, **models.options, **how}
    title = f"{models.name}, drafter {known['drafter']}, γ = {known['gamma']}, temperature {temperature:g}"
    console.print(Panel(as_rich(story(speculative, models)), title=title, padding=(1, 2)))
    console.print(legend())
    outputs = {"speculative": speculative}
    if baseline:
        outputs["ordinary"] = generate(models, prompt, max_new_tokens=max_new_tokens, speculate=False, **common)
    console.print(_numbers(outputs))
    if baseline:
        console.print(_verdict(speculative, outputs["ordinary"], temperature))


def _numbers(outputs: dict[str, Output]) -> Table:
    table = Table(title="Numbers of this one prompt (an example, not evidence)")
    table.add_column("")
    for name in outputs:
        table.add_column(name, justify="right")
    metrics = {name: o.metrics for name, o in outputs.items()}
    for row in next(iter(metrics.values())):
        table.add_row(row.replace("_", " "), *(_number(m[row]) for m in metrics.values()))
    for stage in STAGES:
        table.add_row(f"seconds in {stage}", *(f"{seconds_by_stage(o.records)[stage]:.3f}" for o in outputs.values()))
    table.add_row("stopped by", *(str(o.stop) for o in outputs.values()))
    return table


def dated(value: float | None, did: str, did_not: str) -> str:
    """``the control acts after 3 tokens``, or what is said where there is no number."""
    if value is None or value != value:
        return did_not
    return f"{did} after {value:g} token" + ("" if value == 1 else "s")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}" if value == int(value) else f"{value:.3f}"


def _verdict(speculative: Output, ordinary: Output, temperature: float) -> str:
    fast, slow = speculative.metrics["tokens_per_second"], ordinary.metrics["tokens_per_second"]
    speed = (
        f"{fast / slow:.2f} × the speed of ordinary decoding after the prefill"
        if fast and slow
        else "too short to time"
    )
    if temperature > 0:
        return f"{speed}. Sampled texts differ; their law is the same (notebook 01)."
    same = speculative.tokens == ordinary.tokens
    return f"{speed}. Tokens are {'identical' if same else 'NOT identical (in 16 bits, rounding can do that)'}."
