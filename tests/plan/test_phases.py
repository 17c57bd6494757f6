"""A recipe of phases: what all of them take on each number of devices, and the best way through them."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from darkroom.cli.application import main
from darkroom.errors import InputError
from darkroom.plan import advise as advise_phases
from darkroom.plan import ask, targets
from darkroom.plan.advise import Option, Search

RECIPE = """
task: pretrain
model: {base: tiny}
data: {store: nowhere.lance}
train: {global_batch: 4096, precision: bf16, gradient_checkpointing: false}
phases:
- {resolution: 64, samples: 409600}
- {resolution: 128, samples: 163840, global_batch: 1024}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes") / "two.yaml"
    path.write_text(RECIPE)
    return str(path)


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_the_curve_is_of_all_phases(capsys, recipe):
    code, out, err = told(
        capsys, recipe, "--gpu", "A100-80", "--count", "1..4", "--deadline", "0.05", "--json"
    )
    assert code == 0, err
    counts = json.loads(out)["counts"]
    assert [one["count"] for one in counts] == [1, 2, 4]
    for one in counts:
        number = str(one["count"])
        phases = json.loads(told(capsys, recipe, "--gpu", "A100-80", "--count", number, "--json")[1])["plans"]
        assert len(phases) == 2
        assert one["hours"] == pytest.approx(sum(plan["hours"] for plan in phases))
        assert one["usd"] == pytest.approx(sum(plan["cost"]["usd"] for plan in phases))
        assert one["kept"] == (one["hours"] <= 0.05)
    assert counts[2]["hours"] < counts[1]["hours"] < counts[0]["hours"]
    code, out, _ = told(capsys, recipe, "--gpu", "A100-80", "--count", "1..4")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [["A100-SXM4-80GB", n] for n in "124"]
    # As far as every phase's batch goes round.
    _, out, _ = told(capsys, recipe, "--gpu", "A100-80", "--count", "512..4096", "--json")
    assert [one["count"] for one in json.loads(out)["counts"]] == [512, 1024]
    # On all cards each number of devices stands in one list, the cheapest first.
    _, out, _ = told(capsys, recipe, "--gpu", "all", "--count", "1..4", "--deadline", "0.05", "--json")
    cards = json.loads(out)["cards"]
    assert {one["count"] for one in cards} == {1, 2, 4}
    mine = {one["count"]: one for one in cards if one["device"] == "A100-SXM4-80GB"}
    assert [mine[one["count"]]["usd"] for one in counts] == [one["usd"] for one in counts]
    assert [mine[one["count"]]["kept"] for one in counts] == [one["kept"] for one in counts]
    spent = [one["usd"] for one in cards if one["kept"] and one["usd"] is not None]
    assert spent == sorted(spent)


def test_advice_is_of_each_phase_and_adds_up(capsys, recipe):
    plain = "train.gradient_checkpointing=false"  # said, so not searched: as many counts again
    on = (plain, "--gpu", "A100-80", "--count", "1..4", "--advise", "--json")
    code, out, err = told(capsys, recipe, *on)
    assert code == 0, err
    advice = json.loads(out)
    assert [phase["job"] for phase in advice["phases"]] == ["two, phase 1, 64 px", "two, phase 2, 128 px"]
    together = advice["together"]
    for name, taken in together.items():
        for unit in ("usd", "hours"):
            assert taken[unit] == pytest.approx(sum(phase[name][unit] for phase in advice["phases"]))
    assert together["cheapest"]["usd"] < together["fastest"]["usd"]
    assert together["fastest"]["hours"] < together["cheapest"]["hours"]
    # What a phase is advised is what it is advised alone.
    alone = ("phases=[]", "data.resolution=128", "train.global_batch=1024", "train.steps=160")
    single = json.loads(told(capsys, recipe, *alone, *on)[1])
    for name in ("cheapest", "fastest"):
        assert single[name]["settings"] == advice["phases"][1][name]["settings"]
        assert single[name]["usd"] == pytest.approx(advice["phases"][1][name]["usd"])
    # The limits are those of the whole: less time is dearer, and no time is refused.
    middle = (together["cheapest"]["hours"] + together["fastest"]["hours"]) / 2
    bounded = json.loads(told(capsys, recipe, *on, "--deadline", str(middle))[1])["together"]
    assert bounded["cheapest"]["hours"] <= middle
    assert together["cheapest"]["usd"] < bounded["cheapest"]["usd"] <= together["fastest"]["usd"]
    code, _, err = told(capsys, recipe, *on, "--deadline", str(together["fastest"]["hours"] / 2))
    assert code == 2
    assert "of all phases" in err
    code, out, _ = told(capsys, recipe, *on[:-1])
    assert code == 0
    assert "two, phase 1, 64 px\n  cheapest: " in out
    assert "\ntogether, the cheapest: " in out
    assert "\ntogether, the fastest: " in out
    assert out.count("prices as of") == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_best_way_is_the_best_of_all_ways(monkeypatch, recipe, seed):
    draw = random.Random(seed)
    asked = ask.ask_phases(Path(recipe))[:1] * 3
    plan = ask.plans(asked[0], targets.Target(gpu="T4"))[0]

    def option():
        cost = replace(plan.cost, usd=draw.uniform(1, 9))
        return Option({}, replace(plan, hours=draw.uniform(1, 9), cost=cost))

    job = replace(asked[0], settings={})
    options = [[option() for _ in range(7)] for _ in asked]
    searches = [Search(job, some, len(some)) for some in options]
    monkeypatch.setattr(advise_phases, "search", lambda *_, phase: searches[phase])

    def best(target):
        return advise_phases.advise_phases(asked, Path(recipe), (), target, [1])

    ways = list(itertools.product(*options))
    hours, usd = advise_phases.hours_of, advise_phases.usd_of
    free = best(targets.Target())
    assert usd(free.way("cheapest")) == pytest.approx(min(map(usd, ways)))
    assert hours(free.way("fastest")) == pytest.approx(min(map(hours, ways)))
    limits = targets.Target(deadline_hours=12.0, budget_usd=14.0)
    kept = [way for way in ways if hours(way) <= 12 and usd(way) <= 14]
    if not kept:
        with pytest.raises(InputError, match="of all phases"):
            best(limits)
        return
    found = best(limits)
    assert usd(found.way("cheapest")) == pytest.approx(min(map(usd, kept)))
    assert hours(found.way("fastest")) == pytest.approx(min(map(hours, kept)))
