"""Recipes: read, overridden, written back, and every kind of mistake told in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from darkroom.errors import RecipeError
from darkroom.recipe import make_recipe, read_recipe
from darkroom.recipe.recipe import recipe_of, with_new_names

GOOD = """
task: pretrain
model: {base: tiny}
data: {store: pictures.lance, resolution: 64}
optim: {lr: 1e-4}
"""


def laughs(form: str) -> str:
    """Twelve levels of ten aliases each: a kilobyte that means 10^12 values."""
    levels = (f"x{i}: &x{i} {form % ','.join([f'*x{i - 1}'] * 10)}\n" for i in range(1, 13))
    return "x0: &x0 {a: 1}\n" + "".join(levels)


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(GOOD)
    return file


def test_a_recipe_is_read_with_its_defaults(recipe_file):
    recipe = read_recipe(recipe_file)
    assert recipe.optim.lr == 1e-4  # PyYAML reads 1e-4 as text
    assert recipe.data.encode == "stored"
    assert recipe.train.global_batch == 64


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "task: pretrain\noptim: [\n",
            r"while parsing a flow node; expected the node content, .* \(line 3, column 1\)",
        ),
        ("task: pretrain\n  lr: 1\n", r"mapping values are not allowed here \(line 2, column 5\)"),
        ("task: 'a\n", r"while scanning a quoted scalar \(line 1, column 7\); found unexpected end.*"),
        ("task: a\x07b\n", r"position 7: the character '\\x07'"),
        ("task: a\ntask: b\n", r"the key 'task' is given twice \(line 2, column 1\)"),
        ("task: *x\n", r"found undefined alias 'x' \(line 1, column 7\)"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_file_and_place(recipe_file, text, why):
    recipe_file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe_file)
    assert "unicode string" not in str(caught.value)
    assert re.fullmatch(rf"{re.escape(str(recipe_file))}: not readable as YAML: {why}", str(caught.value))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_recipe_may_be_written_by_powershell(recipe_file, encoding):
    """Its > makes UTF-16, and its editors put a mark before UTF-8."""
    plain = read_recipe(recipe_file)
    recipe_file.write_bytes(GOOD.replace("\n", "\r\n").encode(encoding))
    assert read_recipe(recipe_file) == plain
    recipe_file.write_bytes(GOOD.replace("pictures", "gemälde").encode("cp1252"))
    with pytest.raises(RecipeError, match="not readable as YAML"):
        read_recipe(recipe_file)


def test_overrides_go_by_path_and_the_last_wins(recipe_file):
    recipe = read_recipe(
        recipe_file, ["optim.lr=2e-4", "train.steps=7", "train.ema.decay=0.9", "train.steps=8"]
    )
    assert (recipe.optim.lr, recipe.train.steps, recipe.train.ema.decay) == (2e-4, 8, 0.9)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("a photo of sks dog #1", "a photo of sks dog #1"),
        ("note: a dog, sitting", "note: a dog, sitting"),
        ("yes", "yes"),
        ("'quoted #1'", "quoted #1"),
        ("[a dog, a cat]", ("a dog", "a cat")),
        ("null", None),
        ("", None),
    ],
)
def test_prompts_are_taken_as_they_are_said(recipe_file, given, taken):
    assert read_recipe(recipe_file, [f"data.prompt={given}"]).data.prompt == taken


def test_a_resolved_recipe_reads_back_the_same(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file, ["data.filter=width >= 64", "model.unet={layers_per_block: 2}"])
    (tmp_path / "resolved.yaml").write_text(recipe.dump())
    assert read_recipe(tmp_path / "resolved.yaml") == recipe
    assert read_recipe(tmp_path / "resolved.yaml", ["train.seed=1"]) != recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=5", "trian: no such key; allowed: task, model.*did you mean 'train'"),
        ("train.step=5", "train.step: no such key; allowed: steps.*did you mean 'steps'"),
        ("train.ema.decya=0.5", "train.ema.decya: no such key.*did you mean 'decay'"),
        ("train.steps=many", "train.steps: 'many' was given; allowed: a whole number"),
        ("train.steps=0", "train.steps: 0 was given; allowed: above 0"),
        ("task=trian", "task: 'trian' was given; allowed: 'autoencoder'"),
        ("data.resolution=100", "data.resolution: 100 was given; allowed: a multiple of 8"),
        ("data.store=null", "data.store: missing; say where the pictures are"),
        ("data.filter=[1]", "data.filter: .1. was given; allowed: text"),
        ("train.steps", "train.steps: not an override; allowed: key=value"),
        ("task.steps=4", "task.steps: 'task' holds a value"),
        ("data.filter=[", "data.filter: not readable as YAML"),
        ("model.unet=" + "[" * 50_000, "^model.unet: not readable as YAML.*nested deeper than 32 levels$"),
        ("." * 5000 + "=1", "a key of 5001 parts; allowed: at most 32"),
        ("train.steps=" + "1" * 5000, "^train.steps: not readable as YAML: .{400,500} is no int$"),
        ("model.unet={? {a: 1} : 3}", "a key that is a list or a mapping"),
        ("a" * 5000 + "=1", "^a{200}: no such key; allowed: task"),
        ("train.steps=yes", "^train.steps: True was given; allowed: a number$"),
        ("optim.lr=true", "^optim.lr: True was given; allowed: a number$"),
        ("phases=[{resolution: 32, samples: yes}]", "^phases.0.samples: True was given; allowed: a number$"),
        ("train.steps=010", "^train.steps: not readable as YAML: '010': '010' is another number in other"),
        ("train.steps=1:30", "'1:30' is another number in other versions of YAML"),
        ("model.base=!!binary aGk=", "^model.base: b.hi. was given; allowed: text$"),
        ("train.steps=" + "a" * 5000, r"^train.steps: 'a{199}\.\.\. was given; allowed: a whole number"),
    ],
)
def test_a_mistake_is_one_line_with_its_path(recipe_file, override, message):
    with pytest.raises(RecipeError, match=message) as caught:
        read_recipe(recipe_file, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "[.nan]"])
def test_no_number_of_a_recipe_is_infinite(recipe_file, value):
    """Pydantic takes them where a number has no upper bound."""
    with pytest.raises(RecipeError, match=r"^data.holdout(.0)?: -?(inf|nan); allowed: a finite number"):
        read_recipe(recipe_file, [f"data.holdout={value}"])


def test_a_text_of_a_recipe_is_unicode(recipe_file):
    """A command line in another encoding comes with half surrogate pairs, which no tokenizer takes."""
    with pytest.raises(RecipeError, match=r"^sample.prompts.0: 'caf.udce9'; allowed: Unicode, in UTF-8"):
        read_recipe(recipe_file, ['sample.prompts=["caf\\udce9"]'])


def test_what_is_missing_is_named(recipe_file):
    recipe_file.write_text("task: pretrain\nmodel: {base: tiny}\n")
    with pytest.raises(RecipeError, match="^data: missing; say it in .*job.yaml or as data=VALUE"):
        read_recipe(recipe_file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: pretrain\ntask: autoencoder\n", "the key 'task' is given twice"),
        ("- a\n", "not a recipe; allowed: a mapping of task"),
        ("task: [", "not readable as YAML"),
        ("", "not a recipe"),
        ("[" * 50_000, "nested deeper than 32 levels"),
        ("- " * 50_000, "nested deeper than 32 levels"),
        ("{a: 1}: b\n", "a key that is a list or a mapping"),
        ("a: &a [*a]\n", r"\*a stands inside of what it names"),
        ("x: &x {a: 1}\ny: {<<: *x, <<: *x}\n", "the key '<<' is given twice"),
        (laughs("[%s]"), "more than 10,000 values, aliases written out"),
        (laughs("{<<: [%s]}"), "more than 10,000 values, aliases written out"),
        ("a: [" + "1," * 20_000 + "]", "more than 10,000 values"),
        ("task: 2026-13-45\n", "'2026-13-45' is no timestamp"),
        ('task: "\\U00110000"\n', "not readable as YAML: chr.. arg not in range"),
        ("task: pretrain\noptim: !!map 3\n", "'3' is no mapping"),
        ("task: pretrain\noptim: !!set 3\n", "'3' is no mapping"),
        ("task: !!bool maybe\n", "'maybe' is no bool"),
        ("a: " + "1" * 2**20, "1,048,579 bytes; allowed: a recipe of at most 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_no_recipe(recipe_file, text, message):
    recipe_file.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        read_recipe(recipe_file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_the_nearest(recipe_file):
    with pytest.raises(RecipeError, match=r"no such recipe file; did you mean '.*job\.yaml'"):
        read_recipe(recipe_file.with_name("jop.yaml"))


def test_several_mistakes_are_counted():
    with pytest.raises(RecipeError, match="and 2 more in recipe"):
        make_recipe({"task": "pretrain", "model": {}, "data": {}, "optim": {"lr": -1}, "x": 1})


def test_the_callers_dictionary_is_left_alone():
    content = {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "a"}}
    assert make_recipe(content, ["data.store=b", "train.steps=3"]).data.store == "b"
    assert content == {"task": "pretrain", "model": {"base": "tiny"}, "data": {"store": "a"}}


def test_merge_keys_are_merged(recipe_file):
    phases = (
        "phases: [&one {resolution: 64, samples: 640, lr: 1.0e-3}, {<<: *one, samples: 64}, {<<: [*one]}]\n"
    )
    recipe_file.write_text(GOOD + phases)
    found = [(phase.resolution, phase.samples, phase.lr) for phase in read_recipe(recipe_file).phases]
    assert found == [(64, 640, 1e-3), (64, 64, 1e-3), (64, 640, 1e-3)]
    recipe_file.write_text(GOOD + phases.replace("<<: *one, samples: 64", "<<: *one, sample: 64"))
    with pytest.raises(RecipeError, match="phases.1.sample: no such key"):
        read_recipe(recipe_file)


@pytest.mark.parametrize("task", ["finetune", "lora", "distill"])
@pytest.mark.parametrize(
    ("overrides", "averages"),
    [
        ((), False),
        (("train.ema.decay=0.99",), True),
        (("train.ema.every=2",), True),
        (("train.ema.decay=0.99", "train.ema.enabled=false"), False),
    ],
)
def test_who_says_how_weights_are_averaged_gets_an_average(recipe_file, task, overrides, averages):
    recipe_file.write_text(GOOD.replace("pretrain", task))
    more = ["objective.distill.method=dmd2"] if task == "distill" else []
    assert read_recipe(recipe_file, [*more, *overrides]).train.ema.enabled is averages


LONG = "optim: {lr: 1e-4, warmup_steps: 200}\ntrain: {steps: 9000, ema: {start_step: 500}}\n"


@pytest.mark.parametrize(
    ("overrides", "warmup", "ema", "notes"),
    [
        ((), 200, 500, 0),
        (("train.steps=600",), 200, 500, 0),
        (("train.steps=201",), 200, 100, 1),
        (("train.steps=60",), 6, 30, 2),
        (("train.steps=1",), 0, 0, 2),
        (("train.steps=60", "optim.warmup_steps=50", "train.ema.start_step=59"), 50, 59, 0),
        (
            ("train.steps=60", "optim.warmup_steps=100", "train.ema.enabled=false"),
            100,
            500,
            0,
        ),  # refused later
    ],
)
def test_a_trial_has_a_short_warm_up(recipe_file, overrides, warmup, ema, notes):
    """A recipe of 9000 steps tried with a few: not refused, and what was made shorter is said."""
    recipe_file.write_text(GOOD.replace("optim: {lr: 1e-4}\n", LONG))
    recipe = read_recipe(recipe_file, overrides)
    assert (recipe.optim.warmup_steps, recipe.train.ema.start_step) == (warmup, ema)
    assert len(recipe.derived) == notes
    if "train.steps=60" in overrides and notes:
        assert recipe.derived == (
            "optim.warmup_steps 6, not 200: a tenth of train.steps 60",
            "train.ema.start_step 30, not 500: half of train.steps 60",
        )


def test_an_override_of_where_the_pictures_are_wins(recipe_file):
    recipe_file.write_text(GOOD.replace("pretrain", "lora").replace("base: tiny", "base: sd15"))
    recipe = read_recipe(recipe_file, ["data.folder=photos/"])
    assert (recipe.data.store, recipe.data.folder) == (None, "photos/")
    assert recipe.derived[0] == "data.store pictures.lance is left out: data.folder photos/ is given"
    assert read_recipe(recipe_file, ["data.store=other.lance"]).derived == read_recipe(recipe_file).derived
    assert read_recipe(recipe_file, ["data.folder=null"]).data.store == "pictures.lance"
    with pytest.raises(RecipeError, match="data: store and folder are both given"):
        read_recipe(recipe_file, ["data.folder=photos/", "data.store=other.lance"])
    recipe_file.write_text(recipe_file.read_text().replace("store:", "folder: photos/, store:"))
    with pytest.raises(RecipeError, match="data: store and folder are both given"):
        read_recipe(recipe_file)


def test_old_names_of_keys_are_read_with_a_line_that_names_the_new_ones(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(
        "task: pretrain\nmodel: {base: tiny}\ndata: {store: x, ahead: 7}\noptim: {decay: cosine}\n"
        "train: {on_nan: skip}\n"
    )
    recipe = read_recipe(file, ["train.on_nan=rollback"])
    assert (recipe.data.prefetch_batches, recipe.optim.lr_schedule) == (7, "cosine")
    assert recipe.train.nonfinite_policy == "rollback", "what the command line says holds"
    named = [line.partition(";")[0] for line in recipe.derived if "is now" in line]
    assert sorted(set(named)) == [
        "data.ahead is now data.prefetch_batches",
        "optim.decay is now optim.lr_schedule",
        "train.on_nan is now train.nonfinite_policy",
    ]
    today = read_recipe(file, ["data.ahead=5"]).model_dump(mode="json")
    of_before = {**today, "data": {**today["data"], "ahead": 5}}
    del of_before["data"]["prefetch_batches"]
    assert recipe_of(of_before, tmp_path).model_dump(mode="json") == today
    with pytest.raises(RecipeError, match=r"data\.ahead: no such key"):
        recipe_of({**today, "data": {**today["data"], "ahead": 5}}, tmp_path)


def test_recipes_that_come_with_darkroom_have_todays_names():
    root = Path(__file__).resolve().parents[2]
    files = [file for folder in ("recipes", "src", "benchmarks") for file in (root / folder).rglob("*.yaml")]
    contents = {file: yaml.safe_load(file.read_text("utf-8")) for file in files}
    recipes = {file: content for file, content in contents.items() if isinstance(content, dict)}
    assert len(recipes) >= 20
    assert {file: old for file, content in recipes.items() if (old := with_new_names(content)[1])} == {}
    assert with_new_names({"optim": {"decay": "cosine"}})[1], "the control"
