"""What machines are and cost: this one (`machine`, `environment`, `doctor`, peak memory and energy), and the
dated tables of cards, networks and prices with their readers. A leaf: it imports nothing else of darkroom,
and torch only inside functions.
"""

from __future__ import annotations

from darkroom.hardware.cards import (
    Card,
    Network,
    StoragePrice,
    cards,
    find_card,
    mfu,
    networks,
    peak_flops,
    storage_price,
    storage_prices,
)
from darkroom.hardware.machine import (
    Check,
    Device,
    Machine,
    doctor,
    environment,
    git_commit,
    machine,
    versions,
)
from darkroom.hardware.meters import EnergyMeter, PeakMemory, resident_bytes
from darkroom.hardware.prices import Price, price, prices

__all__ = [
    "Card",
    "Check",
    "Device",
    "EnergyMeter",
    "Machine",
    "Network",
    "PeakMemory",
    "Price",
    "StoragePrice",
    "cards",
    "doctor",
    "environment",
    "find_card",
    "git_commit",
    "machine",
    "mfu",
    "networks",
    "peak_flops",
    "price",
    "prices",
    "resident_bytes",
    "storage_price",
    "storage_prices",
    "versions",
]
