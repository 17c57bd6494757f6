"""benchmarks/portability.py: when a case counts as slower than it was."""

from __future__ import annotations

from types import ModuleType

import pytest

from scripts import load_script


@pytest.fixture(scope="module")
def portability() -> ModuleType:
    return load_script("benchmarks/portability.py")


@pytest.mark.parametrize(
    ("scan", "loader", "cpu", "slower"),
    [
        (0.87, 0.45, 20.0, set()),  # the machine: Lance's own scan as much as the loader, and no more work
        (0.77, 0.45, 22.0, {"loader, from the store"}),  # the loader alone
        (0.87, 0.45, 22.0, {"plain scan"}),  # the reading of stores, with more work
        (0.87, 0.55, 22.0, {"plain scan", "loader, from the store"}),
        (0.77, 0.405, 20.0, set()),
    ],
)
def test_a_machine_that_was_slower_is_not_the_code(
    portability: ModuleType, scan: float, loader: float, cpu: float, slower: set[str]
) -> None:
    def sides(before: float, after: float) -> dict[str, list[float]]:
        return {"before": [before, before * 1.01], "after": [after, after * 1.01]}

    rows = portability.rows(
        {
            ("loader", portability.CPU): sides(20.0, cpu),
            ("loader", "plain scan"): sides(0.77, scan),
            ("loader", "loader, from the store"): sides(0.40, loader),
        }
    )
    assert {row["case"] for row in rows if row["slower"]} == slower
    ratios = {row["case"]: (row["ratio"], row["to_control"], row["cpu_ratio"]) for row in rows}
    to_control = f"{(loader / scan) / (0.40 / 0.77):.4f}"
    assert ratios["loader, from the store"] == (f"{loader / 0.40:.4f}", to_control, f"{cpu / 20:.4f}")
    assert ratios["plain scan"][1] == ""
