"""Today's offers through gpuhunt: which cards its items mean, and what of them is believed."""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from darkroom.errors import InputError
from darkroom.hardware.cards import storage_price, storage_prices
from darkroom.hardware.prices import PROVIDERS, offers, price, prices, refresh

HEADER = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags,"
    "cpu_arch,provider_data"
)


@dataclass
class Item:
    """The fields of gpuhunt's catalogue items that are read."""

    instance_name: str
    location: str
    price: float
    gpu_name: str | None
    gpu_memory: float | None
    gpu_count: int = 1
    spot: bool = False
    provider: str = "aws"


def test_items_become_rows_of_the_cards_that_they_mean():
    found = offers(
        [
            Item("p4d", "here", 22.0, "A100", 40, 8),
            Item("p4de", "here", 27.0, "A100", 80, 8),
            Item("g5", "here", 1.0, "A10G", 22),
            Item("gtx", "here", 1.0, "GTX1080", 8),
            Item("cpu", "here", 0.1, None, None, 0),
            Item("slice", "here", 0.5, "A10G", 6),
        ]
    )
    assert [(row.device, row.count, row.usd_per_device_hour) for row in found] == [
        ("A100-SXM4-40GB", 8, 2.75),
        ("A100-SXM4-80GB", 8, 27 / 8),
        ("A10G", 1, 1.0),
    ]


def test_prices_that_cannot_be_are_left_out():
    regions = [Item("p5", place, usd, "H100", 80, 8) for place, usd in (("a", 50), ("b", 55), ("c", 200))]
    spots = [Item("p5", "a", usd, "H100", 80, 8, spot=True) for usd in (20.0, 24.0, 90.0)]
    (row,) = offers([*regions, *spots])
    assert (row.region, row.on_demand_usd_per_hour) == ("a", 50)
    assert row.spot_usd_per_hour == 22


def test_a_catalogue_of_gpuhunt_becomes_a_price_table_or_the_package_is_named(tmp_path, monkeypatch):
    """gpuhunt is no dependency: where it is not installed, the refusal says what mends it."""
    if importlib.util.find_spec("gpuhunt") is None:
        with pytest.raises(InputError, match="pip install gpuhunt"):
            refresh(tmp_path / "new.csv")
        return
    for name in PROVIDERS:
        (tmp_path / f"{name}.csv").write_text(HEADER + "\n")
    with (tmp_path / "aws.csv").open("a") as file:
        csv.writer(file, lineterminator="\n").writerow(
            ["g5.xlarge", "us-east-1", 1.25, 4, 16, 1, "A10G", 22, False, "", "nvidia", "", "x86", "{}"]
        )
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    refresh(tmp_path / "new.csv")
    found = price("A10G", table=prices(Path(tmp_path / "new.csv")))
    assert found is not None
    assert found.usd_per_device_hour == 1.25
    assert not found.stale()


def test_stores_are_priced_and_the_users_price_counts():
    assert len(storage_prices()) >= 3
    for row in storage_prices():
        assert 0.005 <= row.usd_per_gb_month <= 0.1
        assert 0 <= row.usd_per_gb_out <= 0.2
        assert row.source
    assert storage_price("gcp").provider == "gcp"
    assert storage_price("nobody") == storage_price()
    own = storage_price("gcp", usd_per_gb_month=0.5)
    assert (own.usd_per_gb_month, own.usd_per_gb_out) == (0.5, storage_price("gcp").usd_per_gb_out)
