"""A1111's routes about the server itself, and those that make pictures larger: what its clients also call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
from fastapi import APIRouter, Request
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import DarkroomError
from darkroom.hardware import accelerator
from darkroom.models.upscaler import Upscaler, Upscalers
from darkroom.sample.provenance import Provenance
from darkroom.serve.api.shared import caller, decoded, encoded, sent
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.jobs.admission import checked_picture
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import Refused, say
from darkroom.serve.settings import Limits

UPSCALERS = {
    "none": None,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}
"""By name in small letters; none leaves the size as it is."""
MOST_PICTURES = 16


class Upscale(BaseModel):
    """How pictures are upscaled. Faces are not restored here, and one upscaler works at a time."""

    model_config = ConfigDict(extra="ignore", strict=True)

    resize_mode: int = Field(0, ge=0, le=1, description="0: by upscaling_resize, 1: to a width and height")
    upscaling_resize: float = Field(2.0, ge=1, le=8, allow_inf_nan=False)
    upscaling_resize_w: int = Field(512, ge=8, le=8192)
    upscaling_resize_h: int = Field(512, ge=8, le=8192)
    upscaling_crop: bool = Field(True, description="cut what is over; else the picture lies within")
    upscaler_1: str = Field("None", max_length=100)
    upscaler_2: str = Field("None", max_length=100)
    extras_upscaler_2_visibility: float = Field(0, ge=0, le=1)
    gfpgan_visibility: float = Field(0, ge=0, le=1)
    codeformer_visibility: float = Field(0, ge=0, le=1)

    def upscaler(self, networks: Upscalers) -> Image.Resampling | Upscaler | None:
        """The first upscaler; 422 for what is not served."""
        for name in ("gfpgan_visibility", "codeformer_visibility", "extras_upscaler_2_visibility"):
            if getattr(self, name):
                raise Refused(422, "not_served", f"{name}: not served here", param=name)
        if self.upscaler_1.lower() in UPSCALERS:
            return UPSCALERS[self.upscaler_1.lower()]
        try:
            return networks.get(self.upscaler_1)
        except DarkroomError as error:
            message = f"upscaler_1: None, Lanczos or Nearest; {say(error)}"
            raise Refused(422, "invalid_value", message, param="upscaler_1") from error

    def of(
        self, content: bytes, limits: Limits, networks: Upscalers, provenance: Provenance | None = None
    ) -> bytes:
        """An upscaled picture, as PNG, with the mark and the credentials of the one given. Takes a while."""
        how = self.upscaler(networks)
        image = checked_picture(content, limits, "image")
        network = how.name if isinstance(how, Upscaler) else None
        if how is not None:
            image = self._larger(image, how, limits)
        return png_of(image) if provenance is None else provenance.upscaled(image, content, network)

    def _larger(self, image: Image.Image, how: Image.Resampling | Upscaler, limits: Limits) -> Image.Image:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        size = self._size(image)
        wanted = (self.upscaling_resize_w, self.upscaling_resize_h) if self.resize_mode else size
        made = round(image.width * image.height * how.scale**2) if isinstance(how, Upscaler) else 0
        if max(size[0] * size[1], wanted[0] * wanted[1], made) > limits.upload_pixels:
            message = f"upscaling_resize: at most {limits.upload_pixels} pixels"
            raise Refused(422, "over_limit", message, param="upscaling_resize")
        if isinstance(how, Upscaler):
            image, how = how.enlarge(image), Image.Resampling.LANCZOS
        image = image.resize(size, how)
        if self.resize_mode and self.upscaling_crop and size != wanted:
            left, top = ((mine - theirs) // 2 for mine, theirs in zip(size, wanted, strict=True))
            image = image.crop((left, top, left + wanted[0], top + wanted[1]))
        return image

    def _size(self, image: Image.Image) -> tuple[int, int]:
        factor = self.upscaling_resize
        if self.resize_mode:
            factors = self.upscaling_resize_w / image.width, self.upscaling_resize_h / image.height
            factor = max(factors) if self.upscaling_crop else min(factors)
        return max(1, round(image.width * factor)), max(1, round(image.height * factor))


class UpscaleOne(Upscale):
    """One picture."""

    image: str


class NamedPicture(BaseModel):
    """A picture of several."""

    model_config = ConfigDict(extra="ignore", strict=True)

    data: str
    name: str = Field("", max_length=1000)


class UpscaleSeveral(Upscale):
    """Several pictures alike."""

    imageList: list[NamedPicture] = Field(min_length=1, max_length=MOST_PICTURES)


def add_server_routes(router: APIRouter, core: Core) -> None:
    """What stock clients ask for around the pictures."""
    for path in ("checkpoints", "vae", "loras", "embeddings"):
        router.add_api_route(f"/refresh-{path}", _nothing, methods=["POST"])
    for path in ("sd-vae", "sd-modules", "hypernetworks", "face-restorers", "realesrgan-models"):
        router.add_api_route(f"/{path}", _no_entries, methods=["GET"])
    for path in ("prompt-styles", "script-info"):
        router.add_api_route(f"/{path}", _no_entries, methods=["GET"])

    @router.get("/scripts")
    async def scripts() -> dict[str, list[str]]:
        """Scripts that a request may have under `alwayson_scripts`, where there are nets.

        The second is by what the package webuiapi knows the extension: without it, pictures asked for after
        one with a net are asked for with that net again.
        """
        there = [] if core.settings.controls is None else ["controlnet", "controlnet m2m"]
        return {"txt2img": there, "img2img": there}

    @router.post("/interrogate")
    async def interrogate() -> None:
        """422: there is no model here that describes pictures."""
        raise Refused(422, "not_served", "interrogate: no model here describes pictures", param="model")

    @router.get("/latent-upscale-modes")
    async def latent_upscale_modes() -> list[dict[str, str]]:
        """How latents are upscaled."""
        return [{"name": "Latent"}]

    @router.get("/cmd-flags")
    async def cmd_flags() -> dict[str, Any]:
        """A1111's start options, as far as they mean something here."""
        prefix = core.settings.prefix
        return {"api": True, "nowebui": False, "ckpt": core.model.name, "subpath": prefix or None}

    @router.get("/memory")
    async def memory() -> dict[str, Any]:
        """Of the machine and of the device, in bytes."""
        ram = psutil.virtual_memory()
        return {
            "ram": {"free": ram.available, "used": ram.total - ram.available, "total": ram.total},
            "cuda": _device_memory(core),
        }

    @router.post("/extra-single-image")
    async def extra_single_image(body: UpscaleOne, request: Request) -> dict[str, Any]:
        """An upscaled picture."""
        return {"html_info": "", "image": (await _upscaled(core, request, body, "image", [body.image]))[0]}

    @router.post("/extra-batch-images")
    async def extra_batch_images(body: UpscaleSeveral, request: Request) -> dict[str, Any]:
        """Several upscaled pictures."""
        given = [one.data for one in body.imageList]
        made = await _upscaled(core, request, body, "imageList", given)
        return {"html_info": "", "images": made}


async def _upscaled(
    core: Core, request: Request, body: Upscale, param: str, given: Sequence[str]
) -> list[str]:
    """Pictures upscaled, in base64; they count among the key's of the day, unless nothing is done to them."""

    def made() -> list[bytes]:
        """Each of them in turn."""
        contents = [decoded(one, param) for one in given]
        return [body.of(one, core.limits, core.upscalers, core.provenance) for one in contents]

    if UPSCALERS.get(body.upscaler_1.lower(), body) is None:
        pngs = await core.bench.do(caller(request), made, len(given))
    else:
        pngs = await core.upscaled(caller(request), made, len(given))
    return [encoded(sent(png)) for png in pngs]


async def _nothing() -> dict[str, Any]:
    """The folders are looked at anew by themselves."""
    return {}


async def _no_entries() -> list[dict[str, Any]]:
    """There are none here."""
    return []


def _device_memory(core: Core) -> dict[str, Any]:
    device = core.device
    if device is None or not accelerator.kind_of(device).own_memory:
        return {"error": "no device with memory of its own"}
    free = accelerator.free_bytes(device)
    if free is None:
        return {"error": "the device does not say"}
    used = accelerator.allocated_bytes(device)
    return {"system": {"free": free, "used": used, "total": free + used}}
