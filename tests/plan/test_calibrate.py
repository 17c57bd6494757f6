"""This machine is measured, for real but briefly, and plans of it use what was found."""

from __future__ import annotations

import json

import pytest
import torch

from darkroom.cli.application import main
from darkroom.hardware import machine
from darkroom.hardware.cards import cards
from darkroom.measure.timing import Measurement, append_csv
from darkroom.plan import calibrate, targets
from darkroom.plan.calibrate import host_seconds
from darkroom.plan.roofline import ClusterSpec, Roofline, Software, all_reduce_s, efficiency, units_rate
from darkroom.plan.targets import Measured, calibration

PICTURES = ("generate", "--model", "tiny", "--size", "64", "--steps", "4", "--precision", "float32")


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert exit_.value.code == 0, err
    return json.loads(out)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "BUDGET_S", 0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_a_cpu_is_measured_in_each_precision_and_planned_with_it(capsys, own_cache, tmp_path):
    here = machine()
    card = cards()[here.cpu_class]
    planned = told(capsys, *PICTURES, "--json")["plans"][0]["images_per_s"]
    # A table of bench batch that says pictures come in half the time.
    row = Measurement(
        benchmark="batch",
        case="torch float32",
        settings={"model": "tiny", "size": "64x64", "steps": 4, "guidance": 7.5, "precision": "float32"},
        median_s=1 / (2 * planned),
        images_per_s=2 * planned,
        machine=here.name,
        device=card.name,
    )
    table = append_csv(tmp_path / "rows.csv", [row, row.model_copy(update={"machine": "another"})])
    found = told(capsys, "--calibrate", "--rows", str(table), "--json")["measured"]
    names = {one["name"] for one in found}
    assert names >= {"matmul", "conv", "attention", "bandwidth", "kernel", "pictures, 1 rows"}
    assert any(name.startswith("link, ") for name in names)
    kept = calibration(card.name)
    assert kept["attention", f"{card.name} float32"] > 0
    assert {precision for name, precision in kept if name == "conv"} == {
        f"{card.name} {precision}" for precision in ("float32", "bf16") if precision in card.flops
    }
    # The row's rate is planned again, and the measured link is what gradients are summed over.
    again = told(capsys, *PICTURES, "--json")["plans"][0]["images_per_s"]
    assert again == pytest.approx(2 * planned, rel=1e-3)
    where = targets.here(targets.Target())
    rate = kept["link_bytes_s", card.name]
    assert all_reduce_s(card, ClusterSpec(2), 1e9, where.known) == pytest.approx(1e9 / rate, rel=0.01)


def test_rows_of_another_machine_are_refused(capsys, own_cache, tmp_path):
    row = Measurement(benchmark="batch", case="x", machine="another", device="T4")
    table = append_csv(tmp_path / "rows.csv", [row])
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--calibrate", "--rows", str(table)])
    assert exit_.value.code == 2
    assert "--rows: none of 1 rows" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["T4", "V100-SXM2-16GB", "RTX 3090", "A100-SXM4-40GB"])
def test_a_gpu_that_is_as_quick_as_the_fit_says_is_planned_as_before(name):
    """Shares go back to the rate they came from, in the precision they were measured in, and in no other."""
    card = cards()[name]
    precision = targets.fast_precision(card)
    fitted = Roofline(card, Software(precision))
    peak = fitted.peak()[0]
    rates = {kind: fitted._rate(kind) for kind in ("conv", "matmul", "attention")}
    measured = {kind: Measured(kind, rate, "", rate / peak) for kind, rate in rates.items()}
    known = calibrate._constants(list(calibrate._relative(card, precision, measured)))
    own = efficiency().with_values(known)
    for kind, rate in rates.items():
        assert Roofline(card, Software(precision), known=own)._rate(kind) == pytest.approx(rate)
    assert known["conv", name] == pytest.approx(rates["conv"] / units_rate(card, precision))
    halves = {k: Measured(k, one.rate / 2, "", (one.share or 0) / 2) for k, one in measured.items()}
    slower = efficiency().with_values(
        calibrate._constants(list(calibrate._relative(card, precision, halves)))
    )
    plain = Software(precision, attention="plain")
    # The share of fused attention is not that of plain attention, which is a share of convolutions' rate.
    assert Roofline(card, plain, known=slower)._rate("attention") == pytest.approx(
        Roofline(card, plain)._rate("attention") / 2, rel=0.01
    )
    float32 = Software("float32", conv_tf32=False)
    assert Roofline(card, float32, known=slower)._rate("conv") == Roofline(card, float32)._rate("conv")


def test_a_half_card_is_measured_in_half():
    assert [targets.fast_precision(cards()[name]) for name in ("T4", "TITAN RTX", "RTX 8000")] == ["fp16"] * 3
    assert targets.fast_precision(cards()["A100-SXM4-40GB"]) == "bf16"


def test_launches_are_timed_by_stage():
    taken, kernels = host_seconds(torch.device("cpu"))
    assert 0 < taken < 30
    assert kernels["forward"] > 50
    assert kernels["backward"] > kernels["forward"]


def test_what_an_older_version_kept_is_left_alone(own_cache):
    file = targets.calibration_file()
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"T4": {"conv": 0.9, "matmul": 1.0}}))
    assert calibration("T4") == {}
