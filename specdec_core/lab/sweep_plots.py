"""Figures of sweeps and of stress: cells as maps, survival by position, prompts, subgroups, what a failure costs. Each
title states the finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..api import Output
from .plots import LINES, headline
from .show import COLOURS


def maps(cells: pd.DataFrame, value: str, label: str, title: str, middle: float | None = None) -> Figure:
    """A map for each temperature, top-p and rule: ``value`` by drafter and γ. With ``middle`` blue is above it and
    orange below; ``{value}_low`` and ``_high`` on the same side of it make a number bold."""
    panels = list(cells.groupby(["temperature", "top_p", "rule"], sort=True))
    drafters, gammas = list(dict.fromkeys(cells["drafter"])), sorted(cells["gamma"].unique())
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    size = (1.2 + 0.62 * len(gammas) * across + 1.0, 0.9 + (0.75 + 0.36 * len(drafters)) * down)
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, sharey=True, sharex=True)
    low, high = cells[value].min(), cells[value].max()
    norm: Normalize = Normalize(low, high)
    if middle is not None:
        norm = TwoSlopeNorm(middle, min(low, middle - 1e-3), max(high, middle + 1e-3))
    for axes, (_, panel) in zip(grid.flat, panels, strict=False):
        temperature, top_p, rule = panel[["temperature", "top_p", "rule"]].iloc[0]
        table = panel.set_index(["drafter", "gamma"])
        shown = np.array([[table.loc[(d, g), value] for g in gammas] for d in drafters], dtype=float)
        image = axes.imshow(shown, cmap="PuOr" if middle is not None else "viridis", norm=norm, aspect="auto")
        for y, drafter in enumerate(drafters):
            for x, gamma in enumerate(gammas):
                row = table.loc[(drafter, gamma)]
                sure = middle is not None and (row[f"{value}_low"] > middle or row[f"{value}_high"] < middle)
                shade = image.cmap(norm(row[value]))[:3]
                ink = "white" if np.dot(shade, (0.3, 0.59, 0.11)) < 0.5 else "black"
                weight = "bold" if sure else "normal"
                axes.text(x, y, f"{row[value]:.2f}", ha="center", va="center", fontsize=8, color=ink, fontweight=weight)
        cut = f", top-p {top_p:g}" if top_p < 1 else ""
        axes.set_title(f"T = {temperature:g}{cut}, {rule}", fontsize=9, fontweight="normal")
        axes.set_xticks(range(len(gammas)), [str(g) for g in gammas])
        axes.set_yticks(range(len(drafters)), [d.replace("_", " ") for d in drafters])
        axes.grid(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("block length γ (tokens)", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.9).set_label(label, fontsize=8)
    headline(figure, title)
    return figure


def survival(tables: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Left: how many blocks survive each position, beside what one α would give. Right: acceptance at each position,
    given that it was judged, with its interval over prompts."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for (name, table), colour in zip(tables.items(), LINES, strict=False):
        left.plot(table["position"], table["joint"], marker="o", color=colour, label=name.replace("_", " "))
        left.plot(table["position"], table["geometric"], linestyle=":", color=colour)
        spread = np.array(
            [table["conditional"] - table["conditional_low"], table["conditional_high"] - table["conditional"]]
        )
        spread = np.where(np.isfinite(spread), spread.clip(min=0), 0)
        right.errorbar(
            table["position"], table["conditional"], yerr=spread, marker="o", capsize=3, color=colour,
            label=name.replace("_", " "),
        )  # fmt: skip
    left.plot([], [], linestyle=":", color="#555555", label="one α at all positions")
    left.set(xlabel="position in the block", ylabel="share of blocks accepted up to here", ylim=(0, 1.02))
    right.set(xlabel="position in the block", ylabel="acceptance, given that it was judged", ylim=(0, 1.02))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    headline(figure, title)
    return figure


def spread(values: Mapping[str, Sequence[float]], label: str, title: str, middle: float = 1.0) -> Figure:
    """How prompts differ: a row for each name, a dot for each prompt, the quartiles as a bar."""
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(values) + 1.5))
    jitter = np.random.default_rng(0)
    for y, each in enumerate(values.values()):
        dots = np.asarray(each, dtype=float)
        colours = [COLOURS["accepted"] if v >= middle else COLOURS["rejected"] for v in dots]
        axes.scatter(dots, y + jitter.uniform(-0.22, 0.22, len(dots)), s=14, alpha=0.7, color=colours)
        low, median, high = np.quantile(dots, [0.25, 0.5, 0.75])
        axes.plot([low, high], [y, y], color="black", linewidth=2)
        axes.plot([median], [y], marker="|", markersize=14, color="black", markeredgewidth=2)
    axes.axvline(middle, color="black", linewidth=1)
    axes.set_yticks(range(len(values)), [name.replace("_", " ") for name in values])
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set(xlabel=label)
    headline(figure, title)
    return figure


def forest(groups: pd.DataFrame, value: str, label: str, title: str, middle: float = 1.0) -> Figure:
    """Subgroups with their intervals, by ``of`` (what they are groups of) and ``group``; ``sure`` ones are filled."""
    figure, axes = plt.subplots(figsize=(9, 0.3 * (len(groups) + groups["of"].nunique()) + 1.4))
    y, names, places = 0, [], []
    for of, some in groups.groupby("of", sort=False):
        axes.text(0, y, f"by {of}", transform=axes.get_yaxis_transform(), fontsize=9, fontweight="bold", va="center")
        y += 1
        for row in some.to_dict("records"):
            colour = COLOURS["accepted"] if row[value] >= middle else COLOURS["rejected"]
            low, high = (x if np.isfinite(x) else row[value] for x in (row[f"{value}_low"], row[f"{value}_high"]))
            axes.plot([low, high], [y, y], color=colour, linewidth=1.6)
            axes.plot([row[value]], [y], "o", color=colour, markerfacecolor=colour if row["sure"] else "white")
            names.append(f"{row['group']} ({row['prompts']})")
            places.append(y)
            y += 1
    axes.axvline(middle, color="black", linewidth=1)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(y - 0.5, -0.7)
    axes.set(xlabel=label)
    axes.grid(axis="y", visible=False)
    headline(figure, title)
    return figure


def against(table: pd.DataFrame, title: str) -> Figure:
    """Predicted against measured speed of the cells that were run, with the interval of what was measured."""
    figure, axes = plt.subplots(figsize=(6.2, 5))
    ends = [
        table["predicted"].min(),
        table["measured_low"].min(),
        table["predicted"].max(),
        table["measured_high"].max(),
    ]
    low, high = min(*ends, 0.95) * 0.95, max(*ends, 1.05) * 1.05
    axes.plot([low, high], [low, high], color="#888888", linewidth=1, label="prediction = measurement")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axvline(1, color="black", linewidth=0.8)
    for (drafter, some), colour in zip(table.groupby("drafter", sort=False), LINES, strict=False):
        errors = [some["measured"] - some["measured_low"], some["measured_high"] - some["measured"]]
        axes.errorbar(
            some["predicted"], some["measured"], yerr=np.clip(np.array(errors), 0, None), fmt="o", capsize=3,
            color=colour, label=str(drafter).replace("_", " "),
        )  # fmt: skip
        for row in some.to_dict("records"):
            note = f"γ{row['gamma']}" + (f", T {row['temperature']:g}" if row["temperature"] else "")
            axes.annotate(note, (row["predicted"], row["measured"]), (5, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="predicted speed over ordinary decoding", ylabel="measured, on the same prompts", xlim=(low, high))
    axes.legend(fontsize=8)
    headline(figure, title)
    return figure


# --- failure modes ----------------------------------------------------------------------------------------


def severity(table: pd.DataFrame, title: str, least: float = 0.95) -> Figure:
    """For each case the mean and the worst request, with speculation alone and with the control; the dashed line is
    what the control should keep."""
    rows = table[table["alone"].notna()].to_dict("records")
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.8))
    for y, row in enumerate(rows):
        for arm, colour, shift in (("alone", COLOURS["rejected"], -0.13), ("controlled", COLOURS["accepted"], 0.13)):
            axes.plot([row[f"{arm}_worst"], row[arm]], [y + shift, y + shift], color=colour, linewidth=1.5)
            axes.plot([row[arm]], [y + shift], "o", color=colour)
            axes.plot([row[f"{arm}_worst"]], [y + shift], "|", color=colour, markersize=9, markeredgewidth=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.axvline(least, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [str(row["case"]) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="speed over ordinary decoding (ratio; dot: mean over requests, bar: worst request)")
    handles = [
        Patch(color=COLOURS["rejected"], label="speculation alone"),
        Patch(color=COLOURS["accepted"], label="with the control"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    headline(figure, title)
    return figure


def signs(table: pd.DataFrame, names: Sequence[str], title: str) -> Figure:
    """How many tokens pass until each sign warns and until the control acts, by case (medians over requests)."""
    rows = table.to_dict("records")
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.8))
    shown = {**{f"until_{name}": name.replace("_", " ") for name in names}, "until_fallback": "the control acts"}
    for i, ((column, label), colour, mark) in enumerate(zip(shown.items(), LINES, "os^D", strict=False)):
        there = [(row[column], y + 0.16 * (i - 1.5)) for y, row in enumerate(rows) if not pd.isna(row.get(column))]
        axes.scatter([x for x, _ in there], [y for _, y in there], color=colour, marker=mark, label=label, zorder=3)
    axes.set_yticks(range(len(rows)), [str(row["case"]) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="output tokens since the cause began (median over requests; no mark: not seen)", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    headline(figure, title)
    return figure


def timeline(output: Output, during: tuple[int, int] | None, title: str) -> Figure:
    """One request pass by pass: tokens kept and turned down over those of the output, the control's state behind."""
    figure, axes = plt.subplots(figsize=(10, 3))
    shades = {"off": "#DDDDDD", "probe": "#FCE7B2"}
    written = 0
    for record in output.records:
        tokens = len(record.emitted)
        if record.kind != "prefill":
            if record.control in shades:
                axes.axvspan(written, written + tokens, color=shades[record.control], linewidth=0)
            axes.bar(written + tokens / 2, record.accepted, width=0.8, color=COLOURS["accepted"])
            axes.bar(written + tokens / 2, -(record.verified - record.accepted), width=0.8, color=COLOURS["rejected"])
        written += tokens
    for edge in during or ():
        axes.axvline(edge, color="black", linestyle=":", linewidth=1)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="output token", ylabel="drafted tokens\nof the pass")
    handles = [
        Patch(color=COLOURS["accepted"], label="kept"),
        Patch(color=COLOURS["rejected"], label="scored in vain"),
        Patch(color=shades["off"], label="control: off"),
        Patch(color=shades["probe"], label="control: probe"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    headline(figure, title)
    return figure
