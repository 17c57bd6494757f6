"""Fine-tuning measured at toy size: cases, processes, the search, the chosen points, and what cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from darkroom import models
from darkroom.errors import DarkroomError, InputError
from darkroom.evaluate.job import read_scores
from darkroom.evaluate.pictures import Prompts
from darkroom.measure import finetuning_results
from darkroom.measure.finetuning import (
    BEST,
    FIDELITY,
    LARGEST,
    METHODS,
    PARAMETERS,
    PLANNED,
    RATES,
    STEP,
    Finetuning,
    Growing,
    parameter_rows,
    planned_rows,
    row,
)
from darkroom.measure.finetuning_results import (
    Followed,
    Judging,
    alone_if_it_fits,
    balance,
    best_rows,
    follow_rates,
    largest,
    largest_rows,
    search,
    step_rows,
    weigh,
)
from darkroom.measure.timing import append_csv, read_csv
from darkroom.report.finetuning import write_finetuning

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
        ({"method_steps": {"lore": 9}}, "method 'lore'"),
        ({"steps": 9, "every": 5, "method_steps": {"lora": 3}}, "every at most steps"),
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


def weighed(content, repeats):
    """What `weigh` finds, made up; at batch 2 memory ends, as it does in a process."""
    if content["train"]["global_batch"] == 2:
        return bytearray(2**62)
    return {
        "seconds": [0.5] * repeats, "warmup_s": 1.0, "load": 0.0, "peak_bytes": 10**9, "device": "cpu",
        "above_start_bytes": 1, "trained_state_bytes": 160, "trained": 10, "total": 1000, "rows": 1,
        "precision": "float32", "threads": 1, "host_peak_bytes": 10**9,
    }  # fmt: skip


def test_a_case_that_finds_no_memory_is_a_row_and_what_is_kept_is_not_measured_again(
    root, tmp_path, monkeypatch
):
    asked = []

    def alone(call, content, *arguments):
        asked.append(content)
        if call is search:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")
        return weighed(content, *arguments)

    monkeypatch.setattr(finetuning_results, "alone", alone)
    bench = bench_of(root, methods=("full", "lora"), ranks=(2,))
    for _ in range(2):  # once measured, once read from the table
        table = Growing(tmp_path / "measurements.csv")
        rows = step_rows(bench, table=table)
        rows += largest_rows(bench, budget_bytes=1, table=table)
        assert [(r.settings["batch"], r.note) for r in rows if r.images_per_s is None] == [
            (2, "out of memory"),
            (2, "out of memory"),
            (0, "out of memory"),
            (0, "out of memory"),
        ]
        assert [r.images_per_s for r in rows if r.images_per_s] == [2.0, 2.0]
        assert len(asked) == 6
        assert [r.case for r in read_csv(tmp_path / "measurements.csv")] == [r.case for r in rows]
    assert parameter_rows(rows)[0].settings["trained"] == 10
    # The page is written of what there is: a case that found no memory is a cross in the plots.
    plots, _ = write_finetuning(table.rows, {}, bench, tmp_path)
    assert [plot.stem for plot in plots] == ["memory", "memory-by", "speed", "largest-batch"]


def test_a_process_without_memory_is_told_from_one_with_a_mistake():
    assert alone_if_it_fits(bytearray, 2**62) == (None, "out of memory")
    found, why = alone_if_it_fits(os._exit, 9)
    assert found is None
    assert "killed" in why
    with pytest.raises(ZeroDivisionError):
        alone_if_it_fits(divmod, 1, 0)


def test_a_process_goes_with_the_one_that_asked():
    """A bench that is killed leaves no process behind that holds gigabytes."""
    code = "import os; from darkroom.measure.finetuning_results import alone; "
    code = f"{code}\nif __name__ == '__main__': alone(os.system, 'echo $PPID; exec sleep 40')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as bench:
        child = psutil.Process(int(bench.stdout.readline()))
        assert child.parent().pid == bench.pid
        bench.kill()
        child.wait(timeout=20)


def test_a_rate_that_diverges_is_a_row_without_scores(root, tmp_path, monkeypatch):
    def diverges(recipe, **_):
        raise DarkroomError(f"the loss of step 3 is nan at {recipe.optim.lr:g}; the checkpoint is kept")

    monkeypatch.setattr(finetuning_results, "train", diverges)
    bench, table = bench_of(root, sweep=(9.0, 8.0)), Growing(tmp_path / "rows.csv")
    found = follow_rates(bench, Judging({}, Prompts.of("one", ["a"], "sks")), table)
    assert [(r.case, r.note) for r in found.rows] == [
        ("lr 9", "the loss of step 3 is nan at 9"),
        ("lr 8", "the loss of step 3 is nan at 8"),
    ]
    assert best_rows(found, bench) == []
    monkeypatch.setattr(finetuning_results, "train", None)  # what is kept is not tried again
    assert follow_rates(bench, Judging({}, Prompts.of("one", ["a"], "sks")), table).rows == found.rows


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


def no_such_thing(*_):
    raise DarkroomError("the machine went away")


@pytest.mark.nightly
def test_the_whole_command(root, tmp_path, capsys, monkeypatch):
    from darkroom.cli.application import main
    from darkroom.data.importers import import_pictures
    from darkroom.data.store import Store
    from darkroom.recipe import make_recipe
    from darkroom.train.run import train

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
        " --method-steps lora=3"
    )
    more = f"--resolutions {SIDE} --resolution {SIDE} --sweep 1e-3 --sweep-batch 1 --num 1 --draw-steps 2"
    rest = f"--memory 1KB --planned none --repeats 1 --json --extractor all={tmp_path}/extractor/model"

    def command(*others: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", "finetune", str(root / "base"), str(root / "photos"), "--out",
                  str(tmp_path / "out"), *flags.split(), *more.split(), *rest.split(), *others])  # fmt: skip
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    assert command("--method-steps", "lora=long")[0] == 2
    with monkeypatch.context() as cut_short:
        cut_short.setattr(finetuning_results, "search", no_such_thing)
        assert command()[0] == 1
    kept = read_csv(tmp_path / "out" / "measurements.csv")
    assert {one.benchmark for one in kept} == {STEP, FIDELITY, RATES, BEST}
    code, out, said = command("--num", "2")
    assert code == 2
    assert "was measured with another num (1); choose another --out" in said
    code, out, said = command()
    assert code == 0, said
    assert len(said.splitlines()) == 2  # the largest batch of two methods: all else was there
    found = json.loads(out)
    rows = read_csv(found["measurements"])
    assert [one.date for one in rows[: len(kept)]] == [one.date for one in kept]
    assert len(read_scores(found["scores"])) == 2 * len([one for one in rows if "step" in one.settings]) - 4
    assert {one.benchmark for one in rows} >= {STEP, FIDELITY, BEST}
    base = [one for one in rows if one.benchmark == FIDELITY and one.settings["step"] == 0]
    assert len({one.settings["subject_fidelity"] for one in base}) == 1  # one base, drawn once
    tuned = [one for one in rows if one.benchmark == FIDELITY and one.settings["step"] == 2]
    assert {one.settings["series"] for one in tuned} == {"full", "lora"}
    longest = [one for one in rows if one.benchmark == FIDELITY and one.settings["step"] == 3]
    assert {one.settings["series"] for one in longest} == {"lora"}
    assert longest[0].settings["train_usd"] >= max(one.settings["train_usd"] for one in tuned[1:])
    assert all(one.settings["subject_fidelity"] != base[0].settings["subject_fidelity"] for one in tuned)
    for name in ("fidelity", "rates", "memory", "memory-by", "speed", "pictures", "best"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 1000
    assert Path(found["page"]).read_text().count("<img") >= 6


def test_costs_alone_need_no_extractor(root, tmp_path, capsys):
    from darkroom.cli.application import main

    sizes = f"--batches 1 --ranks 2 --rank 2 --batch 1 --resolutions {SIDE} --resolution {SIDE}"
    flags = f"--class-word dog --methods lora --steps 1 --every 1 {sizes}"
    flags += " --memory 1KB --planned none --repeats 1 --json"
    command = ["bench", "finetune", str(root / "base"), str(root / "photos"), *flags.split()]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--costs-only", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] is None
    assert found["best"] == []
    rows = read_csv(found["measurements"])
    assert {one.benchmark for one in rows} == {STEP, LARGEST, PARAMETERS}
    searched = {one.case for one in rows if one.benchmark == LARGEST}
    assert searched == {f"lora {SIDE} px"}
    assert not (tmp_path / "out" / "work").exists()  # nothing was trained
    assert "extractors" not in json.loads((tmp_path / "out" / "asked.json").read_text())  # scores may follow
    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", str(tmp_path / "scored"), "--extractor", f"all={tmp_path}/none"])
    assert ended.value.code == 2
