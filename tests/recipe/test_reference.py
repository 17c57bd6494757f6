"""The keys of a recipe as `darkroom recipe` prints them, and the files that were made by it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from darkroom import cli
from darkroom.recipe import make_recipe, reference

ROOT = Path(__file__).resolve().parents[2]
MODELINE = "# yaml-language-server: $schema=recipe.schema.json"
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
CHECK = jsonschema.Draft202012Validator(json.loads((ROOT / "recipes" / "recipe.schema.json").read_text()))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["recipe", *arguments])
    printed = capsys.readouterr()
    return left.value.code or 0, printed.out, printed.err


@pytest.mark.parametrize(
    ("flag", "file"), [("--schema", "recipes/recipe.schema.json"), ("--markdown", "docs/recipe.md")]
)
def test_the_committed_file_is_what_the_verb_prints(flag, file, capsys):
    code, out, _ = run(capsys, flag)
    assert code == 0
    assert out == (ROOT / file).read_text(encoding="utf-8"), f"make it anew: darkroom recipe {flag} > {file}"


def test_another_schema_is_found_out(capsys, monkeypatch):
    made = reference.schema()
    monkeypatch.setattr(reference, "schema", lambda: {**made, "title": "another"})
    _, out, _ = run(capsys, "--schema")
    assert out != (ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_names_the_schema_and_keeps_it(path):
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == MODELINE
    content = yaml.safe_load(text)
    CHECK.validate(content)
    wrong = {**content, "optim": {**content.get("optim", {}), "lr": -1}}
    assert [list(error.path) for error in CHECK.iter_errors(wrong)] == [["optim", "lr"]]
    with pytest.raises(jsonschema.ValidationError, match="'trian' was unexpected"):
        CHECK.validate({**content, "trian": {}})


def test_the_keys_are_all_that_a_resolved_recipe_says():
    content = {
        "task": "lora",
        "model": {"base": "tiny", "word": None},
        "data": {"folder": "pictures"},
        "phases": [{"resolution": 64, "samples": 8}],
    }
    said = make_recipe(content).model_dump(mode="json")

    def paths(value, path):
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from paths(inner, f"{path}.{name}" if path else name)
        elif path == "phases":
            yield from paths(value[0], "phases[]")
        else:
            yield path

    empty = {"model.word", "data.stores", "data.sets", "optim.layers"}
    inside = ("model.word.", "data.stores[].", "data.sets[].", "optim.layers[].")
    listed = {one.key for one in reference.find_keys() if not one.key.startswith(inside)}
    assert set(paths(said, "")) - empty == listed


def test_a_key_is_printed_with_default_limits_and_what_tasks_set(capsys):
    code, out, _ = run(capsys, "--keys", "optim.lr")
    assert code == 0
    first, meaning, *others = out.splitlines()
    assert first == "optim.lr  number  default 0.0001  above 0, at most 10"
    assert meaning.strip() == "peak learning rate"
    assert any(line.strip().startswith("with task: dreambooth: 5e-06 (") for line in others)
    assert not any("task: lora:" in line for line in others)  # which keeps the key's own
    assert any(
        line.strip().startswith("with optim.name: adafactor, task: finetune: 0.0005") for line in others
    )


def test_the_printed_defaults_of_a_task_are_those_it_gets():
    recipe = make_recipe(
        {"task": "dreambooth", "model": {"base": "tiny"}, "data": {"instance": "p", "prompt": "sks"}}
    )
    lr, steps = (reference.find_keys(key)[0] for key in ("optim.lr", "train.steps"))
    assert {one.when: one.value for one in lr.other_defaults}["task: dreambooth"] == recipe.optim.lr
    assert {one.when: one.value for one in steps.other_defaults}["task: dreambooth"] == recipe.train.steps
    recipe = make_recipe(
        {"task": "distill", "model": {"base": "tiny"}, "data": {"store": "x", "resolution": 32}}
    )
    enabled, decay = (reference.find_keys(f"train.ema.{key}")[0] for key in ("enabled", "decay"))
    assert {one.when: one.value for one in decay.other_defaults}["task: distill"] == recipe.train.ema.decay
    assert recipe.train.ema.enabled == enabled.default
    assert not any("distill" in one.when for one in enabled.other_defaults)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("train.ema.*", ["decay", "enabled", "every", "start_step", "warmup"]),
        ("optim.beta", ["beta1", "beta2", "beta3"]),
    ],
)
def test_a_pattern_chooses_keys(pattern, keys, capsys):
    _, out, _ = run(capsys, pattern, "--json")
    assert sorted(one["key"].rpartition(".")[2] for one in json.loads(out)) == keys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.leraning"], "no key matches 'optim.leraning'"),
        (["--schema", "--markdown"], "--schema and --markdown; allowed: one of them"),
        (["optim", "--schema"], "'optim' with --schema, which prints every key; allowed: with --keys"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_key_is_shown_with_its_unit_and_its_tasks(capsys) -> None:
    _, out, _ = run(capsys, "objective.loss.type")
    assert "tasks: all but autoencoder, tiny-vae, extractor, dpo, distill" in out
    _, out, _ = run(capsys, "train.steps")
    assert "integer (steps)" in out
    assert "tasks:" not in out
    by_key = {one.key: one for one in reference.find_keys()}
    named = {key for keys in reference._UNITS.values() for key in keys}
    assert named <= by_key.keys()
    assert all(by_key[key].unit for key in named)
