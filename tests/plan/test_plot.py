"""What `--plot` draws: bars of cards or phases, a curve, and many curves with the best in colour."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from darkroom.cli.application import main
from darkroom.plan import written
from darkroom.plan.written import BLUE, GREY, ORANGE, Point, draw, frontier

RECIPE = """
task: pretrain
model: {base: tiny}
data: {store: nowhere.lance, resolution: 64}
train: {global_batch: 4096, steps: 100}
"""
SERVE = ("serve", "--model", "tiny", "--size", "64x64", "--steps", "4", "--rate", "600", "--latency", "2")
PHASES = "phases:\n- {resolution: 64, samples: 409600}\n- {resolution: 128, samples: 163840}\n"


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def share(path: Path, colour: str) -> float:
    """Of a picture's pixels, how many are of a colour."""
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return float((pixels == ImageColor.getrgb(colour)).all(axis=1).mean())


@pytest.mark.parametrize("phases", ["", PHASES], ids=["one job", "phases"])
@pytest.mark.parametrize(
    ("on", "colours"),
    [
        (("--gpu", "T4"), {BLUE}),
        (("--gpu", "all"), {BLUE}),
        (("--gpu", "A100-80", "--count", "1..8"), {BLUE, ORANGE, GREY}),
        (("--gpu", "all", "--count", "1..8"), {BLUE, GREY}),
    ],
    ids=["bar", "bars", "curve", "curves"],
)
def test_what_is_compared_is_drawn(capsys, tmp_path, phases, on, colours):
    recipe = tmp_path / "job.yaml"
    recipe.write_text(RECIPE + phases)
    to = tmp_path / "made" / "plot.png"
    code, out, err = told(capsys, str(recipe), *on, "--plot", str(to))
    assert code == 0, err
    assert out.splitlines()[-1] == f"drawn: {to}"
    for colour in colours:
        assert share(to, colour) > 1e-4, colour
    assert share(to, "#ffffff") < 0.99


def test_what_breaks_the_deadline_is_grey(capsys, tmp_path):
    recipe = tmp_path / "job.yaml"
    recipe.write_text(RECIPE)
    drawn = {}
    for hours in ("1000", "0.000001"):
        to = tmp_path / f"{hours}.png"
        assert told(capsys, str(recipe), "--gpu", "all", "--deadline", hours, "--plot", str(to))[0] == 0
        drawn[hours] = share(to, BLUE)
    assert drawn["1000"] > 0.01
    assert drawn["0.000001"] == 0


def test_cards_that_need_several_are_bars(capsys, tmp_path, monkeypatch):
    """Of serving each card's number is the plan's: that is no curve."""
    kinds = []
    for kind in ("_bars", "_curve", "_many_curves"):
        monkeypatch.setattr(written, kind, lambda *_, kind=kind: kinds.append(kind))
    _, out, _ = told(capsys, *SERVE, "--gpu", "all", "--json", "--plot", str(tmp_path / "serve.png"))
    assert kinds == ["_bars"]
    counts = json.loads(out)["plans"]
    assert len({plan["count"] for plan in counts}) > 1


def test_a_plot_of_advice_is_refused(capsys, tmp_path):
    recipe = tmp_path / "job.yaml"
    recipe.write_text(RECIPE)
    to = tmp_path / "plot.png"
    code, _, err = told(capsys, str(recipe), "--gpu", "all", "--advise", "--plot", str(to))
    assert code == 2
    assert "--plot with --advise" in err
    assert not to.exists()


POINT = Point("card", 1, 1.0, 1.0, 1.0, 1.0, True)


def test_the_frontier_is_what_nothing_beats():
    draws = random.Random(0)
    found = [
        replace(POINT, label=f"card {i % 9}", hours=draws.random(), usd=draws.random(), kept=i % 4 > 0)
        for i in range(200)
    ]
    found += [replace(POINT, hours=0.0, usd=None)]  # no price is known: it beats nothing in cost
    best = frontier(found)
    able = [point for point in found if point.kept and point.usd is not None]
    beaten = [
        point for point in able if any(other.hours < point.hours and other.usd < point.usd for other in able)
    ]
    assert len(best) > 2
    assert {id(point) for point in best} == {id(point) for point in able} - {id(point) for point in beaten}
    for one, next_ in itertools.pairwise(best):
        assert one.hours < next_.hours
        assert one.usd > next_.usd


def test_without_any_price_device_hours_count(tmp_path):
    found = [
        replace(POINT, label=label, count=count, hours=1 / count, device_hours=cost, usd=None)
        for label, count, cost in (("a", 1, 1.0), ("a", 2, 2.0), ("b", 1, 3.0), ("b", 2, 4.0))
    ]
    assert [point.label for point in frontier(found)] == ["a", "a"]
    draw(found, tmp_path / "hours.png")
    assert share(tmp_path / "hours.png", BLUE) > 0
