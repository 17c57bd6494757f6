"""`darkroom bench backends`: rows that say what they compare, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from darkroom import models
from darkroom.errors import InputError
from darkroom.hardware import system
from darkroom.measure import backends
from darkroom.measure.backends import DIFFUSERS, PLAIN, bench_backends

SMALL: dict[str, dict[str, Any]] = {
    "unet": {"block_out_channels": [16, 32], "norm_num_groups": 4},
    "vae": {"block_out_channels": [8, 16, 16], "norm_num_groups": 4},
}


@pytest.fixture(scope="module")
def small() -> models.Model:
    return models.create("tiny", seed=1, overrides=SMALL)


def test_every_case_is_compared_with_diffusers(small: models.Model) -> None:
    rows = list(bench_backends(small, cases=(PLAIN, "torch bf16"), steps=2, repeats=3))
    by_name = {(row.benchmark.removeprefix("backends-"), row.case): row for row in rows}
    assert set(by_name) == {
        *((kind, name) for kind in ("unet", "picture") for name in (DIFFUSERS, PLAIN, "torch bf16")),
        ("overhead", "diffusers loop"),
        ("overhead", "darkroom loop"),
        ("overhead", "darkroom loop, auto"),
    }
    for (_, name), row in by_name.items():
        compared = name not in (DIFFUSERS, "diffusers loop")
        assert (row.ratio is not None) == compared
        assert row.ratio_to == ((DIFFUSERS if "loop" not in name else "diffusers loop") if compared else None)
    assert by_name["unet", PLAIN].settings["mean_error"] < 1e-5
    assert 1e-4 < by_name["unet", "torch bf16"].settings["mean_error"] < 0.1
    assert by_name["picture", DIFFUSERS].settings["max_diff"] <= 1
    assert by_name["picture", "torch bf16"].settings["precision"] == "bfloat16"
    assert by_name["picture", "torch bf16"].settings["psnr_db"] > 20
    assert 0 < by_name["overhead", "darkroom loop"].settings["share_outside_the_unet"] < 1


@pytest.mark.parametrize(("guidance", "rows_a_call"), [(1.0, 1), (7.5, 2)])
def test_a_picture_without_guidance_has_one_row_a_call(
    small: models.Model, monkeypatch: pytest.MonkeyPatch, guidance: float, rows_a_call: int
) -> None:
    """As few-step models draw, diffusers' pipeline alike; the loop's own table is always guided."""
    monkeypatch.setattr(backends, "_overhead_rows", lambda *_: [])
    called: list[int] = []
    small.unet.register_forward_pre_hook(lambda _, given: called.append(len(given[0])))  # type: ignore[union-attr]
    rows = list(bench_backends(small, cases=(PLAIN,), steps=2, repeats=1, guidance=guidance))
    drawn = [row for row in rows if row.benchmark == "backends-picture"]
    assert [row.settings["guidance"] for row in drawn] == [guidance] * 2
    assert all(row.settings["max_diff"] <= 1 for row in drawn)
    assert max(called) == rows_a_call


def test_a_case_that_cannot_be_opened_is_a_row(
    small: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "file"))
    rows = list(bench_backends(small, cases=(PLAIN, "openvino bf16"), steps=1, repeats=1, pictures=0))
    (failed,) = [row for row in rows if row.case == "openvino bf16"]
    assert failed.median_s is None
    assert ("DARKROOM_CACHE" if system.bf16_instructions() else "no bfloat16 instructions") in failed.note


def test_a_case_may_name_backend_and_optimisations(small: models.Model) -> None:
    case = "torch bf16,guidance_interval:1-3"
    rows = list(bench_backends(small, cases=(PLAIN, case), steps=3, repeats=1))
    drawn = {row.case: row for row in rows if row.benchmark == "backends-picture"}
    assert drawn[case].settings["max_diff"] > drawn[PLAIN].settings["max_diff"]
    for wrong in ("torch", "torch fastest", "tensorrt bf16"):
        with pytest.raises(InputError, match="allowed"):
            bench_backends(small, cases=(wrong,))


def test_what_cannot_be_is_refused(small: models.Model) -> None:
    with pytest.raises(InputError, match="case 'tensorrt'; allowed: torch float32"):
        bench_backends(small, cases=("tensorrt",))
    half = models.create("tiny", seed=1, overrides=SMALL).to(dtype=torch.bfloat16)
    with pytest.raises(InputError, match="float32"):
        bench_backends(half)
