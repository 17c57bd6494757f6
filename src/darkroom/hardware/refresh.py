"""Today's offers, read through gpuhunt where it is installed, as a price table like prices.csv."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.cards import Card, find_card
from darkroom.hardware.prices import Price

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
