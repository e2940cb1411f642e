"""Draws the bytes, the distance and the recall of variants."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from matplotlib.figure import Figure

from .measure import FORGETS, GOOD, LEAST_RECALL, VISIBLE, Quality

COLOURS = {GOOD: "#2a8f4f", VISIBLE: "#d08a12", FORGETS: "#c0392b"}
FLOOR = 1e-6  # nats; smaller distances are drawn here


def draw(quality: Quality, model: str, path: Path) -> None:
    """Writes a picture; the suffix of `path` chooses its file type.

    Args:
        model: the model's name, which the picture shows with the texts' lengths and the day.

    Raises:
        OSError: the file cannot be written.
    """
    names = [each.name for each in quality.variants]
    colours = [COLOURS[each.verdict] for each in quality.variants]
    figure = Figure(figsize=(10, 1.8 + 0.42 * len(names)), layout="constrained")
    fewer, distance, recall = figure.subplots(1, 3, sharey=True)

    panels = [
        (fewer, "times fewer bytes", [each.fewer for each in quality.variants], "%.2f", 1.0),
        (
            distance,
            f"KL, nats (good: below {quality.most_kl:g})",
            [max(each.worst_kl, FLOOR) for each in quality.variants],
            "%.2g",
            quality.most_kl,
        ),
        (
            recall,
            f"% of the recall (good: from {100 * LEAST_RECALL:.0f})",
            [100 * (each.recalled or 0) for each in quality.variants],
            "%.0f",
            100 * LEAST_RECALL,
        ),
    ]
    for axes, title, values, form, gate in panels:
        axes.bar_label(axes.barh(names, values, color=colours), fmt=form, padding=3)
        axes.axvline(gate, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.15)
    fewer.invert_yaxis()
    distance.set_xscale("log")
    distance.set_xlim(min(quality.most_kl, *panels[1][2]) / 5)
    recall.set_xlim(0, 118)
    if quality.full.recalled is None:
        recall.set_title("recall: the full cache has none", fontsize=11)
    figure.suptitle(quality.recommendation, fontsize=10, wrap=True)
    read = ", ".join(f"{name}: {tokens:,} tokens" for name, tokens in quality.tokens.items())
    about = f"{model}, {quality.dtype}; {read}; {date.today():%Y-%m-%d}"
    figure.supxlabel(about, fontsize=9, color="0.35", wrap=True)
    figure.savefig(path, dpi=150)
