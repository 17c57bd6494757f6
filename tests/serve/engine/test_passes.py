"""Two passes through the engine (hires), U-Nets that repaint (9 channels), and texts encoded once."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from darkroom import models, sample
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import AdapterChoice, HiresChoice, PictureRequest, Refused, Uploads
from serve.conftest import SMALL, difference

LATENT = HiresChoice(scale=2, strength=0.5)
PIXELS = HiresChoice(scale=1.5, strength=1.0, steps=4, upscaler="lanczos")


def asked(seed: int, hires: HiresChoice | None, **more: Any) -> PictureRequest:
    return PictureRequest(prompt="a red circle", steps=6, seed=seed, hires=hires, **more)


def lone(model: models.Model, request: PictureRequest) -> Image.Image:
    hires = None if request.hires is None else sample.Hires(**request.hires.model_dump())
    told = {"steps": request.steps, "seed": request.seed, "num": request.num, "hires": hires}
    return sample.generate(model, request.prompt, **told)[-1].image


async def made(core: Core, name: str) -> Image.Image:
    job = await core.finished(name, key="a")
    assert job.state == "done", job.error
    picture = (await core.pictures(name, key="a"))[-1]
    return Image.open(io.BytesIO(picture.png)).convert("RGB")


def test_larger_passes_share_the_engine_and_give_the_lone_pictures(small, run_core):
    requests = [asked(1, LATENT), asked(2, PIXELS), asked(3, None), asked(4, LATENT, num=3)]

    async def scenario(core: Core) -> list[Image.Image]:
        for i, request in enumerate(requests):
            job = await core.submit(request, key="a", job_id=f"x{i}")
            assert (job.steps_total > 6 * request.num) == (request.hires is not None)
        pictures = [await made(core, f"x{i}") for i in range(len(requests))]
        assert core.engine is not None
        assert core.engine.load == 0
        return pictures

    pictures = run_core(scenario)
    assert [picture.size for picture in pictures] == [(64, 64), (48, 48), (32, 32), (64, 64)]
    for picture, request in zip(pictures, requests, strict=True):
        assert difference(picture, lone(small, request).convert("RGB")) <= 1
    other = lone(small, asked(9, LATENT)).convert("RGB")
    assert difference(pictures[0], other) >= 10


def test_adapters_stay_through_both_passes_and_leave_with_a_cancel(run_core, adapter_folder):
    styles = [
        asked(i, HiresChoice(scale=2, strength=1.0), adapters=(AdapterChoice(name=f"style{i % 3}"),))
        for i in range(6)
    ]

    async def scenario(core: Core) -> Any:
        for i, request in enumerate(styles):
            await core.submit(request, key="a", job_id=f"x{i}")
        while (job := await core.get("x5", key="a")).steps_done < 7 and not job.over:  # to its second pass
            await asyncio.sleep(0.005)
        await core.cancel("x5", key="a")
        states = [(await core.finished(f"x{i}", key="a")).state for i in range(6)]
        assert core.engine is not None
        library = core.pool.first.opened.library if core.pool.first.opened else None
        assert library is not None
        for _ in range(200):
            if not library._users and not core.engine.load:
                break
            await asyncio.sleep(0.01)
        return states, dict(library._users), core.engine.load

    states, users, load = run_core(scenario, adapters=adapter_folder, slots=2)
    assert states[:5] == ["done"] * 5
    assert states[5] in ("cancelled", "done")
    assert users == {}
    assert load == 0


def test_limits_hold_for_the_larger_size(run_core):
    image = io.BytesIO()
    Image.new("RGB", (32, 32)).save(image, "PNG")

    async def scenario(core: Core) -> list[Refused]:
        refused = []
        for hires, uploads, steps in (
            (HiresChoice(scale=8), None, 20),
            (HiresChoice(scale=4), None, 150),
            (LATENT, Uploads(image.getvalue()), 6),
        ):
            request = PictureRequest(prompt="a", steps=steps, hires=hires, width=256, height=256)
            with pytest.raises(Refused) as told:
                await core.submit(request, key="a", uploads=uploads)
            refused.append(told.value)
        return refused

    limits = {"side_pixels": 1024, "work": 2**27}
    sides, work, upload = run_core(scenario, limits=limits)
    assert (sides.status, sides.param) == (422, "hires")
    assert (work.status, work.code) == (422, "over_limit")
    assert (upload.status, upload.param) == (422, "hires")


@pytest.fixture(scope="module")
def repainting(tmp_path_factory) -> Any:
    """A model whose U-Net sees mask and picture, in a folder."""
    unet = {**SMALL["unet"], "in_channels": 9}
    model = models.create("tiny", seed=3, overrides={**SMALL, "unet": unet})
    folder = tmp_path_factory.mktemp("models") / "repainting"
    models.save(model, folder)
    return model, folder


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_a_unet_that_repaints_is_served(repainting, run_core):
    model, folder = repainting
    picture = Image.effect_noise((32, 32), 80).convert("RGB")
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (8, 8, 24, 24))
    request = PictureRequest(prompt="a hat", steps=5, seed=2)

    async def scenario(core: Core) -> Any:
        with pytest.raises(Refused) as without:
            await core.submit(request, key="a")
        with pytest.raises(Refused) as unmasked:
            await core.submit(request, key="a", uploads=Uploads(png(picture)))
        for i in range(3):
            wanted = request.model_copy(update={"seed": i + 1})
            await core.submit(wanted, key="a", job_id=f"x{i}", uploads=Uploads(png(picture), png(mask)))
        return without.value, unmasked.value, [await made(core, f"x{i}") for i in range(3)]

    without, unmasked, pictures = run_core(scenario, model=str(folder))
    for refused in (without, unmasked):
        assert (refused.status, refused.param) == (422, "mask")
        assert "repaints" in refused.message
    alone = [
        sample.generate(model, "a hat", steps=5, seed=i + 1, image=picture, mask=mask)[0].image.convert("RGB")
        for i in range(3)
    ]
    assert [difference(one, other) <= 1 for one, other in zip(pictures, alone, strict=True)] == [True] * 3
    assert difference(pictures[0], alone[1]) >= 10
    kept = np.asarray(pictures[0])[:4, :4].astype(int) - np.asarray(picture)[:4, :4].astype(int)
    assert np.abs(kept).max() <= 1


def test_texts_that_come_again_are_encoded_once(small, run_core):
    calls: list[int] = []

    async def scenario(core: Core) -> list[Image.Image]:
        assert core.pool.first.opened is not None
        encoder = core.pool.first.opened.model.text_encoders[0]
        hook = encoder.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
        for i, prompt in enumerate(("a red circle", "a red circle", "a blue square")):
            wanted = PictureRequest(prompt=prompt, steps=3, seed=5, num=1 + i)
            await core.submit(wanted, key="a", job_id=f"x{i}")
            await core.finished(f"x{i}", key="a")
        hook.remove()
        return [Image.open(io.BytesIO((await core.pictures(f"x{i}", key="a"))[0].png)) for i in range(3)]

    first, same, other = run_core(scenario)
    assert calls == [2, 1]  # a red circle and nothing, a blue square
    assert difference(first, same) == 0
    assert difference(first.convert("RGB"), other.convert("RGB")) >= 10
    alone = sample.generate(small, "a blue square", steps=3, seed=5)[0].image
    assert difference(other.convert("RGB"), alone.convert("RGB")) <= 1
