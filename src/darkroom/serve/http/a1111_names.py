"""A1111's names of samplers and schedules, and the solvers that they are."""

from __future__ import annotations

from typing import Any, Literal

from darkroom.serve.refused import Refused

SAMPLERS: dict[str, tuple[str, bool | None]] = {
    "DPM++ 2M": ("dpmpp_2m", None),
    "DPM++ 2M Karras": ("dpmpp_2m", True),
    "DPM++ 2M SDE": ("dpmpp_2m_sde", None),
    "DPM++ 2M SDE Karras": ("dpmpp_2m_sde", True),
    "Euler a": ("euler_a", None),
    "Euler": ("euler", None),
    "DDIM": ("ddim", None),
    "PLMS": ("pndm", None),
    "UniPC": ("unipc", None),
    "LCM": ("lcm", None),
}
"""A sampler's solver, and whether its sigmas are Karras'; None leaves that to the schedule."""
SCHEDULERS: dict[str, bool | None] = {"Automatic": None, "Uniform": False, "Karras": True}
TAKE_KARRAS = ("euler", "euler_a", "dpmpp_2m", "dpmpp_2m_sde", "unipc")
FOLDED = {name.lower(): found for name, found in SAMPLERS.items()}
FOLDED |= {found[0]: found for name, found in SAMPLERS.items() if found[1] is None}
FOLDED |= {f"k_{name}": FOLDED[name] for name in ("euler", "euler_a", "dpmpp_2m", "dpmpp_2m_sde")}


Neutral = bool | int | float | str | list[Any] | dict[str, Any] | None
UNUSED = frozenset(
    {
        "comments",
        "disable_extra_networks",
        "distilled_cfg_scale",
        "do_not_save_grid",
        "do_not_save_samples",
        "eta_noise_seed_delta",
        "firstphase_height",
        "firstphase_width",
        "force_task_id",
        "hr_additional_modules",
        "hr_cfg",
        "hr_checkpoint_name",
        "hr_negative_prompt",
        "hr_prompt",
        "hr_sampler_name",
        "hr_scheduler",
        "include_init_images",
        "infotext",
        "initial_noise_multiplier",
        "inpaint_full_res_padding",
        "inpainting_fill",
        "latent_mask",
        "mask_blur",
        "mask_blur_x",
        "mask_blur_y",
        "mask_round",
        "override_settings_restore_afterwards",
        "refiner_switch_at",
        "resize_mode",
        "restore_faces_visibility",
        "s_churn",
        "s_min_uncond",
        "s_noise",
        "s_tmax",
        "s_tmin",
        "save_images",
        "seed_resize_from_h",
        "seed_resize_from_w",
        "send_images",
        "styles",
        "subseed",
    }
)
"""Fields that are taken and not used: they concern files and windows, or only what is refused below."""
REFUSED: dict[str, tuple[Neutral, ...]] = {
    "hr_resize_x": (0, None),
    "hr_resize_y": (0, None),
    "restore_faces": (False, None),
    "tiling": (False, None),
    "subseed_strength": (0, 0.0, None),
    "refiner_checkpoint": ("", "None", None),
    "script_name": ("", "None", None),
    "script_args": ([], None),
    "alwayson_scripts": ({}, None),
    "image_cfg_scale": (None, 0, 0.0, 1.5),
}
"""Fields that would change the picture in a way that is not served, with the values that do not."""


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
        found = FOLDED.get(sampler.strip().lower())
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
    return next((name for name, (ours, karras) in SAMPLERS.items() if ours == solver and not karras), solver)
