"""The benchmarks of `generate` on a tiny model: what ran, what could not, and how far off pictures are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from darkroom import models
from darkroom.errors import InputError, is_out_of_memory
from darkroom.measure import batch
from darkroom.measure import optimisations as optimisations_bench
from darkroom.measure.batch import PrecisionCase, bench_batch, default_kinds
from darkroom.measure.optimisations import (
    APART,
    INTERMEDIATES,
    RUNS,
    StepTimer,
    Workload,
    bench_optimisations,
    compare_precisions,
    default_cases,
    parse_steps,
)
from darkroom.measure.timing import append_csv, read_csv
from darkroom.report.measurements import write_precision_page
from darkroom.report.runs import write_report
from darkroom.sample import optimisations


@pytest.fixture(scope="module")
def drawing():
    return Workload(models.create("tiny", seed=1), (32, 32), steps=3, guidance=5.0)


@pytest.fixture(scope="module")
def optimisation_rows(drawing):
    cases = ["fused_qkv", "feature_cache", "cuda_graphs"]
    return list(bench_optimisations(drawing, cases=cases, repeats=2))


@pytest.fixture(scope="module")
def precisions(drawing):
    return compare_precisions(drawing, steps=(2, 6), repeats=1)


def test_there_is_a_row_for_every_case(optimisation_rows):
    rows = {row.case: row for row in optimisation_rows if row.benchmark == "optimisations"}
    assert list(rows) == ["plain", "fused_qkv", "feature_cache", "cuda_graphs"]
    assert rows["plain"].ratio is None
    assert rows["fused_qkv"].ratio_to == "plain"
    assert rows["fused_qkv"].repeats == 2
    assert rows["fused_qkv"].settings["max_diff"] <= 2
    assert rows["feature_cache"].settings["max_diff"] > rows["fused_qkv"].settings["max_diff"]
    assert rows["feature_cache"].mfu is None
    assert rows["plain"].mfu is not None
    assert all(rows[name].peak_memory_bytes and rows[name].steps_per_s for name in ("plain", "fused_qkv"))


def test_what_cannot_work_is_a_row_that_says_why(optimisation_rows):
    (row,) = [row for row in optimisation_rows if row.case == "cuda_graphs"]
    assert row.median_s is None
    assert "CUDA graphs are of CUDA" in row.note


def test_a_misspelt_case_is_refused_before_anything_is_measured(drawing):
    with pytest.raises(InputError, match="optimise 'fused_qvk'"):
        bench_optimisations(drawing, cases=["auto", "fused_qvk"], repeats=1)


@pytest.mark.nightly
def test_cold_and_warm_starts_are_told_apart(drawing):
    rows = list(bench_optimisations(drawing, cases=["compile_regional"], repeats=1))
    starts = [row for row in rows if row.benchmark == "optimisations-start"]
    assert [row.case for row in starts] == ["compile_regional, cold", "compile_regional, warm"]
    assert all(row.median_s and row.repeats == 1 for row in starts)


def test_every_rung_and_stack_is_a_case_by_itself():
    for device in ("cpu", "cuda:0"):
        cases = default_cases(device)
        assert set(optimisations.OPTIMISATIONS) - set(cases) == {"lcm", "tiny_vae"}
        assert "bf16,auto" in cases
        for case in cases:
            optimisations.parse(case)


def test_batches_double_and_kinds_take_turns(drawing):
    kinds = [PrecisionCase("float32"), PrecisionCase("bf16"), PrecisionCase("bf16", autocast=True)]
    rows = list(bench_batch(drawing, kinds=kinds, most=2, repeats=1))
    assert [row.settings["batch"] for row in rows] == [1, 1, 1, 2, 2, 2]
    assert [row.case for row in rows[:3]] == ["torch float32", "torch bf16", "torch bf16 autocast"]
    assert all(row.images_per_s == pytest.approx(row.settings["batch"] / row.median_s) for row in rows)
    assert all(row.settings["solver"] == "ddim" and row.settings["pictures_a_decode"] == 32 for row in rows)
    assert rows[3].energy_j is None or rows[3].energy_j > 0


def test_out_of_memory_is_a_row_and_the_end_of_that_kind(drawing, monkeypatch):
    kinds = [PrecisionCase("float32"), PrecisionCase("bf16")]
    as_drawn = optimisations.optimise(drawing.model).model
    one_picture = batch.count_needs(as_drawn, drawing.size).unet(2)
    small = replace(batch.machine(), memory_available_bytes=int(one_picture * 1.5))
    monkeypatch.setattr(batch, "machine", lambda: small)
    rows = list(bench_batch(drawing, kinds=kinds, most=8, repeats=1))
    ends = [row for row in rows if "out of memory" in row.note]
    assert {row.case for row in ends} == {"torch float32", "torch bf16"}
    assert all(row.median_s is None and "not run" in row.note for row in ends)
    last = {row.case: row.settings["batch"] for row in ends}
    assert last["torch bf16"] > last["torch float32"] == 2
    assert max(row.settings["batch"] for row in rows if row.median_s) == last["torch bf16"] // 2


def test_an_allocator_s_error_is_known_and_others_are_not():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    )
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_grid_has_no_half_precision_on_a_cpu():
    assert [kind.name for kind in default_kinds("cpu")] == [
        *("torch float32", "torch float32 autocast", "torch bf16", "torch bf16 autocast")
    ]
    assert PrecisionCase("fp16") in default_kinds("cuda:0")
    assert PrecisionCase("float32", backend="openvino") in default_kinds("cpu", ["torch", "openvino"])


def test_compiled_batches_are_measured_in_half_precision_too():
    kinds = default_kinds("cuda:0", ["torch", "compile"])
    compiled = [kind for kind in kinds if kind.backend == "compile"]
    assert [kind.precision for kind in compiled] == ["float32", "fp16", "bf16"]
    assert [kind.names for kind in compiled] == ["auto", "auto,fp16", "auto,bf16"]
    assert PrecisionCase("fp16", backend="compile") not in default_kinds("cpu", ["compile"])


def test_rows_come_one_by_one_and_a_failure_ends_its_case_alone(drawing, monkeypatch):
    rows = bench_optimisations(drawing, cases=["fused_qkv", "channels_last"], repeats=1)
    assert next(rows).case == "plain"
    really = optimisations_bench._case

    def failing(drawing, names, *more):
        if names == "fused_qkv":
            raise ValueError("an illegal shape")
        return really(drawing, names, *more)

    monkeypatch.setattr(optimisations_bench, "_case", failing)
    failed, whole = rows
    assert (failed.case, failed.note, failed.median_s) == (
        "fused_qkv", "failed: ValueError: an illegal shape", None,
    )  # fmt: skip
    assert whole.case == "channels_last"
    assert whole.median_s


def test_runs_are_not_the_intermediates_of_a_longer_run(precisions):
    apart = {pair.steps: pair.likeness["psnr_db"] for pair in precisions.series(APART)}
    runs = {pair.steps: pair.likeness["psnr_db"] for pair in precisions.series(RUNS)}
    assert apart[6] == float("inf")  # the longest run's end is that run
    assert apart[2] < runs[2] < float("inf")
    assert [pair.steps for pair in precisions.series(INTERMEDIATES)] == [2, 6]


def test_both_precisions_are_timed_against_each_other(precisions):
    timed = [row for row in precisions.rows if row.median_s]
    assert {row.case for row in timed} == {"float32", "bf16"}
    assert all(row.ratio_to == "float32" for row in timed if row.case == "bf16")
    assert all("ssim" in row.settings for row in precisions.rows)


def test_one_page_and_one_table_hold_it_all(precisions, optimisation_rows, tmp_path):
    page = write_precision_page(precisions, tmp_path / "page.html").read_text()
    assert page.count("<svg") >= 3
    assert page.count('src="data:image/png') == 3 * len(precisions.pairs)
    assert "http" not in page.replace("http://www.w3.org", "")
    table = append_csv(tmp_path / "rows.csv", [*optimisation_rows, *precisions.rows])
    assert len(read_csv(table)) == len(optimisation_rows) + len(precisions.rows)
    report = write_report(table, tmp_path / "report.html").read_text()
    for words in ("Difference to the plain picture", "Peak memory", "PSNR by steps"):
        assert words in report


def test_steps_are_read_as_people_write_them():
    assert parse_steps("20, 5,5") == [5, 20]
    for wrong in ("", "0", "5,a", "5,-1", "2000"):
        with pytest.raises(InputError, match="5,10,20"):
            parse_steps(wrong)


def test_a_watch_leaves_the_first_step_out():
    watch = StepTimer("cpu")
    for done in (2, 4, 6):
        watch(done, 6)
    watch(1, 1)
    assert len(watch.rates) == 1
    assert watch.rates[0] > 0


def test_flops_are_those_of_all_steps_and_the_decoder(drawing):
    half = Workload(drawing.model, drawing.size, steps=3, guidance=1.0)
    once, twice = half.flops_per_image(), drawing.flops_per_image()
    assert twice > once
    longer = Workload(drawing.model, drawing.size, steps=6, guidance=1.0).flops_per_image()
    assert twice - once == longer - once  # guidance costs as much as twice the steps
