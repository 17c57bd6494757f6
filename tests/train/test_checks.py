"""What is checked of a recipe of phases and left to each phase; what is asked of the machine that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from darkroom.errors import RecipeError
from darkroom.plan.ask import ask_recipe_object
from darkroom.recipe import read_recipe
from darkroom.train.tracking import check_reach

RECIPE = Path(__file__).parents[2] / "recipes" / "sd2-two-phases.yaml"


def test_lengths_are_each_phases_own():
    whole = read_recipe(RECIPE)
    assert whole.optim.warmup_steps > whole.train.steps  # which no phase uses
    whole.check()
    for _, phase in whole.in_phases(Path("run")):
        phase.check()
    with pytest.raises(RecipeError, match="^optim.warmup_steps: 10000 is more than train.steps 1000"):
        read_recipe(RECIPE, ["phases=[]"]).check()
    short = read_recipe(RECIPE, ["phases=[{resolution: 256, samples: 4096}]"])
    next(short.in_phases(Path("run")))[1].check()


def test_a_phase_shorter_than_the_recipes_warm_up_gets_one_of_its_own():
    told = "{resolution: 256, samples: 61440}, {resolution: 512, samples: 40960000}"
    whole = read_recipe(RECIPE, [f"phases=[{told}]"])
    batch, warmup = whole.train.global_batch, whole.optim.warmup_steps
    steps = 61440 // batch
    assert whole.phases[0].warmup_steps == steps // 10
    assert whole.phases[1].warmup_steps is None
    assert f"phases.0.warmup_steps {steps // 10}, not {warmup}: a tenth of its {steps} steps" in whole.derived
    first, second = (phase for _, phase in whole.in_phases(Path("run")))
    assert (first.optim.warmup_steps, second.optim.warmup_steps) == (steps // 10, warmup)
    own = read_recipe(RECIPE, ["phases=[{resolution: 256, samples: 4096, warmup_steps: 900}]"])
    with pytest.raises(RecipeError, match="^optim.warmup_steps: 900 is more than train.steps 2"):
        next(own.in_phases(Path("run")))[1].check()


def test_a_plan_asks_nothing_of_the_machine_that_only_training_needs(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    recipe = read_recipe(RECIPE, ["phases=[]", "optim.warmup_steps=10", "track.wandb=emoji"])
    with pytest.raises(RecipeError, match=r"^track.wandb: 'emoji', but there is no API key"):
        check_reach(recipe.track, recipe.evaluate, recipe.checkpoint)
    assert ask_recipe_object(recipe).settings["global_batch"] == recipe.train.global_batch
