"""What keeping and moving data costs: a few object stores of storage.csv, dated."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import cache

from darkroom.hardware.cards import HERE, read_rows


@dataclass(frozen=True)
class StoragePrice:
    """One store: USD for a decimal gigabyte kept a month, and for one that leaves the provider."""

    provider: str
    service: str
    region: str
    usd_per_gb_month: float
    usd_per_gb_out: float
    as_of: date
    source: str

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.provider, self.service, self.region)))
        return f"{where}, as of {self.as_of}"


@cache
def storage_prices() -> tuple[StoragePrice, ...]:
    """All rows of storage.csv."""
    return tuple(
        StoragePrice(
            provider=row["provider"],
            service=row["service"],
            region=row["region"],
            usd_per_gb_month=float(row["usd_per_gb_month"]),
            usd_per_gb_out=float(row["usd_per_gb_out"]),
            as_of=date.fromisoformat(row["as_of"]),
            source=row["source"],
        )
        for row in read_rows(HERE / "storage.csv")
    )


def storage_price(
    provider: str | None = None,
    *,
    usd_per_gb_month: float | None = None,
    usd_per_gb_out: float | None = None,
) -> StoragePrice:
    """The store of a provider, or the table's first where it has none; the user's own prices override it."""
    rows = storage_prices()
    found = next((row for row in rows if row.provider == provider), rows[0])
    if usd_per_gb_month is None and usd_per_gb_out is None:
        return found
    kept = found.usd_per_gb_month if usd_per_gb_month is None else usd_per_gb_month
    out = found.usd_per_gb_out if usd_per_gb_out is None else usd_per_gb_out
    return StoragePrice("given", "", "", kept, out, date.today(), "by the user")
