"""Prices: the table is sane, the pick is said, age is said, the user's own price comes first."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from darkroom.errors import InputError
from darkroom.hardware import cards, prices
from darkroom.hardware.prices import Price, choose, offers_of, price

# USD for one device and hour, on demand: a row outside is a slip of the pen or of the catalogue.
BANDS = {
    "T4": (0.3, 1.5),
    "V100": (0.1, 4.5),
    "A10": (0.5, 3.0),
    "L4": (0.4, 2.5),
    "L40": (0.5, 5.0),
    "A40": (0.4, 3.0),
    "A100": (0.7, 5.5),
    "H100": (1.5, 12.0),
    "H200": (2.0, 12.0),
    "GH200": (1.5, 6.0),
    "B200": (4.0, 18.0),
    "B300": (6.0, 20.0),
    "MI3": (1.0, 7.0),
    "RTX": (0.05, 2.5),
    "CPU": (0.01, 0.15),
}


def test_there_are_about_a_hundred_rows_and_each_is_dated_and_sourced():
    rows = prices()
    assert 90 <= len(rows) <= 140
    assert all(row.source and date(2023, 1, 1) <= row.as_of <= date.today() for row in rows)
    assert {row.device for row in rows} <= set(cards())


@pytest.mark.parametrize("row", prices(), ids=lambda row: f"{row.provider} {row.instance} {row.region}")
def test_spot_is_below_on_demand_and_the_price_is_in_its_familys_band(row):
    assert row.count >= 1
    if row.spot_usd_per_hour is not None:
        assert 0 < row.spot_usd_per_hour <= row.on_demand_usd_per_hour
    if (one := row.reserved_usd_per_hour(1)) is not None:
        three = row.reserved_usd_per_hour(3)
        assert three is not None
        assert 0.25 * row.on_demand_usd_per_hour < three < one < row.on_demand_usd_per_hour
    family = max((name for name in BANDS if row.device.startswith(name)), key=len)
    low, high = BANDS[family]
    assert low <= row.usd_per_device_hour <= high


def offer(name: str, usd: float, as_of: str, device: str = "T4", count: int = 1) -> Price:
    return Price("cloud", name, device, count, "", usd, None, date.fromisoformat(as_of), "a test")


def test_the_median_of_the_newest_reading_is_picked_and_said():
    table = [
        offer("old and cheap", 0.1, "2025-01-01"),
        offer("a", 0.5, "2026-07-01"),
        offer("b", 8.0, "2026-07-10", count=10),
        offer("c", 0.9, "2026-06-20"),
    ]
    found = price("Tesla T4", table=table)
    assert found is not None
    assert (found.instance, found.usd_per_device_hour) == ("b", 0.8)
    assert "median of 3 offers" in str(found)
    cheapest = price("T4", table=table, pick="cheapest")
    assert cheapest is not None
    assert cheapest.instance == "a"
    assert price("T4", table=table, provider="nobody") is None


def test_an_old_price_says_so():
    row = offer("a", 1.0, "2026-01-01")
    day = row.as_of + timedelta(days=91)
    assert row.age_days(day) == 91
    assert row.stale(day)
    assert not row.stale(row.as_of + timedelta(days=90))
    assert "days old" in str(offer("a", 1.0, "2020-01-01"))
    assert "days old" not in str(offer("a", 1.0, date.today().isoformat()))


def test_the_users_price_overrides_and_needs_no_known_device():
    given = price("Voodoo 2", usd_per_hour=2.5)
    assert given is not None
    assert (given.usd_per_device_hour, given.as_of) == (2.5, date.today())
    assert price("Voodoo 2") is None


def test_a_cpu_has_a_price_for_a_virtual_cpu():
    known = price("CPU AMX")
    assert known is not None
    assert known.device == "CPU AMX"
    for other in ("CPU Apple", "CPU AVX2"):  # no offer of its own: another class's price is not its own
        assert price(other) is None


def test_a_table_of_ones_own_is_read(tmp_path):
    header = "provider,instance,device,count,region,on_demand_usd_per_hour,spot_usd_per_hour,as_of,source"
    (tmp_path / "mine.csv").write_text(f"{header}\nus,rack 1,H200,8,cellar,16,,2026-11-01,invoice\n")
    found = price("NVIDIA H200", table=prices(tmp_path / "mine.csv"))
    assert found is not None
    assert found.usd_per_device_hour == 2.0
    assert found.spot_usd_per_device_hour is None


def test_a_table_of_ones_own_names_cards_as_people_do(tmp_path):
    header = "provider,instance,device,count,region,on_demand_usd_per_hour,spot_usd_per_hour,as_of,source"
    for name in ("H100", "NVIDIA H100 80GB HBM3", "H100-SXM"):
        file = tmp_path / f"{name}.csv"
        file.write_text(f"{header}\nus,rack,{name},8,cellar,16,,2026-11-01,invoice\n")
        found = price("H100", table=prices(file))
        assert found is not None
        assert (found.device, found.usd_per_device_hour) == ("H100-SXM", 2.0)
    for text, word in ((f"{header}\nus,rack,Voodoo,8,,16,,2026-11-01,me\n", "Voodoo"), (header, "no offers")):
        wrong = tmp_path / f"{word}.csv"
        wrong.write_text(text)
        with pytest.raises(InputError, match=word):
            prices(wrong)


def test_whole_machines_are_paid_for():
    day = "2026-07-01"
    table = [offer("eight", 8.0, day, count=8), offer("dear", 3.0, day), offer("two", 5.0, day, count=2)]
    picked = {n: price("T4", table=table, number=n) for n in (1, 2, 3, 8)}
    # The middle one is let in twos: for one or three the nearest that they fill.
    assert {n: one.instance for n, one in picked.items()} == {1: "dear", 2: "two", 3: "dear", 8: "two"}
    assert [one.idle for one in picked.values()] == [0, 0, 0, 0]
    only = price("T4", table=table[:1], number=3)
    assert (only.idle, only.paid_for(3), only.paid_for(9)) == (5, 8, 16)
    assert "let 8 at a time, 5 of them idle" in str(only)
    cheap = choose(table, cheapest=True)
    assert [price("T4", table=cheap, number=n).instance for n in (1, 2, 8)] == ["dear", "two", "eight"]
    assert price("CPU AMX", number=3).idle == 0  # its cores are let one by one


def test_offers_are_chosen_by_provider_region_and_kind():
    table = prices()
    lambda_ = choose(table, provider="lambda")
    assert {row.provider for row in lambda_} == {"lambda"}
    assert {row.region[:2] for row in choose(table, region="us-") if row.region != "all"} == {"us"}
    spot = choose(table, spot=True)
    normal = {
        (row.provider, row.instance, row.device, row.region): row
        for row in table
        if row.spot_usd_per_hour is not None
    }
    for row in spot:
        own = normal[row.provider, row.instance.removesuffix(" (spot)"), row.device, row.region]
        assert row.on_demand_usd_per_hour == own.spot_usd_per_hour
    cheapest = price("A100-80", table=choose(table, cheapest=True))
    assert cheapest.usd_per_device_hour == min(row.usd_per_device_hour for row in offers_of("A100-80"))
    assert cheapest.picked.startswith("cheapest of ")
    assert cheapest.usd_per_device_hour < price("A100-80").usd_per_device_hour
    each = [row.usd_per_device_hour for row in offers_of("H100")]
    assert each == sorted(each)
    assert len(each) > 3
    for wrong in ({"provider": "nobody"}, {"provider": "aws", "region": "mars"}):
        with pytest.raises(InputError):
            choose(table, **wrong)


def test_a_commitment_has_its_own_price_and_says_what_it_comes_to():
    table = prices()
    for years, usd in ((1, 0.604), (3, 0.402)):
        picked = price("A10G", table=choose(table, reserved=years), number=1)
        assert (picked.instance, picked.usd_per_device_hour) == ("g5.xlarge", usd)
        assert picked.committed_usd == pytest.approx(years * 8760 * usd)
        assert f"reserved for {years} year" in str(picked)
        assert picked.spot_usd_per_hour is None
    on_demand = price("A10G")
    assert (on_demand.committed_usd, "reserved" in str(on_demand)) == (0.0, False)
    # Anyscale's USD 39,511 of 13,165 A100-hours on machines reserved for a year are the same list's.
    eight = price("A100-80", table=choose(table, reserved=1), number=8)
    assert eight.usd_per_device_hour == pytest.approx(39_511 / 13_165, rel=0.001)


def test_what_has_no_reserved_price_is_refused_and_none_is_made_up(tmp_path):
    with pytest.raises(InputError, match="none of these offers has a reserved price"):
        choose(prices(), provider="vast", reserved=1)
    held = {row.device for row in choose(prices(), reserved=3)}
    assert "A10G" in held
    assert "H100-SXM" not in held
    header = "provider,instance,device,count,region,on_demand_usd_per_hour,spot_usd_per_hour,as_of,source"
    mine = tmp_path / "mine.csv"
    row = "us,rack,H100,8,,16,,2026-11-01,invoice"
    mine.write_text(f"{header},reserved_1y_usd_per_hour,reserved_3y_usd_per_hour\n{row},12,\n")
    assert price("H100", table=choose(prices(mine), reserved=1)).usd_per_device_hour == 1.5
    with pytest.raises(InputError, match="--reserved 3"):
        choose(prices(mine), reserved=3)
    mine.write_text(f"{header},reserved_1y_usd_per_hour\n{row},-12\n")
    prices.cache_clear()
    with pytest.raises(InputError, match="USD of 0 and more"):
        prices(mine)
