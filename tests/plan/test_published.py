"""The proof: what is exact is exact, what is predicted is told honestly, and fitted rows never count."""

from __future__ import annotations

import json

import pytest

from darkroom.plan import published
from darkroom.plan.roofline import efficiency
from darkroom.plan.validate import validate

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
    assert len(found["rows"]) == 15
    assert all("plain_reading" in row for row in found["rows"])
    printed = {row["case"]: row["error"] for row in found["rows"]}
    assert abs(printed["full, batch 4, 512 px"]) <= 0.15
    assert abs(printed["LoRA 8 checkpointed, batch 4, 512 px"]) <= 0.15


def test_the_rows_have_what_machines_read(proof):
    json.dumps(proof)
    for found in proof["tables"]:
        assert {"table", "holds", "rows"} <= found.keys()
        for row in found["rows"]:
            assert {"case", "published", "predicted", "error", "fitted"} <= row.keys()


def test_at_least_half_of_every_table_is_predicted(proof):
    for found in proof["tables"]:
        left = [row for row in found["rows"] if not row["fitted"]]
        assert 2 * len(left) >= len(found["rows"]), found["table"]


def test_a_wrong_efficiency_breaks_the_proof():
    slow = efficiency().with_values({("conv", "Hopper"): 0.1, ("conv", "Blackwell"): 0.1})
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
    from darkroom.plan import shipped
    from darkroom.plan.generation import PrepareSpec, profile_preparing

    kept = shipped.preparing_profile("sd2", 256, "bf16")
    again = shipped.unpacked(shipped.packed(profile_preparing(PrepareSpec("sd2", 256, True, "bf16"))))
    assert again.kernels == kept.kernels
    assert again.parameters == kept.parameters
    for rows in (1, 10, 100):
        assert again.memory(rows) == kept.memory(rows)
    other = profile_preparing(PrepareSpec("sd2", 128, True, "bf16"))
    assert other.flops(4) != pytest.approx(kept.flops(4), rel=0.1)
