"""Memory by plan: full-size models on the meta device, choices under limits, refusals with a number."""

from __future__ import annotations

import sys

import pytest
import torch

from darkroom import models, sample
from darkroom.errors import InputError
from darkroom.options import parse_bytes
from darkroom.sample.memory import Needs, count_needs, optimise_within, pictures_that_fit, plan_memory
from darkroom.sample.pictures import DECODE_PIXELS, decode_pixels

GB = 10**9


@pytest.fixture(scope="module")
def sd15():
    model = models.create("sd15", parts=("unet", "vae", "text_encoder"), device="meta").to(
        dtype=torch.float16
    )
    return count_needs(model, (512, 512))


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("3GB", 3 * GB),
        ("2.5 GiB", int(2.5 * 2**30)),
        ("800MB", 8 * 10**8),
        ("4096", 4096),
        (5, 5),
        ("1mib", 2**20),
    ],
)
def test_memory_is_read_as_people_write_it(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["3TB", "much", "-1GB", "0", "GB", ""])
def test_other_words_are_refused(text):
    with pytest.raises(InputError, match="3GB"):
        parse_bytes(text)


def test_the_counted_weights_are_the_model_s(sd15):
    assert sd15.weights["unet"] == 859_520_964 * 2
    assert sd15.unet(2) > sd15.unet(1) > 0
    assert sd15.vae[None] > sd15.vae[256] > sd15.vae[64]


def test_sd15_at_512_in_half_precision_fits_3200_mb_on_the_card(sd15):
    plan = plan_memory(sd15, int(3.2 * GB), device="cuda", pictures=1)
    assert plan.peak_bytes <= 3.2 * GB
    assert not any(name.startswith("offload") for name in plan.names)
    assert plan.pictures_a_call == 1


def test_sd15_at_512_fits_2_gb_with_offload(sd15):
    plan = plan_memory(sd15, 2 * GB, device="cuda", pictures=1)
    assert plan.peak_bytes < 2 * GB
    assert any(name.startswith("offload") for name in plan.names)
    with pytest.raises(InputError):
        plan_memory(sd15, 2 * GB, device="cpu", base_bytes=sum(sd15.weights.values()))


def test_sd15_at_512_on_a_cpu_fits_3_gb_where_its_weights_lie_in_files():
    model = models.create("sd15", parts=("unet", "vae", "text_encoder"), device="meta")
    needs = count_needs(model, (512, 512))
    held = GB // 2  # Python and libraries
    asked = {"device": "cpu", "base_bytes": held + sum(needs.weights.values())}
    plan = plan_memory(needs, 3 * GB, **asked, streamed_base_bytes=held)
    assert plan.names[0] == "offload_mmap"
    assert plan.peak_bytes < 2.5 * GB
    roomy = plan_memory(needs, 8 * GB, **asked, streamed_base_bytes=held)
    assert "offload_mmap" not in roomy.names  # the slower way only where it is needed
    with pytest.raises(InputError, match="darkroom export"):  # control: random weights lie in no file
        plan_memory(needs, 3 * GB, **asked)


def test_less_memory_means_slower_choices_in_order(sd15):
    whole = sum(sd15.weights.values())
    plans = [
        plan_memory(sd15, limit, device="cuda", pictures=8)
        for limit in (20 * GB, 5 * GB, whole + GB // 2, 2 * GB)
    ]
    assert plans[0].names == ()
    assert plans[0].pictures_a_call == 8
    assert [plan.pictures_a_call for plan in plans] == sorted(
        (p.pictures_a_call for p in plans), reverse=True
    )
    assert all(
        plan.peak_bytes <= limit
        for plan, limit in zip(plans, (20 * GB, 5 * GB, whole + GB // 2, 2 * GB), strict=True)
    )
    assert "GB at most" in plans[0].says()


def test_too_little_is_refused_with_the_smallest_that_would_do(sd15):
    with pytest.raises(InputError, match=r"allowed: (\d+\.\d+) GB or more") as refused:
        plan_memory(sd15, GB // 100, device="cuda", pictures=4)
    smallest = float(str(refused.value).split("allowed: ")[1].split(" GB")[0])
    assert plan_memory(sd15, int(smallest * GB), device="cuda", pictures=4).peak_bytes <= smallest * GB
    with pytest.raises(InputError):
        plan_memory(sd15, int((smallest - 0.02) * GB), device="cuda", pictures=4)


def test_a_4k_picture_is_decoded_under_8_gb_in_tiles(sd15):
    model = models.create("sd15", parts=("unet", "vae"), device="meta").to(dtype=torch.float16)
    from darkroom.sample.memory import _vae_bytes

    tiled, plain = (_vae_bytes(model, (2224 // 8, 3840 // 8), tile, False) for tile in (512, None))
    assert tiled + sum(sd15.weights.values()) < 8 * GB < plain


def test_offloading_that_cannot_stand_beside_quantising_is_not_chosen(sd15):
    assert plan_memory(sd15, 2 * GB, device="cuda", fixed=("int8",)).names[0] == "offload_model"
    with pytest.raises(InputError):
        plan_memory(sd15, GB, device="cuda", fixed=("cuda_graphs",))


def test_a_plan_is_kept_and_the_pictures_are_the_same(tiny):
    plain = sample.generate(tiny, "a red circle", steps=3, num=4, size=(64, 64), optimise="none")
    large = (256, 256)  # its activations outweigh what the process's own memory moves between two looks
    applied, roomy = optimise_within(tiny, "none", "40GB", size=large, pictures=4)
    assert roomy.pictures_a_call == 4
    assert applied.rows_a_call is None
    half = (roomy.peak_bytes + roomy.phases["text encoding"]) // 2
    _, plan = optimise_within(tiny, "none", half, size=large, pictures=4)
    assert plan.pictures_a_call < 4 or plan.names
    said: list[str] = []
    made = sample.generate(
        tiny,
        "a red circle",
        steps=3,
        num=4,
        size=(64, 64),
        optimise="none",
        memory=roomy.peak_bytes,
        notice=said.append,
    )
    assert any(line.startswith("memory:") for line in said)
    for a, b in zip(made, plain, strict=True):
        torch.testing.assert_close(a.latents, b.latents, atol=1e-4, rtol=1e-4)


def test_memory_is_for_the_torch_backend(tiny):
    with pytest.raises(InputError, match="backend torch"):
        sample.generate(tiny, "a red circle", memory="3GB", backend="openvino")


def test_calls_and_decodes_follow_a_card_s_free_memory():
    """A plain eight pictures of 512 px and a megapixel where nothing is known; more where a card has room."""
    needs = Needs({}, 0, 0, unet_fixed=10**9, unet_row=10**8, vae={None: 10**9}, picture=3)

    def fitting(gigabytes: float, *, guided: bool = True) -> int:
        return pictures_that_fit(needs, int(gigabytes * 1e9), guided=guided, most=64)

    assert [fitting(size) for size in (1, 8, 24, 80)] == [1, 16, 32, 64]
    assert fitting(8, guided=False) > fitting(8)
    assert decode_pixels(None) == decode_pixels(2**30) == DECODE_PIXELS
    assert DECODE_PIXELS < decode_pixels(24 * 2**30) < decode_pixels(80 * 2**30) <= 32 * DECODE_PIXELS


@pytest.mark.parametrize(
    ("hires", "kind"), [(None, RuntimeError), ({"scale": 2.0, "steps": 2}, torch.OutOfMemoryError)]
)
def test_what_does_not_fit_a_call_is_made_in_halves(tiny, monkeypatch, caplog, hires, kind):
    """Free memory that another process took since: the same pictures in calls that fit; one alone fails."""
    asked = {"steps": 2, "num": 5, "size": (32, 32), "optimise": "none", "hires": hires}
    plain = sample.generate(tiny, "a red circle", **asked)
    forward, most, rows, steps = type(tiny.unet).forward, 4, [], []

    def bounded(self, x, *more, **named):
        if len(x) > most:
            raise kind("MPS backend out of memory")
        rows.append(len(x))
        return forward(self, x, *more, **named)

    monkeypatch.setattr(type(tiny.unet), "forward", bounded)
    made = sample.generate(tiny, "a red circle", progress=lambda at, of: steps.append((at, of)), **asked)
    assert max(rows) == most
    assert steps[-1][0] == steps[-1][1]
    assert "no memory for 5 pictures a U-Net call: 2 are tried" in caplog.text
    for a, b in zip(made, plain, strict=True):
        torch.testing.assert_close(a.latents, b.latents, atol=1e-4, rtol=1e-4)
        assert a.parameters["seed"] == b.parameters["seed"]
    most = 1
    with pytest.raises(kind, match="out of memory"):
        sample.generate(tiny, "a red circle", **asked)


def test_a_model_that_waits_in_main_memory_leaves_room_for_its_weights(tiny, monkeypatch):
    """What is free before the U-Net comes to the card is not free after it."""
    settings = sample.GenerateSettings(steps=2, num=16, size=(512, 512), guidance=5.0)
    job = sample.Generation(tiny, ["a"], settings, "torch", optimise="none")
    needs = Needs({"unet": 10**9}, 0, 0, unet_fixed=0, unet_row=10**7, vae={None: 1}, picture=3)
    inside = sys.modules[sample.Generation.__module__]
    monkeypatch.setattr(inside, "free_on_card", lambda device: 10**9)
    monkeypatch.setattr(inside, "count_needs", lambda *_: needs)
    usual = job.first.rows_a_call
    found = {}
    for name in ("offload_model", "none"):
        job.backend.optimised, job.first.least_a_call = (name,), 1
        job._follow_free_memory(job.backend)
        found[name] = job.first.rows_a_call
    assert found == {"offload_model": usual, "none": 16}
    assert usual < 16
