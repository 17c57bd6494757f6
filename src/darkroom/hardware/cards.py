"""Peak rates, memory, power and links of cards and CPU classes: hardware.csv, networks.csv, machines.csv.

Memory is what torch.cuda.mem_get_info says is there (`total_gib`; where no such report is at hand 98 % of
what is sold, as cards of its kind have), not the number on the box. Rates are dense, in FLOP a second with 2
per multiply-add; fp16 and bf16 accumulate in float32 unless the column says otherwise. A CPU class is given
per core.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
MAKES = ("", "tesla", "quadro", "instinct")
_FORM = re.compile(r"(sxm\d?|pcie|oam|hbm\d?e?|\d+gb|generation)*")
NVIDIA = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")
"""Architectures that CUDA and TensorRT run on."""
PRECISIONS = ("float32", "tf32", "fp16", "fp16_acc16", "bf16", "fp8", "int8")


@dataclass(frozen=True)
class Card:
    """One row of hardware.csv: a GPU, or one core of a CPU class."""

    name: str
    kind: str  # gpu | cpu
    unit: str  # card | core
    architecture: str
    year: int
    memory_gb: float | None  # as it is sold
    memory_bytes: int | None  # as a program sees it
    bandwidth_bytes_s: float
    cache_bytes: float  # of the last cache before memory
    flops: dict[str, float]  # by precision; what is missing the hardware does not do in matrices
    power_w: float
    link: str
    machine: str  # a row of machines.csv: what it usually stands in
    aliases: tuple[str, ...]
    source: str
    guessed: tuple[str, ...] = ()  # columns of hardware.csv that no data sheet at hand confirms

    @property
    def own_memory(self) -> bool:
        """Whether its memory is its own, not the processor's too."""
        return self.kind == "gpu" and self.link != UNIFIED


@dataclass(frozen=True)
class Network:
    """One row of networks.csv: bandwidth one way, per `per` (gpu, port or node)."""

    name: str
    scope: str  # inside a node | between nodes
    bandwidth_bytes_s: float
    latency_s: float
    per: str
    source: str


@dataclass(frozen=True)
class Chassis:
    """One row of machines.csv: how many cards a machine has, and the network between machines."""

    name: str
    devices: int
    network: str
    source: str


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file with a header."""
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


@cache
def cards() -> dict[str, Card]:
    """All rows of hardware.csv by name."""
    return {row["name"]: _card(row) for row in read_rows(HERE / "hardware.csv")}


@cache
def networks() -> dict[str, Network]:
    """All rows of networks.csv by name."""
    return {
        row["name"]: Network(
            name=row["name"],
            scope=row["scope"],
            bandwidth_bytes_s=float(row["bandwidth_gb_s"]) * 1e9,
            latency_s=float(row["latency_us"]) * 1e-6,
            per=row["per"],
            source=row["source"],
        )
        for row in read_rows(HERE / "networks.csv")
    }


@cache
def machines() -> dict[str, Chassis]:
    """All rows of machines.csv by name."""
    rows = read_rows(HERE / "machines.csv")
    return {r["name"]: Chassis(r["name"], int(r["devices"]), r["network"], r["source"]) for r in rows}


def find_card(name: str) -> Card | None:
    """The row for a device's name as drivers, catalogues or people write it; None if there is none.

    'NVIDIA A100-SXM4-80GB', 'a100-80gb', 'A100' and '4090' are found. A longer name counts where what it
    adds to a known one is its form or its own memory ('Tesla T4 16GB'); anything else names another device,
    or several.
    """
    wanted = _plain(name)
    names = _cards_by_plain_name()
    for text in (wanted, f"rtx{wanted}"):
        if text in names:
            return names[text]
    agree = [text for text, card in names.items() if text in wanted and _adds_nothing(wanted, text, card)]
    return names[max(agree, key=len)] if agree else _with_its_memory(wanted, names)


@cache
def _cards_by_plain_name() -> dict[str, Card]:
    return {_plain(text): card for card in cards().values() for text in (card.name, *card.aliases)}


UNIFIED = "unified"  # the link of a GPU that shares its machine's memory


def _with_its_memory(wanted: str, names: dict[str, Card]) -> Card | None:
    """A GPU that shares its machine's memory, in a machine with so much: 'Apple M2 16GB'."""
    for text, card in names.items():
        said = re.fullmatch(rf"{text}(?:gpu)?(\d+)gb", wanted)
        if said and card.kind == "gpu" and card.link == UNIFIED:
            memory = int(said[1])
            if not 8 <= memory <= (card.memory_gb or 0):
                return None
            held = int(_metal_share(memory) * memory * 2**30)
            return replace(card, name=f"{card.name} {memory}GB", memory_gb=memory, memory_bytes=held)
    return None


def _metal_share(memory_gb: float) -> float:
    """The share of a machine's memory that Metal lets its GPU have."""
    return 2 / 3 if memory_gb <= 36 else 3 / 4


def _adds_nothing(wanted: str, text: str, card: Card) -> bool:
    """Whether the extra words of a longer name leave the known card's figures true."""
    before, _, after = wanted.partition(text)
    if before not in MAKES or not _FORM.fullmatch(after) or (before and card.link == UNIFIED):
        return False
    memory = re.search(r"(\d+)gb", after)
    if memory and int(memory[1]) != card.memory_gb:
        return False
    return not ("pcie" in after and not card.link.startswith("PCIe")) and not (
        "sxm" in after and card.link.startswith("PCIe")
    )


def peak_flops(device: str, precision: str, *, cores: int = 1) -> float | None:
    """Peak FLOP/s of a device (of `cores` cores, for a CPU class); None where it is not known.

    A precision that the hardware has no matrix units for runs as float32: its rate is float32's.
    """
    card = find_card(device)
    if card is None or precision not in PRECISIONS:
        return None
    rate = card.flops.get(precision, card.flops["float32"])
    return rate * (cores if card.unit == "core" else 1)


def mfu(
    flops_per_image: float, images_per_s: float, device: str, precision: str, *, num_devices: int = 1
) -> float | None:
    """Model FLOPs utilisation: the share of the peak rate that a throughput means (2 FLOP a multiply-add,
    attention included; PaLM's definition, Chowdhery et al. 2022, appendix B). For a CPU class `num_devices`
    counts cores. None for a device that hardware.csv does not know.
    """
    peak = peak_flops(device, precision)
    return None if peak is None else flops_per_image * images_per_s / (peak * num_devices)


def _card(row: dict[str, str]) -> Card:
    rates = {name: row[_column(name)] for name in PRECISIONS}
    return Card(
        name=row["name"],
        kind=row["kind"],
        unit=row["unit"],
        architecture=row["architecture"],
        year=int(row["year"]),
        memory_gb=float(row["memory_gb"]) if row["memory_gb"] else None,
        memory_bytes=_memory_bytes(row),
        bandwidth_bytes_s=float(row["bandwidth_gb_s"]) * 1e9,
        cache_bytes=float(row["cache_mb"] or 0) * 2**20,
        flops={name: float(text) * 1e12 for name, text in rates.items() if text},
        power_w=float(row["power_w"]),
        link=row["link"],
        machine=row["machine"],
        aliases=tuple(filter(None, row["aliases"].split("|"))),
        source=row["source"],
        guessed=tuple(filter(None, row["guessed"].split("|"))),
    )


GUESSED = {
    "bandwidth_gb_s": "the bandwidth",
    "int8_tops": "the rate of 8-bit integers",
    "total_gib": "what programs see of the memory (98 % of what is sold is taken)",
    "cache_mb": "the cache",
    "power_w": "the power",
    "memory_gb": "the memory",
    "fp32_tflops": "the rates",
}


def unsourced(card: Card) -> Iterator[str]:
    """What of a GPU's figures no data sheet confirms: a plan says so."""
    shares = card.link == UNIFIED
    found = [GUESSED[name] for name in card.guessed if not (shares and name == "total_gib")]
    if found and card.kind == "gpu":
        yield f"no data sheet confirms {' or '.join(found)} of the {card.name}"
    if shares and card.kind == "gpu":
        share = "two thirds" if _metal_share(card.memory_gb or 0) < 0.7 else "three quarters"
        own = card.name.endswith("GB")
        other = "" if own else f", its largest configuration; say --gpu '{card.name} 16GB' for a smaller one"
        yield f"{card.name}: {share} of {card.memory_gb:g} GB are the GPU's, as Metal has it{other}"


def _memory_bytes(row: dict[str, str]) -> int | None:
    """What torch sees of a card; of a core of a CPU class its share of what such machines have."""
    if row["total_gib"]:
        return int(float(row["total_gib"]) * 2**30)
    return int(float(row["memory_gb"]) * 1e9) if row["memory_gb"] else None


def _column(precision: str) -> str:
    if precision == "int8":
        return "int8_tops"
    return f"{'fp32' if precision == 'float32' else precision}_tflops"


def _plain(name: str) -> str:
    return re.sub(r"nvidia|amd|geforce|radeon|[^a-z0-9]", "", name.lower())


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
