"""A1111's routes about the server itself, and those that make pictures larger: what its clients also call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from fastapi import APIRouter, Request
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import DarkroomError
from darkroom.hardware import accelerator
from darkroom.hardware.system import write_atomically
from darkroom.models.embeddings import Embedding
from darkroom.models.upscaler import Upscaler, Upscalers
from darkroom.options import (
    A1111_SCHEDULES,
    SAMPLERS,
)
from darkroom.sample.provenance import Provenance
from darkroom.serve.api.shared import caller, decoded, encoded, sent
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.jobs.admission import checked_picture
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import (
    Refused,
    say,
)
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
        return {"api": True, "nowebui": False, "ckpt": core.catalogue.model.name, "subpath": prefix or None}

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
        return [body.of(one, core.limits, core.catalogue.upscalers, core.provenance) for one in contents]

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
    device = core.catalogue.device
    if device is None or not accelerator.kind_of(device).own_memory:
        return {"error": "no device with memory of its own"}
    free = accelerator.free_bytes(device)
    if free is None:
        return {"error": "the device does not say"}
    used = accelerator.allocated_bytes(device)
    return {"system": {"free": free, "used": used, "total": free + used}}


def add_lists(router: APIRouter, core: Core, chosen: ChosenModels) -> None:
    """What the server has, and the options: of them only the caller's model can be set."""

    @router.get("/options")
    async def options(request: Request) -> dict[str, Any]:
        """The server's settings, as far as they have a name in this dialect, with the caller's model."""
        name = chosen.of(caller(request)) or core.catalogue.model.name
        return {"sd_model_checkpoint": name, "samples_format": "png", "CLIP_stop_at_last_layers": 1}

    @router.post("/options")
    async def set_options(body: dict[str, Any], request: Request) -> None:
        """Chooses the model of the caller's own requests here, kept over restarts. Else takes what is so
        already: nothing can be set for everybody."""
        now = await options(request)
        given = body.pop("sd_model_checkpoint", None)
        wanted = None if given is None else named_model(core, given, "sd_model_checkpoint")
        for name, value in body.items():
            if name not in now or value != now[name]:
                shown = name[:100].encode("ascii", "replace").decode()
                raise Refused(
                    422, "not_served", f"{shown}: cannot be set, say it with each picture", param=shown
                )
        if wanted is not None and wanted != now["sd_model_checkpoint"]:
            if core.settings.shared:  # the next request may go to another of the servers
                message = "sd_model_checkpoint: say it with each picture (override_settings)"
                raise Refused(422, "not_served", message, param="sd_model_checkpoint")
            await asyncio.to_thread(chosen.choose, caller(request), wanted)

    @router.get("/sd-models")
    async def sd_models() -> list[dict[str, Any]]:
        """The models served."""
        return [
            {
                "title": card.name,
                "model_name": card.name,
                "hash": card.sha256 and card.sha256[:10],
                "sha256": card.sha256,
                "filename": card.name,
                "config": None,
            }
            for card in core.catalogue.models()
        ]

    @router.get("/samplers")
    async def samplers() -> list[dict[str, Any]]:
        """Samplers by their names here."""
        return [{"name": name, "aliases": [solver], "options": {}} for name, (solver, _) in SAMPLERS.items()]

    @router.get("/schedulers")
    async def schedulers() -> list[dict[str, Any]]:
        """Schedules of sigmas."""
        return [{"name": name.lower().replace(" ", "_"), "label": name, "aliases": []} for name in SCHEDULERS]

    @router.get("/loras")
    async def loras() -> list[dict[str, Any]]:
        """The adapters that a prompt may name."""
        return [
            {"name": one.name, "alias": one.name, "path": one.name, "metadata": {}}
            for one in core.catalogue.adapters()
        ]

    @router.get("/embeddings")
    async def embeddings() -> dict[str, Any]:
        """The textual inversions that prompts may name, and those that are for other models."""
        there = core.catalogue.embeddings()
        return {
            kind: {one.name: _embedding(one) for one in found}
            for kind, found in (("loaded", there.loaded), ("skipped", there.skipped))
        }

    @router.get("/upscalers")
    async def upscalers() -> list[dict[str, Any]]:
        """How a second pass may begin."""
        plain = {"model_name": None, "model_path": None, "model_url": None, "scale": None}
        return [{"name": name, **plain} for name in ("Latent", "Lanczos", *core.catalogue.upscalers.names())]


class ChosenModels:
    """The model that each key has chosen by `options`, in a file: a restart draws by no other."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._chosen: dict[str, str] = {}
        if file.is_file():
            self._chosen = json.loads(file.read_text(encoding="utf-8"))

    def of(self, key: str) -> str | None:
        """None where the key has chosen none."""
        return self._chosen.get(key)

    def choose(self, key: str, name: str) -> None:
        """From now on. Writes a file."""
        with self._lock:
            chosen = {**self._chosen, key: name}
            write_atomically(self._file, json.dumps(chosen), durable=True)
            self._chosen = chosen


def named_model(core: Core, given: Any, param: str) -> str:
    """A model's name as the server has it; 422 for none of that name."""
    try:
        return core.catalogue.card(str(given)).name
    except Refused as refused:
        if refused.status != 404:
            raise
        message = refused.message.removeprefix("model: ")
        raise Refused(422, "invalid_value", f"sd_model_checkpoint: {message}", param=param) from refused


def _embedding(one: Embedding) -> dict[str, Any]:
    """As A1111 tells it: `shape` is the width of all text encoders' vectors together."""
    return {
        "step": None,
        "sd_checkpoint": None,
        "sd_checkpoint_name": None,
        "shape": sum(vectors.shape[1] for vectors in one.vectors),
        "vectors": len(one.vectors[0]),
    }


def sigmas_of(ours: str | None) -> dict[str, Any]:
    """A spacing of sigmas as a request says it."""
    if ours is None:
        return {}
    return {ours: True} if ours in ("karras", "exponential") else {"sigmas": ours}


SCHEDULERS: dict[str, dict[str, Any]] = {
    "Automatic": {},
    "Uniform": {"karras": False, "spacing": "linspace"},
    "SGM Uniform": {"spacing": "trailing"},
    **{name: sigmas_of(ours) for name, ours in A1111_SCHEDULES.items()},
}
"""A1111's schedules in this server's words. diffusers gives the last the same spacing."""
