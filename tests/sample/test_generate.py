"""`generate` against diffusers' pipelines at the same seed and solver, and what it refuses."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from darkroom import models
from darkroom.errors import InputError
from darkroom.models.model import Model
from darkroom.options import SOLVERS
from darkroom.sample import generate
from darkroom.sample.backends import open_backend
from darkroom.sample.generate import GenerateSettings
from darkroom.sample.pictures import Picture

CLASSES = {name: getattr(diffusers, row.scheduler) for name, row in SOLVERS.items()}
AS_DIFFUSERS = [name for name in SOLVERS if name not in ("dpmpp_sde", "dpmpp_3m_sde")]
"""diffusers draws DPM++ SDE's noise by torchsde, and has another third order: test_solvers compares these."""
PROMPTS = ["a red circle on a blue background", "a photo of an astronaut"]
SEED = 7


def pipeline_of(model: Model, solver: str) -> Any:
    extra = {"algorithm_type": "sde-dpmsolver++"} if solver == "dpmpp_2m_sde" else {}
    scheduler = CLASSES[solver].from_config({"skip_prk_steps": True, **model.scheduler, **extra})
    parts: dict[str, Any] = {"vae": model.vae, "unet": model.unet, "scheduler": scheduler}
    parts |= {"text_encoder": model.text_encoders[0], "tokenizer": model.tokenizers[0]}
    if model.is_sdxl:
        parts |= {"text_encoder_2": model.text_encoders[1], "tokenizer_2": model.tokenizers[1]}
        pipe = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipe = diffusers.StableDiffusionPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def theirs(
    model: Model,
    solver: str,
    *,
    steps: int,
    guidance: float,
    num: int = 1,
    negative: str | None = None,
    **more: Any,
) -> tuple[torch.Tensor, np.ndarray]:
    """Latents and uint8 pictures of the diffusers pipeline, picture i drawn from seed SEED + i."""
    pipe = pipeline_of(model, solver)
    latents = pipe(
        PROMPTS,
        negative_prompt=None if negative is None else [negative] * len(PROMPTS),
        num_images_per_prompt=num,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(SEED + i) for i in range(len(PROMPTS) * num)],
        output_type="latent",
        **more,
    ).images
    with torch.no_grad():
        pixels = model.vae.decode(latents / model.vae.config.scaling_factor).sample  # type: ignore[union-attr]
    images = pipe.image_processor.postprocess(pixels, output_type="np")
    return latents, (images * 255).round().astype(np.uint8)


def apart(pictures: list[Picture], reference: tuple[torch.Tensor, np.ndarray]) -> tuple[float, int]:
    """The largest difference of latents, over max(1, max|x|), and of pixels, in 1/255."""
    latents = torch.stack([picture.latents for picture in pictures])
    pixels = np.stack([np.asarray(picture.image) for picture in pictures]).astype(int)
    return (
        float((latents - reference[0]).abs().max() / max(1.0, float(reference[0].abs().max()))),
        int(np.abs(pixels - reference[1]).max()),
    )


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("solver", AS_DIFFUSERS)
def test_same_picture_as_the_diffusers_pipeline(tiny: Model, solver: str, guidance: float) -> None:
    settings: dict[str, Any] = {"steps": 8, "guidance": guidance, "num": 2}
    pictures = generate(tiny, PROMPTS, seed=SEED, solver=solver, **settings)
    latents, pixels = apart(pictures, theirs(tiny, solver, **settings))
    assert latents <= 1e-4
    assert pixels <= 2


def test_a_model_is_drawn_with_its_own_guidance_unless_told_otherwise(tiny: Model) -> None:
    model = copy.copy(tiny)
    model.guidance = 1.5
    draw = partial(generate, model, PROMPTS[0], steps=3)
    (silent,), (told,), (usual,) = draw(), draw(guidance=1.5), generate(tiny, PROMPTS[0], steps=3)
    assert silent.parameters["guidance"] == 1.5
    assert usual.parameters["guidance"] == 7.5
    assert torch.equal(silent.latents, told.latents)
    assert not torch.equal(silent.latents, usual.latents)
    assert draw(solver="lcm")[0].parameters["guidance"] == 1.0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("negative", [None, "", "a blue horse"])
def test_negative_prompt_and_rescaling(tiny: Model, negative: str | None, prediction: str) -> None:
    model = copy.copy(tiny)
    model.scheduler = {**tiny.scheduler, "prediction_type": prediction}
    pictures = generate(
        model, PROMPTS, seed=SEED, steps=6, guidance=6.0, negative=negative, guidance_rescale=0.7
    )
    want = theirs(model, "ddim", steps=6, guidance=6.0, negative=negative, guidance_rescale=0.7)
    latents, pixels = apart(pictures, want)
    assert latents <= 1e-4
    assert pixels <= 2


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("negative", [None, "", "a blue horse"])
def test_same_picture_as_the_sdxl_pipeline(small_xl: Model, negative: str | None, guidance: float) -> None:
    pictures = generate(small_xl, PROMPTS, seed=SEED, steps=6, guidance=guidance, negative=negative)
    want = theirs(small_xl, "euler", steps=6, guidance=guidance, negative=negative)
    latents, pixels = apart(pictures, want)
    assert latents <= 1e-4
    assert pixels <= 2


@pytest.mark.parametrize("solver", ["pndm", "euler", "unipc", "dpmpp_2m_sde"])
def test_a_saved_folder_gives_one_picture_here_and_in_diffusers(
    tiny: Model, tmp_path: Path, solver: str
) -> None:
    """The folder's own scheduler on both sides, nothing said about solvers."""
    model = copy.copy(tiny)
    model.scheduler = dict(pipeline_of(tiny, solver).scheduler.config)
    models.save(model, tmp_path / "model")
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.scheduler) is CLASSES[solver]
    generator = torch.Generator().manual_seed(SEED)
    (reference,) = pipe(PROMPTS[0], num_inference_steps=7, generator=generator).images
    (picture,) = generate(models.load(tmp_path / "model"), PROMPTS[0], seed=SEED, steps=7)
    assert picture.parameters["solver"] == solver
    assert np.abs(np.asarray(picture.image).astype(int) - np.asarray(reference)).max() <= 2


def test_sdxl_is_told_the_size(small_xl: Model) -> None:
    pictures = generate(small_xl, PROMPTS, seed=SEED, steps=4, size=(32, 16))
    want = theirs(small_xl, "euler", steps=4, guidance=7.5, width=32, height=16)
    assert pictures[0].image.size == (32, 16)
    assert apart(pictures, want)[0] <= 1e-4
    lied = theirs(small_xl, "euler", steps=4, guidance=7.5, width=32, height=16, original_size=(512, 512))
    assert apart(pictures, lied)[0] > 1e-3


@pytest.mark.parametrize("change", ["seed", "prompt", "negative", "guidance", "solver"])
def test_a_change_moves_the_picture(tiny: Model, change: str) -> None:
    """Control of all the equalities here: each knob moves pixels by at least 10/255, and the latents."""
    same: dict[str, Any] = {"seed": 3, "steps": 6, "guidance": 7.5, "solver": "ddim"}
    other = {"seed": 4, "negative": "a blue horse", "guidance": 3.0, "solver": "euler_a"}.get(change)
    (first,) = generate(tiny, "a red circle", **same)
    prompt = "a green square on a horse" if change == "prompt" else "a red circle"
    (second,) = generate(tiny, prompt, **(same if change == "prompt" else {**same, change: other}))
    pixels = np.abs(np.asarray(first.image).astype(int) - np.asarray(second.image)).max()
    assert pixels >= 10
    assert (first.latents - second.latents).abs().max() > 0.05


def test_a_timestep_condition_carries_the_guidance(tiny: Model) -> None:
    """Consistency models distilled with guidance take it as an embedding, in one evaluation a step."""
    from darkroom.models.families import create

    overrides: dict[str, dict[str, Any]] = {"unet": {"time_cond_proj_dim": 32}}
    model = create("tiny", seed=1, overrides=overrides)
    torch.nn.init.normal_(model.unet.time_embedding.cond_proj.weight)  # type: ignore[union-attr]
    want = theirs(model, "lcm", steps=4, guidance=8.0)
    latents, pixels = apart(generate(model, PROMPTS, seed=SEED, steps=4, guidance=8.0, solver="lcm"), want)
    assert latents <= 1e-4
    assert pixels <= 2
    weaker = generate(model, PROMPTS, seed=SEED, steps=4, guidance=2.0, solver="lcm")
    assert apart(weaker, want)[0] > 1e-3


def test_pictures_do_not_depend_on_the_batch(tiny: Model) -> None:
    settings: dict[str, Any] = {"seed": 20, "num": 3, "steps": 4, "solver": "euler_a", "size": (48, 32)}
    whole = generate(tiny, PROMPTS, **settings)
    for rows in (1, 4):
        for a, b in zip(whole, generate(tiny, PROMPTS, **settings, batch_rows=rows), strict=True):
            assert (a.latents - b.latents).abs().max() < 1e-4
            assert np.abs(np.asarray(a.image).astype(int) - np.asarray(b.image)).max() <= 1
            assert a.parameters == b.parameters
    # Picture i of a call is the one that its own seed gives.
    (fourth,) = generate(tiny, PROMPTS[1], **{**settings, "num": 1, "seed": 24})
    assert (fourth.latents - whole[4].latents).abs().max() < 1e-4
    assert (fourth.latents - whole[3].latents).abs().max() > 0.1


@pytest.mark.parametrize("told", [{"prompts": "caf\udce9"}, {"prompts": "a", "negative": "\ud800"}])
def test_a_prompt_that_is_no_unicode_is_refused(tiny: Model, told: dict[str, Any]) -> None:
    """A command line in another encoding, or JSON with half a surrogate pair."""
    with pytest.raises(InputError, match=r"a prompt whose character \d is no Unicode; give it in UTF-8"):
        generate(tiny, steps=1, **told)


@pytest.mark.parametrize("told", [{"prompts": "ab\0c"}, {"prompts": "a", "negative": "ab\0c"}])
def test_a_prompt_with_a_nul_is_refused(tiny: Model, told: dict[str, Any]) -> None:
    """As a file of prompts may hold one, and no text in a picture."""
    with pytest.raises(InputError, match="^a prompt whose character 3 is a NUL; give it without$"):
        generate(tiny, steps=1, **told)


def test_progress_and_parameters(tiny: Model) -> None:
    seen: list[tuple[int, int]] = []
    pictures = generate(
        tiny, PROMPTS, steps=3, seed=5, batch_rows=1, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(i + 1, 6) for i in range(6)]
    told = pictures[1].parameters
    assert told["prompt"] == PROMPTS[1]
    expected = {"seed": 6, "width": 32, "height": 32, "steps": 3, "guidance": 7.5, "solver": "ddim"}
    assert {key: told[key] for key in expected} == expected
    assert told["spacing"] == "leading"
    assert told["karras"] is False


def test_defaults_follow_the_solver(tiny: Model) -> None:
    (picture,) = generate(tiny, "a horse", solver="lcm")
    assert (picture.parameters["steps"], picture.parameters["guidance"]) == (4, 1.0)
    resolved = GenerateSettings().resolved("ddim")
    assert (resolved.steps, resolved.guidance) == (30, 7.5)


def test_notes_are_told_and_kept(tiny: Model) -> None:
    model = copy.copy(tiny)
    model.scheduler = {**tiny.scheduler, "_class_name": "DDPMScheduler"}
    heard: list[str] = []
    (picture,) = generate(model, "a red circle " * 60, steps=2, notice=heard.append)
    assert any("DDPMScheduler is replaced by solver ddim" in note for note in heard)
    assert any("is read in 3 parts of the text encoder" in note for note in heard)
    assert picture.parameters["notes"] == heard
    heard.clear()
    generate(tiny, "a red circle", steps=2, notice=heard.append)
    assert heard == []


def test_bfloat16_stays_near_float32(tiny: Model) -> None:
    settings: dict[str, Any] = {"seed": 1, "steps": 6, "guidance": 2.0}
    (exact,) = generate(tiny, "a red circle", **settings)
    (half,) = generate(copy.deepcopy(tiny).to(dtype=torch.bfloat16), "a red circle", **settings)
    (other,) = generate(tiny, "a red circle", **{**settings, "seed": 2})
    scale = float(exact.latents.std())
    assert float((half.latents - exact.latents).abs().mean()) < 0.1 * scale
    assert float((other.latents - exact.latents).abs().mean()) > 0.5 * scale
    assert half.parameters["precision"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps: 0"),
        ({"steps": 1001}, "steps: 1001"),
        ({"guidance": float("nan")}, "guidance: nan"),
        ({"guidance": float("inf")}, "guidance: inf"),
        ({"guidance": -1.0}, "guidance: -1"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**63}, "seed: "),
        ({"seed": 2**63 - 1, "num": 2}, "seed 9223372036854775807"),
        ({"num": 0}, "num: 0"),
        (
            {"size": (30, 32)},
            "size 30x32; allowed: sides of 8 to 8192 pixels, multiples of 8; nearest: 32x32",
        ),
        ({"size": (32, 0)}, "size 32x0"),
        ({"size": (32, 100_000)}, "size 32x100000"),
        ({"solver": "dpm2"}, "solver 'dpm2'; allowed: ddim, pndm"),
        ({"eta": 2.0, "solver": "ddim"}, "eta: 2.0"),
        ({"guidance_rescale": 1.5}, "guidance_rescale: 1.5"),
        ({"spacing": "even"}, "spacing 'even'"),
        ({"batch_rows": 0}, "batch_rows 0"),
        ({"batch_rows": -3}, "batch_rows -3"),
    ],
)
def test_refusals(tiny: Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        generate(tiny, "a horse", **{"steps": 2, **options})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_generate_are_refused(tiny: Model, small_xl: Model) -> None:
    from darkroom.models.families import create

    for part in ("unet", "vae"):
        broken = copy.copy(tiny)
        setattr(broken, part, None)
        with pytest.raises(InputError, match=f"no {part}"):
            generate(broken, "a horse")
    deaf = copy.copy(tiny)
    deaf.text_encoders, deaf.tokenizers = [], []
    with pytest.raises(InputError, match="no text encoder"):
        generate(deaf, "a horse")
    with pytest.raises(InputError, match="no prompt"):
        generate(tiny, [])
    with pytest.raises(InputError, match="fp16 on a CPU"):
        generate(copy.deepcopy(tiny).to(dtype=torch.float16), "a horse")
    inpainting = create("tiny", overrides={"unet": {"in_channels": 9}})
    with pytest.raises(InputError, match="takes 9 channels"):
        generate(inpainting, "a horse")
    refiner = copy.copy(small_xl)
    refiner.text_encoders, refiner.tokenizers = small_xl.text_encoders[1:], small_xl.tokenizers[1:]
    refiner.text_encoders[0].config.projection_dim = 16
    try:
        with pytest.raises(InputError, match="refiner is not known"):
            generate(refiner, "a horse")
    finally:
        refiner.text_encoders[0].config.projection_dim = 32


def test_a_job_is_gone_when_its_pictures_are_made(tiny, monkeypatch):
    """Without a collection of cycles: it holds copies of weights, and on a card captured graphs."""
    opened = []

    def opening(*given, **named):
        backend = open_backend(*given, **named)
        opened.append(weakref.ref(backend))
        return backend

    monkeypatch.setattr(sys.modules["darkroom.sample.generate"], "open_backend", opening)
    gc.collect()
    gc.disable()
    try:
        made = generate(tiny, "a red circle", steps=2, size=(32, 32), num=3, batch_rows=2)
        assert len(made) == 3
        assert [one() for one in opened] == [None]
    finally:
        gc.enable()
