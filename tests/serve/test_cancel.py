"""Cancelling: at once, whatever is on its way, and nobody else waits for it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from darkroom.errors import Stopped
from darkroom.sample.backends import open_backend
from darkroom.sample.denoise import Condition, Row
from darkroom.sample.pictures import while_wanted
from darkroom.serve.engine.tickets import EngineJob, Shape
from darkroom.serve.request import PictureRequest
from serve.conftest import Released

SIDE = 64
"""Of SD 1.5's latents at 512 px."""


def test_sixteen_pictures_are_cancelled_while_others_are_answered(run_http, monkeypatch):
    """They had formed the repr of every tensor, under the engine's lock, before 507 was answered."""
    formed: list[None] = []
    plain = torch.Tensor.__repr__

    def noted(tensor: torch.Tensor, **more: object) -> str:
        formed.append(None)
        return plain(tensor, **more)

    async def scenario(core, http):
        unet = core.engine.unet = Released()
        side = SIDE * core.pool.first.model.vae_factor
        asked = {"prompt": "a", "num": 16, "steps": 20, "guidance": 5.0, "width": side, "height": side}
        assert (await http.put("/jobs/x", json=asked)).status_code == 202
        unet.steps.release()
        while not (await http.get("/jobs/x")).json()["steps_done"] or unet.calls < 2 or unet.rows < 32:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(torch.Tensor, "__repr__", noted)
        cancel, live = await asyncio.gather(http.delete("/jobs/x"), http.get("/live"))
        over = (await http.get("/jobs/x")).json()["state"]
        still = core.engine.load
        unet.steps.release(2)  # the step that was under way: after it the rows are free
        while core.engine.load:
            await asyncio.sleep(0.01)
        return cancel.status_code, cancel.json()["state"], live.status_code, over, still > 0

    told = run_http(scenario, capacity=2048, lanes=1)
    assert told == (200, "cancelled", 200, "cancelled", True)
    assert not formed
    repr(torch.zeros(1))
    assert formed, "the control: it would have been noticed"


def test_no_word_is_made_of_what_holds_tensors():
    latents = torch.zeros(4, 8, 8)
    row = Row(None, latents, Condition(latents[0]))  # type: ignore[arg-type]
    work = EngineJob("u", "k", PictureRequest(prompt="a", num=2), Shape(8, 8, 1, 2), None)  # type: ignore[arg-type]
    work.tickets[0].row = row
    for one in (row, row.positive, work, work.tickets[0], work.tickets[0].entry):
        assert "tensor" not in repr(one)
    assert "tensor" in repr([latents])


def test_a_picture_nobody_wants_is_left_between_two_tiles(small):
    tiles: list[int] = []
    backend = open_backend("torch", small, optimise="vae_tiling:64")
    latents = torch.zeros(1, small.latent_channels, 32, 32)
    hook = small.vae.decoder.register_forward_hook(lambda *_: tiles.append(1))
    try:
        backend.decode(latents)
        whole = len(tiles)
        tiles.clear()
        with pytest.raises(Stopped), while_wanted(lambda: len(tiles) < 2):
            backend.decode(latents)
    finally:
        hook.remove()
    assert (len(tiles), whole > 4) == (2, True)
