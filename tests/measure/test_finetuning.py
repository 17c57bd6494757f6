"""Fine-tuning measured at toy size: cases, processes, the search, the chosen points, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from darkroom import models
from darkroom.errors import InputError
from darkroom.measure import append_csv, read_csv
from darkroom.measure.finetuning import (
    BEST,
    FIDELITY,
    METHODS,
    PLANNED,
    STEP,
    Finetuning,
    parameter_rows,
    planned_rows,
    row,
)
from darkroom.measure.finetuning_costs import largest, search, weigh
from darkroom.measure.finetuning_quality import Followed, balance, best_rows

SIDE = 32


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("finetuning")
    (root / "photos").mkdir()
    draw = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(draw.integers(0, 255, (40, 40, 3), np.uint8)).save(root / "photos" / f"{i}.png")
    model = models.create("tiny", seed=1)
    model.tokenizers = [models.train_tokenizer(["a photo of sks dog"], vocab_size=514, model_max_length=77)]
    models.save(model, root / "base")
    return root


def bench_of(root: Path, **more) -> Finetuning:
    small = {"batches": (1, 2), "ranks": (2, 4), "resolutions": (SIDE,), "resolution": SIDE, "batch": 1}
    given = {"rank": 2, "steps": 4, "every": 2, "class_images": 1, "precision": "float32"}
    return Finetuning(
        base=str(root / "base"), photos=root / "photos", class_word="dog", work=root / "work",
        **(small | given | more),
    )  # fmt: skip


def test_cases_vary_one_thing_at_a_time_and_come_once(root):
    cases = bench_of(root, batches=(1, 2, 4), ranks=(2, 8), resolutions=(32, 64)).cases()
    assert len(cases) == len(set(cases))
    # of each method three batches and one more resolution; of the two with adapters one more rank
    assert len(cases) == 4 * (3 + 1) + 2
    assert {case.rank for case in cases if case.method == "lora"} == {2, 8}


def test_recipes_of_all_methods_can_be(root):
    bench = bench_of(root)
    for method in METHODS:
        recipe = bench.recipe(bench.case(method))
        assert (recipe.adapter is not None) == method.endswith("lora")
        assert (recipe.data.class_prompt is not None) == method.startswith("dreambooth")


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"methods": ("lore",)}, "method 'lore'"),
        ({"rates": {"lore": 1.0}}, "method 'lore'"),
        ({"steps": 3, "every": 5}, "every at most steps"),
        ({"batches": (0,)}, "below 1"),
    ],
)
def test_what_cannot_be_is_refused(root, more, word):
    with pytest.raises(InputError, match=word):
        bench_of(root, **more)


def test_a_folder_without_photographs_is_refused(root, tmp_path):
    with pytest.raises(InputError, match="no photographs"):
        Finetuning(base="tiny", photos=tmp_path, class_word="dog", work=tmp_path)


def test_an_adapter_holds_far_less_than_all_weights(root):
    bench = bench_of(root)
    full, lora = (weigh(bench.content(bench.case(method)), repeats=1) for method in ("full", "lora"))
    assert full["trained"] == full["total"] > 10 * lora["trained"]
    # master, gradient and AdamW's two moments, float32, and a counter for each tensor
    assert full["trained_state_bytes"] == pytest.approx(16 * full["trained"], rel=0.02)
    assert full["trained_state_bytes"] > 8 * lora["trained_state_bytes"]
    assert len(full["seconds"]) == 1
    assert full["seconds"][0] > 0
    assert full["peak_bytes"] > full["trained_state_bytes"]


def test_class_pictures_double_the_rows(root):
    bench = bench_of(root)
    assert weigh(bench.content(bench.case("dreambooth-lora", batch=2)), repeats=1)["rows"] == 4


@pytest.mark.parametrize(
    ("limit", "most"), [(0, 8), (1, 8), (7, 64), (100, 512), (64, 64), (600, 512), (5, 6)]
)
def test_the_search_finds_the_largest_that_fits(limit, most):
    tried = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest(fits, most)
    true = min(limit, most)
    assert found <= true
    assert true - found <= true / 8
    assert max(tried) <= most


def test_the_search_on_a_cpu_stops_at_its_budget(root):
    bench = bench_of(root)
    content = bench.content(bench.case("lora", batch=4))
    assert search(content, budget_bytes=2**20)["batch"] == 0
    assert search(content, budget_bytes=2**40)["batch"] == 4


def planner(recipe):
    batch = recipe.train.global_batch
    adapter = recipe.adapter is not None
    return {
        "device": "A100", "count": 2, "memory_bytes": 2e9 if adapter else 2e10, "images_per_s": 10.0 * batch,
        "usd_per_image": 0.001 / batch, "trained": 10 if adapter else 1000, "total": 1000,
        "trained_state_bytes": 160, "largest_batch": 32, "note": "planned",
    }  # fmt: skip


def test_planned_rows_cost_samples_and_steps(root):
    rows = planned_rows(bench_of(root), planner, base="sd15", samples=1000, step_counts=(50,))
    assert {one.benchmark for one in rows} == {PLANNED}
    assert {one.settings["source"] for one in rows} == {"planned"}
    two = next(one for one in rows if one.settings["batch"] == 2 and "steps" not in one.settings)
    assert two.settings["usd"] == pytest.approx(0.5)
    assert two.num_devices == 2
    by_steps = [one for one in rows if "steps" in one.settings]
    assert len(by_steps) == len(METHODS)
    assert by_steps[0].settings["usd"] == pytest.approx(0.05)


def test_parameters_are_told_once_for_method_and_rank(root):
    rows = parameter_rows(planned_rows(bench_of(root), planner, base="sd15"))
    assert len(rows) == 2 + 2 * 2  # full and dreambooth; two adapters of two ranks
    assert {one.settings["percent"] for one in rows} == {1.0, 100.0}


def fidelity(series, step, subject, prompt):
    told = {"series": series, "step": step, "samples": step, "batch": 1}
    return row(
        FIDELITY, f"{series} step {step}", told | {"subject_fidelity": subject, "prompt_fidelity": prompt}
    )


def test_the_best_point_has_flattened_and_not_yet_fallen(root):
    points = [(0, 0.1, 0.3), (10, 0.5, 0.29), (20, 0.8, 0.27), (30, 0.82, 0.1)]
    found = Followed([fidelity("lora", *point) for point in points])
    values = [balance(one, found.rows) for one in found.rows]
    assert values[0] == 0
    assert values[3] == 0
    (best,) = best_rows(found, bench_of(root), planner=planner, base="sd15")
    assert best.benchmark == BEST
    assert best.settings["step"] == 20
    assert best.settings["planned_usd"] == pytest.approx(0.02)


def test_rows_go_through_a_table(root, tmp_path):
    rows = planned_rows(bench_of(root), planner, base="sd15")
    assert read_csv(append_csv(tmp_path / "rows.csv", rows))[0].settings == rows[0].settings


@pytest.mark.slow
def test_the_whole_command(root, tmp_path, capsys):
    from darkroom.cli import main
    from darkroom.data import Store
    from darkroom.data.importers import import_pictures
    from darkroom.recipe import make_recipe
    from darkroom.train import train

    others = tmp_path / "others"
    others.mkdir()
    for i, colour in enumerate(["red", "green", "blue", "white"]):
        Image.new("RGB", (SIDE, SIDE), colour).save(others / f"{i}.png")
        (others / f"{i}.txt").write_text(f"a {colour} dog")
    import_pictures(others, Store.create(tmp_path / "others.lance"))
    network = {"network": {"width": 8, "levels": 2, "embedding": 16}}
    train(
        make_recipe({
            "task": "extractor", "data": {"store": str(tmp_path / "others.lance"), "resolution": SIDE},
            "objective": {"extractor": network}, "train": {"steps": 2, "global_batch": 4},
        }),
        out=tmp_path / "extractor", console=lambda _: None,
    )  # fmt: skip
    flags = (
        "--class-word dog --methods full,lora --batches 1 --ranks 2 --rank 2 --batch 1 --steps 2 --every 1"
    )
    more = f"--resolutions {SIDE} --resolution {SIDE} --sweep 1e-3 --sweep-batch 1 --num 1 --draw-steps 2"
    rest = f"--memory 1KB --planned none --repeats 1 --json --extractor all={tmp_path}/extractor/model"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "finetune", str(root / "base"), str(root / "photos"), "--out", str(tmp_path / "out"),
              *flags.split(), *more.split(), *rest.split()])  # fmt: skip
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    found = json.loads(told.out)
    rows = read_csv(found["measurements"])
    assert {one.benchmark for one in rows} >= {STEP, FIDELITY, BEST}
    base = [one for one in rows if one.benchmark == FIDELITY and one.settings["step"] == 0]
    assert len({one.settings["subject_fidelity"] for one in base}) == 1  # one base, drawn once
    tuned = [one for one in rows if one.benchmark == FIDELITY and one.settings["step"] == 2]
    assert all(one.settings["subject_fidelity"] != base[0].settings["subject_fidelity"] for one in tuned)
    for name in ("fidelity", "rates", "memory", "speed", "pictures", "best"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 1000
    assert Path(found["page"]).read_text().count("<img") >= 6
