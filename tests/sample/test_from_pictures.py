"""Pictures from pictures: image-to-image, inpainting and the larger second pass, against diffusers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from darkroom import models
from darkroom.errors import InputError
from darkroom.models.model import Model
from darkroom.options import SOLVERS
from darkroom.picture_settings import GenerateSettings, Hires
from darkroom.sample import denoise, generate
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import Row
from darkroom.sample.generate import Generation
from darkroom.sample.inputs import read_image, read_mask
from darkroom.sample.pictures import Picture, read_parameters
from darkroom.sample.pictures import save_pictures as save

CLASSES = {name: getattr(diffusers, row.scheduler) for name, row in SOLVERS.items()}
AS_DIFFUSERS = [name for name in CLASSES if name not in ("lms", "dpmpp_sde", "dpmpp_3m_sde")]
"""From a picture. diffusers' LMS takes its fourth order's weights there before it has four slopes; the noise
of DPM++ SDE is torchsde's, and the third order another."""
SEED = 7


def photo(side: int = 32, seed: int = 3) -> Image.Image:
    """Smooth blobs of colour."""
    rough = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((side, side), Image.Resampling.BICUBIC)


def half_mask(side: int = 32) -> Image.Image:
    """The right half is painted anew."""
    mask = np.zeros((side, side), np.uint8)
    mask[:, side // 2 :] = 255
    return Image.fromarray(mask)


def pipeline_of(model: Model, solver: str, kind: str) -> Any:
    extra = {"algorithm_type": "sde-dpmsolver++"} if solver == "dpmpp_2m_sde" else {}
    scheduler = CLASSES[solver].from_config({"skip_prk_steps": True, **model.scheduler, **extra})
    parts: dict[str, Any] = {"vae": model.vae, "unet": model.unet, "scheduler": scheduler}
    parts |= {"text_encoder": model.text_encoders[0], "tokenizer": model.tokenizers[0]}
    if model.is_sdxl:
        parts |= {"text_encoder_2": model.text_encoders[1], "tokenizer_2": model.tokenizers[1]}
        parts |= {"add_watermarker": False}
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe = getattr(diffusers, f"StableDiffusion{'XL' * model.is_sdxl}{kind}Pipeline")(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def theirs(model: Model, solver: str, kind: str, *, seed: int = SEED, **options: Any) -> Picture:
    """Latents and picture of the diffusers pipeline."""
    pipe = pipeline_of(model, solver, kind)
    latents = pipe(
        "a red circle", generator=torch.Generator().manual_seed(seed), output_type="latent", **options
    ).images
    with torch.no_grad():
        pixels = model.vae.decode(latents / model.vae.config.scaling_factor).sample  # type: ignore[union-attr]
    (image,) = pipe.image_processor.postprocess(pixels, output_type="pil")
    return Picture(image, {}, latents[0])


def apart(ours: Picture, reference: Picture) -> tuple[float, int]:
    """The largest difference of latents, over max(1, max|x|), and of pixels, in 1/255."""
    scale = max(1.0, float(reference.latents.abs().max()))
    pixels = [np.asarray(picture.image).astype(int) for picture in (ours, reference)]
    return (
        float((ours.latents - reference.latents).abs().max()) / scale,
        int(np.abs(pixels[0] - pixels[1]).max()),
    )


def assert_same(ours: Picture, reference: Picture) -> None:
    latents, pixels = apart(ours, reference)
    assert latents <= 1e-4
    assert pixels <= 2


def assert_other(ours: Picture, reference: Picture) -> None:
    assert apart(ours, reference)[1] >= 10


@pytest.mark.parametrize("solver", AS_DIFFUSERS)
def test_image_to_image_is_diffusers(tiny: Model, solver: str) -> None:
    strength = 0.65  # 6 of 10 steps
    (picture,) = generate(
        tiny,
        "a red circle",
        seed=SEED,
        solver=solver,
        steps=10,
        guidance=5.0,
        image=photo(),
        strength=strength,
    )
    options = {"image": photo(), "num_inference_steps": 10, "guidance_scale": 5.0}
    assert_same(picture, theirs(tiny, solver, "Img2Img", strength=strength, **options))
    assert_other(picture, theirs(tiny, solver, "Img2Img", strength=strength, seed=SEED + 1, **options))


def test_lms_from_a_picture_begins_as_from_noise(tiny: Model) -> None:
    """One step of the last one is Euler's; diffusers takes the fourth order's weights, on one slope."""
    common: dict[str, Any] = {"seed": SEED, "steps": 10, "image": photo(), "strength": 0.1}
    (lms,) = generate(tiny, "a red circle", solver="lms", **common)
    (euler,) = generate(tiny, "a red circle", solver="euler", **common)
    assert_same(lms, euler)
    (more,) = generate(tiny, "a red circle", solver="lms", **{**common, "strength": 0.65})
    (other,) = generate(tiny, "a red circle", solver="euler", **{**common, "strength": 0.65})
    assert apart(more, other)[0] > 1e-3


@pytest.mark.parametrize("strength", [0.1, 0.35, 1.0])
def test_any_strength_is_diffusers(tiny: Model, strength: float) -> None:
    for solver in ("pndm", "unipc", "dpmpp_2m"):
        (picture,) = generate(
            tiny, "a red circle", seed=SEED, solver=solver, steps=20, image=photo(), strength=strength
        )
        want = theirs(
            tiny,
            solver,
            "Img2Img",
            image=photo(),
            num_inference_steps=20,
            guidance_scale=7.5,
            strength=strength,
        )
        assert_same(picture, want)
    assert_other(picture, generate(tiny, "a red circle", seed=SEED, steps=20, solver="unipc")[0])


def test_strength_counts_steps_and_leaves_at_least_one() -> None:
    config: dict[str, Any] = {"_class_name": "DDIMScheduler", "clip_sample": False}
    assert [len(make_table("ddim", config, 30, strength=s)) for s in (0.05, 0.5, 0.99, 1.0)] == [
        1,
        15,
        29,
        30,
    ]
    whole, part = make_table("euler", config, 30), make_table("euler", config, 30, strength=0.5)
    assert part.timesteps == whole.timesteps[15:]
    with pytest.raises(InputError, match="strength 0.02 of 30 steps leaves none"):
        make_table("ddim", config, 30, strength=0.02)
    with pytest.raises(InputError, match="strength 1.5; allowed: above 0 to 1"):
        make_table("ddim", config, 30, strength=1.5)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_sdxl_image_to_image_is_diffusers(small_xl: Model, solver: str) -> None:
    options: dict[str, Any] = {"image": photo(16), "strength": 0.6}
    (picture,) = generate(
        small_xl, "a red circle", seed=SEED, solver=solver, steps=10, guidance=5.0, **options
    )
    options |= {"num_inference_steps": 10, "guidance_scale": 5.0}
    assert_same(picture, theirs(small_xl, solver, "Img2Img", **options))
    assert_other(picture, theirs(small_xl, solver, "Img2Img", seed=SEED + 1, **options))


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("solver", AS_DIFFUSERS)
def test_inpainting_with_four_channels_is_diffusers(tiny: Model, solver: str, strength: float) -> None:
    pictures: dict[str, Any] = {"strength": strength, "guidance": 5.0, "steps": 8, "paste": False}
    (picture,) = generate(
        tiny, "a red circle", seed=SEED, solver=solver, image=photo(), mask=half_mask(), **pictures
    )
    options = {"image": photo(), "num_inference_steps": 8, "guidance_scale": 5.0, "height": 32, "width": 32}
    options["strength"] = strength
    assert_same(picture, theirs(tiny, solver, "Inpaint", mask_image=half_mask(), **options))
    other = half_mask().transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert_other(picture, theirs(tiny, solver, "Inpaint", mask_image=other, **options))


@pytest.fixture(scope="module")
def nine(tiny: Model) -> Model:
    model = copy.copy(tiny)
    model.unet = models.create("tiny", seed=4, overrides={"unet": {"in_channels": 9}}, parts=("unet",)).unet
    return model


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("solver", ["ddim", "euler_a", "unipc"])
def test_inpainting_with_nine_channels_is_diffusers(nine: Model, solver: str, strength: float) -> None:
    (picture,) = generate(
        nine,
        "a red circle",
        seed=SEED,
        solver=solver,
        steps=8,
        image=photo(),
        mask=half_mask(),
        strength=strength,
        paste=False,
    )
    options = {"image": photo(), "num_inference_steps": 8, "guidance_scale": 7.5, "height": 32, "width": 32}
    options["strength"] = strength
    assert_same(picture, theirs(nine, solver, "Inpaint", mask_image=half_mask(), **options))
    assert_other(picture, theirs(nine, solver, "Inpaint", mask_image=half_mask(), seed=SEED + 1, **options))


def test_sdxl_inpainting_is_diffusers(small_xl: Model) -> None:
    (picture,) = generate(
        small_xl,
        "a red circle",
        seed=SEED,
        steps=8,
        image=photo(16),
        mask=half_mask(16),
        strength=0.7,
        paste=False,
    )
    options = {"image": photo(16), "num_inference_steps": 8, "guidance_scale": 7.5, "height": 16, "width": 16}
    options |= {"mask_image": half_mask(16), "strength": 0.7}
    assert_same(picture, theirs(small_xl, "euler", "Inpaint", **options))
    assert_other(picture, theirs(small_xl, "euler", "Inpaint", seed=SEED + 1, **options))


def test_what_is_outside_the_mask_stays_to_the_pixel(tiny: Model) -> None:
    options: dict[str, Any] = {"steps": 4, "image": photo(), "mask": half_mask(), "seed": SEED}
    (pasted,) = generate(tiny, "a red circle", **options)
    (made,) = generate(tiny, "a red circle", paste=False, **options)
    given = np.asarray(photo()).astype(int)
    assert np.array_equal(np.asarray(pasted.image)[:, :16], given[:, :16])
    assert np.array_equal(np.asarray(pasted.image)[:, 16:], np.asarray(made.image)[:, 16:])
    assert np.abs(np.asarray(made.image).astype(int)[:, :16] - given[:, :16]).max() >= 10


def job(model: Model, **options: Any) -> Generation:
    pictures = {name: options.pop(name) for name in ("image", "mask") if name in options}
    settings = GenerateSettings.of(**{"seed": SEED, "steps": 6, "guidance": 4.0, **options})
    return Generation(model, ["a red circle"], settings, **pictures)


def finished(model: Model, rows: list[Row]) -> list[torch.Tensor]:
    from darkroom.sample.backends import open_backend

    for _ in denoise(open_backend("torch", model).unet, rows):
        pass
    return [row.latents_CHW for row in rows]


def test_rows_from_pictures_and_from_noise_share_a_batch(tiny: Model) -> None:
    jobs = [
        job(tiny),
        job(tiny, image=photo(), strength=0.5),
        job(tiny, image=photo(), mask=half_mask(), solver="unipc"),
        job(tiny, image=photo(seed=5), mask=half_mask(), strength=0.8, solver="euler_a"),
    ]
    alone = [finished(tiny, [one.row(0)])[0] for one in jobs]
    together = finished(tiny, [one.row(0) for one in jobs])
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert (a - alone[i - 1]).abs().max() > 0.1


def test_texts_of_different_length_share_a_batch(tiny: Model) -> None:
    prompts = ["a red circle", "a blue square " * 40, "a photo of a horse"]
    options: dict[str, Any] = {"steps": 4, "seed": SEED, "notice": lambda note: None}
    together = generate(tiny, prompts, **options)
    for i, picture in enumerate(together):
        (alone,) = generate(tiny, prompts[i], **{**options, "seed": SEED + i})
        assert_same(picture, alone)
        assert_other(picture, together[i - 1])


def test_a_long_negative_prompt_makes_the_prompt_as_long(tiny: Model) -> None:
    long = job(tiny, negative="a blue square " * 40)
    assert long.positives[0].text_LD.shape == long.negatives[0].text_LD.shape  # type: ignore[union-attr]
    assert len(long.positives[0].text_LD) > 77
    short = job(tiny, negative="blue")
    assert len(short.positives[0].text_LD) == 77


def test_extra_channels_are_for_all_rows_of_a_batch(nine: Model, tiny: Model) -> None:
    rows = [job(nine, image=photo(), mask=half_mask()).row(0), job(tiny).row(0)]
    with pytest.raises(ValueError, match="with and without extra channels"):
        list(denoise(lambda *_: torch.zeros(0), rows))


def test_clip_skip_is_diffusers(tiny: Model) -> None:
    (picture,) = generate(tiny, "a red circle", seed=SEED, steps=6, guidance=5.0, clip_skip=1)
    encoder: Any = tiny.text_encoders[0]
    ids = [
        tiny.tokenizers[0](text, padding="max_length", return_tensors="pt").input_ids
        for text in ("a red circle", "")
    ]
    with torch.no_grad():  # the pipeline's own clip_skip fails with this transformers: the same by hand
        skipped = encoder.final_layer_norm(encoder(ids[0], output_hidden_states=True).hidden_states[-2])
        negative = encoder(ids[1])[0]
    pipe = pipeline_of(tiny, "ddim", "")
    options = {"num_inference_steps": 6, "guidance_scale": 5.0, "output_type": "latent"}
    latents = pipe(
        prompt_embeds=skipped,
        negative_prompt_embeds=negative,
        generator=torch.Generator().manual_seed(SEED),
        **options,
    ).images
    torch.testing.assert_close(picture.latents, latents[0], rtol=1e-4, atol=1e-4)
    (unskipped,) = generate(tiny, "a red circle", seed=SEED, steps=6, guidance=5.0)
    assert_other(picture, unskipped)


def test_hires_latent_is_image_to_image_of_enlarged_latents(tiny: Model) -> None:
    options: dict[str, Any] = {"seed": SEED, "solver": "euler", "steps": 6, "guidance": 5.0}
    (picture,) = generate(tiny, "a red circle", hires=Hires(scale=1.5, strength=0.7, steps=8), **options)
    assert picture.image.size == (48, 48)
    small = theirs(tiny, "euler", "", num_inference_steps=6, guidance_scale=5.0)
    enlarged = torch.nn.functional.interpolate(small.latents[None], size=(12, 12), mode="bilinear")
    again = {"num_inference_steps": 8, "guidance_scale": 5.0, "strength": 0.7, "image": enlarged}
    assert_same(picture, theirs(tiny, "euler", "Img2Img", **again))
    assert_other(picture, theirs(tiny, "euler", "Img2Img", seed=SEED + 1, **again))


def test_hires_lanczos_is_image_to_image_of_the_enlarged_picture(tiny: Model, small_xl: Model) -> None:
    for model, small_side in ((tiny, 32), (small_xl, 16)):
        options: dict[str, Any] = {"seed": SEED, "solver": "euler", "steps": 6, "guidance": 5.0}
        hires = Hires(scale=2, strength=0.5, upscaler="lanczos")
        (picture,) = generate(model, "a red circle", hires=hires, **options)
        (small,) = generate(model, "a red circle", **options)
        enlarged = small.image.resize((2 * small_side,) * 2, Image.Resampling.LANCZOS)
        again = {"num_inference_steps": 6, "guidance_scale": 5.0, "strength": 0.5, "image": enlarged}
        assert_same(picture, theirs(model, "euler", "Img2Img", **again))
        assert_other(picture, theirs(model, "euler", "Img2Img", seed=SEED + 1, **again))


def test_hires_pictures_do_not_depend_on_the_batch(tiny: Model) -> None:
    options: dict[str, Any] = {"seed": SEED, "steps": 4, "num": 3, "hires": Hires(scale=1.5)}
    counted: list[tuple[int, int]] = []
    together = generate(tiny, "a red circle", progress=lambda *at: counted.append(at), **options)
    for one, alone in zip(together, generate(tiny, "a red circle", batch_rows=1, **options), strict=True):
        assert_same(one, alone)
    assert_other(together[0], together[1])
    assert counted[-1] == (3 * (4 + 2), 3 * (4 + 2))


def test_what_it_was_made_with_is_in_the_file(tiny: Model, tmp_path: Path) -> None:
    (inpainted,) = generate(
        tiny, "a (red:1.2) circle", steps=2, image=photo(), mask=half_mask(), weighting="a1111", clip_skip=1
    )
    (larger,) = generate(tiny, "a red circle", steps=2, hires=Hires(scale=1.5, steps=3, upscaler="lanczos"))
    for picture in (inpainted, larger):
        file = save([picture], tmp_path)[0]
        assert read_parameters(file) == picture.parameters
        with Image.open(file) as image:
            text = image.info["parameters"]
        plain = Image.new("RGB", (1, 1))
        from PIL import PngImagePlugin

        info = PngImagePlugin.PngInfo()
        info.add_text("parameters", text)
        plain.save(tmp_path / "plain.png", pnginfo=info)
        back = read_parameters(tmp_path / "plain.png")
        for key in ("strength", "clip_skip", "hires"):
            assert back.get(key) == picture.parameters.get(key), key
    assert inpainted.parameters["strength"] == 1.0
    assert inpainted.parameters["mask"] == "32x32"
    assert "Denoising strength: 1, Clip skip: 2" in _text(inpainted)
    assert "Denoising strength: 0.7, Hires upscale: 1.5, Hires steps: 2, Hires upscaler: Lanczos" in _text(
        larger
    )


def _text(picture: Picture) -> str:
    from darkroom.sample.pictures import a1111_text

    return a1111_text(picture.parameters)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_pictures_come_in_upright_and_opaque() -> None:
    wide = photo().resize((40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(encoded(wide, "JPEG", exif=exif)).size == (20, 40)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert read_image(encoded(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(encoded(photo(), "WEBP", lossless=True)).getpixel((5, 5)) == photo().getpixel((5, 5))


def test_masks_are_white_or_transparent_where_painted_anew() -> None:
    assert read_mask(encoded(half_mask(), "PNG")).getpixel((31, 0)) == 255
    assert read_mask(encoded(half_mask(), "PNG")).getpixel((0, 0)) == 0
    holes = photo().convert("RGBA")
    holes.putalpha(Image.eval(half_mask(), lambda value: 255 - value))
    assert read_mask(encoded(holes, "PNG")).getpixel((31, 0)) == 255
    assert read_mask(encoded(holes, "PNG")).getpixel((0, 0)) == 0


def test_the_size_follows_the_picture(tiny: Model) -> None:
    sizes = [
        job(tiny, image=photo().resize(size)).size for size in ((32, 32), (400, 200), (20, 12), (3, 300))
    ]
    assert sizes == [(32, 32), (48, 24), (24, 16), (8, 304)]
    assert job(tiny, image=photo(), size=(48, 32)).size == (48, 32)
    assert (
        "the picture of 400x200 pixels is taken at 48x24" in job(tiny, image=photo().resize((400, 200))).notes
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask": half_mask()}, "a mask without a picture"),
        ({"strength": 0.5}, "strength 0.5 without a picture"),
        ({"image": photo(), "strength": 0.0}, "strength: 0.0"),
        ({"image": photo(), "strength": 0.1}, "strength 0.1 of 4 steps leaves none"),
        ({"image": photo(), "hires": Hires(scale=2)}, "hires with a picture"),
        ({"image": photo(), "mask": half_mask().resize((32, 16))}, "a mask of 32x16 for a picture of 32x32"),
        ({"image": "nowhere.png"}, "'nowhere.png' cannot be read: No such file"),
        ({"weighting": "wildcards"}, "weighting: 'wildcards'"),
        ({"clip_skip": 5}, "clip-skip 5; allowed: up to 1"),
        ({"stepps": 3}, "stepps"),
    ],
)
def test_refusals(tiny: Model, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        generate(tiny, "a horse", **{"steps": 4, **options})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_png_jpeg_and_webp_are_taken(tmp_path: Path) -> None:
    for kind in ("GIF", "BMP", "TIFF"):
        with pytest.raises(InputError, match="allowed: PNG, JPEG, WebP"):
            read_image(encoded(photo(), kind))
    (tmp_path / "torn.png").write_bytes(encoded(photo(), "PNG")[:200])
    with pytest.raises(InputError, match="torn.png' is no picture that can be read"):
        read_image(tmp_path / "torn.png")
    with pytest.raises(InputError, match="can be read: 10000x10000 pixels, more than 64000000"):
        read_image(encoded(Image.new("1", (10_000, 10_000)), "PNG"))
    with pytest.raises(InputError):
        read_image(tmp_path)


@pytest.mark.parametrize("text", ["", "x", "1.5:", "1.5:2", "1:1:1:1", "0.5", "20", "1.5:0.5:0", "nan"])
def test_hires_is_scale_strength_steps(text: str) -> None:
    with pytest.raises(InputError):
        Hires.parsed(text)
    assert Hires.parsed("1.5:0.6:20") == Hires(scale=1.5, strength=0.6, steps=20)
    assert Hires.parsed("2") == Hires(scale=2)


def test_no_memory_for_exif_is_not_taken_for_damaged_exif(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> Any:
        def fail(_: Any) -> Any:
            raise error

        return fail

    picture = Image.new("RGB", (8, 8), "red")
    monkeypatch.setattr(Image.Image, "getexif", failing(MemoryError()))
    for read in (read_image, read_mask):
        with pytest.raises(MemoryError):
            read(picture)
    monkeypatch.setattr(Image.Image, "getexif", failing(SyntaxError("not a TIFF file")))
    assert read_image(picture).size == (8, 8)
