"""What a plan is for: cards and their number, precision, layout, and this machine's own rates."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darkroom.errors import InputError
from darkroom.hardware.cards import NVIDIA, Card, cards, find_card
from darkroom.hardware.prices import Price
from darkroom.plan.counts import Profile, cache_folder
from darkroom.plan.jobs import Plan, Where
from darkroom.plan.roofline import ClusterSpec, Software, default_cluster, efficiency

if TYPE_CHECKING:
    from darkroom.hardware.machine import Machine

OTHER_MAKES = ("gaudi", "intel gaudi", "habana", "tpu", "trainium", "inferentia")


@dataclass(frozen=True)
class Target:
    """On what, how many, and what may be spent."""

    gpu: str = "here"  # here, all, memory=12GB, a card's name, or several with commas
    count: int = 1
    mode: str = "auto"  # the recipe's own, else ddp
    shard: str = "grads"  # of fsdp: the recipe's own
    node_devices: int | None = None  # on one machine; a recipe's own
    network: str | None = None
    stands_in: str | None = None  # a row of machines.csv; None: the card's usual one
    usd_per_hour: float | None = None
    prices: tuple[Price, ...] | None = None
    budget_usd: float | None = None
    deadline_hours: float | None = None
    usd_per_gb_month: float | None = None
    usd_per_gb_out: float | None = None
    precision: str = "auto"
    engine: str = "eager"
    software: str = "darkroom"  # a key of SOFTWARE
    tf32: bool = False  # float32 products on tensor cores
    machine: Machine | None = None  # which machine is 'here', where it is not this one

    @property
    def several(self) -> bool:
        """Whether it names many cards, which are compared."""
        return self.gpu == "all" or self.gpu.startswith("memory=") or "," in self.gpu


SOFTWARE = {
    "darkroom": ("", ""),
    "diffusers": ("", "diffusers: plain PyTorch, tensors not channels last; fitted on its published rates"),
    "compile": (
        "compile",
        "torch.compile: fused kernels, by constants fitted on A100, V100, T4, 3090, 4090, H100",
    ),
    "tensorrt": (
        "tensorrt",
        "TensorRT is taken as CUDA graphs of fused kernels: of 8 published rows (A100, H100, H200, B200, "
        "3090, 4080) some are 11 % slower than that, some 40 % quicker",
    ),
}
"""Whose program runs it: the engine it stands for, and what its figures rest on."""
QUANTISED = ("fp8", "int8")

Layout = Callable[[str, Where], bool]
"""Whether tensors lie channels last, of a precision and a place."""


def layout_of(asked: bool | None) -> Layout:
    """As asked; where nothing is, in half precisions."""
    return lambda precision, where: precision != "float32" if asked is None else asked


@dataclass(frozen=True)
class PlanRequest:
    """A job that can be planned on any device."""

    name: str
    profile: Callable[[str, bool], Profile]  # of a precision; whether a GPU computes it
    plan: Callable[[Profile, Where, Software, float | None, Sequence[Price] | None], Plan]
    precision: str = "auto"
    attention: str = "fused"
    channels_last: Layout = lambda precision, where: True
    settings: dict[str, Any] = field(default_factory=dict)
    remade: Callable[[Mapping[str, Any]], PlanRequest] | None = (
        None  # with other settings and the same counts
    )


def mode_of(asked: PlanRequest, target: Target) -> str:
    """How several devices train together: as asked, else as the recipe says."""
    return target.mode if target.mode != "auto" else str(asked.settings.get("mode", "ddp"))


def choose_precision(asked: PlanRequest, target: Target, card: Card) -> str:
    """The precision to compute in: as asked, else what the hardware is fast in."""
    precision = target.precision if target.precision != "auto" else asked.precision
    return fast_precision(card) if precision == "auto" else precision


def software_of(asked: PlanRequest, target: Target, where: Where) -> Software:
    """The program that computes it, in which precision and layout."""
    chosen = target.precision if target.precision != "auto" else asked.precision
    quantised = chosen if chosen in QUANTISED else ""
    if quantised and asked.settings:
        raise InputError(f"--precision {quantised}", allowed="generate and serve: training has no such step")
    precision = fast_precision(where.card) if quantised else choose_precision(asked, target, where.card)
    channels_last = target.software != "diffusers" and asked.channels_last(precision, where)
    tf32 = target.tf32 or bool(asked.settings.get("tf32"))
    engine = SOFTWARE[target.software][0] or target.engine
    if engine == "tensorrt" and asked.settings:
        raise InputError("--software tensorrt", allowed="generate and serve: it does not train")
    if engine == "tensorrt" and not runs_tensorrt(where.card):
        raise InputError(f"--software tensorrt on {where.card.name}", allowed="NVIDIA's cards")
    if engine == "eager" and asked.settings.get("compile"):
        engine = "compile"
    if quantised and where.card.kind == "cpu" and quantised in where.card.flops:
        engine = "compile"  # OpenVINO, which fuses what follows a product
    return Software(
        precision=precision,
        engine=engine,
        channels_last=channels_last,
        attention=asked.attention,
        matmul_tf32=tf32,
        # Others leave cuDNN its default, which rounds convolutions.
        conv_tf32=tf32 or (target.software in ("diffusers", "tensorrt") and not asked.settings),
        quantised=quantised,
    )


def runs_tensorrt(card: Card) -> bool:
    """Whether TensorRT has kernels for a card."""
    return card.kind == "gpu" and card.architecture in NVIDIA


def software_notes(target: Target, where: Where, software: Software) -> Iterator[str]:
    """What a reader must know of the software that was planned with."""
    card, gpu = where.card, where.card.kind == "gpu"
    if SOFTWARE[target.software][1]:
        yield SOFTWARE[target.software][1]
    if gpu and software.precision == "bf16" and "bf16" not in card.flops:
        yield f"{card.name} has no bf16 units: it computes in float32"
    if software.quantised and software.quantised not in card.flops:
        yield f"{card.name} has no {software.quantised} units: it computes in {software.precision}"
    elif software.quantised:
        which = (
            "products and convolutions"
            if software.engine == "tensorrt" or not gpu
            else "products, not convolutions,"
        )
        if not gpu:
            yield f"{software.quantised} on a CPU: OpenVINO's, at the rate of {_int8_instruction(card)}"
        yield f"{software.quantised}: {which} at its rate; memory is planned as in {software.precision}"
    if target.tf32 and "tf32" not in card.flops:
        yield f"{card.name} has no tf32 units"


def _int8_instruction(card: Card) -> str:
    return (
        "AMX" if "AMX" in card.name else "VNNI, which Intel's has from Cascade Lake on and AMD's from Zen 4"
    )


def fast_precision(card: Card) -> str:
    """The precision that a device is fastest in and trains in by default."""
    if "bf16" in card.flops:
        return "bf16"
    return "fp16" if card.kind == "gpu" and "fp16" in card.flops else "float32"


# ---- devices


def chosen_cards(name: str, option: str = "--gpu") -> list[Card]:
    """The cards of a name; 'all' is every GPU. InputError names the nearest for one that `option` does not
    know.
    """
    if name == "all":
        return [card for card in cards().values() if card.kind == "gpu"]
    if name.startswith("memory="):
        return _cards_with(name)
    names = [one for part in name.split(",") if (one := part.strip())]
    if len(names) > 1:
        return _cards_named(name, names)
    card = find_card(name)
    if card is None:
        near = nearest(name)
        mend = f"did you mean {', '.join(near)}?" if near else ""
        counted = re.fullmatch(r"(\d+)\s*[x*]\s*(.+)", name.strip(), re.IGNORECASE)
        if counted and find_card(counted[2]):
            mend = f"say --gpu '{counted[2]}' --count {counted[1]}"
        elif re.search(r"laptop|mobile|max-?q", name, re.IGNORECASE):
            mend = "a laptop's card has less memory and power than that of its name: compare --gpu memory=8GB"
        elif re.search(r"\b(i[3579]|core|ryzen|xeon|epyc|threadripper)\b", name, re.IGNORECASE):
            classes = (one.name for one in cards().values() if one.kind == "cpu")
            mend = f"processors are planned by their class: {', '.join(classes)}"
        if name.lower().startswith(OTHER_MAKES):
            mend = "darkroom does not run on it, so its rates there are not known"
        allowed = "here, all, memory=12GB, or cards of hardware.csv, with commas between"
        raise InputError(f"{option} {name}", allowed=allowed if option == "--gpu" else "a card", mend=mend)
    return [card]


def _cards_named(given: str, names: Sequence[str]) -> list[Card]:
    """Several cards to compare, each once."""
    if alone := next((one for one in names if one in ("here", "all")), None):
        raise InputError(f"--gpu {given}", mend=f"'{alone}' stands by itself: leave it out of the list")
    return list({card.name: card for one in names for card in chosen_cards(one)}.values())


def _cards_with(name: str) -> list[Card]:
    """Every GPU with so much memory as it is sold: 'memory=12GB'."""
    match = re.fullmatch(r"memory=(\d+(?:\.\d+)?)\s*(?:GB|GiB|G)?", name, re.IGNORECASE)
    gpus = [card for card in cards().values() if card.kind == "gpu"]
    found = [card for card in gpus if match and card.memory_gb == float(match[1])]
    if not found:
        sizes = sorted({card.memory_gb for card in gpus if card.memory_gb})
        raise InputError(f"--gpu {name}", allowed="memory=12GB, of " + ", ".join(f"{s:g}" for s in sizes))
    return found


def nearest(name: str) -> list[str]:
    """Up to three cards that are called nearly so: those whose name is in it first, then the most alike."""
    wanted = name.lower()
    names = {text.lower(): text for card in cards().values() for text in (card.name, *card.aliases)}
    inside = sorted((text for text in names if text in wanted), key=len, reverse=True)
    alike = [one for text in (wanted, f"rtx {wanted}") for one in difflib.get_close_matches(text, names, 3)]
    return list(dict.fromkeys(names[text] for text in [*inside, *alike]))[:3]


def place(card: Card, target: Target) -> Where:
    """A card as it usually stands; a CPU class stands for eight of its cores."""
    return Where(card, _cluster(card, target), cores=8 if card.unit == "core" else 1)


def _cluster(card: Card, target: Target) -> ClusterSpec:
    return default_cluster(
        card,
        target.count,
        target.mode,
        target.network,
        machine=target.stands_in,
        node_devices=target.node_devices,
        shard=target.shard,
    )


def here(target: Target) -> Where:
    """This machine, with what `plan --calibrate` measured of it; or the target's."""
    from darkroom.hardware.machine import machine

    found = target.machine or machine()
    memory: float | None
    if found.devices:
        name, memory = found.devices[0].name, found.devices[0].memory_bytes
        card = find_card(name)
        if card is None:
            raise InputError(f"this machine's {name} is not in hardware.csv", mend="say --gpu NAME")
    else:
        name = found.cpu
        card, memory = cards()[found.cpu_class], float(found.memory_bytes)
    measured = calibration(card.name) if target.machine is None else {}
    known = efficiency().with_values(measured)
    # Processes on one CPU share its cores and its memory.
    sharers = 1 if found.devices else min(target.count, target.node_devices or 1)
    cores = max(1, round(found.cores / sharers))
    share = None if memory is None else memory / sharers
    return Where(card, _cluster(card, target), cores, known, share, calibrated=bool(measured))


@dataclass(frozen=True)
class Measured:
    """One measurement: its rate, what share of the rated peak that is, and the constant it replaces."""

    name: str
    rate: float
    unit: str
    share: float | None = None  # of the rated peak, where there is one
    constant: tuple[str, str, float] | None = None  # name, what it applies to, value


def calibration_file() -> Path:
    """Where the measurements of this machine are kept."""
    return cache_folder() / "calibration.json"


def calibration(card: str) -> dict[tuple[str, str], float]:
    """Constants measured on this machine for a card, to replace the fitted ones; empty if none were."""
    with suppress(OSError, ValueError, TypeError):
        content = json.loads(calibration_file().read_text(encoding="utf-8"))
        return {(name, applies_to): float(value) for name, applies_to, value in content.get(card, [])}
    return {}
