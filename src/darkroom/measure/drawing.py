"""What the benchmarks of `generate` share: one settled picture job, its clock, its energy, its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from darkroom.counting import counting
from darkroom.errors import InputError
from darkroom.hardware import machine
from darkroom.hardware.cards import find_card
from darkroom.hardware.meters import EnergyMeter
from darkroom.measure.timing import synchronise
from darkroom.options import parse_bytes
from darkroom.sample import generate
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import Backend
from darkroom.sample.pictures import DECODE_PICTURES, Picture, decode_pixels, free_on_card

if TYPE_CHECKING:
    from darkroom.models.model import Model

PROMPTS = ("a photo of an astronaut riding a horse", "a red circle and a blue square on a green background")
PRECISIONS = {torch.float32: "float32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Workload:
    """A picture job as every case of a benchmark does it. Written out in each row's settings."""

    model: Model
    size: tuple[int, int]
    steps: int = 20
    guidance: float = 7.5
    solver: str = "ddim"
    seed: int = 0
    prompts: Sequence[str] = PROMPTS[:1]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps {self.steps}", allowed="1 or more")

    @property
    def device(self) -> str:
        """Where the work is done."""
        return str(self.model.unet.device)  # type: ignore[union-attr]

    @property
    def precision(self) -> str:
        """Of the model's weights as they were given."""
        return PRECISIONS[self.model.unet.dtype]  # type: ignore[union-attr]

    def settings(self, **more: Any) -> dict[str, Any]:
        """What a row says of the job."""
        width, height = self.size
        pixels = decode_pixels(free_on_card(torch.device(self.device)))
        at_once = max(1, min(DECODE_PICTURES, pixels // (width * height)))
        return {
            "model": self.model.family,
            "size": f"{width}x{height}",
            "steps": self.steps,
            "solver": self.solver,
            "guidance": self.guidance,
            "pictures_a_decode": at_once,
            "threads": torch.get_num_threads(),
            **more,
        }

    def open(self, names: str, backend: str = "torch") -> Backend:
        """The model with optimisations in place."""
        return open_backend(backend, self.model, optimise=names, notice=lambda _: None)

    def run(
        self, backend: Backend, *, num: int = 1, watch: StepTimer | None = None, **changes: Any
    ) -> list[Picture]:
        """End to end: text, steps, pictures."""
        settings: dict[str, Any] = {
            "size": self.size,
            "steps": self.steps,
            "guidance": self.guidance,
            "solver": self.solver,
            "seed": self.seed,
        } | changes
        return generate(
            self.model,
            list(self.prompts),
            num=num,
            batch_rows=num * len(self.prompts),
            backend=backend,
            progress=watch,
            notice=lambda _: None,
            **settings,
        )

    def flops_per_image(self) -> int:
        """Of all U-Net calls and the decoder, as the plain job does them; 2 FLOP a multiply-add."""
        unet, vae = self.model.unet, self.model.vae
        rows = 2 if self.guidance > 1 else 1
        given = _meta_inputs(self.model, self.size)
        with counting(unet) as counter, torch.no_grad():
            x, t, text, added = counter.fake(given)
            unet(x, t, encoder_hidden_states=text, added_cond_kwargs=added or None)  # type: ignore[misc]
            step = counter.result().flops
        latents = given[0][:, : self.model.latent_channels].clone()
        with counting(vae) as counter, torch.no_grad():
            vae.decode(counter.fake(latents))  # type: ignore[union-attr]
            return rows * self.steps * step + counter.result().flops


def _meta_inputs(model: Model, size: tuple[int, int]) -> tuple[Any, ...]:
    config: Any = model.unet.config  # type: ignore[union-attr]
    dtype = model.unet.dtype  # type: ignore[union-attr]
    sides = (size[1] // model.vae_factor, size[0] // model.vae_factor)
    added: dict[str, torch.Tensor] = {}
    if model.is_sdxl:
        pooled = int(config.projection_class_embeddings_input_dim) - 6 * int(config.addition_time_embed_dim)
        added = {
            "text_embeds": torch.empty(1, pooled, dtype=dtype, device="meta"),
            "time_ids": torch.empty(1, 6, device="meta"),
        }
    x = torch.empty(1, int(config.in_channels), *sides, dtype=dtype, device="meta")
    text = torch.empty(1, 77, int(config.cross_attention_dim), dtype=dtype, device="meta")
    return x, torch.empty(1, device="meta"), text, added


@dataclass
class StepTimer:
    """Times the steps of runs, from the end of the first step to the end of the last, device synchronised."""

    device: str
    rates: list[float] = field(default_factory=list)
    """Steps a second of each run; a run of one step has none."""
    _first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._first is not None and done != total:
            return
        synchronise(self.device)
        now = time.perf_counter()
        if self._first is None:
            self._first = (done, now)
        if done == total:
            steps = round(total / self._first[0]) - 1
            if steps:
                self.rates.append(steps / (now - self._first[1]))
            self._first = None


class Metered:
    """A call that notes the joules of each time it is called."""

    def __init__(self, call: Callable[[], object], device: str) -> None:
        here = machine()
        on_card = bool(here.devices) and not device.startswith("cpu")
        card = find_card(here.devices[0].name if on_card else here.cpu_class)
        units = 1 if on_card else max(1, round(here.usable_cores))
        self._call = call
        self._meter = EnergyMeter(device, power_w=card.power_w if card else None, num_devices=units)
        self.joules: list[float] = []

    def __call__(self) -> None:
        before = self._meter.joules()
        self._call()
        self.joules.append(self._meter.joules() - before)

    def median_j(self, repeats: int) -> float | None:
        """Of the latest `repeats` calls; None where nothing is known of the device's power."""
        some = sorted(self.joules[-repeats:])
        return some[len(some) // 2] if some and self.source != "unknown" else None

    @property
    def source(self) -> str:
        """Where the joules come from."""
        return self._meter.source


__all__ = ["PROMPTS", "Metered", "StepTimer", "Workload", "parse_bytes"]
