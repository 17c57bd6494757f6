"""A1111's dialect against a real server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import threading
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from darkroom import sample
from darkroom.serve.api.a1111 import Txt2Img
from darkroom.serve.api.controlnet import _shaped
from darkroom.serve.api.guard import make_key
from darkroom.serve.engine.tickets import png_of
from darkroom.serve.settings import Limits, ServeSettings
from darkroom.serve.status import model_card
from serve.api.conftest import base64_of, change, opened
from serve.conftest import difference

QUICK = {"steps": 4, "seed": 5}


def test_txt2img_is_what_generate_makes_and_tells_its_seeds(http, small):
    body = {
        **QUICK,
        "prompt": "a (red:4) horse",
        "negative_prompt": "blue",
        "cfg_scale": 6,
        "batch_size": 2,
        "sampler_name": "DPM++ 2M Karras",
        "enable_hr": False,
        "override_settings": {},
    }
    told = http.post("/sdapi/v1/txt2img", json=body).json()
    lone = sample.generate(
        small,
        "a (red:4) horse",
        negative="blue",
        steps=4,
        seed=5,
        num=2,
        guidance=6.0,
        solver="dpmpp_2m",
        karras=True,
        weighting="a1111",
        optimise="none",
        notice=lambda _: None,
    )
    for one, other in zip(told["images"], lone, strict=True):
        assert difference(opened(one), other.image) <= 1
    info = json.loads(told["info"])
    assert info["all_seeds"] == [5, 6]
    assert info["infotexts"][0].startswith(
        "a (red:4) horse\nNegative prompt: blue\nSteps: 4, Sampler: DPM++ 2M"
    )
    plain = http.post("/sdapi/v1/txt2img", json={**body, "prompt": "a red horse", "batch_size": 1}).json()
    assert difference(opened(plain["images"][0]), lone[0].image) >= 3  # the weight is of effect


def test_a_tag_names_an_adapter(http):
    body = {**QUICK, "prompt": "a horse"}
    plain = opened(http.post("/sdapi/v1/txt2img", json=body).json()["images"][0])
    for tag, least in (("<lora:style1:1>", 10), ("<lora:style1:0>", 0)):
        told = http.post("/sdapi/v1/txt2img", json={**body, "prompt": f"a horse {tag}"})
        found = difference(opened(told.json()["images"][0]), plain)
        assert found >= least if least else found <= 1
    unknown = http.post("/sdapi/v1/txt2img", json={**body, "prompt": "a horse <lora:nobody:1>"})
    assert unknown.status_code == 422
    assert "nobody" in unknown.json()["detail"]


def test_img2img_redoes_what_is_white(http):
    start = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (0, 0, 16, 32))
    left, right = (0, 0, 14, 32), (18, 0, 32, 32)
    for invert, redone, same in ((0, left, right), (1, right, left)):
        body = {**QUICK, "prompt": "a horse", "init_images": [base64_of(start)], "mask": base64_of(mask)}
        body |= {"inpainting_fill": 1, "inpainting_mask_invert": invert}
        told = http.post("/sdapi/v1/img2img", json=body).json()
        made = opened(told["images"][0])
        assert change(made.crop(same), start.crop(same)) < 3
        assert change(made.crop(redone), start.crop(redone)) > 10


def test_clip_skip_is_of_one_text_encoder(small):
    """A1111 reads SDXL's penultimate layer whatever is set, which is what its users mean by 2."""
    card = model_card(small, ServeSettings(model="a"), 4096)
    asked = Txt2Img(override_settings={"CLIP_stop_at_last_layers": 2})
    assert (asked._clip_skip(card), asked._clip_skip(replace(card, family="sdxl"))) == (1, 0)


def test_a_mask_is_a1111s_opaque_is_redone_and_its_edge_is_soft(http):
    """Of an RGBA mask A1111 takes the alpha: 255 is redone. A blur of sigma 3 mixes over some 6 pixels."""
    start = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    grey = Image.new("L", (64, 64), 0)
    grey.paste(255, (0, 0, 32, 64))
    see_through = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    see_through.paste((0, 0, 0, 255), (0, 0, 32, 64))
    body = {**QUICK, "prompt": "a horse", "init_images": [base64_of(start)], "width": 64, "height": 64}

    def redone(mask: Image.Image, **more: Any) -> Image.Image:
        told = http.post("/sdapi/v1/img2img", json={**body, "mask": base64_of(mask), **more})
        return opened(told.json()["images"][0])

    plain = redone(grey)
    assert difference(redone(see_through), plain) <= 1
    assert difference(redone(see_through, inpainting_mask_invert=1), plain) >= 10
    soft = redone(grey, mask_blur=3)
    strip = (33, 0, 36, 64)
    assert change(plain.crop(strip), start.crop(strip)) < 1
    assert change(soft.crop(strip), start.crop(strip)) > 2
    far = (48, 0, 64, 64)
    assert change(soft.crop(far), start.crop(far)) < 1


def test_a_sampler_without_a_schedule_has_a1111s(http, small):
    settings = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None}
    for sampler, solver, sigmas in (
        ("DPM++ 2M", "dpmpp_2m", "karras"),
        ("DPM++ 2M SDE", "dpmpp_2m_sde", "exponential"),
    ):
        lone, plain = (
            sample.generate(small, "a horse", solver=solver, **more, **settings)[0].image
            for more in ({sigmas: True}, {"karras": False, "spacing": "linspace"})
        )
        for scheduler, wanted, other in (
            ("Automatic", lone, plain),
            ("", lone, plain),
            ("Uniform", plain, lone),
        ):
            body = {**QUICK, "prompt": "a horse", "sampler_name": sampler, "scheduler": scheduler}
            made = opened(http.post("/sdapi/v1/txt2img", json=body).json()["images"][0])
            assert difference(made, wanted) <= 1, (sampler, scheduler)
            assert difference(made, other) >= 2, (sampler, scheduler)


SIGMAS_OF = {
    "Align Your Steps": "align_your_steps",
    "KL Optimal": "kl_optimal",
    "Simple": "simple",
    "Normal": "normal",
    "DDIM": "ddim_uniform",
    "Beta": "beta",
    "Polyexponential": "exponential",
}


def test_each_schedule_of_a1111s_list_is_drawn(http, small):
    """By the name and by the label that the list of schedulers gives."""
    settings = {"steps": 8, "seed": 5, "solver": "euler", "optimise": "none", "notice": lambda _: None}
    wanted = {
        label: sample.generate(small, "a horse", sigmas=ours, **settings)[0].image
        for label, ours in SIGMAS_OF.items()
    }
    listed = {one["label"]: one["name"] for one in http.get("/sdapi/v1/schedulers").json()}
    assert listed["Align Your Steps"] == "align_your_steps"
    for i, (label, picture) in enumerate(wanted.items()):
        body = {**QUICK, "steps": 8, "prompt": "a horse", "sampler_name": "Euler"}
        body |= {"scheduler": label if i % 2 else listed[label]}
        told = http.post("/sdapi/v1/txt2img", json=body).json()
        made = opened(told["images"][0])
        assert difference(made, picture) <= 1, label
        shown = "Exponential" if label == "Polyexponential" else label
        assert f"Schedule type: {shown}," in json.loads(told["info"])["infotexts"][0]
        for other, away in wanted.items():
            assert other == label or difference(made, away) >= 2, (label, other)


def test_variations_and_noise_of_another_size_are_a1111s(http, small):
    settings = {"steps": 4, "seed": 5, "weighting": "a1111", "optimise": "none", "notice": lambda _: None}
    body = {**QUICK, "prompt": "a horse", "batch_size": 2}
    varied = {"subseed": 8, "subseed_strength": 0.3}
    told = http.post("/sdapi/v1/txt2img", json={**body, **varied}).json()
    lone = sample.generate(small, "a horse", num=2, variation_seed=8, variation_strength=0.3, **settings)
    [plain] = sample.generate(small, "a horse", **settings)
    for one, other in zip(told["images"], lone, strict=True):
        assert difference(opened(one), other.image) <= 1
        assert difference(opened(one), plain.image) >= 2
    info = json.loads(told["info"])
    assert (info["all_seeds"], info["all_subseeds"], info["subseed_strength"]) == ([5, 5], [8, 9], 0.3)
    drawn = json.loads(http.post("/sdapi/v1/txt2img", json={**body, "subseed_strength": 0.3}).json()["info"])
    assert drawn["all_subseeds"][1] == drawn["all_subseeds"][0] + 1
    assert drawn["all_subseeds"][0] not in (0, 8)
    resized = {"seed_resize_from_w": 24, "seed_resize_from_h": 24}
    made = opened(http.post("/sdapi/v1/txt2img", json={**body, **resized}).json()["images"][0])
    [lone] = sample.generate(small, "a horse", seed_size=(24, 24), **settings)
    assert difference(made, lone.image) <= 1
    assert difference(made, plain.image) >= 2
    one_side = http.post("/sdapi/v1/txt2img", json={**body, "seed_resize_from_w": 24}).json()
    assert difference(opened(one_side["images"][0]), plain.image) <= 1  # as in A1111


def test_what_a_masked_part_starts_from_is_a1111s(http, small):
    start = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (0, 0, 16, 32))
    body = {**QUICK, "prompt": "a horse", "init_images": [base64_of(start)], "mask": base64_of(mask)}
    settings = {"steps": 4, "seed": 5, "strength": 0.75, "weighting": "a1111", "optimise": "none"}
    wanted = {
        fill: sample.generate(
            small,
            "a horse",
            image=start,
            mask=mask,
            masked_content=content,
            notice=lambda _: None,
            **settings,
        )[0].image
        for fill, content in ((0, "fill"), (1, None), (2, "noise"), (3, "nothing"))
    }
    for fill, picture in (*wanted.items(), (None, wanted[0])):
        more = {} if fill is None else {"inpainting_fill": fill}
        made = opened(http.post("/sdapi/v1/img2img", json={**body, **more}).json()["images"][0])
        assert difference(made, picture) <= 1, fill
        for other, away in wanted.items():
            assert other == (fill or 0) or difference(made, away) >= 2, (fill, other)


def test_inpaint_full_res_draws_the_masked_part_alone_and_puts_it_back(http, small):
    start = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (40, 8, 52, 20))
    body = {**QUICK, "prompt": "a horse", "init_images": [base64_of(start)], "mask": base64_of(mask)}
    body |= {"inpainting_fill": 1}
    full = {"inpaint_full_res": True, "inpaint_full_res_padding": 2, "denoising_strength": 0.9}
    told = http.post("/sdapi/v1/img2img", json={**body, **full, "width": 32, "height": 32}).json()
    box = (38, 6, 54, 22)  # 12 by 12 pixels and 2 around
    settings = {"steps": 4, "seed": 5, "strength": 0.9, "weighting": "a1111", "size": (32, 32)}
    [alone] = sample.generate(
        small,
        "a horse",
        image=start.crop(box),
        mask=mask.crop(box),
        optimise="none",
        notice=lambda _: None,
        **settings,
    )
    wanted = start.copy()
    wanted.paste(alone.image.resize((16, 16), Image.Resampling.LANCZOS), box[:2])
    wanted = Image.composite(wanted, start, mask)
    made = opened(told["images"][0])
    assert made.size == (64, 64)
    assert difference(made, wanted) <= 2
    assert difference(made, start) >= 10
    assert json.loads(told["info"])["width"] == 64
    whole = http.post("/sdapi/v1/img2img", json={**body, "denoising_strength": 0.9}).json()
    assert difference(opened(whole["images"][0]).resize((64, 64)), wanted) >= 10
    empty = {**body, **full, "mask": base64_of(Image.new("L", (64, 64)))}
    refused = http.post("/sdapi/v1/img2img", json=empty)
    assert (refused.status_code, "nothing white" in refused.json()["detail"]) == (422, True)


def test_png_info_reads_back(http):
    image = http.post("/sdapi/v1/txt2img", json={**QUICK, "prompt": "a horse"}).json()["images"][0]
    told = http.post("/sdapi/v1/png-info", json={"image": image}).json()
    assert told["info"].startswith("a horse\nSteps: 4")
    assert (told["parameters"]["seed"], told["parameters"]["prompt"]) == (5, "a horse")
    empty = http.post("/sdapi/v1/png-info", json={"image": base64_of(Image.new("RGB", (8, 8)))}).json()
    assert empty == {"info": "", "items": {}, "parameters": {}}


def test_png_info_of_a_hostile_text_holds_nobody_up(http):
    texts = [
        "a" + " " * 1_000_000 + "!",
        "Steps: " * 100_000,
        'a\nSteps: 3, CFG scale: nan, Model: "\\ud800"',
    ]
    for text in texts:
        told = PngImagePlugin.PngInfo()
        told.add_text("parameters", text)
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, "PNG", pnginfo=told)
        start = time.monotonic()
        answer = http.post("/sdapi/v1/png-info", json={"image": base64.b64encode(buffer.getvalue()).decode()})
        assert (answer.status_code, answer.json()["info"]) == (200, text)
        assert time.monotonic() - start < 5


def test_lists(http):
    names = [one["name"] for one in http.get("/sdapi/v1/samplers").json()]
    assert {"Euler a", "DPM++ 2M Karras", "UniPC"} <= set(names)
    assert [one["name"] for one in http.get("/sdapi/v1/loras").json()] == [f"style{i}" for i in range(6)]
    assert http.get("/sdapi/v1/sd-models").json()[0]["model_name"] == "small"
    options = http.get("/sdapi/v1/options").json()
    assert options["sd_model_checkpoint"] == "small"
    assert http.post("/sdapi/v1/options", json=options).status_code == 200
    refused = http.post("/sdapi/v1/options", json={"sd_model_checkpoint": "other"})
    assert (refused.status_code, refused.json()["error"]) == (422, "invalid_value")
    assert "this server has 'small'" in refused.json()["detail"]


def test_what_clients_ask_for_around_the_pictures(http):
    for path in ("sd-vae", "sd-modules", "hypernetworks", "script-info", "prompt-styles", "face-restorers"):
        assert http.get(f"/sdapi/v1/{path}").json() == []
    for path in ("checkpoints", "vae", "loras", "embeddings"):
        assert http.post(f"/sdapi/v1/refresh-{path}").status_code == 200
    assert http.get("/sdapi/v1/scripts").json() == {"txt2img": [], "img2img": []}  # no nets here
    assert http.get("/sdapi/v1/cmd-flags").json()["ckpt"] == "small"
    ram = http.get("/sdapi/v1/memory").json()["ram"]
    assert 0 < ram["free"] < ram["total"] == ram["free"] + ram["used"]
    assert http.get("/sdapi/v1/embeddings").json() == {"loaded": {}, "skipped": {}}
    refused = http.post("/sdapi/v1/interrogate", json={"image": "", "model": "clip"})
    assert (refused.status_code, refused.json()["error"]) == (422, "not_served")
    assert refused.json()["detail"] == "interrogate: no model here describes pictures"


def test_pictures_are_made_larger(http):
    start = Image.linear_gradient("L").resize((32, 16)).convert("RGB")
    image = base64_of(start)
    sizes = {
        (64, 32): {"upscaling_resize": 2},
        (48, 48): {"resize_mode": 1, "upscaling_resize_w": 48, "upscaling_resize_h": 48},
        (40, 20): {
            "resize_mode": 1,
            "upscaling_resize_w": 40,
            "upscaling_resize_h": 48,
            "upscaling_crop": False,
        },
    }
    for size, how in sizes.items():
        body = {**how, "upscaler_1": "Lanczos"}
        one = http.post("/sdapi/v1/extra-single-image", json={**body, "image": image}).json()["image"]
        assert opened(one).size == size
        if "resize_mode" not in how:
            assert difference(opened(one), start.resize(size, Image.Resampling.LANCZOS)) == 0
            assert difference(opened(one), start.resize(size, Image.Resampling.NEAREST)) > 0
        several = {**body, "imageList": [{"data": image, "name": "a.png"}] * 2}
        assert http.post("/sdapi/v1/extra-batch-images", json=several).json()["images"] == [one] * 2
    for more, named in (
        ({"upscaler_1": "R-ESRGAN 4x+"}, "upscaler_1"),
        ({"gfpgan_visibility": 0.5}, "gfpgan_visibility"),
        ({"upscaler_1": "Lanczos", "resize_mode": 1, "upscaling_resize_w": 8192}, "upscaling_resize"),
    ):
        told = http.post("/sdapi/v1/extra-single-image", json={"image": image, **more})
        assert told.status_code == 422
        assert named in told.json()["detail"]


def test_progress_shows_the_picture_as_far_as_it_is_and_skip_ends_it(http):
    answers: list[int] = []

    def ask() -> None:
        body = {"prompt": "a horse", "steps": 150, "batch_size": 8}
        answers.append(http.post("/sdapi/v1/txt2img", json=body).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    start, shown = time.monotonic(), None
    while shown is None and time.monotonic() - start < 30:
        shown = http.get("/sdapi/v1/progress").json()["current_image"]
    assert shown is not None
    assert opened(shown).size == (32, 32)
    assert http.get("/sdapi/v1/progress?skip_current_image=true").json()["current_image"] is None
    assert http.post("/sdapi/v1/skip").status_code == 200
    asking.join(30)
    assert answers == [410]


def test_interrupt_ends_own_jobs_of_this_dialect_only(http):
    http.put("/jobs/native", json={"prompt": "a", "steps": 150, "num": 4})
    answers: list[int] = []
    body = {"prompt": "b", "steps": 150, "batch_size": 4}

    def ask() -> None:
        answers.append(http.post("/sdapi/v1/txt2img", json=body).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    start = time.monotonic()
    while not (told := http.get("/sdapi/v1/progress").json())["progress"]:
        assert time.monotonic() - start < 20
    assert 0 < told["progress"] < 1
    assert told["state"]["sampling_steps"] == 600
    assert told["state"]["job_count"] == 1
    assert http.post("/sdapi/v1/interrupt").json() == {}
    thread.join(20)
    assert answers == [410]
    assert http.get("/jobs/native").json()["state"] in ("running", "done")
    assert http.get("/sdapi/v1/progress").json()["state"]["job_count"] == 0
    http.delete("/jobs/native")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"enable_hr": True, "hr_upscaler": "ESRGAN_4x"}, "hr_upscaler"),
        ({"enable_hr": True, "hr_scale": 9}, "hr_scale"),
        ({"enable_hr": True, "hr_resize_x": 512}, "hr_resize_x"),
        ({"enable_hr": True, "denoising_strength": 0}, "denoising_strength"),
        ({"sampler_name": "DPM2"}, "sampler_name"),
        ({"scheduler": "Turbo"}, "scheduler"),
        ({"sampler_name": "DDIM", "scheduler": "Beta"}, "sigmas"),
        ({"inpainting_fill": 4}, "inpainting_fill"),
        ({"subseed_strength": 1.5}, "subseed_strength"),
        ({"seed_resize_from_w": 4, "seed_resize_from_h": 64}, "seed_resize_from_w"),
        ({"enable_hr": True, "hr_prompt": "a dog"}, "hr_prompt"),
        ({"enable_hr": True, "hr_negative_prompt": "a dog"}, "hr_negative_prompt"),
        ({"enable_hr": True, "hr_sampler_name": "DDIM"}, "hr_sampler_name"),
        ({"enable_hr": True, "hr_cfg": 3.5}, "hr_cfg"),
        ({"styles": ["oil"]}, "styles"),
        ({"s_churn": 0.5}, "s_churn"),
        ({"s_churn": math.nan}, "s_churn"),
        ({"s_noise": 0.9}, "s_noise"),
        ({"resize_mode": 1}, "resize_mode"),
        ({"eta_noise_seed_delta": 31337}, "eta_noise_seed_delta"),
        ({"nonsense": 1}, "nonsense"),
        ({"steps": "20"}, "steps"),
        ({"cfg_scale": 1e300}, "cfg_scale"),
        ({"override_settings": {"sd_vae": "other"}}, "override_settings"),
        ({"alwayson_scripts": {"controlnet": {}}}, "alwayson_scripts"),
    ],
)
def test_what_is_not_served_is_refused_by_name(http, more, named):
    body = json.dumps({"prompt": "a", **more})
    told = http.post("/sdapi/v1/txt2img", content=body, headers={"Content-Type": "application/json"})
    assert told.status_code == 422
    assert named in told.json()["detail"]


def test_what_changes_nothing_is_taken_and_only_what_is_known_comes_back(http):
    neutral = {
        "styles": [],
        "s_churn": 0.0,
        "s_noise": 1.0,
        "s_tmax": None,
        "resize_mode": 0,
        "seed_resize_from_h": -1,
        "seed_resize_from_w": -1,
        "hr_prompt": "unused without a second pass",
        "mask_blur": 4,
        "infotext": "\ud800",
        "override_settings": {"samples_format": "\ud800", "CLIP_stop_at_last_layers": 1},
    }
    body = json.dumps({**QUICK, "prompt": "a", **neutral})
    told = http.post("/sdapi/v1/txt2img", content=body, headers={"Content-Type": "application/json"})
    assert told.status_code == 200
    given = told.json()["parameters"]
    assert (given["steps"], given["override_settings"]) == (4, {"CLIP_stop_at_last_layers": 1})
    assert "infotext" not in given
    again = {"enable_hr": True, "hr_scale": 1.5, "hr_prompt": "a", "hr_cfg": 5.0, "cfg_scale": 5.0}
    assert http.post("/sdapi/v1/txt2img", json={**QUICK, "prompt": "a", **again}).status_code == 200


def test_hostile_pictures_are_refused(http):
    noise = np.random.default_rng(0).integers(0, 256, 300, dtype=np.uint8).tobytes()
    for given in (
        "http://localhost/x.png",
        "file:///etc/passwd",
        "!!",
        base64_of(Image.new("L", (9, 9)))[:40],
        noise.hex(),
    ):
        told = http.post("/sdapi/v1/img2img", json={"prompt": "a", "init_images": [given]})
        assert told.status_code == 422
        assert "init_images" in told.json()["detail"]


def test_a_second_pass_makes_the_picture_larger(http, small):
    body = {"prompt": "a", "steps": 4, "seed": 3, "width": 32, "height": 32}
    more = {"enable_hr": True, "hr_scale": 1.5, "hr_second_pass_steps": 6, "denoising_strength": 0.3}
    told = http.post("/sdapi/v1/txt2img", json={**body, **more, "hr_upscaler": "Lanczos"}).json()
    [image] = told["images"]
    assert opened(image).size == (48, 48)
    text = json.loads(told["info"])["infotexts"][0]
    assert "Hires upscale: 1.5" in text
    assert "Denoising strength: 0.3" in text
    assert "Hires steps: 6" in text
    asked = sample.Hires(scale=1.5, strength=0.3, steps=20, upscaler="lanczos")  # six of twenty are taken
    lone, fewer = (
        sample.generate(small, "a", steps=4, seed=3, size=(32, 32), hires=hires, optimise="none")[0].image
        for hires in (asked, asked.model_copy(update={"steps": 6}))
    )
    assert difference(opened(image), lone) <= 1
    assert difference(opened(image), fewer) >= 2
    plain = http.post("/sdapi/v1/txt2img", json=body).json()["images"][0]
    assert opened(plain).size == (32, 32)
    assert change(opened(image).resize((32, 32)), opened(plain)) > 1


def test_more_pictures_than_a_job_may_have_are_refused_not_left_out(http):
    told = http.post("/sdapi/v1/txt2img", json={"prompt": "a", "batch_size": 40, "n_iter": 40})
    assert (told.status_code, told.json()["detail"]) == (
        422,
        "batch_size times n_iter: at most 16 pictures",
    )


def test_work_on_pictures_outside_of_jobs_takes_turns_and_holds_up_no_job(run_http, tmp_path):
    file = tmp_path / "keys.txt"
    keys = {name: {"Authorization": f"Bearer {make_key(file, name)}"} for name in ("alice", "bob")}
    body = {"image": base64_of(Image.new("RGB", (1024, 1024), "red")), "upscaler_1": "Lanczos"}

    async def scenario(core, http):
        async def enlarged():
            return await http.post("/sdapi/v1/extra-single-image", json=body, headers=keys["alice"])

        async def drawn():
            job = {"prompt": "a", "steps": 2}
            answer = await http.post("/jobs", json=job, headers=keys["bob"])
            asked = f"/jobs/{answer.json()['id']}?wait_s=30"
            return (await http.get(asked, headers=keys["bob"])).json()["state"]

        many = [asyncio.create_task(enlarged()) for _ in range(40)]
        while sum(core.bench._here.values()) < 32:
            await asyncio.sleep(0.001)
        other = await http.post("/maps", json={"image": body["image"], "map": "invert"}, headers=keys["bob"])
        assert (other.status_code, await drawn()) == (200, "done")
        assert sum(not one.done() for one in many) > 16, "who came later did not wait for all of them"
        return [(one.status_code, one.headers.get("retry-after")) for one in await asyncio.gather(*many)]

    answers = run_http(scenario, key_file=file)
    assert sorted(set(answers), key=str) == [(200, None), (429, "5")]
    assert answers.count((200, None)) >= 32


def test_the_border_of_a_picture_of_one_row_is_found_in_no_time(small):
    picture = np.zeros((1, 3_000_000, 3), np.uint8)
    picture[:, :2_000_000] = (200, 10, 90)
    tracemalloc.start()
    made = _shaped(png_of(Image.fromarray(picture)), (64, 32), "fill", Limits())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened(made).getpixel((0, 0)) == (200, 10, 90)
    assert peak < 150 * 2**20
