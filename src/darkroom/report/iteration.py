"""One training iteration as a picture: what it does when, and the memory it holds meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from darkroom.bill import format_bytes
from darkroom.measure.profiling import PARTS, Profile, shares

COLOURS = dict(zip(PARTS, ("#8d99ae", "#2a9d8f", "#2f6690", "#d9822b", "#b5179e", "#6a994e"), strict=True))
GIB = 2**30
SHORT = 0.035  # of the width: below it a part has no room for its name


def draw_iteration(profile: Profile, path: Path) -> Path:
    """Write a PNG (or what the file's ending says) of the iteration of median length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, middle, below) = plt.subplots(
        3, 1, figsize=(10, 5.6), height_ratios=(1.0, 1.5, 2.2), layout="constrained"
    )
    one = profile.typical
    _split(above, profile)
    for span in one.spans:
        row = len(PARTS) - 1 - PARTS.index(span.part)
        width = span.end_s - span.start_s
        middle.barh(row, width, left=span.start_s, color=COLOURS[span.part], height=0.8)
    middle.set(yticks=range(len(PARTS)), yticklabels=PARTS[::-1], xlim=(0, one.seconds))
    middle.set_title("one iteration, in order", loc="left", fontsize=9)
    seconds, used = zip(*one.memory, strict=True)
    below.fill_between(seconds, [value / GIB for value in used], color="#2f6690", alpha=0.18, linewidth=0)
    below.plot(seconds, [value / GIB for value in used], color="#2f6690", linewidth=1.2)
    for span in one.spans:
        below.axvspan(span.start_s, span.end_s, color=COLOURS[span.part], alpha=0.10, linewidth=0)
    kind = "allocated on the card" if profile.device.startswith("cuda") else "resident"
    below.set(xlim=(0, one.seconds), ylim=(0, None), xlabel="seconds", ylabel="GiB")
    below.set_title(f"memory, {kind}; peak {format_bytes(one.peak_bytes)}", loc="left", fontsize=9)
    figure.suptitle(f"{profile.name}: {profile.images} pictures in {one.seconds:.3g} s", x=0.01, ha="left")
    for axis in (above, middle, below):
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _split(axis: Any, profile: Profile) -> None:
    """One bar of the parts' shares, each with its name and per cent where there is room."""
    left = 0.0
    for part, share in shares(profile):
        axis.barh(0, share, left=left, color=COLOURS[part], label=f"{part} {100 * share:.1f} %")
        if share > SHORT:
            text = f"{100 * share:.0f} %"
            axis.text(left + share / 2, 0, text, ha="center", va="center", color="white", fontsize=8)
        left += share
    axis.set(xlim=(0, 1), yticks=[], xticks=[])
    axis.set_title("share of the iteration, median", loc="left", fontsize=9)
    axis.legend(ncols=6, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.05))
    axis.spines[["left", "bottom"]].set_visible(False)
