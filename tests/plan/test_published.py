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
    for (name, _), value in efficiency().values.items():
        assert value > 0
        if name in ("conv", "bandwidth", "plain_cores", "network", "overlap"):
            assert value <= 1
