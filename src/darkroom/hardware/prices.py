"""What an hour of a device costs: a small dated table, or what the user says. And what device-hours come to:
dollars, energy and carbon.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.cards import HERE, Card, StoragePrice, find_card, read_rows

STALE_DAYS = 90
SPOT = " (spot)"  # marks an offer whose price is its spot price
HOURS_A_YEAR = 8760


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
    idle: int = 0  # devices of its machines that a job of fewer pays for too
    reserved_1y_usd_per_hour: float | None = None  # of a commitment of one year; of three
    reserved_3y_usd_per_hour: float | None = None
    reserved_years: int = 0  # what its price commits to: set by `choose`

    @property
    def usd_per_device_hour(self) -> float:
        """On demand, for one device (one virtual CPU of a CPU class)."""
        return self.on_demand_usd_per_hour / self.count

    @property
    def spot_usd_per_device_hour(self) -> float | None:
        """Spot, for one device; None where there is no offer."""
        return None if self.spot_usd_per_hour is None else self.spot_usd_per_hour / self.count

    def reserved_usd_per_hour(self, years: int) -> float | None:
        """Of a commitment of 1 or 3 years; None where no such price is known."""
        return {1: self.reserved_1y_usd_per_hour, 3: self.reserved_3y_usd_per_hour}.get(years)

    @property
    def committed_usd(self) -> float:
        """What a commitment to one of its machines comes to, used or not; 0 without one."""
        return self.reserved_years * HOURS_A_YEAR * self.on_demand_usd_per_hour

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
        idle = f"; let {self.count} at a time, {self.idle} of them idle" if self.idle else ""
        return f"{where}{self._term()}, as of {self.as_of}{age}{picked}{idle}"

    def _term(self) -> str:
        if not self.reserved_years:
            return ""
        years = "1 year" if self.reserved_years == 1 else f"{self.reserved_years} years"
        return f", reserved for {years}"

    def paid_for(self, number: int) -> int:
        """Cards that a job on so many pays for: whole machines. A processor's cores are sold one by one."""
        card = find_card(self.device)
        if card is None or card.kind == "cpu":
            return number
        return -(-number // self.count) * self.count


@cache
def prices(path: Path = HERE / "prices.csv") -> tuple[Price, ...]:
    """All rows of prices.csv, or of a user's file with the same columns; InputError where they are others."""
    try:
        found = _read(path)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"prices in {path}: {error}", allowed="columns and values as in prices.csv"
        ) from error
    if not found:
        raise InputError(f"prices in {path}: no offers", allowed="rows as in prices.csv")
    for row in found:
        asked = (
            row.on_demand_usd_per_hour,
            *(row.spot_usd_per_hour or 0.0, row.reserved_1y_usd_per_hour or 0.0),
            row.reserved_3y_usd_per_hour or 0.0,
        )
        if not all(math.isfinite(usd) and usd >= 0 for usd in asked) or row.count < 1:
            raise InputError(f"prices in {path}: {row.provider} {row.instance}", allowed="USD of 0 and more")
    return found


def _read(path: Path) -> tuple[Price, ...]:
    return tuple(
        Price(
            provider=row["provider"],
            instance=row["instance"],
            device=_known(row["device"]),
            count=int(row["count"]),
            region=row["region"],
            on_demand_usd_per_hour=float(row["on_demand_usd_per_hour"]),
            spot_usd_per_hour=_usd(row["spot_usd_per_hour"]),
            as_of=date.fromisoformat(row["as_of"]),
            source=row["source"],
            threads_per_core=int(row.get("threads_per_core") or 1),
            reserved_1y_usd_per_hour=_usd(row.get("reserved_1y_usd_per_hour")),
            reserved_3y_usd_per_hour=_usd(row.get("reserved_3y_usd_per_hour")),
        )
        for row in read_rows(path)
    )


def _usd(text: str | None) -> float | None:
    """A price that a table may leave out."""
    return float(text) if text else None


def _known(device: str) -> str:
    """A card's own name, however it is written; ValueError for a card that no plan could be of."""
    card = find_card(device)
    if card is None:
        raise ValueError(f"device '{device}' is no card of hardware.csv")
    return card.name


def price(
    device: str,
    *,
    provider: str | None = None,
    pick: Literal["median", "cheapest"] = "median",
    usd_per_hour: float | None = None,
    table: Sequence[Price] | None = None,
    number: int | None = None,
) -> Price | None:
    """What one hour of a device costs, and which offer that is; None if no price is known.

    Of the device's offers only those of the newest reading count (within 90 days of it), and of these the
    one at the (lower) median on-demand price, or the cheapest. Of a `number` of devices the machines are let
    whole: instead of one that they do not fill the offer next to it in price that they do; where there is
    none, what is left of it is `idle` and paid for too. `usd_per_hour` is the user's own price of one device
    and overrides all.
    """
    if usd_per_hour is not None:
        return Price("given", "", device, 1, "", usd_per_hour, None, date.today(), "by the user")
    card = find_card(device)
    if card is None:
        return None
    rows = [row for row in (prices() if table is None else table) if provider in (None, row.provider)]
    offers = [row for row in rows if row.device == card.name]
    return _pick(offers, pick, number) if offers else None


def _pick(offers: list[Price], pick: str, number: int | None) -> Price:
    newest = max(row.as_of for row in offers)
    fresh = [row for row in offers if row.age_days(newest) <= STALE_DAYS]
    if pick == "cheapest" or fresh[0].picked.startswith("cheapest"):
        chosen = min(fresh, key=lambda row: _usd_of(row, number or row.count))
    else:
        by_cost = sorted(fresh, key=lambda row: row.usd_per_device_hour)
        chosen = by_cost[statistics.median_low(range(len(by_cost)))]
        filled = [row for row in fresh if number and row.paid_for(number) == number]
        if filled and chosen not in filled:
            middle = chosen.usd_per_device_hour
            chosen = min(filled, key=lambda row: abs(row.usd_per_device_hour - middle))
    choice = f"{pick} of {len(fresh)} offers" if len(fresh) > 1 else "the only offer"
    idle = chosen.paid_for(number) - number if number else 0
    return replace(chosen, picked=chosen.picked or choice, idle=idle)


def _usd_of(row: Price, number: int) -> float:
    """What one of so many devices costs for an hour, idle ones of the same machine included."""
    return row.usd_per_device_hour * row.paid_for(number) / number


def offers_of(device: str, table: Sequence[Price] | None = None) -> list[Price]:
    """A device's offers, the cheapest first; older than 90 days before the newest ones are left out."""
    card = find_card(device)
    rows = prices() if table is None else table
    found = [row for row in rows if card is not None and row.device == card.name]
    newest = max((row.as_of for row in found), default=date.min)
    fresh = [row for row in found if row.age_days(newest) <= STALE_DAYS]
    return sorted(fresh, key=lambda row: row.usd_per_device_hour)


def choose(
    table: Sequence[Price],
    *,
    provider: str = "",
    region: str = "",
    spot: bool = False,
    cheapest: bool = False,
    reserved: int = 0,
) -> tuple[Price, ...]:
    """The offers of a provider, in regions whose names begin so, at spot prices or at those of so many years
    `reserved`, only each device's cheapest (for one device or for a machine of them).

    InputError where no offer is left, with what there is.
    """
    rows = [row for row in table if not provider or row.provider == provider]
    if not rows:
        names = ", ".join(sorted({row.provider for row in table}))
        raise InputError(f"--provider {provider}", allowed=names)
    if region and not any(row.region.startswith(region) for row in table):
        names = ", ".join(sorted({row.region for row in table if row.region not in ("", "all")}))
        raise InputError(f"--region {region}", allowed=f"how a region begins: {names}")
    held = [row for row in rows if not region or row.region.startswith(region) or row.region == "all"]
    if not held:
        names = ", ".join(sorted({row.region for row in rows if row.region}))
        raise InputError(f"--region {region}", allowed=names or "no regions are known of these offers")
    if spot:
        held = [_at_spot(row) for row in held if row.spot_usd_per_hour is not None]
        if not held:
            raise InputError("--spot", mend="none of these offers has a spot price: leave --spot away")
    if reserved:
        held = [_reserved(row, reserved) for row in held if row.reserved_usd_per_hour(reserved) is not None]
        if not held:
            raise InputError(
                f"--reserved {reserved}",
                mend="none of these offers has a reserved price: say yours with --price",
            )
    if not cheapest:
        return tuple(held)
    offers = [offers_of(device, held) for device in dict.fromkeys(row.device for row in held)]
    return tuple(
        replace(row, picked=f"cheapest of {len(rows)} offers") for rows in offers for row in _unbeaten(rows)
    )


def _unbeaten(rows: Sequence[Price]) -> Iterator[Price]:
    """Of offers from the cheapest on those that are the cheapest for some number of devices: a dearer one is
    worth it where it is let in smaller machines.
    """
    least = math.inf
    for row in rows:
        if row.count < least:
            least = row.count
            yield row


def _reserved(row: Price, years: int) -> Price:
    """An offer at the price of a commitment of so many years."""
    usd = row.reserved_usd_per_hour(years) or 0.0
    return replace(row, on_demand_usd_per_hour=usd, spot_usd_per_hour=None, reserved_years=years)


def _at_spot(row: Price) -> Price:
    """An offer at its spot price, which may end at any time."""
    usd = row.spot_usd_per_hour or 0.0
    return replace(row, instance=f"{row.instance}{SPOT}", on_demand_usd_per_hour=usd, spot_usd_per_hour=None)


PROVIDERS = ("aws", "azure", "gcp", "lambdalabs", "nebius", "oci", "runpod")
COLUMNS = (
    *("provider", "instance", "device", "count", "region", "on_demand_usd_per_hour", "spot_usd_per_hour"),
    *("as_of", "source"),
)
OFF_MEDIAN = 0.4  # a region's price further than this from the instance's median is taken for a mistake


def refresh(file: Path) -> list[Price]:
    """Read what the providers ask today and write it to a file for `plan --prices FILE`.

    InputError where gpuhunt is not installed, DarkroomError where its catalogue cannot be read. gpuhunt takes
    a catalogue in a folder from GPUHUNT_CATALOG_DIR.
    """
    found = offers(_items())
    if not found:
        raise DarkroomError("gpuhunt's catalogue has no offer of a card of hardware.csv")
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in found:
            spot = "" if one.spot_usd_per_hour is None else one.spot_usd_per_hour
            offer = (one.provider, one.instance, one.device, one.count, one.region)
            writer.writerow([*offer, one.on_demand_usd_per_hour, spot, one.as_of.isoformat(), one.source])
    return found


def offers(items: Iterable[Any]) -> list[Price]:
    """One row a provider, instance and card: the region of the middle price, with the middle spot price.

    `items` are gpuhunt's catalogue items. Spot prices above the one on demand are left out, as are prices far
    from their instance's median: catalogues have both.
    """
    groups: defaultdict[tuple[str, str, str, int], list[Any]] = defaultdict(list)
    for item in items:
        card = _card(item)
        if card is not None and item.price > 0:
            groups[item.provider, item.instance_name, card.name, item.gpu_count].append(item)
    return sorted(_priced(groups), key=lambda row: (row.provider, row.device, row.count, row.instance))


def _priced(groups: dict[tuple[str, str, str, int], list[Any]]) -> Iterator[Price]:
    source = f"gpuhunt {_version()}"
    for (provider, instance, device, count), items in groups.items():
        firm = [item for item in items if not item.spot]
        if not firm:
            continue
        middle = statistics.median(item.price for item in firm)
        sane = sorted(
            (item for item in firm if abs(item.price / middle - 1) <= OFF_MEDIAN), key=lambda item: item.price
        )
        chosen = sane[(len(sane) - 1) // 2]
        spots = [item.price for item in items if item.spot and item.price <= chosen.price]
        spot = round(statistics.median(spots), 4) if spots else None
        usd = round(chosen.price, 4)
        yield Price(provider, instance, device, count, chosen.location, usd, spot, date.today(), source)


def _card(item: Any) -> Card | None:
    """The card that an item means: by its name, and its memory where one name has several."""
    if not item.gpu_count or not item.gpu_name:
        return None
    memory = item.gpu_memory or 0
    card = find_card(f"{item.gpu_name}-{memory:g}GB") or find_card(item.gpu_name)
    if card is None or card.memory_gb is None:
        return None
    return card if abs(memory / card.memory_gb - 1) <= 0.15 else None


def _items() -> list[Any]:
    try:
        import gpuhunt
    except ImportError as error:
        raise InputError(
            "gpuhunt is not installed", mend="pip install gpuhunt, or keep a table of your own: --prices FILE"
        ) from error
    import os

    catalog = gpuhunt.Catalog(auto_reload=False)
    try:
        if "GPUHUNT_CATALOG_DIR" not in os.environ:
            catalog.load()
        found: list[Any] = catalog.query(provider=list(PROVIDERS), min_gpu_count=1)
    except Exception as error:  # its own errors, the network's, a folder's
        raise DarkroomError(f"gpuhunt's catalogue cannot be read ({error}): is there a network?") from error
    return found


def _version() -> str:
    try:
        return metadata.version("gpuhunt")
    except metadata.PackageNotFoundError:
        return ""


# ---- device-hours: dollars, energy and carbon


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
