"""Figures. Each title states the finding; the caller logs what comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..api import Output, Pair
from ..record import STAGES, seconds_by_stage, target_passes, tokens_emitted
from .show import COLOURS, MEANING, Kind
from .stats import Interval
from .theory import best_gamma, expected_tokens, walltime_factor

STAGE_COLOURS = {
    "draft": "#CC79A7",
    "score": "#0072B2",
    "accept": "#009E73",
    "resample": "#E69F00",
    "repeat": "#999999",
}
LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def style() -> None:
    """The look of every figure: quiet axes, readable at the width of a notebook."""
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "axes.prop_cycle": cycler(color=LINES),
        }
    )


def finish(figure: Figure, run_id: str) -> Figure:
    """Put the run id above the picture, so that a copy can be traced."""
    figure.text(1.0, 1.01, f"run {run_id}", ha="right", va="bottom", fontsize=7, color="#888888")
    return figure


def headline(figure: Figure, title: str) -> None:
    """The finding, at the left edge above everything."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")


def block_map(output: Output, pair: Pair, title: str, most: int = 16) -> Figure:
    """The first target passes as rows of tokens: accepted, rejected (struck, with the target's choice), resampled."""
    passes = [r for r in output.records if r.kind != "prefill"]
    records = passes[:most]
    widest = max((len(r.draft_tokens) for r in records), default=0) + 1
    figure, axes = plt.subplots(figsize=(max(8.0, 1.25 * (widest + 1)), 0.42 * len(records) + 1.4))
    word = lambda t: _short(str(pair.tokenizer.decode([t])))  # noqa: E731
    for y, r in enumerate(records):
        drafted = list(r.draft_tokens)
        if r.branch is not None:  # the candidate that was kept in place of the first
            drafted[r.accepted - 1] = r.branch
        for x, token in enumerate(drafted):
            kept, judged = x < r.accepted, x < r.accepted + r.rejected
            kind: Kind = "accepted" if kept else "rejected"
            text = word(token)
            if judged and not kept and r.preferred:
                text = f"{text} → {word(r.preferred[x])}"
            _cell(axes, x, y, text, COLOURS[kind] if judged else "#DDDDDD", strike=judged and not kept)
        if len(r.emitted) > r.accepted:
            end: Kind = "bonus" if r.last == "bonus" else "resampled" if r.last == "resampled" else "target"
            _cell(axes, widest, y, word(r.emitted[-1]), COLOURS[end])
        axes.text(-0.15, y + 0.5, f"pass {r.step}", ha="right", va="center", fontsize=8)
    axes.set(xlim=(-0.9, widest + 1), ylim=(len(records), 0))
    if len(passes) > most:
        axes.set_xlabel(f"the first {most} of {len(passes)} passes", fontsize=8)
    headline(figure, title)
    axes.set_xticks(
        [*(x + 0.5 for x in range(widest - 1)), widest + 0.5],
        [*(f"draft {x + 1}" for x in range(widest - 1)), "target's token"],
    )
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    handles = [Patch(color=COLOURS[k], alpha=_alpha(k == "rejected"), label=MEANING[k]) for k in COLOURS]
    handles.append(Patch(color="#DDDDDD", label="behind a rejection, never judged"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _cell(axes: Axes, x: float, y: float, text: str, colour: str, strike: bool = False) -> None:
    axes.add_patch(Rectangle((x + 0.03, y + 0.08), 0.94, 0.84, color=colour, alpha=_alpha(strike)))
    ink = "black" if strike or colour in ("#DDDDDD", "#E69F00") else "white"
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, color=ink, parse_math=False)


def _alpha(rejected: bool) -> float:
    return 0.28 if rejected else 0.85


def _short(token: str, most: int = 11) -> str:
    text = token.replace("\n", "⏎").replace("\t", "⇥")
    text = "␣" if not text.strip() else text.strip() if len(text.strip()) <= most else text.strip()[: most - 1] + "…"
    return text


def stage_bars(outputs: Mapping[str, Output], title: str) -> Figure:
    """Milliseconds per output token by stage, after the prefill; one bar for each way of decoding."""
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(outputs) + 1.6))
    for y, output in enumerate(outputs.values()):
        tokens = max(1, tokens_emitted([r for r in output.records if r.kind != "prefill"]))
        left = 0.0
        for stage, seconds in seconds_by_stage(output.records).items():
            width = 1e3 * seconds / tokens
            axes.barh(y, width, left=left, color=STAGE_COLOURS[stage], label=stage if y == 0 else None)
            if width > 4:
                axes.text(left + width / 2, y, f"{width:.0f}", ha="center", va="center", color="white", fontsize=9)
            left += width
        axes.text(left, y, f"  {left:.1f} ms a token, {target_passes(output.records)} passes", va="center", fontsize=9)
    axes.set(xlabel="milliseconds per output token, after the prefill")
    headline(figure, title)
    axes.set_yticks(range(len(outputs)), list(outputs))
    axes.margins(x=0.3)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(handles=[Patch(color=STAGE_COLOURS[s], label=s) for s in STAGES], loc="outside lower center", ncols=5)
    return figure


def law_errors(rows: Sequence[Mapping[str, Any]], title: str, limit: float = 1e-12) -> Figure:
    """How far each rule's enumerated law lies from the target's, one point a random (p, q) pair, on a log axis."""
    rules = list(dict.fromkeys(str(r["rule"]) for r in rows))
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rules) + 1.7))
    jitter = np.random.default_rng(0)
    for y, rule in enumerate(rules):
        errors = np.array([r["error"] for r in rows if r["rule"] == rule])
        exact = all(r["exact"] for r in rows if r["rule"] == rule)
        axes.scatter(
            np.maximum(errors, 1e-17), y + jitter.uniform(-0.25, 0.25, len(errors)), s=12, alpha=0.6,
            color=COLOURS["accepted"] if exact else COLOURS["rejected"],
        )  # fmt: skip
    axes.axvline(limit, color="black", linestyle="--", linewidth=1)
    axes.text(limit * 1.3, -0.65, f"limit {limit:g}", fontsize=8, va="bottom")
    axes.set(xscale="log", xlabel="largest error in the probability of any text (no unit)")
    headline(figure, title)
    axes.set_yticks(range(len(rules)), [r.replace("_", " ") for r in rules])
    axes.set_ylim(len(rules) - 0.4, -0.9)
    return figure


def theory_curves(title: str, cs: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5)) -> Figure:
    """Expected tokens a pass against γ by α, and the best walltime factor against α by c."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    gammas = np.arange(0, 17)
    for alpha in (0.5, 0.7, 0.8, 0.9, 0.95):
        left.plot(gammas, [expected_tokens(alpha, int(g)) for g in gammas], marker=".", label=f"α = {alpha}")
    left.set(
        xlabel="block length γ (tokens)", ylabel="expected tokens per target pass", title="More γ buys less and less"
    )
    left.legend()
    alphas = np.linspace(0.02, 0.98, 97)
    for c in cs:
        right.plot(alphas, [max(1.0, best_gamma(float(a), c)[1]) for a in alphas], label=f"c = {c}")
    right.axhline(1, color="black", linewidth=1)
    right.set(
        xlabel="acceptance rate α", ylabel="speed over ordinary decoding (ratio)", title="No gain until α exceeds c"
    )
    right.legend()
    headline(figure, title)
    return figure


def walltime_slider(alpha: float, c: float, gamma: int) -> Figure:
    """One walltime curve over γ with its best point and the chosen one: what :func:`sliders` of notebook 01 redraw."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    gammas = range(1, 21)
    axes.plot(gammas, [walltime_factor(alpha, g, c) for g in gammas], marker="o")
    best, factor = best_gamma(alpha, c)
    axes.axhline(1, color="black", linewidth=1)
    axes.scatter([gamma], [walltime_factor(alpha, gamma, c)], s=120, color=COLOURS["rejected"], zorder=3)
    pays = f"best γ = {best}: {factor:.2f} ×" if factor > 1 else "no γ pays"
    chosen = walltime_factor(alpha, gamma, c)
    axes.set(
        xlabel="block length γ (tokens)",
        ylabel="speed over ordinary\ndecoding (ratio)",
        title=f"α = {alpha:.2f}, c = {c:.2f}: {pays}; γ = {gamma} gives {chosen:.2f} ×",
    )
    axes.set_xticks(range(0, 21, 2))
    return figure


def sliders(draw: Callable[..., Figure], **ranges: tuple[Any, Any, Any, Any]) -> None:
    """Show ``draw(**values)`` under one slider a name; each range is (first, last, step, value).

    Not ``ipywidgets.interactive``: its Output widget makes nbclient wait for ever now and then
    (jupyter/nbclient issue 312), and leaves no figure in a page that has no kernel.
    """
    import ipywidgets
    from IPython.display import display

    def slider(name: str, first: Any, last: Any, step: Any, value: Any) -> Any:
        kind = ipywidgets.FloatSlider if isinstance(value, float) else ipywidgets.IntSlider
        return kind(value, min=first, max=last, step=step, description=name, continuous_update=False)

    def drawn() -> Figure:
        figure = draw(**{name: control.value for name, control in controls.items()})
        plt.close(figure)  # shown by hand: else the backend shows it once more
        return figure

    controls = {name: slider(name, *given) for name, given in ranges.items()}
    display(ipywidgets.VBox(list(controls.values())))
    shown = display(drawn(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: shown.update(drawn()), "value")


def prediction(
    gammas: Sequence[int], measured: Sequence[Interval], predicted: Mapping[str, Sequence[float]], title: str, note: str
) -> Figure:
    """Measured tokens per pass with intervals against γ, and each way of predicting them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    values = np.array([m.value for m in measured])
    spread = np.array([[max(0.0, m.value - m.low), max(0.0, m.high - m.value)] for m in measured]).T
    left.errorbar(gammas, values, yerr=np.where(np.isfinite(spread), spread, 0), fmt="ko", capsize=4, label="measured")
    for (name, line), mark in zip(predicted.items(), ("s--", "^-", "v:"), strict=False):
        left.plot(gammas, line, mark, label=f"predicted: {name.replace('_', ' ')}")
    left.axhline(1, color="black", linewidth=1)
    left.set(xlabel="block length γ (tokens)", ylabel="output tokens per target pass")
    left.set_xticks(list(gammas))
    left.legend()
    for i, (name, line) in enumerate(predicted.items()):
        error = 100 * (np.array(line) - values) / values
        right.bar(np.arange(len(gammas)) + 0.4 * i - 0.2, error, 0.38, color=LINES[i], label=name.replace("_", " "))
    right.axhline(0, color="black", linewidth=1)
    right.set_xticks(range(len(gammas)), [str(g) for g in gammas])
    right.set(xlabel="block length γ (tokens)", ylabel="error of the prediction (%)", title=note)
    headline(figure, title)
    return figure


def shares(values: Mapping[str, float], title: str, label: str, overall: float | None = None) -> Figure:
    """A bar a name, the highest on top, perhaps with the figure over all as a line."""
    ordered = sorted(values.items(), key=lambda item: item[1])
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.26 * len(ordered)))
    axes.barh([name for name, _ in ordered], [value for _, value in ordered], color=LINES[0], height=0.7)
    for i, (_, value) in enumerate(ordered):
        axes.text(value, i, f" {value:.2f}", va="center", fontsize=8)
    if overall is not None:
        axes.axvline(overall, color=LINES[1], linewidth=1.2, label=f"all: {overall:.2f}")
        axes.legend(loc="lower right")
    axes.set(xlabel=label, xlim=(0, 1.05))
    headline(figure, title)
    return figure


def learning(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Acceptance on held-out texts over the steps of a training; a dotted line where its loss changes."""
    figure, axes = plt.subplots(figsize=(8, 3.2))
    steps = [row["step"] for row in rows]
    for name, words in (("greedy", "same preference"), ("alpha_07", "Σ min(p, q) at T = 0.7"), ("alpha", "at T = 1")):
        axes.plot(steps, [row[name] for row in rows], marker="o", markersize=3, label=words)
    for before, after in itertools.pairwise(rows):
        if before["learns"] != after["learns"]:
            axes.axvline(before["step"], color="#888888", linestyle=":")
            axes.text(before["step"], 0.01, f" {after['learns']}", fontsize=8, color="#555555")
    axes.set(xlabel="step", ylabel="share accepted", ylim=(0, None))
    axes.legend(loc="upper left")
    headline(figure, title)
    return figure


def coverage(sizes: Sequence[int], covered: Sequence[float], chosen: int, title: str) -> Figure:
    """What share of the written tokens the most frequent ones are, by how many of them are kept."""
    figure, axes = plt.subplots(figsize=(8, 2.8))
    axes.plot(sizes, covered, marker="o", markersize=3)
    axes.axvline(chosen, color=LINES[1], linewidth=1.2, label=f"kept: {chosen:,}")
    axes.set(
        xscale="log", xlabel="tokens in the draft's output head", ylabel="share of what is written", ylim=(0, 1.02)
    )
    axes.legend(loc="lower right")
    headline(figure, title)
    return figure


def ratios(values: Sequence[float], labels: Sequence[str], overall: Interval, title: str) -> Figure:
    """Speed over ordinary decoding by prompt, worst at the top, with the interval of the geometric mean."""
    order = np.argsort(values)
    figure, axes = plt.subplots(figsize=(8, 0.34 * len(values) + 1.8))
    if np.isfinite([overall.low, overall.high]).all():
        axes.axvspan(overall.low, overall.high, color=LINES[0], alpha=0.15, label="95 % interval of the mean")
    axes.axvline(overall.value, color=LINES[0], label=f"geometric mean {overall.value:.2f} ×")
    axes.axvline(1, color="black", linewidth=1)
    sorted_values = np.asarray(values)[order]
    colours = [COLOURS["accepted"] if v >= 1 else COLOURS["rejected"] for v in sorted_values]
    axes.scatter(sorted_values, range(len(values)), color=colours, zorder=3)
    axes.set_yticks(range(len(values)), [labels[i] for i in order])
    axes.invert_yaxis()
    axes.set(xlabel="speed over ordinary decoding (ratio, after the prefill; 1 = no gain)")
    headline(figure, title)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
