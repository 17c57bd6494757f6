"""The proof: what is exact is exact, what is predicted is told honestly, and fitted rows never count."""

from __future__ import annotations

import json
from statistics import median

import pytest

from darkroom.hardware.cards import read_rows
from darkroom.plan.roofline import HERE, efficiency
from darkroom.proof import published
from darkroom.proof.published import validate

EXACT = (
    "LoRA parameters and files (Vertex)",
    "days (MosaicML)",
    "costs (MosaicML)",
    "costs from their rates (Anyscale)",
)


@pytest.fixture(scope="module")
def proof():
    return validate().to_dict()


@pytest.mark.parametrize("name", EXACT)
def test_what_follows_from_their_own_figures_follows(name):
    assert published.holds(published.table(name), efficiency())


def test_every_row_of_the_memory_table_is_within_its_tolerance(proof):
    found = next(one for one in proof["tables"] if one["table"] == "peak VRAM (Vertex)")
    assert found["holds"]
    assert len(found["rows"]) == 17
    assert all("plain_reading" in row for row in found["rows"])
    printed = {row["case"]: row["error"] for row in found["rows"]}
    assert abs(printed["full, batch 4, 512 px"]) <= 0.15
    assert abs(printed["LoRA 8 checkpointed, batch 4, 512 px"]) <= 0.15


def test_a_full_card_is_foretold_without_slack():
    rows = [row for row in published.table("peak VRAM (Vertex)").rows if row.at_least is not None]
    assert len(rows) == 4
    assert {row.limit for row in rows} == {0.0}


def test_the_largest_batches_show_the_plain_reading_too(proof):
    found = next(one for one in proof["tables"] if one["table"] == "largest batch (Vertex)")
    for row in found["rows"]:
        exact = "plain_reading" if row["case"].startswith("A100") else "predicted"
        assert row[exact] == row["published"], row["case"]
        assert row["plain_reading"] >= row["predicted"]


def test_a_row_that_follows_from_another_is_not_counted(proof):
    found = published.table("serving (Vertex)")
    known = efficiency()
    counted = published.counted(found, unseen=True)
    assert {row.unit for row in counted} == {"s"}
    assert len(counted) * 2 == len(found.rows)
    told = next(one for one in proof["tables"] if one["table"] == found.name)
    seconds = [abs(row["error"]) for row in told["rows"] if row["unit"] == "s" and not row["fitted"]]
    assert told["median_error"] == pytest.approx(median(seconds))
    assert published.median_error(found, known, unseen=True) != told["median_error"]


def test_mlperf_is_predicted_card_by_card_from_one_row():
    found = published.table("MLPerf SD 2, eight cards")
    seen = [row.case for row in found.rows if row.fitted]
    assert seen == ["v4.1 NVIDIA: 8 H200, batch 256"]
    for card in ("8 H100-SXM,", "8 H200,", "8 B200,", "8 GB200,"):
        errors = [published.error(row, efficiency()) for row in published.counted(found) if card in row.case]
        assert errors, card
        assert max(map(abs, errors)) <= 0.20, card


def test_the_three_ways_of_phase_1_are_predicted_from_counts(proof):
    name = "phases and total from counts (Anyscale)"
    found = next(one for one in proof["tables"] if one["table"] == name)
    rows = {row["case"]: row for row in found["rows"]}
    for kind in ("inline", "offline", "online"):
        for unit in ("hours", "USD"):
            row = rows[f"phase 1 {kind}, {unit}, from counts"]
            assert 0 < abs(row["error"]) <= 0.20
            assert "the fit has seen" in row["note"]
    assert rows["total A100-hours, from counts"]["note"].startswith("in part fitted")
    assert rows["total USD, from counts"]["derived"]


def test_every_fitted_table_has_its_verdict_unseen(proof):
    for found in proof["tables"]:
        fitted = any(row["fitted"] for row in found["rows"]) or found["table"].startswith("phases")
        assert (found["left_out_error"] is not None) == fitted, found["table"]
        if fitted:
            assert isinstance(found["left_out_holds"], bool)
            if found["by_median"]:
                assert found["left_out_holds"] == (found["left_out_error"] <= found["limit"])


def test_a_constant_that_few_rows_tell_says_so():
    """Rows that move by half a percent where a constant moves by a tenth."""
    known, sources = efficiency(), list(read_rows(HERE / "efficiency.csv"))
    rows = [row for name in published.TABLES for row in published.table(name).rows if row.fitted]
    before = [row.predict(known) for row in rows]
    for constant in sources:
        if not constant["source"].startswith(("fitted", "guessed: fitted")):
            continue
        key = constant["name"], constant["applies_to"]
        moved = [known.with_values({key: known.values[key] * factor}) for factor in (0.9, 1.1)]
        told = [
            any(abs(row.predict(one) / value - 1) > 0.005 for one in moved)
            for row, value in zip(rows, before, strict=True)
        ]
        said = {0: "guessed: fitted rows hardly tell", 1: "fitted on one row"}
        assert constant["source"] == said.get(sum(told), "fitted"), key


def test_the_rows_have_what_machines_read(proof):
    json.dumps(proof)
    for found in proof["tables"]:
        assert {"table", "holds", "rows"} <= found.keys()
        for row in found["rows"]:
            assert {"case", "published", "predicted", "error", "fitted"} <= row.keys()


def test_at_least_half_of_every_table_is_predicted(proof):
    for found in proof["tables"]:
        counted = [row for row in found["rows"] if not row.get("derived")]
        left = [row for row in counted if not row["fitted"]]
        assert 2 * len(left) >= len(counted), found["table"]


def test_a_wrong_efficiency_breaks_the_proof():
    slow = efficiency().with_values({("conv", "Hopper"): 0.1})
    table = published.table("MLPerf SD 2, eight cards")
    assert not published.holds(table, slow)


def test_efficiencies_are_shares():
    for (name, where), value in efficiency().values.items():
        assert value > 0 or name == "beside"
        cached = (name, where) == ("bandwidth", "Ada")  # a cache of 48 to 96 MB serves much of the traffic
        if name in ("conv", "bandwidth", "plain_cores", "network", "overlap", "contention", "beside"):
            assert value <= 1 or cached


def test_a_shipped_count_is_what_counting_gives():
    """The counts kept with the package, counted once more: the encoders of SD 2 at 256 px."""
    from darkroom.plan.generation import PrepareSpec, profile_preparing
    from darkroom.proof import peers as shipped

    kept = shipped.preparing_profile("sd2", 256, "bf16")
    again = shipped.unpacked(shipped.packed(profile_preparing(PrepareSpec("sd2", 256, True, "bf16"))))
    assert again.kernels == kept.kernels
    assert again.parameters == kept.parameters
    for rows in (1, 10, 100):
        assert again.memory(rows) == kept.memory(rows)
    other = profile_preparing(PrepareSpec("sd2", 128, True, "bf16"))
    assert other.flops(4) != pytest.approx(kept.flops(4), rel=0.1)
