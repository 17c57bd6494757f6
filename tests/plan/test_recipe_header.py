"""What recipes quote at their heads is what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from darkroom.errors import InputError
from darkroom.plan import written

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
ALL = sorted(FOLDER.glob("*.yaml"))
RECIPES = [path for path in ALL if written.quoted(path) is not None]
SMALL = {"autoencoder", "pretrain"}  # counted within seconds


def test_heads_name_their_own_recipe():
    unplanned = {path.stem for path in ALL} - {path.stem for path in RECIPES}
    # no plan; phase by phase in a table of its own; of the model that the quickstart leaves
    assert unplanned == {"extractor", "dit-budget", "laptop", "four-steps"}
    for recipe in RECIPES:
        found = written.quoted(recipe)
        assert len(found.lines) > len(list(written.devices(found.on)))
        assert f"recipes/{recipe.name}" in found.lines[0]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in SMALL else [pytest.mark.nightly])
        for path in RECIPES
    ],
)
def test_the_plan_says_what_the_head_quotes(recipe):
    assert written.differences(recipe) == []


def test_a_wrong_head_is_found(tmp_path):
    recipe = next(path for path in RECIPES if path.stem == "pretrain")
    found = written.quoted(recipe)
    number = found.lines[1].split(" a step")[0].rsplit(" ", 2)[1]
    wrong = tmp_path / recipe.name
    wrong.write_text(recipe.read_text().replace(f" {number} ", f" {10 * float(number):g} ", 1))
    assert len(written.differences(wrong)) == 1


def test_a_head_is_put_in_and_replaced(tmp_path):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "# Small.\ntask: pretrain\nmodel: {base: tiny}\ndata: {store: x.lance, resolution: 64}\n"
    )
    written.write(recipe, ["train.steps=10"], "T4, 2 x A100-80")
    first = recipe.read_text()
    assert first.startswith(
        '# Small.\n# Planned by: darkroom plan recipes/small.yaml train.steps=10 --recipe-header "T4,'
    )
    assert written.differences(recipe) == []
    written.write(recipe, ["train.steps=1000"], "T4")
    assert recipe.read_text().count("# Planned by") == 1
    assert written.quoted(recipe).overrides == ("train.steps=1000",)
    assert recipe.read_text().endswith(first[first.index("task:") :])


def test_numbers_may_differ_a_little_and_words_not():
    assert written.alike("# 1.00 s, USD 1,000", "# 1.04 s, USD 1,010")
    assert not written.alike("# 1.00 s", "# 1.1 s")
    assert not written.alike("# 1.00 s", "# 1.00 h")


def test_cards_that_cannot_be_read():
    assert list(written.devices("A10G, 8 x A100-80")) == [("A10G", 1), ("A100-80", 8)]
    with pytest.raises(InputError, match="--recipe-header"):
        list(written.devices("A10G,,T4"))
