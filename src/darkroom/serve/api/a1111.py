"""A1111's dialect under `/sdapi/v1`: txt2img, img2img, and what its clients ask for around them.

Prompts are weighted as A1111 weights them, and `<lora:NAME:W>` names an adapter of the server's folder.
Settings that would change the picture and are not served are refused by name (`a1111_names` has the two that
are not); those that only concern A1111's own files and windows are taken and not used. `progress` and
`interrupt` see only what the same key asked for in this dialect. So does a model chosen by `options`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from PIL import Image, ImageFilter, ImageOps
from pydantic import BaseModel, ConfigDict, Field

from darkroom.errors import InputError
from darkroom.options import (
    A1111_AUTOMATIC,
    A1111_NAMES,
    FLOW_SOLVER_NAMES,
    LCM_SOLVERS,
    SAMPLERS,
    SOLVERS,
    find_solver,
)
from darkroom.picture_settings import DEFAULT_STEPS, LCM_STEPS, steps_of_share
from darkroom.sample.pictures import a1111_text, parse_a1111
from darkroom.serve.api.a1111_server import (
    SCHEDULERS,
    ChosenModels,
    add_lists,
    add_server_routes,
    named_model,
    sigmas_of,
)
from darkroom.serve.api.controlnet import units_of
from darkroom.serve.api.shared import all_made, caller, decoded, encoded, pngs_of, route_in
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.jobs.admission import checked_picture
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import MAX_SEED, ControlUpload, HiresChoice, Job, PictureRequest, Refused, Uploads
from darkroom.serve.settings import Limits
from darkroom.serve.status import ModelCard

PREFIX = "sdapi-"
"""Of the ids of this dialect's jobs."""
USED_SETTINGS = ("CLIP_stop_at_last_layers", "sd_model_checkpoint")
UNUSED_SETTINGS = ("samples_format", "save_images_add_number")
"""Of `override_settings`: others would change the picture."""


class Txt2Img(BaseModel):
    """A1111's fields. Others are in `UNUSED` or `REFUSED`, or not known."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: str = Field("", max_length=100_000)
    negative_prompt: str | None = Field("", max_length=100_000)
    seed: int | None = Field(-1, ge=-1, le=MAX_SEED, description="-1 draws one")
    subseed: int | None = Field(-1, ge=-1, le=MAX_SEED, description="-1 draws one")
    subseed_strength: float | None = Field(0, ge=0, le=1, allow_inf_nan=False)
    seed_resize_from_w: int | None = Field(-1, ge=-1, le=8192, description="-1 and 0: not")
    seed_resize_from_h: int | None = Field(-1, ge=-1, le=8192)
    steps: int | None = Field(None, ge=1, le=1000, description="none: the server's own, not A1111's 50")
    cfg_scale: float | None = Field(None, ge=0, le=1000, allow_inf_nan=False)
    width: int | None = Field(None, ge=8, le=8192)
    height: int | None = Field(None, ge=8, le=8192)
    batch_size: int | None = Field(1, ge=1, le=1000)
    n_iter: int | None = Field(1, ge=1, le=1000)
    sampler_name: str | None = Field(None, max_length=100)
    sampler_index: str | None = Field(None, max_length=100, description="A1111's older name of sampler_name")
    scheduler: str | None = Field(None, max_length=100)
    eta: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    denoising_strength: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    override_settings: dict[str, Any] | None = None
    alwayson_scripts: dict[str, Any] | None = Field(None, description="controlnet, as its extension has it")
    enable_hr: bool | None = False
    hr_scale: float | None = Field(None, ge=1, le=8, allow_inf_nan=False, description="none: 2")
    hr_second_pass_steps: int | None = Field(0, ge=0, le=1000, description="0: as the first pass")
    hr_upscaler: str | None = Field(None, max_length=100, description="Latent or Lanczos")

    def check_others(self) -> None:
        """422 for a field that is not known, or that would change the picture."""
        for name, value in (self.model_extra or {}).items():
            shown = name[:100].encode("ascii", "replace").decode()
            if name in REFUSED:
                if not self._neutral(name, value):
                    raise Refused(422, "not_served", f"{shown}: not served here", param=shown)
            elif name not in UNUSED:
                raise Refused(422, "unknown_field", f"{shown}: not known here", param=shown)

    def _neutral(self, name: str, value: Any) -> bool:
        """Whether the picture is the same without it: so is one without the second pass it is about."""
        if value in REFUSED[name] or (name.startswith("hr_") and not self.enable_hr):
            return True
        first = AS_IN_THE_FIRST_PASS.get(name)
        return first is not None and value == getattr(self, first)

    def echo(self) -> dict[str, Any]:
        """What was given, as far as it is known and of use."""
        settings = self.model_dump(
            include=set(type(self).model_fields) - {"init_images", "mask", "alwayson_scripts"}
        )
        used = {k: v for k, v in (self.override_settings or {}).items() if k in USED_SETTINGS}
        return {**settings, "override_settings": used}

    def request(self, core: Core, chosen: str | None) -> PictureRequest:
        """In the terms of the core; `chosen` is the model that the caller set by `options`."""
        self.check_others()
        model = self._model(core, chosen)
        card = core.catalogue.card(model)
        named = _solver_of(self.sampler_name or self.sampler_index, self.scheduler)
        if not set(card.solvers) & set(FLOW_SOLVER_NAMES):
            named = _with_automatic(named, self.scheduler)
        return PictureRequest(
            prompt=self.prompt,
            model=model,
            negative=self.negative_prompt or None,
            num=self._num(core),
            seed=None if self.seed in (-1, None) else self.seed,
            **self._variation(),
            width=self.width,
            height=self.height,
            steps=self.steps,
            guidance=self.cfg_scale,
            **named,
            eta=(self.eta or 0.0) if named.get("solver") == "ddim" else 0.0,
            weighting="a1111",
            clip_skip=self._clip_skip(card),
            strength=None,
            hires=self._hires(core, named.get("solver") or card.solver),
            controls=tuple(unit.choice() for unit in units_of(self.alwayson_scripts)),
        )

    def _variation(self) -> dict[str, Any]:
        """How the noise differs from that of its seed and size alone."""
        varied: dict[str, Any] = {}
        if self.subseed_strength:
            other = None if self.subseed in (-1, None) else self.subseed
            varied = {"variation_seed": other, "variation_strength": float(self.subseed_strength)}
        width, height = self.seed_resize_from_w or 0, self.seed_resize_from_h or 0
        if width > 0 and height > 0:  # A1111 takes no notice of one alone
            if min(width, height) < 8:
                message = "seed_resize_from_w: sides of 8 pixels or more"
                raise Refused(422, "invalid_value", message, param="seed_resize_from_w")
            varied |= {"seed_width": width, "seed_height": height}
        return varied

    def _num(self, core: Core) -> int:
        num = (self.batch_size or 1) * (self.n_iter or 1)
        if num > core.limits.pictures:
            message = f"batch_size times n_iter: at most {core.limits.pictures} pictures"
            raise Refused(422, "over_limit", message, param="batch_size")
        return num

    def uploads(self, core: Core, card: ModelCard) -> Uploads | None:
        """The pictures of the ControlNet extension's units. Takes a while."""
        controls = self._control_pictures(core, card, None)
        return Uploads(controls=controls) if controls else None

    def _control_pictures(
        self, core: Core, card: ModelCard, start: bytes | None, hole: bytes | None = None
    ) -> tuple[ControlUpload, ...]:
        units = units_of(self.alwayson_scripts)
        if not units:
            return ()
        size = self.width or self.height or card.width, self.height or self.width or card.height
        if max(size) > core.limits.side_pixels:  # here, for pictures are brought into their shape below
            most = f"width: at most {core.limits.side_pixels} pixels"
            raise Refused(422, "over_limit", most, param="width")
        if start is not None and self._only_masked is not None:  # they are maps of the whole picture
            size = checked_picture(start, core.limits, "init_images").size
        return tuple(unit.pictures(size, start, hole, core.limits) for unit in units)

    @property
    def _only_masked(self) -> int | None:
        """How many pixels around the mask are drawn with it; None: the whole picture."""
        return None

    def _hires(self, core: Core, solver: str) -> HiresChoice | None:
        if not self.enable_hr:
            return None
        strength = 0.75 if self.denoising_strength is None else self.denoising_strength
        if not strength:
            raise Refused(422, "invalid_value", "denoising_strength: more than 0", param="denoising_strength")
        usual = LCM_STEPS if solver in LCM_SOLVERS else DEFAULT_STEPS
        taken = self.hr_second_pass_steps or self.steps or usual
        return HiresChoice(
            scale=2.0 if self.hr_scale is None else self.hr_scale,
            strength=strength,
            steps=steps_of_share(taken, strength),  # A1111's second pass takes them all
            upscaler=_upscaler_of(self.hr_upscaler, core.catalogue.upscalers.names()),
        )

    def _model(self, core: Core, chosen: str | None) -> str | None:
        """The model for this request alone, else the one chosen before; 422 for one that is not here."""
        given = (self.override_settings or {}).get("sd_model_checkpoint")
        if given is None or (chosen is not None and given == chosen):
            return chosen
        return named_model(core, given, "override_settings")

    def _clip_skip(self, card: ModelCard) -> int:
        """From `override_settings`; 422 for any other setting that would change the picture.

        SDXL reads the layer below the last one whatever is set, as in A1111: its users' 2 means just that.
        """
        skip = 0
        for name, value in (self.override_settings or {}).items():
            if name == "CLIP_stop_at_last_layers" and isinstance(value, int) and 1 <= value <= 100:
                skip = 0 if card.family == "sdxl" else value - 1
            elif name == "sd_model_checkpoint":
                continue
            elif name not in UNUSED_SETTINGS:
                shown = name[:100].encode("ascii", "replace").decode()
                message = f"override_settings.{shown}: cannot be set here"
                raise Refused(422, "not_served", message, param="override_settings")
        return skip


class Img2Img(Txt2Img):
    """The further fields of image to image."""

    init_images: list[str] = Field(
        min_length=1, max_length=1, description="base64; white of the mask is redone"
    )
    mask: str | None = None
    inpainting_mask_invert: int | bool | None = 0
    inpainting_fill: int | None = Field(
        0, ge=0, le=3, description="0 fill, 1 original, 2 latent noise, 3 latent nothing"
    )
    inpaint_full_res: bool | int | None = None
    inpaint_full_res_padding: int | None = Field(None, ge=0, le=8192)
    mask_blur: int | None = Field(None, ge=0, le=256, description="soft edge in pixels")
    mask_blur_x: int | None = Field(None, ge=0, le=256)
    mask_blur_y: int | None = Field(None, ge=0, le=256)

    def uploads(self, core: Core, card: ModelCard) -> Uploads:
        """The pictures; what is wrong with them the core finds, which opens them. Takes a while."""
        image = decoded(self.init_images[0], "init_images")
        mask = None if self.mask is None else self._mask(decoded(self.mask, "mask"), core.limits)
        return Uploads(image, mask, self._control_pictures(core, card, image, mask))

    def _mask(self, content: bytes, limits: Limits) -> bytes:
        """A grey mask, white where the picture is redone: where it is opaque, if parts are transparent."""
        opened = checked_picture(content, limits, "mask")
        grey = opened.convert("RGB").convert("L")
        if opened.has_transparency_data:
            alpha = opened.convert("RGBA").getchannel("A")
            if alpha.getextrema() != (255, 255):
                grey = alpha.point(lambda value: 255 if value > 128 else 0)
        if self.inpainting_mask_invert:
            grey = ImageOps.invert(grey)
        return png_of(grey.filter(ImageFilter.GaussianBlur(self._blur())))

    def _blur(self) -> tuple[int, int]:
        """Sigma of the mask's edge, across and down."""
        if self.mask_blur is not None:
            return self.mask_blur, self.mask_blur
        return self.mask_blur_x or 0, self.mask_blur_y or 0

    def request(self, core: Core, chosen: str | None) -> PictureRequest:
        """In the terms of the core. A strength of 0 changes nothing, and is refused."""
        strength = 0.75 if self.denoising_strength is None else self.denoising_strength
        if not strength:
            raise Refused(422, "invalid_value", "denoising_strength: more than 0", param="denoising_strength")
        content = None if self.mask is None else MASKED_CONTENT[self.inpainting_fill or 0]
        more = {"strength": strength, "only_masked": self._only_masked, "masked_content": content}
        return super().request(core, chosen).model_copy(update=more)

    @property
    def _only_masked(self) -> int | None:
        """How many pixels around the mask are drawn with it; None: the whole picture."""
        wanted = self.mask is not None and self.inpaint_full_res
        return (self.inpaint_full_res_padding or 0) if wanted else None


class PngInfo(BaseModel):
    """A picture whose settings are asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image: str = Field(description="a PNG in base64")


def a1111_router(core: Core) -> APIRouter:
    """The `/sdapi/v1` routes."""
    router = APIRouter(prefix="/sdapi/v1", tags=["a1111"], route_class=route_in(core, _error))
    chosen = ChosenModels(core.settings.state / "a1111-models.json")

    @router.post("/txt2img")
    async def txt2img(body: Txt2Img, request: Request) -> dict[str, Any]:
        """Pictures of a prompt."""
        wanted = body.request(core, chosen.of(caller(request)))
        uploads = await _uploads(core, body, wanted, request, is_made=bool(wanted.controls))
        return await _answer(core, body, wanted, request, uploads)

    @router.post("/img2img")
    async def img2img(body: Img2Img, request: Request) -> dict[str, Any]:
        """Pictures that start from one."""
        wanted = body.request(core, chosen.of(caller(request)))
        is_made = bool(wanted.controls) or body.mask is not None
        uploads = await _uploads(core, body, wanted, request, is_made=is_made)
        return await _answer(core, body, wanted, request, uploads)

    @router.get("/progress")
    async def progress(
        request: Request, skip_current_image: Annotated[bool, Query()] = False
    ) -> dict[str, Any]:
        """How far the caller's own oldest running job is; the picture is that of an earlier question."""
        jobs = await _own(core, request)
        shown = None if skip_current_image or not jobs else core.glance(jobs[0].id, key=jobs[0].key)
        return {**_progress(jobs), "current_image": None if shown is None else encoded(shown)}

    @router.post("/interrupt")
    async def interrupt(request: Request) -> dict[str, Any]:
        """Cancels the caller's own jobs of this dialect, no one else's."""
        for job in await _own(core, request):
            await core.cancel(job.id, key=job.key)
        return {}

    @router.post("/skip")
    async def skip(request: Request) -> dict[str, Any]:
        """Cancels the caller's own oldest running job of this dialect."""
        for job in (await _own(core, request))[:1]:
            await core.cancel(job.id, key=job.key)
        return {}

    @router.post("/png-info")
    async def png_info(body: PngInfo, request: Request) -> dict[str, Any]:
        """The settings that a picture carries."""
        return await core.bench.do(caller(request), lambda: _png_info(core, body.image))

    add_lists(router, core, chosen)
    add_server_routes(router, core)
    return router


def _error(refused: Refused) -> dict[str, Any]:
    return {"error": refused.code, "detail": refused.message, "body": "", "errors": refused.message}


async def _uploads(
    core: Core, body: Txt2Img, wanted: PictureRequest, request: Request, *, is_made: bool
) -> Uploads | None:
    """The pictures of a request; those that are cut or blurred first (`is_made`) wait their turn."""
    card = core.catalogue.card(wanted.model)
    if is_made:
        return await core.bench.do(caller(request), lambda: body.uploads(core, card))
    return await asyncio.to_thread(body.uploads, core, card)


async def _answer(
    core: Core, body: Txt2Img, wanted: PictureRequest, request: Request, uploads: Uploads | None
) -> dict[str, Any]:
    try:
        [job] = await all_made(core, request, [wanted], uploads=uploads, prefix=PREFIX)
    except Refused as refused:
        if refused.param != "image":
            raise
        message = f"init_images{refused.message.removeprefix('image')}"
        raise Refused(refused.status, refused.code, message, param="init_images") from refused
    pictures = [] if (body.model_extra or {}).get("send_images") is False else await pngs_of(core, [job])
    return {
        "images": [encoded(png) for png in pictures],
        "parameters": body.echo(),
        "info": json.dumps(_info(core, job, body)),
    }


def _info(core: Core, job: Job, body: Txt2Img) -> dict[str, Any]:
    """What A1111's clients read: settings, seeds, and each picture's settings as text."""
    pictures = job.pictures
    first, num = pictures[0], len(pictures)
    seeds = [one["seed"] for one in pictures]
    subseeds = [one.get("variation_seed", one["seed"]) for one in pictures]
    prompts = [body.prompt] * num
    return {
        "prompt": body.prompt,
        "all_prompts": prompts,
        "negative_prompt": body.negative_prompt or "",
        "all_negative_prompts": [body.negative_prompt or ""] * num,
        "seed": seeds[0],
        "all_seeds": seeds,
        "subseed": subseeds[0],
        "all_subseeds": subseeds,
        "subseed_strength": first.get("variation_strength", 0),
        "width": first["width"],
        "height": first["height"],
        "sampler_name": name_of(first["solver"]),
        "cfg_scale": first["guidance"],
        "steps": first["steps"],
        "batch_size": num,
        "restore_faces": False,
        "sd_model_name": core.catalogue.card(job.request.model).name,
        "sd_model_hash": str(first.get("model_sha256", ""))[:10] or None,
        "denoising_strength": job.request.strength,
        "extra_generation_params": {},
        "index_of_first_image": 0,
        "infotexts": [a1111_text(one) for one in pictures],
        "styles": [],
        "job_timestamp": _timestamp(job),
        "clip_skip": 1 + job.request.clip_skip,
        "is_using_inpainting_conditioning": False,
        "notes": list(job.notes),
        "cost": job.cost,
    }


async def _own(core: Core, request: Request) -> list[Job]:
    """The caller's jobs of this dialect that are not over, oldest first."""
    key = caller(request)
    found = [
        job for state in ("running", "queued") for job in await core.jobs(key=key, state=state, limit=1000)
    ]
    return sorted(
        (
            job
            for job in {job.id: job for job in found}.values()
            if job.id.startswith(PREFIX) and not job.over
        ),
        key=lambda job: (job.state != "running", job.created_s),
    )


def _timestamp(job: Job | None) -> str:
    return "0" if job is None else time.strftime("%Y%m%d%H%M%S", time.gmtime(job.created_s))


def _progress(jobs: Sequence[Job]) -> dict[str, Any]:
    first = jobs[0] if jobs else None
    done, total = (first.steps_done, first.steps_total) if first is not None else (0, 0)
    share = done / total if total else 0.0
    spent_s = time.time() - first.started_s if first is not None and first.started_s else 0.0
    state = {
        "skipped": False,
        "interrupted": False,
        "stopping_generation": False,
        "job": first.id if first is not None else "",
        "job_count": len(jobs),
        "job_timestamp": _timestamp(first),
        "job_no": 0,
        "sampling_step": done,
        "sampling_steps": total,
    }
    eta_s = spent_s * (1 - share) / share if share else 0.0
    text = "" if first is None else first.state
    return {
        "progress": share,
        "eta_relative": eta_s,
        "state": state,
        "textinfo": text,
    }


def _png_info(core: Core, given: str) -> dict[str, Any]:
    image = checked_picture(decoded(given, "image"), core.limits, "image")
    items = {name: value for name, value in _texts(image).items() if len(value) < 2**20}
    info = items.get("parameters", "")
    return {"info": info, "items": items, "parameters": _parsed(info)}


def _texts(image: Image.Image) -> dict[str, str]:
    """A PNG's text chunks."""
    return {str(name): value for name, value in image.info.items() if isinstance(value, str)}


def _parsed(info: str) -> dict[str, Any]:
    """Settings out of the text, in darkroom's names; none where it is something else."""
    try:
        return parse_a1111(info) if info else {}
    except (InputError, ValueError):
        return {}


Neutral = bool | int | float | str | list[Any] | dict[str, Any] | None
UNUSED = frozenset(
    {
        "comments",
        "distilled_cfg_scale",
        "do_not_save_grid",
        "do_not_save_samples",
        "force_task_id",
        "include_init_images",
        "infotext",
        "inpaint_full_res_padding",
        "mask_blur",
        "mask_blur_x",
        "mask_blur_y",
        "mask_round",
        "override_settings_restore_afterwards",
        "refiner_switch_at",
        "restore_faces_visibility",
        "s_tmax",
        "s_tmin",
        "save_images",
        "send_images",
    }
)
"""Fields that are taken and not used: they concern files and windows, or only what is refused below."""
REFUSED: dict[str, tuple[Neutral, ...]] = {
    "disable_extra_networks": (False, None),
    "eta_noise_seed_delta": (0, None),
    "firstphase_height": (0, None),
    "firstphase_width": (0, None),
    "hr_additional_modules": ([], ["Use same choices"], None),
    "hr_cfg": (0, None),
    "hr_checkpoint_name": ("", "Use same checkpoint", None),
    "hr_negative_prompt": ("", None),
    "hr_prompt": ("", None),
    "hr_resize_x": (0, None),
    "hr_resize_y": (0, None),
    "hr_sampler_name": ("", "Use same sampler", None),
    "hr_scheduler": ("", "Use same scheduler", None),
    "image_cfg_scale": (None, 0, 1.5),
    "initial_noise_multiplier": (1, None),
    "inpainting_fill": (0, 1, 2, 3, None),
    "latent_mask": ("", None),
    "refiner_checkpoint": ("", "None", None),
    "resize_mode": (0, None),
    "restore_faces": (False, None),
    "s_churn": (0, None),
    "s_min_uncond": (0, None),
    "s_noise": (1, None),
    "script_args": ([], None),
    "script_name": ("", "None", None),
    "styles": ([], None),
    "tiling": (False, None),
}
"""Fields that would change the picture in a way that is not served, with the values that do not."""
MASKED_CONTENT = ("fill", None, "noise", "nothing")
"""Of `inpainting_fill`; None is the picture itself."""
AS_IN_THE_FIRST_PASS = {
    "hr_cfg": "cfg_scale",
    "hr_negative_prompt": "negative_prompt",
    "hr_prompt": "prompt",
    "hr_sampler_name": "sampler_name",
    "hr_scheduler": "scheduler",
}
"""Fields of the second pass that may also say what the first one does."""


UPSCALERS = {
    "latent": "latent",
    "latent (bilinear)": "latent",
    "lanczos": "lanczos",
}
"""A1111's names of how the second pass begins, in small letters."""


def _upscaler_of(name: str | None, networks: Sequence[str]) -> str:
    """How the second pass begins; 422 for what is not known."""
    known = {one.lower(): one for one in networks} | UPSCALERS
    found = known.get((name or "latent").strip().lower())
    if found is None:
        message = f"hr_upscaler: one of {', '.join(('Latent', 'Lanczos', *networks))}"
        raise Refused(422, "invalid_value", message, param="hr_upscaler")
    return found


def _solver_of(sampler: str | None, scheduler: str | None) -> dict[str, Any]:
    """A solver and how its sigmas are spaced; nothing where nothing is named. 422 for what is not known."""
    named: dict[str, Any] = {}
    if sampler and sampler.lower() not in ("automatic", "none"):
        found = find_solver(sampler)
        if found is None:
            raise Refused(
                422, "invalid_value", f"sampler_name: one of {', '.join(SAMPLERS)}", param="sampler_name"
            )
        named = {"solver": found[0], "karras": None, **sigmas_of(found[1])}
    if scheduler:
        names = {name.lower(): value for name, value in SCHEDULERS.items()}
        asked = scheduler.strip().lower().replace("_", " ")
        if asked not in names:
            raise Refused(
                422, "invalid_value", f"scheduler: one of {', '.join(SCHEDULERS)}", param="scheduler"
            )
        wanted = names[asked]
        takes_karras = named.get("solver") in SOLVERS and SOLVERS[named["solver"]].takes_karras
        if wanted.get("karras") is not False or takes_karras:
            named |= wanted
    return named


def _with_automatic(named: dict[str, Any], scheduler: str | None) -> dict[str, Any]:
    """With the sigmas that A1111 gives a named sampler where no schedule is named."""
    sigmas = A1111_AUTOMATIC.get(named.get("solver", ""))
    said = any(named.get(name) for name in ("karras", "exponential", "sigmas"))
    if sigmas is None or said or (scheduler or "automatic").strip().lower() != "automatic":
        return named
    return {**named, sigmas: True}


def name_of(solver: str) -> str:
    """A1111's name of a solver."""
    return A1111_NAMES.get(solver, solver)
