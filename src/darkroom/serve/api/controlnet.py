"""A1111's ControlNet extension: its units in `alwayson_scripts`, and the `/controlnet` routes.

A unit's `model` is a net of the server's folder. What its picture is made into (`module`) is one of the maps
that need no weights; depth, pose and the like come as finished maps with module `none`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from PIL import Image, ImageOps
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from darkroom.sample.control import INPAINT, MAP_NUMBERS, find_map
from darkroom.serve.api.shared import caller, decoded, encoded, route_in
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.jobs.admission import check_map, checked_picture
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import MOST_CONTROLS, ControlChoice, ControlUpload, Refused
from darkroom.serve.settings import Limits

SCRIPT = "controlnet"
MODULES = {
    "none": "none",
    "canny": "canny",
    "invert (from white bg & black line)": "invert",
    "scribble_xdog": "scribble",
    "t2ia_color_grid": "colour",
    "blur_gaussian": "blur",
    "inpaint_only": "inpaint",
}
"""The extension's preprocessors that are served, and darkroom's map of each."""
ALIASES = {
    **MODULES,
    "": "none",
    "invert": "invert",
    "inpaint": "inpaint",
    "inpaint_global_harmonious": "inpaint",
    "tile_resample": "none",
    "ip-adapter-auto": "none",
    "ip-adapter_clip_sd15": "none",
    "ip-adapter_clip_sdxl": "none",
    "ip-adapter_clip_sdxl_plus_vith": "none",
}
"""Those that leave the picture as it is, too: IP-Adapters bring their encoder along."""
A1111_BLUR = 9.0
"""Sigma of `blur_gaussian` where a request does not say one."""
MODES: dict[int | str, dict[str, bool]] = {
    "balanced": {},
    "my prompt is more important": {"soft": True},
    "controlnet is more important": {"guess": True},
    0: {},
    1: {"soft": True},
    2: {"guess": True},
}
"""The extension's control modes in darkroom's terms."""
RESIZE = {
    "just resize": "stretch",
    "scale to fit (inner fit)": "crop",
    "inner_fit": "crop",
    "crop and resize": "crop",
    0: "stretch",
    1: "crop",
    2: "fill",
    "resize and fill": "fill",
    "envelope (outer fit)": "fill",
}


class Unit(BaseModel):
    """One unit. Fields that only concern the extension's own preprocessors and windows are not used."""

    model_config = ConfigDict(extra="allow", strict=True)

    enabled: bool = True
    model: str | None = Field(None, max_length=300)
    module: str | None = Field("none", max_length=100)
    image: str | dict[str, Any] | None = None
    input_image: str | None = None
    effective_region_mask: str | None = Field(None, description="of an IP-Adapter: white where it counts")
    weight: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    guidance_start: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False)
    guidance_end: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    control_mode: int | str | list[str] = Field(0, description="webuiapi sends a list of one")
    guessmode: bool | None = None
    resize_mode: int | str = 1
    pixel_perfect: bool = False
    threshold_a: float | None = Field(None, le=1000, allow_inf_nan=False, description="below 0: the usual")
    threshold_b: float | None = Field(None, le=1000, allow_inf_nan=False)

    def choice(self) -> ControlChoice:
        """In darkroom's terms."""
        name = re.sub(r"\s*\[[0-9a-fA-F]+\]$", "", self.model or "")
        if name.lower() in ("", "none"):
            raise _refused("model: the net's name; /controlnet/model_list has them")
        map_name = ALIASES.get((self.module or "none").lower())
        if map_name is None:
            raise _refused(f"module: one of {', '.join(MODULES)}; send others' maps with module none")
        mode = self.control_mode if not isinstance(self.control_mode, list) else "".join(self.control_mode)
        wanted = MODES.get(_small(mode))
        if wanted is None:
            raise _refused("control_mode: Balanced (0), My prompt (1) or ControlNet is more important (2)")
        if not self.guidance_start < self.guidance_end:
            raise _refused("guidance_start is before guidance_end")
        return ControlChoice(
            net=name,
            weight=self.weight,
            start=self.guidance_start,
            end=self.guidance_end,
            guess=wanted.get("guess", False) or bool(self.guessmode),
            soft=wanted.get("soft", False),
            map=_with_numbers(map_name, self.threshold_a, self.threshold_b),
        )

    mask: str | None = Field(None, description="of inpaint_only: white where the picture is unknown")

    def pictures(
        self, size: tuple[int, int], start: bytes | None, hole: bytes | None, limits: Limits
    ) -> ControlUpload:
        """The unit's picture in the shape of those that are made; img2img's own and its mask where it has
        none."""
        given = self.image.get("image") if isinstance(self.image, dict) else self.image
        given = given or self.input_image
        content = decoded(str(given), "alwayson_scripts") if given else start
        if content is None:
            raise _refused("image: a picture in base64")
        how = RESIZE.get(_small(self.resize_mode))
        if ALIASES.get((self.module or "none").lower()) == INPAINT:
            drawn = self.image.get("mask") if isinstance(self.image, dict) else None
            own = drawn or self.mask
            hole = hole if own is None else decoded(str(own), "alwayson_scripts")
            if hole is None:
                raise _refused("mask: of inpaint_only, white where the picture is unknown")
            return ControlUpload(_shaped(content, size, how, limits), _shaped(hole, size, how, limits))
        mask = self.effective_region_mask
        content = _shaped(content, size, how, limits)
        return ControlUpload(content, None if mask is None else decoded(mask, "alwayson_scripts"))


def _with_numbers(name: str, *given: float | None) -> str:
    """A map with the extension's thresholds, as far as it has any; below 0 stands for the usual ones."""
    usual = {"canny": (100.0, 200.0), "scribble": (32.0,), "blur": (A1111_BLUR,)}.get(name, ())
    numbers = [
        ours if one is None or one < 0 else one
        for one, ours in zip(given[: len(MAP_NUMBERS.get(name, ()))], usual, strict=True)
    ]
    return ":".join([name, *(f"{one:g}" for one in numbers)])


def _small(value: int | str) -> int | str:
    return value.strip().lower() if isinstance(value, str) else value


def _refused(message: str) -> Refused:
    return Refused(422, "invalid_value", f"alwayson_scripts.controlnet: {message}", param="alwayson_scripts")


def _shaped(content: bytes, size: tuple[int, int], how: str | None, limits: Limits) -> bytes:
    """A picture that is stretched to a size afterwards, cut to its shape first where that is asked for."""
    if how is None:
        raise _refused("resize_mode: 0 (Just Resize), 1 (Crop and Resize) or 2 (Resize and Fill)")
    if how == "stretch":
        return content
    image = checked_picture(content, limits, "alwayson_scripts")
    if image.width * size[1] == image.height * size[0]:
        return content
    rgb = image.convert("RGB")
    made = ImageOps.fit(rgb, size, _LANCZOS) if how == "crop" else _filled(rgb, size)
    return png_of(made)


_LANCZOS = Image.Resampling.LANCZOS


def _filled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The whole picture, on the colour of its border in the middle."""
    pixels_HW3 = np.asarray(image)
    border_N3 = np.concatenate([pixels_HW3[[0, -1]].reshape(-1, 3), pixels_HW3[:, [0, -1]].reshape(-1, 3)])
    middle = len(border_N3) // 2
    colour = tuple(int(value) for value in np.partition(border_N3, middle, axis=0)[middle])
    return ImageOps.pad(image, size, _LANCZOS, color=colour)


def units_of(scripts: Any) -> list[Unit]:
    """The enabled units of `alwayson_scripts`; 422 for other scripts."""
    if not scripts:
        return []
    if not isinstance(scripts, dict):
        raise Refused(422, "invalid_value", "alwayson_scripts: scripts by name", param="alwayson_scripts")
    args: list[Any] = []
    for name, script in scripts.items():
        given = script.get("args") if isinstance(script, dict) else None
        if str(name).lower() != SCRIPT:
            if given:
                shown = str(name)[:100].encode("ascii", "replace").decode()
                message = f"alwayson_scripts.{shown}: not served here"
                raise Refused(422, "not_served", message, param="alwayson_scripts")
            continue
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise _refused("args: a list of units")
        if len(given) > MOST_CONTROLS:
            raise _refused(f"args: at most {MOST_CONTROLS} units")
        args += given
    return [unit for unit in (Unit.model_validate(one) for one in args) if unit.enabled]


class Detect(BaseModel):
    """Pictures to make maps of."""

    model_config = ConfigDict(extra="allow", strict=True)

    controlnet_module: str = Field("none", max_length=100)
    controlnet_input_images: list[str] = Field(
        min_length=1,
        max_length=16,
        validation_alias=AliasChoices("controlnet_input_images", "controlnet_images"),
        description="the package webuiapi calls it controlnet_images",
    )
    controlnet_threshold_a: float | None = Field(None, le=1000, allow_inf_nan=False)
    controlnet_threshold_b: float | None = Field(None, le=1000, allow_inf_nan=False)


def controlnet_router(core: Core) -> APIRouter:
    """The `/controlnet` routes."""
    shape = route_in(core, lambda refused: {"error": refused.code, "detail": refused.message})
    router = APIRouter(prefix="/controlnet", tags=["a1111"], route_class=shape)

    @router.get("/version")
    async def version() -> dict[str, int]:
        """Of the extension's API."""
        return {"version": 2}

    @router.get("/settings")
    async def settings() -> dict[str, int]:
        """Units that a request may have."""
        return {"control_net_unit_count": core.limits.controls}

    @router.get("/model_list")
    async def model_list(update: bool = True) -> dict[str, list[str]]:
        """The nets of the server's folder."""
        return {"model_list": [card.name for card in core.catalogue.nets()]}

    @router.get("/module_list")
    async def module_list(alias_names: bool = False) -> dict[str, Any]:
        """The preprocessors that are served."""
        detail = {"model_free": False, "sliders": []}
        return {"module_list": list(MODULES), "module_detail": dict.fromkeys(MODULES, detail)}

    @router.get("/control_types")
    async def control_types() -> dict[str, Any]:
        """One kind of all: nets say by themselves what they are."""
        nets = ["None", *(card.name for card in core.catalogue.nets())]
        every = {"module_list": list(MODULES), "model_list": nets}
        return {"control_types": {"All": {**every, "default_option": "none", "default_model": "None"}}}

    @router.post("/detect")
    async def detect(body: Detect, request: Request) -> dict[str, Any]:
        """The maps of pictures."""
        name = ALIASES.get(body.controlnet_module.lower())
        if name is None:
            message = f"controlnet_module: one of {', '.join(MODULES)}"
            raise Refused(422, "invalid_value", message, param="controlnet_module")
        name = _with_numbers(name, body.controlnet_threshold_a, body.controlnet_threshold_b)
        check_map(name)

        def made() -> list[str]:
            """The maps of the pictures, as PNG in base64."""
            images = [
                checked_picture(
                    decoded(one, "controlnet_input_images"), core.limits, "controlnet_input_images"
                )
                for one in body.controlnet_input_images
            ]
            return [encoded(png_of(find_map(name)(image.convert("RGB")))) for image in images]

        num = len(body.controlnet_input_images)
        return {"images": await core.bench.do(caller(request), made, num), "info": "Success"}

    return router
