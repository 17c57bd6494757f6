"""A1111's names of samplers and schedules, and the solvers that they are."""

from __future__ import annotations

from typing import Any, Literal

from darkroom.options import A1111_NAMES, SAMPLERS, find_solver
from darkroom.serve.refused import Refused

SCHEDULERS: dict[str, bool | None] = {"Automatic": None, "Uniform": False, "Karras": True}
TAKE_KARRAS = ("euler", "euler_a", "dpmpp_2m", "dpmpp_2m_sde", "unipc")

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
        "inpainting_fill",
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
        "subseed",
    }
)
"""Fields that are taken and not used: they concern files and windows, or only what is refused below.

The exceptions are `mask_blur` and `inpainting_fill`: every client sends A1111's own values of these.
"""
REFUSED: dict[str, tuple[Neutral, ...]] = {
    "alwayson_scripts": ({}, None),
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
    "latent_mask": ("", None),
    "refiner_checkpoint": ("", "None", None),
    "resize_mode": (0, None),
    "restore_faces": (False, None),
    "s_churn": (0, None),
    "s_min_uncond": (0, None),
    "s_noise": (1, None),
    "script_args": ([], None),
    "script_name": ("", "None", None),
    "seed_resize_from_h": (-1, 0, None),
    "seed_resize_from_w": (-1, 0, None),
    "styles": ([], None),
    "subseed_strength": (0, None),
    "tiling": (False, None),
}
"""Fields that would change the picture in a way that is not served, with the values that do not."""
AS_IN_THE_FIRST_PASS = {
    "hr_cfg": "cfg_scale",
    "hr_negative_prompt": "negative_prompt",
    "hr_prompt": "prompt",
    "hr_sampler_name": "sampler_name",
    "hr_scheduler": "scheduler",
}
"""Fields of the second pass that may also say what the first one does."""


UPSCALERS: dict[str, Literal["latent", "lanczos"]] = {
    "latent": "latent",
    "latent (bilinear)": "latent",
    "lanczos": "lanczos",
}
"""A1111's names of how the second pass begins, in small letters."""


def upscaler_of(name: str | None) -> Literal["latent", "lanczos"]:
    """How the second pass begins; 422 for what is not known."""
    found = UPSCALERS.get((name or "latent").strip().lower())
    if found is None:
        raise Refused(422, "invalid_value", "hr_upscaler: one of Latent, Lanczos", param="hr_upscaler")
    return found


def solver_of(sampler: str | None, scheduler: str | None) -> tuple[str | None, bool | None]:
    """A solver and whether Karras; None and None where nothing is named. 422 for what is not known."""
    solver, karras = None, None
    if sampler and sampler.lower() not in ("automatic", "none"):
        found = find_solver(sampler)
        if found is None:
            raise Refused(
                422, "invalid_value", f"sampler_name: one of {', '.join(SAMPLERS)}", param="sampler_name"
            )
        solver, karras = found
    if scheduler:
        names = {name.lower(): value for name, value in SCHEDULERS.items()}
        if scheduler.strip().lower() not in names:
            raise Refused(
                422, "invalid_value", f"scheduler: one of {', '.join(SCHEDULERS)}", param="scheduler"
            )
        wanted = names[scheduler.strip().lower()]
        karras = wanted if wanted is not None and (wanted or solver in TAKE_KARRAS) else karras
    return solver, karras


def name_of(solver: str) -> str:
    """A1111's name of a solver."""
    return A1111_NAMES.get(solver, solver)
