"""The package webuiapi with its own defaults against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webuiapi
from PIL import Image, ImageFilter, ImageOps

from darkroom import sample
from serve.conftest import Server, difference
from serve.nets import steering, write_nets

QUIET: dict[str, Any] = {"optimise": "none", "notice": lambda _: None, "weighting": "a1111"}
SIDES = {"width": 32, "height": 32}


@pytest.fixture(scope="module")
def nets(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nets")
    write_nets(folder, small, small)
    return folder


@pytest.fixture(scope="module")
def api(nets, model_folder, adapter_folder, tmp_path_factory) -> Iterator[Any]:
    """The package's client of a server that has adapters and nets."""
    state = tmp_path_factory.mktemp("webuiapi") / "state"
    server = Server(model_folder, state, "--adapters", str(adapter_folder), "--controls", str(nets))
    server.ready()
    host, _, port = server.url.removeprefix("http://").partition(":")
    yield webuiapi.WebUIApi(host=host, port=int(port), steps=4)
    server.kill()


def test_txt2img(api, small):
    made = api.txt2img(prompt="a (red:1.2) horse", seed=5, **SIDES)
    told = {"steps": 4, "seed": 5, "guidance": 7.0, "solver": "euler_a"}
    lone = sample.generate(small, "a (red:1.2) horse", **told, **QUIET)[0].image
    assert difference(made.image, lone) <= 1
    assert (made.info["all_seeds"], made.parameters["sampler_name"]) == ([5], "Euler a")
    varied = api.txt2img(prompt="a (red:1.2) horse", seed=5, subseed=6, subseed_strength=0.5, **SIDES)
    assert difference(varied.image, lone) >= 3
    larger = api.txt2img(prompt="a horse", seed=5, enable_hr=True, **SIDES)
    assert larger.image.size == (64, 64)


def test_img2img_and_inpainting_with_every_default(api, small):
    """The mask is blurred, what is under it filled, and its part alone drawn at the full size."""
    start = steering(3)
    told = {"steps": 4, "seed": 5, "guidance": 7.0, "solver": "euler_a", "strength": 0.75}
    lone = sample.generate(small, "a horse", image=start, **told, **QUIET)[0].image
    made = api.img2img(images=[start], prompt="a horse", seed=5, **SIDES)
    assert difference(made.image, lone) <= 1
    mask = Image.new("L", (32, 32))
    mask.paste(255, (8, 8, 24, 24))
    made = api.img2img(images=[start], mask_image=mask, prompt="a horse", seed=5, **SIDES)
    soft = mask.filter(ImageFilter.GaussianBlur(4))
    more = {"mask": soft, "only_masked": 0, "masked_content": "fill", "size": (32, 32)}
    lone = sample.generate(small, "a horse", image=start, **more, **told, **QUIET)[0].image
    assert difference(made.image, lone) <= 1
    kept = sample.generate(small, "a horse", image=start, **{**more, "masked_content": None}, **told, **QUIET)
    assert difference(made.image, kept[0].image) >= 2


def test_controlnet_units(api, nets, small):
    unit = webuiapi.ControlNetUnit(image=steering(9), model="edges", resize_mode="Just Resize")
    made = api.txt2img(prompt="a horse", seed=5, controlnet_units=[unit], **SIDES)
    told = {"steps": 4, "seed": 5, "guidance": 7.0, "solver": "euler_a"}
    steered = [sample.Control(nets / "edges", steering(9))]
    lone = sample.generate(small, "a horse", controls=steered, **told, **QUIET)[0].image
    assert difference(made.image, lone) <= 2
    plain = sample.generate(small, "a horse", **told, **QUIET)[0].image
    assert difference(made.image, plain) >= 4
    # The package keeps the units in a default of its own; it clears them where it knows the extension.
    assert difference(api.txt2img(prompt="a horse", seed=5, **SIDES).image, plain) <= 1
    usual = webuiapi.ControlNetUnit(image=steering(9).resize((64, 32)), model="edges", control_mode=1)
    assert api.img2img(images=[steering(3)], controlnet_units=[usual], **SIDES).image.size == (32, 32)
    assert "edges" in api.controlnet_model_list()
    assert webuiapi.ControlNetInterface(api).model_list() == api.controlnet_model_list()
    assert "canny" in api.controlnet_module_list()
    assert api.controlnet_version() >= 2
    seen = api.controlnet_detect([steering(9)], module="invert").image
    assert difference(ImageOps.invert(seen), steering(9)) == 0


def test_lists_options_and_work_on_pictures(api):
    assert api.util_get_model_names() == ["small"]
    assert api.util_get_current_model() == "small"
    assert "Euler a" in [one["name"] for one in api.get_samplers()]
    assert "Align Your Steps" in [one["label"] for one in api.custom_get("schedulers", baseurl=True)]
    assert "style1" in [one["name"] for one in api.get_loras()]
    api.util_set_model("small")
    assert api.get_progress()["progress"] == 0
    assert {"ram", "cuda"} <= api.get_memory().keys()
    lists = ("upscalers", "latent_upscale_modes", "sd_models", "schedulers", "samplers")
    for name in lists:
        assert {"name", "title"} & getattr(api, f"get_{name}")()[0].keys(), name
    for name in ("sd_vae", "hypernetworks", "face_restorers", "realesrgan_models", "prompt_styles"):
        assert getattr(api, f"get_{name}")() == [], name
    assert api.get_scripts()["txt2img"][0] == "controlnet"
    assert api.get_embeddings() == {"loaded": {}, "skipped": {}}
    assert api.get_cmd_flags()["ckpt"] == "small"
    assert "Euler a" in api.util_get_sampler_names()
    assert "kl_optimal" in api.util_get_scheduler_names()
    assert api.set_options(api.get_options()) is None
    api.util_wait_for_ready()
    with pytest.raises(RuntimeError, match="no model here describes pictures"):
        api.interrogate(steering(3))
    for told in ("refresh_checkpoints", "interrupt", "skip"):
        assert getattr(api, told)() == {}
    start = steering(3)
    larger = api.extra_single_image(start, upscaler_1="Lanczos", upscaling_resize=2)
    assert larger.image.size == (64, 64)
    assert api.extra_single_image(start).image.size  # its own default names no upscaler
    both = api.extra_batch_images([start, steering(4)], upscaler_1="Lanczos")
    assert [one.size for one in both.images] == [(64, 64)] * 2
    made = api.txt2img(prompt="a horse", seed=5, **SIDES)
    assert "Steps: 4" in api.png_info(made.image).info
