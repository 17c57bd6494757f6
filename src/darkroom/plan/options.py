"""What `darkroom plan` is asked for, besides a recipe or pictures: devices, money, requests, latents. Every
default, range and meaning stands here once.

The command line's options are generated from these models, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import InputError

if TYPE_CHECKING:
    from darkroom.hardware.prices import Price
    from darkroom.picture_settings import PictureSettings
    from darkroom.plan.targets import PlanRequest, Target


class TargetSettings(BaseModel):
    """On what, how many, and what may be spent."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    gpu: str = Field("here", description="here, all, cards such as A100-80,H100, or memory=12GB")
    count: str = Field(
        "auto", description="devices: 8, or 1..1024 for the curve; auto: the recipe's own number"
    )
    budget_usd: float | None = Field(None, ge=0, description="most USD")
    deadline_hours: float | None = Field(None, ge=0, description="most hours")
    usd_per_hour: float | None = Field(None, ge=0, description="USD for an hour of one device")
    prices: Path | None = Field(None, description="a price table of your own, like prices.csv")
    provider: str = Field("", description="only this provider's prices: aws, lambda, verda, vast ...")
    region: str = Field("", description="only prices of regions that begin so: us, eu-central-1")
    spot: bool = Field(False, description="spot prices: machines that may be taken away")
    reserved: Literal["1", "3"] | None = Field(
        None, description="prices of a commitment of 1 or 3 years, paid for used or not"
    )
    cheapest: bool = Field(False, description="the cheapest offer of each card, not the middle one")
    usd_per_gb_month: float | None = Field(None, ge=0, description="USD for a GB kept a month")
    usd_per_gb_out: float | None = Field(None, ge=0, description="USD for a GB moved out")
    mode: Literal["ddp", "fsdp", "auto"] = Field(
        "auto", description="how several devices train; fsdp with ZeRO-2 shards, auto as the recipe says"
    )
    network: str | None = Field(None, description="between nodes: a row of networks.csv")
    machine: str | None = Field(
        None, description="what the cards stand in: a row of machines.csv; None: the usual one"
    )
    precision: Literal["bf16", "fp16", "float32", "fp8", "int8", "auto"] = Field(
        "auto", description="fp8 and int8 of pictures alone; auto as the job computes by default"
    )
    tf32: bool = Field(False, description="float32 products on tensor cores too")
    engine: Literal["eager", "compile", "graphs"] = Field("eager", description="how kernels are launched")
    software: Literal["darkroom", "diffusers", "compile", "tensorrt"] = Field(
        "darkroom", description="whose program runs it"
    )

    def target(self, card: str = "") -> Target:
        """What is asked for, all but the number of devices; of a `card` where that is not --gpu's.

        InputError for a card, network, machine or price table that is not known.
        """
        from darkroom.hardware.cards import machines, networks
        from darkroom.plan import targets

        if self.gpu != "here":
            targets.chosen_cards(self.gpu)
        offers = self._offers()
        if self.reserved:
            self._check_reserved(offers or (), card or self.gpu)
        _check_known("--network", self.network, networks(), ", ")
        _check_known("--machine", self.machine, machines(), "; ")
        return targets.Target(
            gpu=self.gpu,
            mode=self.mode,
            network=self.network,
            stands_in=self.machine,
            usd_per_hour=self.usd_per_hour,
            prices=offers,
            budget_usd=self.budget_usd,
            deadline_hours=self.deadline_hours,
            usd_per_gb_month=self.usd_per_gb_month,
            usd_per_gb_out=self.usd_per_gb_out,
            precision=self.precision,
            engine=self.engine,
            software=self.software,
            tf32=self.tf32,
        )

    def _offers(self) -> tuple[Price, ...] | None:
        """The offers that count; None where nothing is said: all of prices.csv."""
        from darkroom.hardware.prices import choose, prices

        file = self.prices
        if file is not None and not file.is_file():
            raise InputError(f"--prices {file}", mend="there is no such file: columns as in prices.csv")
        if self.reserved and (self.spot or self.usd_per_hour is not None):
            other = "--spot" if self.spot else "--price"
            raise InputError(f"--reserved {self.reserved} with {other}", allowed="one of them")
        if not (self.provider or self.region or self.spot or self.cheapest or self.reserved):
            return None if file is None else prices(file)
        return choose(
            prices() if file is None else prices(file),
            provider=self.provider,
            region=self.region,
            spot=self.spot,
            cheapest=self.cheapest,
            reserved=int(self.reserved or 0),
        )

    def _check_reserved(self, offers: Iterable[Price], name: str) -> None:
        """InputError where no card of that name is among the offers, with those that are."""
        from darkroom.plan import targets

        known = {row.device for row in offers}
        option = "--gpu" if name == self.gpu else "--fits"
        own = name == "here"
        cards = [targets.here(targets.Target()).card] if own else targets.chosen_cards(name, option)
        if not known & {card.name for card in cards}:
            raise InputError(
                f"--reserved {self.reserved} of {name}",
                allowed=", ".join(sorted(known)),
                mend="no such price is known of it: say yours with --price",
            )


def _check_known(flag: str, name: str | None, known: Iterable[str], between: str) -> None:
    if name is not None and name not in known:
        raise InputError(f"{flag} {name}", allowed=between.join(known))


class FleetSettings(BaseModel):
    """Requests that come to a server, and the devices that serve them."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    pictures_per_s: float = Field(1.0, description="serve: pictures a second")
    trace: Path | None = Field(
        None,
        description="serve: requests as they came, a JSON object a line (docs/plan.md), --rate times",
    )
    latency_s: float = Field(10.0, description="serve: seconds within which 95 of 100 are done")
    least: int | None = Field(
        None, ge=1, description="serve: as few devices as this, more as the queue grows"
    )
    start_s: float = Field(
        120.0, ge=0, description="serve: seconds until another device serves: its machine, loading"
    )
    losses_per_hour: float = Field(
        0.0, ge=0, le=60, description="serve: how often an hour a (spot) device is taken away"
    )

    def asked(self, pictures: PictureSettings) -> PlanRequest:
        """The plan to ask for: of requests that come evenly, or of a trace of them."""
        from darkroom.plan.serving import Fleet, read_trace
        from darkroom.plan.trace import ask_rate, ask_trace

        changes = self.least is not None or self.losses_per_hour
        fleet = Fleet(self.start_s, self.losses_per_hour, self.least) if changes else None
        if self.trace is None:
            return ask_rate(pictures, self.pictures_per_s, self.latency_s, fleet)
        if not self.pictures_per_s > 0:
            raise InputError(f"--rate {self.pictures_per_s}", allowed="a number above 0")
        return ask_trace(pictures, read_trace(self.trace, self.pictures_per_s), self.latency_s, fleet)


class PrepareSettings(BaseModel):
    """Latents that a store is prepared with."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    resolution: int = Field(512, ge=8, description="prepare: side in pixels")
    text: bool = Field(False, description="prepare: the captions' states too")
