"""The proof: what is exact is exact, and what rests on fitted constants is judged by those that saw none of
it.
"""

from __future__ import annotations

import json
from statistics import median

import pytest

from darkroom.hardware.cards import read_rows
from darkroom.plan.roofline import FITTED, HERE, efficiency
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
    counted = published.counted(found)
    assert {row.unit for row in counted} == {"s"}
    assert len(counted) * 2 == len(found.rows)
    told = next(one for one in proof["tables"] if one["table"] == found.name)
    seconds = [abs(row["error"]) for row in told["rows"] if row["unit"] == "s"]
    assert told["median_error"] == pytest.approx(median(seconds))


def test_each_table_is_predicted_by_constants_that_saw_none_of_it(proof):
    for found in proof["tables"]:
        name = found["table"]
        known = published.unseen(name) if name in published.RESTS_ON else efficiency()
        for row, one in zip(found["rows"], published.table(name).rows, strict=True):
            assert row["predicted"] == one.predict(known), (name, row["case"])
        seen = published.RESTS_ON.get(name)
        assert (published.unseen(name).values != efficiency().values) == bool(seen), name
        assert (found["seen_error"] is None) == (seen is None)


def test_all_tables_hold_unseen_and_intervals_hold_four_of_five(proof):
    assert proof["holding"] == len(proof["tables"])
    assert proof["holding_unseen"] == proof["rest_on_the_fit"] == 11
    assert proof["median_error_unseen"] <= 0.15
    assert 0.7 <= proof["inside_80"] <= 0.9
    slow = efficiency().with_values({("conv", "GPU"): 0.1})
    assert published.inside(published.table("MLPerf SD 2, eight cards"), slow) < 0.2


def test_how_much_single_tables_differ_is_said(proof):
    timed = [one for one in proof["tables"] if one["table"] in published.RESTS_ON]
    shares = [one["inside"] for one in timed]
    lines = list(published.Validation(tuple(proof["tables"])).lines())
    assert f"of single tables {min(shares):.0%} to {max(shares):.0%}" in lines[2]
    for one in timed:
        line = next(line for line in lines if line.startswith(f"  {one['table']}"))
        assert f"{one['inside']:.0%} of {one['inside_of']} rows inside 80 %" in line
        assert one["inside_of"] == len(published.counted(published.table(one["table"])))


def test_intervals_are_judged_by_widths_that_saw_none_of_a_tables_rows():
    """Each table's own widths, and so much wider ones hold more of its rows."""
    kept = json.loads(published.LEFT_OUT_SPREAD.read_text())
    assert kept.keys() == published.RESTS_ON.keys()
    for name, widths in kept.items():
        assert widths.keys() == {"any", *published.MOVED}
        assert widths != {key: published.spread()[key] for key in widths}, name
        used = published.unseen_spread(name)
        assert {key: used[key] for key in widths} == widths
    found = published.table("serving (Vertex)")
    row, known = published.counted(found)[0], published.unseen(found.name)
    shares = published.shares(row, known)
    assert published.half(found.name, row, known) == published.half_width(kept[found.name], shares)


def test_few_constants_are_fitted_and_several_tables_tell_each():
    """Rows of a table that move by half a percent where a constant moves by a tenth."""
    known, sources = efficiency(), list(read_rows(HERE / "efficiency.csv"))
    fitted = [(row["name"], row["applies_to"]) for row in sources if row["source"] == "fitted"]
    assert len(fitted) == FITTED <= 10
    tables = [published.table(name) for name, rests in published.RESTS_ON.items() if rests == name]
    for key in fitted:
        moved = known.with_values({key: known.values[key] * 1.1})
        told = [
            sum(abs(row.predict(moved) / row.predict(known) - 1) > 0.005 for row in published.counted(table))
            for table in tables
        ]
        assert sum(number > 0 for number in told) >= 2, key
        assert sum(told) >= 4, key


def test_the_three_ways_of_phase_1_are_predicted_from_counts(proof):
    name = "phases and total from counts (Anyscale)"
    found = next(one for one in proof["tables"] if one["table"] == name)
    rows = {row["case"]: row for row in found["rows"]}
    for kind in ("inline", "offline", "online"):
        for unit in ("hours", "USD"):
            row = rows[f"phase 1 {kind}, {unit}, from counts"]
            assert 0 < abs(row["error"]) <= 0.20
    assert rows["total USD, from counts"]["derived"]


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
    slow = efficiency().with_values({("conv", "GPU"): 0.1})
    table = published.table("MLPerf SD 2, eight cards")
    assert not published.holds(table, slow)


def test_efficiencies_are_shares():
    for (name, _), value in efficiency().values.items():
        assert value > 0
        if name in ("conv", "bandwidth", "plain_cores", "network", "overlap", "contention"):
            assert value <= 1


def test_a_shipped_count_is_what_counting_gives():
    """The counts kept with the package, counted once more: the encoders of SD 2 at 256 px."""
    from darkroom.plan.tracing import PrepareSpec, profile_preparing
    from darkroom.proof import tables as shipped

    kept = shipped.preparing_profile("sd2", 256, "bf16")
    again = shipped.unpacked(shipped.packed(profile_preparing(PrepareSpec("sd2", 256, True, "bf16"))))
    assert again.kernels == kept.kernels
    assert again.parameters == kept.parameters
    for rows in (1, 10, 100):
        assert again.memory(rows) == kept.memory(rows)
    other = profile_preparing(PrepareSpec("sd2", 128, True, "bf16"))
    assert other.flops(4) != pytest.approx(kept.flops(4), rel=0.1)
