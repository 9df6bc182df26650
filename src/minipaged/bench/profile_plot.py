"""A picture of a profile: seconds per class of operation, step after step."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.bench.profile import Profile

MOST_BARS = 400  # neighbouring steps are averaged beyond that


def plot_profile(profile: Profile, path: Path, title: str) -> None:
    """Stacked bars to an image file (.svg, .png, .pdf). ImportError that says what to install if matplotlib is
    missing.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib (or leave --plot out)") from error

    steps = profile.steps
    per_bar = -(-len(steps) // MOST_BARS)
    bars = [steps[i : i + per_bar] for i in range(0, len(steps), per_bar)]
    heights: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(bars))
    for index, bar in enumerate(bars):
        for step in bar:
            for name, seconds in step.seconds.items():
                heights[name][index] += 1e3 * max(seconds, 0.0) / len(bar)
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    positions = [index * per_bar for index in range(len(bars))]
    floor = [0.0] * len(bars)
    colours = colormaps["tab20"](range(20))
    for index, (name, values) in enumerate(sorted(heights.items(), key=lambda item: -sum(item[1]))):
        colour = colours[index % len(colours)]
        axes.bar(positions, values, width=per_bar, bottom=floor, label=name, color=colour, align="edge")
        floor = [below + value for below, value in zip(floor, values, strict=True)]
    axes.set(xlabel="step", ylabel="milliseconds", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path)
