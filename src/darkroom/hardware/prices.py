"""What an hour of a device costs: a small dated table, or what the user says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Literal

from darkroom.hardware.cards import HERE, find_card, read_rows

STALE_DAYS = 90


@dataclass(frozen=True)
class Price:
    """One offer. `count` devices cost `on_demand_usd_per_hour` together (for a CPU class: virtual CPUs)."""

    provider: str
    instance: str
    device: str
    count: int
    region: str
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float | None
    as_of: date
    source: str
    threads_per_core: int = 1  # virtual CPUs that a core of a CPU class is sold as
    picked: str = ""  # why this row, when it was picked from several

    @property
    def usd_per_device_hour(self) -> float:
        """On demand, for one device (one virtual CPU of a CPU class)."""
        return self.on_demand_usd_per_hour / self.count

    @property
    def spot_usd_per_device_hour(self) -> float | None:
        """Spot, for one device; None where there is no offer."""
        return None if self.spot_usd_per_hour is None else self.spot_usd_per_hour / self.count

    def age_days(self, today: date | None = None) -> int:
        """Days since the price was read."""
        return ((today or date.today()) - self.as_of).days

    def stale(self, today: date | None = None) -> bool:
        """Whether the price is older than 90 days and should be read again."""
        return self.age_days(today) > STALE_DAYS

    @property
    def origin(self) -> str:
        """Whose price it is, why this one, and where it was read; without its date."""
        where = " ".join(filter(None, (self.provider, self.instance, self.region)))
        return "; ".join(filter(None, (where, self.picked, self.source)))

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.provider, self.instance, self.region)))
        age = f", {self.age_days()} days old" if self.stale() else ""
        picked = f"; {self.picked}" if self.picked else ""
        return f"{where}, as of {self.as_of}{age}{picked}"


@cache
def prices(path: Path = HERE / "prices.csv") -> tuple[Price, ...]:
    """All rows of prices.csv, or of a user's file with the same columns."""
    return tuple(
        Price(
            provider=row["provider"],
            instance=row["instance"],
            device=row["device"],
            count=int(row["count"]),
            region=row["region"],
            on_demand_usd_per_hour=float(row["on_demand_usd_per_hour"]),
            spot_usd_per_hour=float(row["spot_usd_per_hour"]) if row["spot_usd_per_hour"] else None,
            as_of=date.fromisoformat(row["as_of"]),
            source=row["source"],
            threads_per_core=int(row.get("threads_per_core") or 1),
        )
        for row in read_rows(path)
    )


def price(
    device: str,
    *,
    provider: str | None = None,
    pick: Literal["median", "cheapest"] = "median",
    usd_per_hour: float | None = None,
    table: Sequence[Price] | None = None,
) -> Price | None:
    """What one hour of a device costs, and which offer that is; None if no price is known.

    Of the device's offers only those of the newest reading count (within 90 days of it), and of these the
    one at the (lower) median on-demand price, or the cheapest. `usd_per_hour` is the user's own price of one
    device and overrides all. A CPU class without an offer takes those of all CPU classes.
    """
    if usd_per_hour is not None:
        return Price("given", "", device, 1, "", usd_per_hour, None, date.today(), "by the user")
    card = find_card(device)
    if card is None:
        return None
    rows = [row for row in (prices() if table is None else table) if provider in (None, row.provider)]
    offers = [row for row in rows if row.device == card.name]
    if not offers and card.kind == "cpu":
        offers = [row for row in rows if row.device.startswith("CPU ")]
    return _pick(offers, pick) if offers else None


def _pick(offers: list[Price], pick: str) -> Price:
    newest = max(row.as_of for row in offers)
    fresh = [row for row in offers if row.age_days(newest) <= STALE_DAYS]
    by_cost = sorted(fresh, key=lambda row: row.usd_per_device_hour)
    middle = statistics.median_low(range(len(by_cost)))
    chosen = by_cost[middle if pick == "median" else 0]
    return replace(
        chosen, picked=f"{pick} of {len(by_cost)} offers" if len(by_cost) > 1 else "the only offer"
    )
