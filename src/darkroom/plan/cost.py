"""Dollars, energy and carbon of device-hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from darkroom.hardware.cards import Card, StoragePrice
from darkroom.hardware.prices import SPOT, Price, offers_of, price

PUE = (
    1.3  # power of the building over that of the machines: between hyperscalers' 1.1 and the 1.55 of a survey
)
HOST_SHARE = 0.25  # processors, memory and fans for each accelerator, as a share of its rating
KG_CO2E_PER_KWH = 0.475  # world average of electricity (IEA, 2019)


@dataclass(frozen=True)
class Cost:
    """What device-hours cost; None where no price is known."""

    device_hours: float
    usd: float | None
    usd_spot: float | None
    usd_per_device_hour: float | None
    price: str
    price_as_of: str | None
    price_is_old: bool
    kwh: float
    kg_co2e: float
    provider: str | None = None
    at_spot: bool = False  # `usd` is of a machine that may be taken away
    reserved_years: int = 0  # `usd` is of a machine that is paid for so long, used or not:
    committed_usd: float = 0.0  # all machines of the job for that time


@dataclass(frozen=True)
class Storage:
    """What a job's data cost besides its devices: the data set and one checkpoint, kept and sent out once."""

    size_bytes: float
    usd_per_month: float
    usd_out: float
    price: str
    price_as_of: str


def storage(sizes_bytes: Mapping[str, float], price: StoragePrice) -> Storage | None:
    """The price of keeping what a job has on disk for a month, and of moving it to another provider once."""
    size = sum(sizes_bytes.values())
    if not size:
        return None
    gigabytes = size / 1e9
    return Storage(
        size_bytes=size,
        usd_per_month=gigabytes * price.usd_per_gb_month,
        usd_out=gigabytes * price.usd_per_gb_out,
        price=str(price),
        price_as_of=price.as_of.isoformat(),
    )


def cost(
    card: Card,
    device_hours: float,
    *,
    cores: int = 1,
    offer: Price | None,
    number: int = 1,
    kg_per_kwh: float = KG_CO2E_PER_KWH,
) -> Cost:
    """Device-hours of a `number` of cards in money and energy. Machines are let whole. Energy is of rated
    power, host and building included.
    """
    units = cores if card.unit == "core" else 1
    sold = 1.0 if offer is None else _sold(card, cores, offer, number)
    per_hour = None if offer is None else offer.usd_per_device_hour * sold
    spot = None if offer is None or offer.spot_usd_per_device_hour is None else offer.spot_usd_per_device_hour
    kwh = device_hours * card.power_w * units * (1 + HOST_SHARE) * PUE / 1000
    return Cost(
        device_hours=device_hours,
        usd=None if per_hour is None else per_hour * device_hours,
        usd_spot=None if spot is None else spot * sold * device_hours,
        usd_per_device_hour=per_hour,
        price="no price known" if offer is None else str(offer),
        price_as_of=None if offer is None else offer.as_of.isoformat(),
        price_is_old=offer is not None and offer.stale(),
        kwh=kwh,
        kg_co2e=kwh * kg_per_kwh,
        provider=None if offer is None else offer.provider,
        at_spot=offer is not None and offer.instance.endswith(SPOT),
        reserved_years=0 if offer is None else offer.reserved_years,
        committed_usd=0.0 if offer is None else offer.committed_usd * _machines(card, cores, offer, number),
    )


def _sold(card: Card, cores: int, offer: Price, number: int) -> float:
    """What a device is sold as: a table's price is of a virtual CPU, of which a core may be two, or of a card
    of a machine that is let whole; the user's own is of the device.
    """
    if offer.provider == "given":
        return 1.0
    if card.kind != "cpu":
        return offer.paid_for(number) / number
    return _cpus(card, cores, offer)


def _cpus(card: Card, cores: int, offer: Price) -> int:
    """Virtual CPUs that cores are sold as."""
    return (cores if card.unit == "core" else 1) * offer.threads_per_core


def _machines(card: Card, cores: int, offer: Price, number: int) -> int:
    """How many machines of an offer a `number` of devices stand in."""
    if card.kind == "cpu":
        return -(-_cpus(card, cores, offer) * number // offer.count)
    return offer.paid_for(number) // offer.count


def listed(
    card: Card, cores: int, device_hours: float, table: Sequence[Price] | None = None, *, number: int = 1
) -> tuple[dict[str, Any], ...]:
    """What device-hours of a `number` of cards cost at every offer of the card, the cheapest first."""
    found = []
    for one in offers_of(card.name, table):
        sold = _sold(card, cores, one, number)
        spot = one.spot_usd_per_device_hour
        found.append(
            {
                "provider": one.provider,
                "instance": one.instance,
                "region": one.region,
                "usd_per_device_hour": one.usd_per_device_hour * sold,
                "usd": one.usd_per_device_hour * sold * device_hours,
                "usd_spot": None if spot is None else spot * sold * device_hours,
                "as_of": one.as_of.isoformat(),
                "source": one.source,
            }
        )
    return tuple(sorted(found, key=lambda one: one["usd"]))


def over_limits(
    hours: float, usd: float | None, deadline_hours: float | None, budget_usd: float | None
) -> tuple[str, ...]:
    """What breaks the deadline or the budget; what has no known price keeps no budget."""
    over = []
    if deadline_hours is not None and hours > deadline_hours:
        over.append(f"over the deadline of {deadline_hours:g} h")
    if budget_usd is not None and usd is None:
        over.append(f"no price known to hold against the budget of USD {budget_usd:,.2f}: say --price")
    elif budget_usd is not None and usd is not None and usd > budget_usd:
        over.append(f"over the budget of USD {budget_usd:,.2f}")
    return tuple(over)


def offer_for(
    card: Card, usd_per_hour: float | None, table: Sequence[Price] | None = None, *, number: int = 1
) -> Price | None:
    """The price that counts for so many cards: the user's own, else the median of the newest offers."""
    return price(card.name, usd_per_hour=usd_per_hour, table=table, number=number)
