"""`Model`: the parts of one Stable Diffusion model, together; and how its VAE's latents become what the
denoiser sees, and back (`LatentScaling`).

diffusers keeps the scaling in the VAE's configuration, in two forms: `scaling_factor` with `shift_factor` (SD
3), and `scaling_factor` with `latents_mean` and `latents_std`, a number for each channel (fine-tuned SDXL
VAEs).

Shapes: B rows, C channels, H and W latent pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from darkroom import options
from darkroom.errors import InputError, ModelError, first_line, is_system_failure
from darkroom.hardware import accelerator, system
from darkroom.hardware.meters import drop_file_pages, file_mappings, within_file

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTokenizer


# ---- the model


@dataclass(frozen=True)
class LatentScaling:
    """(latents - shift) * factor / std; `shift` and `std` hold one number, or one a channel, or are empty."""

    factor: float = 1.0
    shift: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, vae: Any) -> LatentScaling:
        """What a VAE's configuration says; ModelError for what is no such number."""
        config: Mapping[str, Any] = dict(vae.config)
        channels = int(config.get("latent_channels", 0))
        factor = _numbers(config, "scaling_factor", 1) or (1.0,)
        shift = _numbers(config, "shift_factor", 1)
        mean, std = (_numbers(config, key, channels) for key in ("latents_mean", "latents_std"))
        if bool(mean) != bool(std) or (shift and mean):
            given = ", ".join(k for k in ("shift_factor", "latents_mean", "latents_std") if config.get(k))
            raise ModelError(
                f"the VAE's configuration has {given}",
                allowed="shift_factor alone, or latents_mean and latents_std together",
            )
        if factor[0] <= 0 or min(std, default=1.0) <= 0:
            raise ModelError(
                f"the VAE's scaling_factor is {factor[0]:g}, its latents_std {list(std)}",
                allowed="numbers above 0",
            )
        return cls(factor[0], mean or (shift if any(shift) else ()), std)

    def seen(self, latents_BCHW: Tensor) -> Tensor:
        """The VAE's latents as the denoiser sees them."""
        if self.shift:
            latents_BCHW = latents_BCHW - _channels(latents_BCHW, self.shift)
        return self.spread(latents_BCHW)

    def spread(self, std_BCHW: Tensor) -> Tensor:
        """The VAE's deviations as the denoiser sees them: scaled, not shifted."""
        return std_BCHW * (_channels(std_BCHW, self.factor_by_channel) if self.std else self.factor)

    def undone(self, latents_BCHW: Tensor) -> Tensor:
        """The denoiser's latents as the VAE decodes them."""
        latents_BCHW = latents_BCHW / self.factor
        if self.std:
            latents_BCHW = latents_BCHW * _channels(latents_BCHW, self.std)
        return latents_BCHW + _channels(latents_BCHW, self.shift) if self.shift else latents_BCHW

    @property
    def factor_by_channel(self) -> tuple[float, ...]:
        """What each channel is multiplied by."""
        return tuple(self.factor / std for std in self.std)

    def noted(self) -> dict[str, str]:
        """As a column of latents notes it."""
        metadata = {"scale": repr(self.factor)}
        metadata |= {"shift": repr(list(self.shift))} if self.shift else {}
        return metadata | ({"std": repr(list(self.std))} if self.std else {})


def _numbers(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """The finite numbers under a key, none where it is null; ModelError for anything else."""
    value = config.get(key)
    if value is None:
        return ()
    listed = count != 1 or key.startswith("latents_")
    found: Sequence[Any] = value if listed and isinstance(value, (list, tuple)) else (value,)
    plain = all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in found)
    if not plain or (listed and len(found) != count):
        raise ModelError(
            f"the VAE's {key} is {value!r}",
            allowed=f"{count} numbers, one a channel" if listed else "a number",
        )
    return tuple(map(float, found))


def _channels(like_BCHW: Tensor, values: Sequence[float]) -> Tensor:
    return like_BCHW.new_tensor(values).view(1, -1, 1, 1)


PARTS = ("unet", "vae", "text_encoder", "tokenizer")
"""What a model is made of, by folder of the diffusers layout. The scheduler's settings always come along."""
TRANSFORMER = "transformer"
"""The folder of the denoiser where it is a diffusion transformer."""


@dataclass(repr=False)
class Model:
    """The parts of one Stable Diffusion model; a part that was not loaded is None or an empty list.

    `unet` is the place of what denoises: a U-Net, or a transformer (`dit.DiT`) that is called as one, has a
    configuration of the same names, and lies in the folder `transformer`. What needs a U-Net's own levels
    asks `needs_unet` first.

    `text_encoders` and `tokenizers` hold one each, two for SDXL. `scheduler` is the content of
    `scheduler/scheduler_config.json`, with its `_class_name`. `guidance` is the scale that it is drawn with
    by default; None: what is usual. `path` is the folder, file or hub id that it was opened from.
    """

    family: str
    unet: UNet2DConditionModel | None = None
    vae: AutoencoderKL | None = None
    text_encoders: list[nn.Module] = field(default_factory=list)
    tokenizers: list[CLIPTokenizer] = field(default_factory=list)
    scheduler: dict[str, Any] = field(default_factory=dict)
    guidance: float | None = None
    path: str | None = None
    in_files: bool = False
    """Whether weights are as the model's files have them and mapped from there: nothing may change them."""
    digest: dict[str, str] | None = None
    """What was hashed of the model's files, and its SHA-256 (`models.file_digest`)."""

    @property
    def name(self) -> str:
        """The last part of what it was opened from, the run's where that is its `model`; else its family."""
        place = Path(self.path or "")
        if self.path and place.exists():
            place = place.resolve()
            if place.name == "model" and (place.parent / "recipe.yaml").is_file():
                place = place.parent
        return place.name or self.family

    @property
    def latent_channels(self) -> int:
        """Channels of a latent, from the VAE or, without one, from what the U-Net gives out."""
        if self.vae is not None:
            return int(self.vae.config.latent_channels)
        assert self.unet is not None
        return int(self.unet.config.out_channels)

    @property
    def vae_factor(self) -> int:
        """How many pixels a latent pixel spans along each side; 8 without a VAE at hand."""
        return 8 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def latent_scaling(self) -> LatentScaling:
        """How the VAE's latents become what the U-Net sees."""
        assert self.vae is not None
        return LatentScaling.of(self.vae)

    @property
    def sample_size(self) -> int:
        """The side in pixels that the U-Net was made for."""
        assert self.unet is not None
        return int(self.unet.config.sample_size) * self.vae_factor

    @property
    def size_unit(self) -> int:
        """What the sides of pictures must be multiples of, in pixels: all levels or whole patches."""
        assert self.unet is not None
        config: Any = self.unet.config
        inside = config.patch_size if self.is_dit else 2 ** (len(config.block_out_channels) - 1)
        return self.vae_factor * int(inside)

    @property
    def is_dit(self) -> bool:
        """Whether a diffusion transformer stands in the U-Net's place."""
        return self.unet is not None and hasattr(self.unet.config, "patch_size")

    @property
    def denoiser(self) -> str:
        """The folder of what denoises, in the diffusers layout."""
        return TRANSFORMER if self.is_dit else "unet"

    @property
    def prediction(self) -> str:
        """What is predicted, in diffusers' terms: epsilon, v_prediction, sample, or flow_prediction."""
        default = "flow_prediction" if is_flow(self.scheduler) else "epsilon"
        return str(self.scheduler.get("prediction_type", default))

    def needs_unet(self, what: str) -> None:
        """InputError where `what` is of a U-Net alone and this model has a transformer."""
        if self.is_dit:
            raise InputError(
                f"{what} with a diffusion transformer ({self.family})",
                allowed="models with a U-Net",
                mend="leave it out",
            )

    @property
    def is_sdxl(self) -> bool:
        """Whether the U-Net takes SDXL's pooled text and size conditioning."""
        return self.unet is not None and self.unet.config.addition_embed_type == "text_time"

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The parts with weights, by their folder's name."""
        found: dict[str, nn.Module] = {}
        if self.unet is not None:
            found["unet"] = self.unet
        if self.vae is not None:
            found["vae"] = self.vae
        for i, encoder in enumerate(self.text_encoders):
            found[numbered("text_encoder", i)] = encoder
        return found

    @property
    def num_parameters(self) -> dict[str, int]:
        """Parameters of each part."""
        return {name: sum(p.numel() for p in module.parameters()) for name, module in self.modules.items()}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Model:
        """Move or cast every part in place; returns the model itself."""
        for module in self.modules.values():
            nn.Module.to(module, device=device, dtype=dtype)  # diffusers' own `to` warns of nothing
        return self


def noted_guidance(note: Any) -> float | None:
    """The guidance scale in a note about a model; what is no scale is none."""
    scale = note.get("guidance") if isinstance(note, Mapping) else None
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 <= scale <= 1000:
        return None
    return float(scale)


def is_flow(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler configuration is of rectified flow: straight lines from noise to picture."""
    of_class = str(scheduler.get("_class_name", "")).startswith("FlowMatch")
    return of_class or bool(scheduler.get("use_flow_sigmas", False))


def is_lcm_scheduler(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler configuration is of a model that was distilled to few steps without guidance."""
    return scheduler.get("_class_name") in ("LCMScheduler", "FlowMatchLCMScheduler")


def numbered(part: str, i: int) -> str:
    """The folder of the i-th text encoder or tokenizer: `text_encoder`, `text_encoder_2`."""
    return part if i == 0 else f"{part}_{i + 1}"


PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


def precision(name: str, device: torch.device | None = None) -> torch.dtype:
    """The type of a precision's name: float32, bf16 or fp16; `auto` is the quickest on the device."""
    if name == options.AUTO and device is not None:
        name = choose_precision(name, device)[0]
    if name not in PRECISIONS:
        raise InputError(f"precision '{name}'", allowed=", ".join(PRECISIONS))
    return PRECISIONS[name]


def choose_precision(asked: str, device: torch.device) -> tuple[str, str]:
    """The precision to compute in on a device, and why; `auto` takes the quickest that is not emulated."""
    if asked != options.AUTO:
        emulated = slow_bf16(precision(asked), device)
        return asked, f"asked for{', but emulated here: float32 is many times as fast' if emulated else ''}"
    if device.type in ("cuda", "xpu"):
        has = accelerator.has_bf16(device)
        return ("bf16", "the GPU has it") if has else ("fp16", "the GPU has no bf16")
    if device.type == "cpu":
        return options.cpu_precision()
    return "float32", f"the safe choice on {device.type}"


def slow_bf16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is bf16 on a processor that has to emulate it: float32 is up to 60 times as fast."""
    return dtype == torch.bfloat16 and device.type == "cpu" and system.bf16_instructions() is None


def device(name: str) -> torch.device:
    """A device by name; 'auto' is the accelerator that is here, else the CPU.

    From then on float32 is float32 on it, as on a CPU: PyTorch would round convolutions' factors to 10 bits.
    """
    if name == "auto":
        here = accelerator.current()
        name = "cpu" if here is None else here.type
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        if is_system_failure(error):  # a card that others have filled is no mistake of who names it
            raise
        raise InputError(f"device '{name}': {first_line(error)}", mend="auto takes what is here") from error
    accelerator.round_float32(found, allowed=False)
    return found


# ---- weights in files
#
# Mapped weights are paged in as they are read, and released again. `models.load(..., dtype=None)` opens them
# so, in the type that the files have. Letting go of a weight that was changed in place would lose the change:
# only models that say so (`Model.in_files`) are treated like this.


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file that others may read where the umask lets them; safetensors itself leaves 600.

    OSError where it cannot be written.
    """
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(dict(tensors), str(file), metadata=None if metadata is None else dict(metadata))
    file.chmod(mode)


MOST = 0.95
"""The share of a model's bytes that must lie in files for it to be called mapped."""


def is_mapped(tensor: Tensor, files: list[tuple[int, int]] | None = None) -> bool:
    """Whether a tensor lies in a mapped file, whole and in one piece."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return within_file(tensor.data_ptr(), tensor.nbytes, file_mappings() if files is None else files)


def _mapped_bytes(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Bytes of weights that lie in files, and of all."""
    files = file_mappings()
    weights = [p for module in modules for p in module.parameters()]
    return sum(p.nbytes for p in weights if is_mapped(p, files)), sum(p.nbytes for p in weights)


def are_mapped(modules: Iterable[nn.Module]) -> bool:
    """Whether a model's weights lie in files, but for a few that were brought into another shape."""
    mapped, total = _mapped_bytes(modules)
    return mapped > MOST * total


def let_go(modules: Iterable[nn.Module]) -> None:
    """Take no memory for weights that lie in files until they are read again."""
    files = file_mappings()
    for module in modules:
        for p in module.parameters():
            if is_mapped(p, files):
                drop_file_pages(p.data_ptr(), p.nbytes)


def cast_opened(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module in place whose weights are as they were opened, letting go of their file on the way.

    The file's pages would stay in memory with the copies until the last is made: 3.4 GB of SD 1.5's U-Net.
    """
    files = file_mappings()
    for inner in module.modules():
        opened = [tensor.data for tensor in chain(inner.parameters(False), inner.buffers(False))]
        inner._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)  # type: ignore[no-untyped-call]
        for tensor in opened:
            if tensor.dtype != dtype and is_mapped(tensor, files):
                drop_file_pages(tensor.data_ptr(), tensor.nbytes)
