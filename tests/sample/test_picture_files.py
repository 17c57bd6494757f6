"""Pictures on disk: what they say about themselves, never over another, whole or not at all."""

from __future__ import annotations

import copy
import json
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from darkroom.errors import DarkroomError, InputError
from darkroom.models.model import Model
from darkroom.picture_settings import Hires
from darkroom.sample import generate
from darkroom.sample.pictures import (
    Picture,
    a1111_text,
    decode,
    make_grid,
    parse_a1111,
    prompt_in,
    read_parameters,
    save_pictures,
)
from darkroom.sample.provenance import verify_picture

TOLD: dict[str, Any] = {
    "prompt": "a red circle, very round",
    "negative": "blurry: yes",
    "seed": 12,
    "width": 16,
    "height": 8,
    "steps": 20,
    "guidance": 7.5,
    "guidance_rescale": 0.0,
    "solver": "dpmpp_2m",
    "eta": 0.0,
    "karras": True,
    "spacing": "trailing",
    "model": "my, model",
    "notes": ["something"],
    "version": "0.1.0",
}


def picture(colour: str = "red", **told: Any) -> Picture:
    return Picture(Image.new("RGB", (16, 8), colour), {**TOLD, **told}, torch.zeros(4, 1, 2))


@pytest.mark.parametrize(
    "prompt", ["plain", "ein Fuß, 猫 and é", 'quotes " and : colons,', "two\nlines", "", "Steps: 3"]
)
def test_parameters_come_back(tmp_path: Path, prompt: str) -> None:
    (path,) = save_pictures([picture(prompt=prompt)], tmp_path)
    assert read_parameters(path) == {**TOLD, "prompt": prompt}


def test_a1111_text_is_what_its_web_ui_writes(tmp_path: Path) -> None:
    (path,) = save_pictures([picture()], tmp_path)
    with Image.open(path) as image:
        text = image.info["parameters"]
        assert json.loads(image.info["darkroom"]) == TOLD
    assert text == (
        "a red circle, very round\n"
        "Negative prompt: blurry: yes\n"
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 12, Size: 16x8, "
        'Model: "my, model", RNG: CPU, Version: darkroom 0.1.0'
    )


def test_a_jpeg_takes_what_of_long_prompts_it_can_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its EXIF is one segment of 64 KiB: saving failed, after all of the drawing."""
    whole, long = picture(prompt="a cat " * 1_500), picture(prompt="a cat " * 5_000, negative="blur " * 6_000)
    paths = save_pictures([whole, long], tmp_path, grid=False, kind="jpeg")
    assert read_parameters(paths[0]) == whole.parameters
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    told = read_parameters(paths[1])
    assert (told["steps"], told["seed"], told["karras"]) == (20, 12, True)
    assert told["prompt"].startswith("a cat a cat")
    assert long.parameters["prompt"].startswith(told["prompt"])
    assert len(told["prompt"]) > 5_000
    [path] = save_pictures([long], tmp_path, kind="webp")
    assert read_parameters(path) == long.parameters


@pytest.mark.parametrize(
    ("solver", "more", "written"),
    [
        ("dpmpp_2m", {}, "Schedule type: Uniform"),
        ("dpmpp_2m", {"spacing": "trailing"}, "Schedule type: SGM Uniform"),
        ("dpmpp_2m_sde", {"exponential": True}, "Schedule type: Exponential"),
        ("euler", {}, "Schedule type: Uniform"),
        ("euler", {"sigmas": "align_your_steps"}, "Schedule type: Align Your Steps"),
        ("euler", {"sigmas": "kl_optimal"}, "Schedule type: KL Optimal"),
        ("dpmpp_2m", {"sigmas": "ddim_uniform"}, "Schedule type: DDIM"),
        ("ddim", {"eta": 0.5}, "Eta DDIM: 0.5"),
    ],
)
def test_a1111_would_draw_by_the_same_schedule(solver: str, more: dict[str, Any], written: str) -> None:
    """What A1111 reads without a schedule is Automatic to it: Karras or exponential of the DPM++ samplers."""
    given = {**TOLD, "karras": False, "spacing": "linspace", "solver": solver, **more}
    text = a1111_text(given)
    assert written in text
    assert ("Schedule type" in text) == (solver != "ddim")
    back = parse_a1111(text)
    for key in ("solver", "karras", "exponential", "sigmas", "eta"):
        assert (back.get(key) or None) == (given.get(key) or None), key


@pytest.mark.parametrize(
    ("sampler", "schedule", "read"),
    [
        ("DPM++ 2M", "Automatic", {"karras": True}),
        ("DPM++ SDE", "Automatic", {"karras": True}),
        ("DPM++ 2M SDE", "Automatic", {"karras": False, "exponential": True}),
        ("DPM++ 3M SDE", "Automatic", {"karras": False, "exponential": True}),
        ("Euler a", "Automatic", {"karras": False}),
        ("DPM++ 2M", "Uniform", {"karras": False, "spacing": "linspace"}),
        ("Euler", "SGM Uniform", {"karras": False, "spacing": "trailing"}),
        ("Euler", "Beta", {"karras": False, "sigmas": "beta"}),
        ("Euler", "Polyexponential", {"karras": False, "exponential": True}),
    ],
)
def test_a1111s_schedules_are_read_as_it_draws(sampler: str, schedule: str, read: dict[str, Any]) -> None:
    back = parse_a1111(f"a\nSteps: 20, Sampler: {sampler}, Schedule type: {schedule}, Seed: 1, Size: 8x8")
    keys = ("karras", "exponential", "sigmas", "spacing")
    assert {key: back[key] for key in keys if key in back} == read


@pytest.mark.parametrize(
    ("pairs", "taken"),
    [("Hires steps: 10, ", 10), ("", 20), ("Hires steps: 0, ", 20), ("Hires steps: 7, ", 7)],
)
@pytest.mark.parametrize("strength", [0.29, 0.3, 0.5, 0.7, 1.0])
def test_a1111s_second_pass_takes_all_its_steps(pairs: str, taken: int, strength: float) -> None:
    """A1111 takes so many steps of `steps / strength`; 0 is as many as the first pass."""
    back = parse_a1111(
        f"a\nSteps: 20, Seed: 1, Size: 64x64, Denoising strength: {strength}, {pairs}Hires upscale: 2"
    )
    assert int(back["hires"]["steps"] * strength) == taken
    again = {"prompt": "a", "steps": 20, "seed": 1, "guidance": 1, "solver": "euler", "hires": back["hires"]}
    assert f"Hires steps: {taken}," in a1111_text({**again, "width": 64, "height": 64})


def test_a1111_pictures_of_others_are_read(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text(
        "parameters",
        "a cat\non a mat\nNegative prompt: dog\nbird\n"
        "Steps: 25, Sampler: DPM++ 2M SDE Karras, CFG scale: 6, Seed: 4294967295, Size: 512x768, "
        'Model hash: abc123, Model: sd15, Lora hashes: "one: 1, two: 2", Clip skip: 2',
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    assert read_parameters(tmp_path / "a.png") == {
        "prompt": "a cat\non a mat",
        "negative": "dog\nbird",
        "steps": 25,
        "solver": "dpmpp_2m_sde",
        "karras": True,
        "guidance": 6.0,
        "seed": 4294967295,
        "width": 512,
        "height": 768,
        "Model hash": "abc123",
        "model": "sd15",
        "Lora hashes": "one: 1, two: 2",
        "clip_skip": 1,
    }
    assert parse_a1111("only a prompt") == {"prompt": "only a prompt", "negative": ""}


@pytest.mark.parametrize(
    "line",
    [
        "a" + " " * 15_000 + "!",
        "a:" * 8_000,
        'a:"' * 5_000,
        'a: "\\' * 3_000,
        "a ," * 5_000,
        ":" * 16_000,
        " " * 8_000 + ":" + " " * 8_000 + '"',
        "Steps: 3, " + "a: " * 2_000_000,
        "Steps: " * 2_000_000,
    ],
)
def test_a_hostile_line_of_pairs_takes_no_time(line: str) -> None:
    start = time.process_time()
    told = parse_a1111("a cat\n" + line)
    assert time.process_time() - start < 0.5
    assert told["prompt"].startswith("a cat")


@pytest.mark.parametrize(
    ("resize", "scale", "size"),
    [("1024x1536", 2.0, (1024, 1536)), ("0x1152", 1.5, (768, 1152)), ("1024x1024", 2.0, (1024, 1024))],
)
def test_a_second_pass_by_its_size_is_read(resize: str, scale: float, size: tuple[int, int]) -> None:
    """A1111 says one or the other."""
    line = "Steps: 20, Seed: 1, Size: 512x768, Denoising strength: 0.3, Hires upscaler: Lanczos"
    told = parse_a1111(f"a\n{line}, Hires resize: {resize}")
    assert told["hires"] == {"scale": scale, "strength": 0.3, "steps": 67, "upscaler": "lanczos"}
    assert (told["first_size"], (told["width"], told["height"])) == ("512x768", size)
    assert {"strength", "Hires resize"}.isdisjoint(told)
    plain = parse_a1111(f"a\n{line}, Hires resize: 0x0")
    assert (plain["width"], plain["height"], "hires" in plain) == (512, 768, False)


def test_values_in_quotes_hold_commas_and_what_has_no_key_is_passed_over() -> None:
    text = 'a cat\njunk, Steps: 3, "odd": 1, Model: 6" sensor, Lora hashes: "a: 1, b: \\"2\\"", Seed: 4,'
    told = parse_a1111(text)
    assert (told["steps"], told["seed"], told["model"]) == (3, 4, '6" sensor')
    assert told["Lora hashes"] == 'a: 1, b: "2"'
    assert '"odd"' not in told


def test_numbers_and_texts_that_nothing_can_hold_are_left_out() -> None:
    digits = "9" * 2000
    told = parse_a1111(
        f"a\nSteps: 3, CFG scale: nan, Eta: inf, Seed: {digits * 3}, Clip skip: {digits}, Size: {digits}x8, "
        f'Hires upscale: 2, Hires steps: {digits}, Model: "\\ud800"'
    )
    assert {"guidance", "eta", "seed", "clip_skip", "width"}.isdisjoint(told)
    assert (told["hires"]["steps"], told["model"]) == (None, '"\\ud800"')


@pytest.mark.parametrize("last", ["Steps: of stone", "Steps: two, Seed: 3", "Steps:"])
def test_a_prompt_whose_last_line_begins_with_steps_stays_whole(last: str) -> None:
    assert parse_a1111(f"a stair\n{last}") == {"prompt": f"a stair\n{last}", "negative": ""}


def test_lines_may_end_as_windows_ends_them() -> None:
    told = parse_a1111("a\r\nb\r\nNegative prompt: c\r\nd\r\nSteps: 3, Seed: 4\r\n")
    assert (told["prompt"], told["negative"], told["seed"]) == ("a\nb", "c\nd", 4)


@pytest.mark.parametrize(
    ("sampler", "solver", "sigmas"),
    [
        ("DPM++ 2M SDE Exponential", "dpmpp_2m_sde", {"exponential": True}),
        ("DPM++ 3M SDE Karras", "dpmpp_3m_sde", {"karras": True}),
        ("Euler Beta", "euler", {"sigmas": "beta"}),
    ],
)
def test_a_schedule_in_the_samplers_name_is_read(sampler: str, solver: str, sigmas: dict[str, Any]) -> None:
    """As A1111 wrote it until 2024."""
    told = parse_a1111(f"a\nSteps: 20, Sampler: {sampler}, Seed: 1, Size: 8x8")
    found = {name: told[name] for name in ("karras", "exponential", "sigmas") if name in told}
    assert (told["solver"], found) == (solver, sigmas)


INFOTEXT = "a caf\u00e9, \u732b\nNegative prompt: b\nSteps: 20, Sampler: Euler a, Seed: 7, Size: 64x64"


@pytest.mark.parametrize(
    ("comment", "read"),
    [
        (b"UNICODE\0" + INFOTEXT.encode("utf-16-be"), True),
        (b"UNICODE\0" + INFOTEXT.encode("utf-16-le"), True),
        (b"UNICODE\0" + INFOTEXT.encode("utf-16"), True),
        (b"ASCII\0\0\0" + INFOTEXT.encode(), True),
        (b"ASCII\0\0\0Screenshot", False),
        (b"UNICODE\0" + "Steps to the sea".encode("utf-16-be"), False),
        (b"\0" * 8, False),
    ],
    ids=["high byte first", "low byte first", "marked", "ascii", "screenshot", "comment", "empty"],
)
def test_a_jpegs_comment_is_read_where_it_says_how_the_picture_was_made(tmp_path, comment, read) -> None:
    """Phones write comments too: they are no prompts."""
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
    assert prompt_in(tmp_path / "a.jpg") == ("a caf\u00e9, \u732b" if read else None)


def bomb() -> bytes:
    """The head of a PNG of 60,000 pixels squared."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
"""Pillow reads it by running Ghostscript, whatever the file is called."""
GIMP = struct.pack(">IIIII", 28, 2, 13, 1_229_472_850, 4) + b"GIMP" + struct.pack(">I", 10) + b"x" * 40
"""A brush of more pixels than Pillow allows."""


@pytest.mark.parametrize(
    "content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n broken", bomb(), POSTSCRIPT, GIMP]
)
def test_files_that_say_nothing_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(InputError, match="no picture that can be read"):
        read_parameters(tmp_path / "a.png")
    with pytest.raises(InputError, match="no file"):
        read_parameters(tmp_path / "b.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png")
    with pytest.raises(InputError, match="does not say how it was made"):
        read_parameters(tmp_path / "c.png")


def test_a_header_of_thousands_of_millions_of_pixels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 2**17, 2**17)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    with pytest.raises(InputError, match="no picture that can be read: .*pixels"):
        read_parameters(path)
    with pytest.raises(InputError, match="no picture that can be read: .*pixels"):
        verify_picture(path)


def test_names_count_on_and_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    first = save_pictures([picture(), picture(seed=13)], out)
    assert [path.name for path in first] == ["00000-12.png", "00001-13.png", "grid-00000.png"]
    (out / "00002-12.png").write_text("someone else's")
    second = save_pictures([picture("blue"), picture("blue")], out)
    assert [path.name for path in second] == ["00003-12.png", "00004-12.png", "grid-00001.png"]
    assert (out / "00002-12.png").read_text() == "someone else's"
    with Image.open(first[0]) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)
    assert len(save_pictures([picture(), picture()], out, grid=False)) == 2
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    saved: list[Path] = []
    threads = [
        threading.Thread(target=lambda: saved.extend(save_pictures([picture()] * 5, tmp_path, grid=False)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(saved) == len(set(saved)) == 20
    assert sorted(saved) == sorted(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    bad = Picture(Image.new("RGB", (8, 8)), {**TOLD, "notes": {1, 2}}, torch.zeros(1))
    with pytest.raises(TypeError):
        save_pictures([bad], tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be saved"):
        save_pictures([picture()], tmp_path / "file")


def test_grid_is_in_reading_order() -> None:
    colours = ["red", "lime", "blue", "yellow", "black"]
    grid = make_grid([picture(colour).image for colour in colours])
    assert grid.size == (48, 16)
    assert [grid.getpixel((16 * x + 8, 8 * y + 4)) for y in range(2) for x in range(3)] == [
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
        (255, 255, 0),
        (0, 0, 0),
        (255, 255, 255),
    ]


def test_decoding_is_bounded_and_does_not_depend_on_it(tiny: Model) -> None:
    sizes: list[int] = []
    assert tiny.vae is not None
    hook = tiny.vae.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    latents = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    try:
        whole, parts = decode(tiny.vae, latents), decode(tiny.vae, latents, max_pixels=2 * 32 * 32)
        one_by_one = decode(tiny.vae, latents, max_pixels=1)
    finally:
        hook.remove()
    assert sizes == [5, 2, 2, 1, 1, 1, 1, 1, 1]
    for a, b, c in zip(whole, parts, one_by_one, strict=True):
        assert a.size == (32, 32)
        assert np.abs(np.asarray(a).astype(int) - np.asarray(b)).max() <= 1
        assert np.abs(np.asarray(a).astype(int) - np.asarray(c)).max() <= 1
    assert np.abs(np.asarray(whole[0]).astype(int) - np.asarray(whole[1])).max() >= 10


def test_numbers_that_are_not_finite_are_an_error(tiny: Model) -> None:
    latents = torch.zeros(1, 4, 8, 8)
    latents[0, 0, 0, 0] = torch.inf
    with pytest.raises(
        DarkroomError, match="^denoising ended in numbers that are not finite; look at the weights"
    ):
        decode(tiny.vae, latents)
    fine = torch.zeros(1, 4, 8, 8)
    with pytest.raises(DarkroomError, match="^the VAE gave numbers that are not finite; with fp16 try bf16"):
        decode(tiny.vae, fine, decoder=lambda _: torch.full((1, 3, 32, 32), torch.nan))
    broken, small = copy.deepcopy(tiny.vae), copy.deepcopy(tiny.vae).to(torch.float16)
    with torch.no_grad():
        broken.post_quant_conv.weight.fill_(torch.nan)
        small.post_quant_conv.weight.fill_(torch.nan)
    with pytest.raises(DarkroomError, match="^the VAE gave numbers that are not finite; look at the weights"):
        decode(broken, fine)  # in float32 there is no larger precision to try
    with pytest.raises(
        DarkroomError, match="^the VAE gave numbers that are not finite; try bfloat16 or float32$"
    ):
        decode(small, fine)


def test_a_generated_picture_can_be_made_again_from_its_file(tiny: Model, tmp_path: Path) -> None:
    made = generate(tiny, "a red circle", seed=9, steps=4, solver="euler", karras=True, negative="a horse")
    (path,) = save_pictures(made, tmp_path)
    told = read_parameters(path)
    again = generate(
        tiny,
        told["prompt"],
        size=(told["width"], told["height"]),
        **{
            key: told[key] for key in ("negative", "seed", "steps", "guidance", "solver", "karras", "spacing")
        },
    )
    with Image.open(path) as image:
        assert np.abs(np.asarray(image).astype(int) - np.asarray(again[0].image)).max() <= 1


def test_a_second_pass_is_written_as_a1111_writes_it(tiny) -> None:
    """A1111's size is the first pass's; read back, both sizes are there."""
    made = generate(tiny, "a", steps=2, size=(32, 32), hires=Hires(scale=1.5, steps=2))[0]
    assert made.image.size == (48, 48)
    told = {**made.parameters, "model_sha256": "0123456789abcdef"}
    text = a1111_text(told)
    assert "Size: 32x32," in text
    assert "Hires upscale: 1.5" in text
    assert "Model hash: 0123456789," in text
    back = parse_a1111(text)
    assert (back["width"], back["height"], back["first_size"]) == (48, 48, "32x32")
    assert (back["hires"]["scale"], back["Model hash"]) == (1.5, "0123456789")
    plain = parse_a1111(a1111_text(generate(tiny, "a", steps=1, size=(32, 32))[0].parameters))
    assert (plain["width"], "first_size" in plain, "Model hash" in plain) == (32, False, False)
