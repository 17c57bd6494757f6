"""What steers pictures beside prompts, through HTTP: embeddings by name, nets with their pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from safetensors.torch import save_file

from darkroom import models, sample
from darkroom.models.upscaler import read_upscaler
from darkroom.sample import Control, Hires
from darkroom.serve.api.controlnet import Unit
from darkroom.serve.engine.tickets import png_of
from serve.api.conftest import base64_of, opened
from serve.conftest import Server, difference
from serve.nets import NAMES, file_of, steering, write_nets, write_network

QUICK: dict[str, Any] = {"steps": 4, "seed": 5}


def write_embeddings(folder: Path, width: int) -> None:
    """`zorp` for the model, `foreign` for one of another width."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    for name, wide in (("zorp", width), ("foreign", width + 8)):
        vectors = 3 * torch.randn(2, wide, generator=draw)
        save_file({"emb_params": vectors}, str(folder / f"{name}.safetensors"))


@pytest.fixture(scope="module")
def nets(small, tmp_path_factory) -> Path:
    """A folder of nets."""
    folder = tmp_path_factory.mktemp("nets")
    write_nets(folder, small, models.create("tiny", seed=1))
    return folder


@pytest.fixture(scope="module")
def http(small, nets, model_folder, adapter_folder, tmp_path_factory) -> Iterator[Any]:
    """A server with embeddings, adapters and nets, with memory for two nets."""
    folder = tmp_path_factory.mktemp("conditions")
    write_embeddings(folder / "embeddings", small.text_encoders[0].config.hidden_size)
    (folder / "upscalers").mkdir()
    write_network(folder / "upscalers" / "4x_soft.safetensors")
    needs = 4 * models.describe_control(nets / "edges", small).num_weights
    server = Server(
        model_folder,
        folder / "state",
        *("--embeddings", str(folder / "embeddings"), "--adapters", str(adapter_folder)),
        *("--upscalers", str(folder / "upscalers")),
        *("--controls", str(nets), "--control-memory", str(int(2.2 * needs))),
    )
    yield server.ready().http
    server.kill()


def drawn(http: Any, **body: Any) -> Image.Image:
    told = http.post("/sdapi/v1/txt2img", json={**QUICK, **body})
    assert told.status_code == 200, told.text
    return opened(told.json()["images"][0])


def test_embeddings_are_words_of_every_api_and_listed(http, small):
    listed = http.get("/sdapi/v1/embeddings").json()
    wide = small.text_encoders[0].config.hidden_size
    plain = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "vectors": 2}
    assert listed == {
        "loaded": {"zorp": {**plain, "shape": wide}},
        "skipped": {"foreign": {**plain, "shape": wide + 8}},
    }
    assert http.get("/model").json()["embeddings"] == ["zorp"]
    body = {"num_inference_steps": 4, "seed": 5, "response_format": "b64_json"}
    pictures = {
        word: opened(
            http.post("/v1/images/generations", json={**body, "prompt": f"a {word}"}).json()["data"][0][
                "b64_json"
            ]
        )
        for word in ("zorp", "ZORP", "zorb")
    }
    assert difference(pictures["zorp"], pictures["ZORP"]) == 0
    assert difference(pictures["zorp"], pictures["zorb"]) >= 3
    assert difference(drawn(http, prompt="a zorp"), pictures["zorp"]) <= 1


ALONE: dict[str, Any] = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None}


def test_prompts_composed_by_and_are_generates(http, small):
    asked = "a horse AND a [red|blue] circle :0.6 AND fog : -0.5"
    made = drawn(http, prompt=asked, negative_prompt="grey", cfg_scale=4.0)
    for prompt, apart in ((asked, False), ("a horse", True), ("a horse AND a [red|blue] circle", True)):
        lone = sample.generate(small, prompt, negative="grey", guidance=4.0, weighting="a1111", **ALONE)[
            0
        ].image
        assert (difference(made, lone) >= 3) == apart
    told = http.post("/sdapi/v1/txt2img", json={**QUICK, "prompt": " AND ".join("abcdefghijklmnopq")})
    assert (told.status_code, "17 prompts joined by AND" in told.json()["detail"]) == (422, True)


def test_samplers_and_schedules_of_a1111_are_generates(http, small):
    for names, ours in (
        ({"sampler_name": "Heun", "scheduler": "exponential"}, {"solver": "heun", "exponential": True}),
        ({"sampler_name": "DPM++ SDE Karras"}, {"solver": "dpmpp_sde", "karras": True}),
        (
            {"sampler_name": "DPM++ 3M SDE", "scheduler": "SGM Uniform"},
            {"solver": "dpmpp_3m_sde", "spacing": "trailing"},
        ),
    ):
        made = drawn(http, prompt="a horse", **names)
        lone, other = (
            sample.generate(small, "a horse", **some, **ALONE)[0].image
            for some in (ours, {"solver": "euler"})
        )
        assert difference(made, lone) <= 1
        assert difference(made, other) >= 2
    named = {one["name"] for one in http.get("/sdapi/v1/schedulers").json()}
    assert {"exponential", "sgm_uniform", "karras"} <= named


def test_networks_make_pictures_larger_by_name(http, small, tmp_path):
    names = [one["name"] for one in http.get("/sdapi/v1/upscalers").json()]
    assert names == ["Latent", "Lanczos", "4x_soft"]
    network = read_upscaler(write_network(tmp_path / "4x_soft.safetensors"))
    start = steering(3)
    body = {"image": base64_of(start), "upscaler_1": "4x_soft", "upscaling_resize": 3}
    made = opened(http.post("/sdapi/v1/extra-single-image", json=body).json()["image"])
    expected = network.enlarge(start).resize((96, 96), Image.Resampling.LANCZOS)
    assert difference(made, expected) <= 1
    assert difference(made, start.resize((96, 96), Image.Resampling.LANCZOS)) >= 20
    hires = {"enable_hr": True, "hr_scale": 1.5, "denoising_strength": 0.5}
    made = drawn(http, prompt="a horse", hr_upscaler="4x_soft", **hires)
    lone, plain = (
        sample.generate(
            small,
            "a horse",
            weighting="a1111",
            hires=Hires(scale=1.5, strength=0.5, steps=8, upscaler=name),
            hires_network=given,
            **ALONE,
        )[0].image
        for name, given in (("4x_soft", network), ("lanczos", None))
    )
    assert difference(made, lone) <= 1
    assert difference(made, plain) >= 3
    [whole] = sample.generate(small, "a horse", upscale=network, **ALONE)
    [before] = sample.generate(small, "a horse", **ALONE)
    assert difference(whole.image, network.enlarge(before.image)) == 0
    assert (whole.parameters["upscaler"], whole.parameters["upscaled_size"]) == ("4x_soft", "128x128")
    told = http.post("/jobs", json={"prompt": "a", "hires": {"scale": 2, "upscaler": "8x_hard"}})
    assert (told.status_code, "no upscaler '8x_hard' here; allowed: 4x_soft" in told.text) == (422, True)


MASK = Image.new("L", (32, 32))
MASK.paste(255, (0, 0, 16, 32))
MIXED: list[list[dict[str, Any]]] = [
    [],
    [{"net": "edges"}],
    [{"net": "depth", "weight": 0.7, "start": 0.25}, {"net": "edges", "weight": 0.5, "guess": True}],
    [],
    [{"net": "sketch", "weight": 0.8, "end": 0.5}],
    [{"net": "depth", "map": "invert"}],
    [{"net": "edges"}, {"net": "sketch"}],
    [{"net": "pose"}],
    [{"net": "face", "weight": 0.9}],
    [{"net": "face", "weight": 0.9}, {"net": "pose"}],
    [{"net": "face", "weight": 2.0, "mask": MASK}],
    [{"net": "lines", "end": 0.7}],
    [{"net": "lines", "weight": 0.8}, {"net": "face", "weight": 0.9}],
    [{"net": "edges", "soft": True}],
]
LARGER, HIRES = 6, {"scale": 1.5, "strength": 0.6}
"""The request with a second pass."""


def told_of(control: dict[str, Any], image: Image.Image) -> dict[str, Any]:
    """As JSON has it."""
    mask = {"mask": base64_of(control["mask"])} if "mask" in control else {}
    return {**control, "image": base64_of(image), **mask}


def test_each_row_of_a_mixed_batch_is_its_lone_run(http, small, nets):
    bodies = [
        {
            "prompt": f"a horse number {i}",
            "steps": 6 + i % 2,
            "seed": i,
            "guidance": 4.0 if i % 3 else 1.0,
            "solver": "euler",
            "adapters": [{"name": "style1"}] if i == 5 else [],
            "hires": HIRES if i == LARGER else None,
            "controls": [told_of(one, steering(i + j)) for j, one in enumerate(controls)],
        }
        for i, controls in enumerate(MIXED)
    ]
    jobs = [http.post("/jobs", json=body).json()["id"] for body in bodies]
    for i, (job, controls) in enumerate(zip(jobs, MIXED, strict=True)):
        told = http.get(f"/jobs/{job}", params={"wait_s": 60}).json()
        assert told["state"] == "done", told
        made = opened(http.get(f"/jobs/{job}/pictures/0").content)
        if i == 5:  # its adapter is compared elsewhere
            continue
        asked = [
            Control(
                file_of(nets, one["net"]), steering(i + j), **{k: v for k, v in one.items() if k != "net"}
            )
            for j, one in enumerate(controls)
        ]
        lone, plain = (
            sample.generate(
                small,
                f"a horse number {i}",
                steps=6 + i % 2,
                seed=i,
                guidance=4.0 if i % 3 else 1.0,
                solver="euler",
                controls=some,
                hires=Hires(**HIRES) if i == LARGER else None,
                optimise="none",
                notice=lambda _: None,
            )[0]
            for some in (asked, [])
        )
        assert difference(made, lone.image) <= 2, controls
        assert (difference(made, plain.image) >= 4) == bool(controls)
        assert [one["name"] for one in told["pictures"][0].get("controls", [])] == [
            one["net"] for one in controls
        ]
    cards = {card["name"]: card for card in http.get("/model").json()["controls"]}
    needs = {name: models.describe_control(file_of(nets, name), small).num_weights for name in NAMES}
    loaded = sum(needs[name] for name, card in cards.items() if card["loaded"])
    assert 0 < loaded <= 2.2 * needs["edges"] < sum(needs.values())


def ask(http: Any, dialect: str, controls: list[dict[str, Any]]) -> Any:
    """A picture in a dialect, with these nets or none."""
    if dialect == "openai":
        body = {"prompt": "a horse", "seed": 5, "num_inference_steps": 4, "response_format": "b64_json"}
        return http.post("/v1/images/generations", json={**body, "controls": controls})
    if dialect == "huggingface":
        told = {"seed": 5, "num_inference_steps": 4, "controls": controls}
        return http.post("/", json={"inputs": "a horse", "parameters": told})
    if dialect == "kserve":
        name = http.get("/model").json()["name"]
        prompt = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["a horse"]}
        told = {"seed": 5, "steps": 4, "controls": json.dumps(controls)}
        return http.post(f"/v2/models/{name}/infer", json={"inputs": [prompt], "parameters": told})
    units = [{"model": f"{one['net']} [0123abcd]", "image": one["image"]} for one in controls]
    return http.post(
        "/sdapi/v1/txt2img",
        json={**QUICK, "prompt": "a horse", "alwayson_scripts": {"ControlNet": {"args": units}}},
    )


def picture_of(answer: Any, dialect: str) -> Image.Image:
    assert answer.status_code == 200, answer.text
    if dialect == "huggingface":
        return opened(answer.content)
    told = answer.json()
    found = {
        "openai": lambda: told["data"][0]["b64_json"],
        "kserve": lambda: told["outputs"][0]["data"][0],
        "a1111": lambda: told["images"][0],
    }
    return opened(found[dialect]())


def test_every_dialect_takes_nets(http, nets, small):
    wanted = [{"net": "edges", "image": base64_of(steering(9))}]
    settings = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None}
    steered = [Control(nets / "edges", steering(9))]
    lone = sample.generate(small, "a horse", controls=steered, **settings)[0].image
    for dialect in ("openai", "huggingface", "kserve", "a1111"):
        assert difference(picture_of(ask(http, dialect, wanted), dialect), lone) <= 2, dialect
        assert difference(picture_of(ask(http, dialect, []), dialect), lone) >= 4, dialect


def test_two_weights_of_a_tag_and_a_second_pass_in_every_dialect(http, small, adapter_folder):
    """`<lora:NAME:TEXT:UNET>` and hires, against the lone run of the adapter so weighted."""
    prompt, second = "a horse <lora:style1:0.3:0.9>", {"scale": 1.5, "strength": 0.5}
    name = http.get("/model").json()["name"]
    told = {"seed": 5, "num_inference_steps": 4, "hires": second}
    hires_of_a1111 = {"enable_hr": True, "hr_scale": 1.5, "denoising_strength": 0.5, "hr_upscaler": "Latent"}
    hires_of_a1111["hr_second_pass_steps"] = 2  # taken; ours are those of which the strength is a share
    data = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": [prompt]}
    answers = {
        "openai": http.post(
            "/v1/images/generations", json={**told, "prompt": prompt, "response_format": "b64_json"}
        ),
        "huggingface": http.post("/", json={"inputs": prompt, "parameters": told}),
        "kserve": http.post(
            f"/v2/models/{name}/infer",
            json={"inputs": [data], "parameters": {**told, "hires": json.dumps(second)}},
        ),
        "a1111": http.post("/sdapi/v1/txt2img", json={**QUICK, "prompt": prompt, **hires_of_a1111}),
    }
    lone, other, small_one = (
        sample.generate(
            small,
            prompt.replace("0.3:0.9", weights),
            adapters={"style1": adapter_folder / "style1.safetensors"},
            hires=hires,
            **ALONE,
        )[0].image
        for weights, hires in (("0.3:0.9", Hires(**second)), ("0.9:0.3", Hires(**second)), ("0.3:0.9", None))
    )
    assert lone.size == (48, 48)
    assert small_one.size == (32, 32)
    assert difference(lone, other) >= 3
    for dialect, answer in answers.items():
        assert difference(picture_of(answer, dialect), lone) <= 2, dialect


def test_a_picture_to_start_from_goes_with_nets(http, nets, small):
    start = steering(3)
    told = {"steps": 4, "seed": 5, "strength": 0.8, "optimise": "none", "notice": lambda _: None}
    for net_picture in (steering(9), start):
        steered = [Control(nets / "edges", net_picture)]
        lone = sample.generate(small, "a horse", image=start, controls=steered, **told)[0].image
        unit = {"model": "edges", "module": "None", "resize_mode": "Just Resize"}
        if net_picture is start:  # that of img2img where the unit has none
            form = {"image": base64_of(start)}
        else:
            form = {"image": base64_of(net_picture)}
            unit |= form
        body = {
            **QUICK,
            "prompt": "a horse",
            "denoising_strength": 0.8,
            "init_images": [base64_of(start)],
            "alwayson_scripts": {"controlnet": {"args": [unit, {"enabled": False}]}},
        }
        answer = http.post("/sdapi/v1/img2img", json=body)
        assert difference(picture_of(answer, "a1111"), lone) <= 2
        fields = {"prompt": "a horse", "seed": "5", "num_inference_steps": "4", "strength": "0.8"}
        answer = http.post(
            "/v1/images/edits",
            data={**fields, "controls": json.dumps([{"net": "edges", **form}])},
            files={"image": ("a.png", png_of(start), "image/png")},
        )
        assert difference(picture_of(answer, "openai"), lone) <= 2
    plain = sample.generate(small, "a horse", image=start, **told)[0].image
    assert difference(plain, lone) >= 4


def test_an_inpainting_net_has_its_mask_in_each_api(http, nets, small):
    """Of the native API its own; of A1111's units theirs, else img2img's."""
    start = steering(3)
    mask = Image.new("L", (32, 32))
    mask.paste(255, (8, 8, 24, 24))
    told = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None}
    control = Control(nets / "edges", start, map="inpaint", mask=mask)
    lone = sample.generate(small, "a horse", controls=[control], **told)[0].image
    whole = sample.generate(small, "a horse", controls=[Control(nets / "edges", start)], **told)[0].image
    given = {"net": "edges", "image": base64_of(start), "map": "inpaint", "mask": base64_of(mask)}
    unit = {"model": "edges", "image": base64_of(start), "module": "inpaint_only", "mask": base64_of(mask)}
    made = [
        picture_of(ask(http, "openai", [given]), "openai"),
        drawn(http, prompt="a horse", alwayson_scripts={"controlnet": {"args": [unit]}}),
    ]
    for one in made:
        assert difference(one, lone) <= 2
        assert difference(one, whole) >= 4
    more = {"init_images": [base64_of(start)], "mask": base64_of(mask), "inpainting_fill": 1}
    units = {"controlnet": {"args": [{"model": "edges", "module": "inpaint_only"}]}}
    body = {**QUICK, "prompt": "a horse", "denoising_strength": 0.8, **more, "alwayson_scripts": units}
    made = picture_of(http.post("/sdapi/v1/img2img", json=body), "a1111")
    redone = {"image": start, "mask": mask, "strength": 0.8, "weighting": "a1111"}
    lone = sample.generate(small, "a horse", controls=[control], **redone, **told)[0].image
    assert difference(made, lone) <= 2
    refused = http.post("/jobs", json={"prompt": "a", "controls": [{**given, "mask": None}]})
    assert (refused.status_code, "inpaint" in refused.text) == (422, True)


def test_openais_further_pictures_guide_by_the_image_prompt(http, nets, small):
    """The first is edited; the others are shown by the IP-Adapter there is, or by one that is named."""
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    start, *shown = (steering(seed) for seed in (3, 9, 12))
    told = {"steps": 4, "seed": 5, "strength": 0.8, "optimise": "none", "notice": lambda _: None}
    lone = {
        num: sample.generate(
            small,
            "a horse",
            image=start,
            controls=[Control(nets / "face.safetensors", one, 0.7) for one in shown[:num]],
            **told,
        )[0].image
        for num in (0, 1, 2)
    }
    more = {"seed": 5, "num_inference_steps": 4, "strength": 0.8, "reference_weight": 0.7}
    for num, named in ((1, {}), (2, {"reference_net": "face"})):
        files = [png_of(one) for one in (start, *shown[:num])]
        made = client.images.edit(image=files, prompt="a horse", extra_body={**more, **named})
        picture = opened(made.data[0].b64_json or "")
        assert difference(picture, lone[num]) <= 2
        assert all(difference(picture, away) >= 3 for other, away in lone.items() if other != num)
    with pytest.raises(openai.BadRequestError, match="nobody"):
        client.images.edit(
            image=[png_of(start)] * 2, prompt="a", extra_body={**more, "reference_net": "nobody"}
        )


def test_of_a_part_alone_the_map_is_that_part_too(http, nets, small):
    start, whole = (steering(seed).resize((64, 64), Image.Resampling.NEAREST) for seed in (3, 9))
    mask = Image.new("L", (64, 64))
    mask.paste(255, (40, 8, 56, 24))
    box = (38, 6, 58, 26)
    body = {
        **QUICK,
        "prompt": "a horse",
        "denoising_strength": 1.0,
        "width": 32,
        "height": 32,
        "init_images": [base64_of(start)],
        "mask": base64_of(mask),
        "inpaint_full_res": 1,
        "inpainting_fill": 1,
        "inpaint_full_res_padding": 2,
        "alwayson_scripts": {"controlnet": {"args": [{"model": "edges", "image": base64_of(whole)}]}},
    }
    made = picture_of(http.post("/sdapi/v1/img2img", json=body), "a1111").crop((40, 8, 56, 24))
    alone, otherwise = (
        sample.generate(
            small,
            "a horse",
            image=start.crop(box),
            mask=mask.crop(box),
            controls=[Control(nets / "edges", seen)],
            size=(32, 32),
            steps=4,
            seed=5,
            strength=1.0,
            optimise="none",
            notice=lambda _: None,
        )[0]
        .image.resize((20, 20), Image.Resampling.LANCZOS)
        .crop((2, 2, 18, 18))
        for seen in (whole.crop(box), whole)
    )
    assert difference(made, alone) <= 2
    assert difference(made, otherwise) >= 4


def test_a_units_picture_is_cut_to_the_shape(http, nets, small):
    wide = steering(9).resize((64, 32), Image.Resampling.NEAREST)
    found = {}
    for mode in (0, 1, 2):
        unit = {"model": "edges", "image": base64_of(wide), "resize_mode": mode}
        body = {**QUICK, "prompt": "a horse", "alwayson_scripts": {"controlnet": {"args": [unit]}}}
        found[mode] = picture_of(http.post("/sdapi/v1/txt2img", json=body), "a1111")
    settings = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None}
    for mode, seen in ((0, wide), (1, wide.crop((16, 0, 48, 32)))):
        lone = sample.generate(small, "a horse", controls=[Control(nets / "edges", seen)], **settings)[0]
        assert difference(found[mode], lone.image) <= 2
    assert difference(found[0], found[1]) >= 3
    assert difference(found[2], found[1]) >= 3
    for unit, named in (
        ({"model": "None"}, "model_list"),
        ({"model": "edges", "module": "openpose"}, "module"),
        ({"model": "edges", "control_mode": 3}, "control_mode"),
        ({"model": "edges", "weight": "much"}, "weight"),
    ):
        body = {"prompt": "a", "alwayson_scripts": {"controlnet": {"args": [unit]}}}
        told = http.post("/sdapi/v1/txt2img", json=body)
        assert told.status_code == 422
        assert named in told.json()["detail"]


def test_the_extensions_modes_are_soft_and_guess(http, nets, small):
    settings = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None}
    modes: list[tuple[int | str, dict[str, Any]]] = [
        (0, {}),
        (1, {"soft": True}),
        ("My prompt is more important", {"soft": True}),
        (2, {"guess": True}),
    ]
    for net in ("edges", "sketch"):
        lone = {
            mode: sample.generate(
                small,
                "a horse",
                guidance=5.0,
                controls=[Control(nets / net, steering(9), **ours)],
                **settings,
            )[0].image
            for mode, ours in modes
        }
        for mode, picture in lone.items():
            unit = {"model": net, "image": base64_of(steering(9)), "control_mode": mode}
            body = {**QUICK, "prompt": "a horse", "cfg_scale": 5.0}
            body |= {"alwayson_scripts": {"controlnet": {"args": [unit]}}}
            made = picture_of(http.post("/sdapi/v1/txt2img", json=body), "a1111")
            assert difference(made, picture) <= 2, (net, mode)
        assert difference(lone[0], lone[1]) >= 3
        assert difference(lone[2], lone[1]) >= 3


def test_the_extensions_lists(http):
    assert http.get("/controlnet/model_list").json() == {"model_list": sorted([*NAMES, "broken", "foreign"])}
    modules = http.get("/controlnet/module_list").json()["module_list"]
    assert {"none", "canny", "scribble_xdog"} <= set(modules)
    body = {"controlnet_module": "invert", "controlnet_input_images": [base64_of(steering(1))]}
    made = opened(http.post("/controlnet/detect", json=body).json()["images"][0])
    assert difference(ImageOps.invert(made), steering(1)) == 0


def test_the_extensions_thresholds_count(http):
    """Its usual ones are 100 and 200 (canny), 32 (xdog) and a sigma of 9 (blur); -1 asks for them."""
    for module, given, wanted in (
        ("canny", {}, "canny:100:200"),
        ("canny", {"threshold_a": -1, "threshold_b": -1}, "canny:100:200"),
        ("canny", {"threshold_a": 64, "threshold_b": 64}, "canny:64:64"),
        ("blur_gaussian", {}, "blur:9"),
        ("blur_gaussian", {"threshold_a": 2.5, "threshold_b": 64}, "blur:2.5"),
        ("scribble_xdog", {"threshold_a": 12}, "scribble:12"),
        ("none", {"threshold_a": 64, "threshold_b": 64}, "none"),
    ):
        assert Unit(model="edges", module=module, **given).choice().map == wanted
    image = steering(1)
    body = {"controlnet_module": "blur_gaussian", "controlnet_input_images": [base64_of(image)]}
    made = opened(
        http.post("/controlnet/detect", json={**body, "controlnet_threshold_a": 2}).json()["images"][0]
    )
    assert difference(made, image.filter(ImageFilter.GaussianBlur(2))) == 0
    assert difference(opened(http.post("/controlnet/detect", json=body).json()["images"][0]), made) > 3


@pytest.mark.parametrize(
    ("control", "code", "named"),
    [
        ({"net": "nobody"}, "unusable_control", "edges"),
        ({"net": "foreign"}, "unusable_control", "another model"),
        ({"net": "broken"}, "unusable_control", "damaged"),
        ({"net": "edges", "map": "pose"}, "invalid_value", "scribble"),
        ({"net": "edges", "start": 0.5, "end": 0.5}, "invalid_value", "start is before end"),
        ({"net": "edges", "image": "bm8gcGljdHVyZQ=="}, "invalid_picture", "controls.0.image"),
        ({"net": "edges", "mask": base64_of(Image.new("L", (8, 8)))}, "unusable_control", "IP-Adapters"),
    ],
    ids=["unknown", "another family", "broken", "map", "interval", "picture", "mask"],
)
def test_what_cannot_steer_is_refused_before_anything_is_drawn(http, control, code, named):
    body = {"prompt": "a horse", "controls": [{"image": base64_of(steering(0)), **control}]}
    told = http.post("/jobs", json=body)
    assert told.status_code == 422
    assert told.json()["error"]["code"] == code
    assert named in told.json()["error"]["message"]
    assert "\n" not in told.json()["error"]["message"]


def test_a_refusal_lists_what_fits_and_no_folder_of_the_servers(http, nets):
    def message(**body: Any) -> str:
        told = http.post("/jobs", json={"prompt": "a horse", **body})
        assert told.status_code == 422
        return str(told.json()["error"]["message"])

    def of_net(name: str) -> str:
        return message(controls=[{"net": name, "image": base64_of(steering(0))}])

    assert of_net("nobody") == f"controls: no net 'nobody' here; allowed: {', '.join(NAMES)}"
    assert of_net("broken").startswith("controls: 'broken.safetensors' is damaged: ")
    troubles = {one["name"]: one["trouble"] for one in http.get("/model").json()["controls"]}
    assert "'broken.safetensors' is damaged" in troubles["broken"]
    assert str(nets) not in str(troubles)
    fits = [one["name"] for one in http.get("/model").json()["adapters"]]
    unknown = message(adapters=[{"name": "nobody"}])
    assert unknown == f"adapters: no adapter 'nobody' here; allowed: {', '.join(fits)}"


def test_too_many_nets_are_refused(http):
    picture = base64_of(steering(0))
    for count, named in ((4, "at most 3"), (9, "at most 8")):
        body = {"prompt": "a horse", "controls": [{"net": "edges", "image": picture}] * count}
        told = http.post("/jobs", json=body)
        assert told.status_code == 422
        assert named in told.json()["error"]["message"]
    three = [{"net": name, "image": picture} for name in ("edges", "depth", "pose")]
    told = http.post("/jobs", json={"prompt": "a horse", "controls": three})
    assert told.status_code == 422
    assert "--control-memory" in told.json()["error"]["message"]


def test_a_form_may_have_a_net_with_a_picture_of_more_than_a_mebibyte(http):
    noise = Image.effect_noise((1200, 1200), 90).convert("RGB")
    controls = json.dumps([{"net": "edges", "image": base64_of(noise)}])
    assert len(controls) > 2**20
    fields = {"prompt": "a", "num_inference_steps": "2", "controls": controls}
    start = {"image": ("a.png", png_of(steering(3)), "image/png")}
    answer = http.post("/v1/images/edits", data=fields, files=start)
    assert answer.status_code == 200, answer.text
    many = json.dumps([{"net": "edges", "image": "", **{f"x{i}": 0 for i in range(60_000)}}])
    answer = http.post("/v1/images/edits", data={**fields, "controls": many}, files=start)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
