"""Jobs from acceptance to stored pictures, in one process."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import stat
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image

from darkroom import sample
from darkroom.models import folder
from darkroom.models.adapters.adapter import Adapter, Factors, names_of
from darkroom.models.adapters.read import adaptable, read_adapter, write_adapter
from darkroom.serve.jobs import core as core_module
from darkroom.serve.jobs.results import Results, ResultWriter
from darkroom.serve.jobs.store import JobStore, StorageError
from darkroom.serve.request import AdapterChoice, PictureRequest, Refused, Uploads
from darkroom.serve.settings import Limits
from serve.conftest import difference

QUICK = PictureRequest(prompt="a red circle", steps=3, seed=5)
LONG = PictureRequest(prompt="a red circle", steps=150, seed=5)


def refused(run_core, request, **settings) -> Refused:
    async def scenario(core):
        with pytest.raises(Refused) as caught:
            await core.submit(request, key="a")
        return caught.value

    return run_core(scenario, **settings)


async def started(core, job):
    while (await core.get(job.id, key=job.key)).state == "queued":
        await asyncio.sleep(0.005)


def test_a_job_becomes_pictures_that_say_how_they_were_made(run_core, small, tmp_path):
    async def scenario(core):
        job = await core.submit(QUICK.model_copy(update={"num": 2}), key="a", job_id="mine")
        done = await core.finished(job.id, key="a")
        return done, await core.pictures("mine", key="a")

    done, pictures = run_core(scenario)
    assert (done.state, done.id, len(done.pictures)) == ("done", "mine", 2)
    assert done.cost["device_s"] > 0
    lone = sample.generate(
        small, "a red circle", steps=3, seed=5, num=2, optimise="none", notice=lambda _: None
    )
    for picture, other in zip(pictures, lone, strict=True):
        assert difference(Image.open(io.BytesIO(picture.png)), other.image) <= 1
        path = tmp_path / "one.png"
        path.write_bytes(picture.png)
        assert sample.read_parameters(path)["seed"] == other.parameters["seed"]


def test_pictures_name_the_hash_of_the_models_file(run_core, model_folder):
    """The same as `generate` writes, in darkroom's chunk and in A1111's."""
    weights = next((model_folder / "unet").glob("*.safetensors"))
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()

    async def scenario(core):
        job = await core.submit(QUICK, key="a")
        await core.finished(job.id, key="a")
        return (await core.pictures(job.id, key="a"))[0].png, core.catalogue.model.sha256

    png, told = run_core(scenario)
    texts = Image.open(io.BytesIO(png)).text
    assert (told, json.loads(texts["darkroom"])["model_sha256"]) == (sha256, sha256)
    assert f"Model hash: {sha256[:10]}, " in texts["parameters"]


def test_a_large_models_hash_comes_while_it_is_served(run_core, monkeypatch):
    monkeypatch.setattr(folder, "QUICK_BYTES", 0)
    monkeypatch.setenv("DARKROOM_CACHE", "/dev/null/none")  # so that it is not known already

    async def scenario(core):
        for _ in range(500):
            if core.catalogue.model.sha256:
                break
            await asyncio.sleep(0.01)
        return len(core.catalogue.model.sha256 or "")

    assert run_core(scenario) == 64


def test_the_same_id_is_the_same_job_and_another_body_is_a_conflict(run_core):
    async def scenario(core):
        first, second = await asyncio.gather(
            core.submit(QUICK, key="a", job_id="x"), core.submit(QUICK, key="a", job_id="x")
        )
        other_key = await core.submit(QUICK, key="b", job_id="x")
        await core.finished("x", key="a")
        third = await core.submit(QUICK, key="a", job_id="x")
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK.model_copy(update={"steps": 4}), key="a", job_id="x")
        await core.finished("x", key="b")
        return first, second, third, other_key, caught.value, core.metrics.accepted._value.get()

    first, second, third, other_key, conflict, accepted = run_core(scenario)
    assert first.uid == second.uid == third.uid != other_key.uid
    assert third.state == "done"
    assert (conflict.status, conflict.code) == (409, "conflict")
    assert accepted == 2


def test_a_drawn_seed_is_kept_with_the_job(run_core):
    async def scenario(core):
        job = await core.submit(QUICK.model_copy(update={"seed": None}), key="a")
        done = await core.finished(job.id, key="a")
        return job.request.seed, done.pictures[0]["seed"]

    accepted, drawn = run_core(scenario)
    assert accepted == drawn


def test_jobs_of_another_key_do_not_exist(run_core):
    async def scenario(core):
        job = await core.submit(LONG, key="a", job_id="x")
        for call in (core.get, core.cancel, core.pictures, core.finished):
            with pytest.raises(Refused) as caught:
                await call("x", key="b")
            assert caught.value.status == 404
        assert await core.jobs(key="b") == []
        await core.cancel("x", key="a")
        return [one.id for one in await core.jobs(key="a")], job.id

    assert run_core(scenario) == (["x"], "x")


def test_cancelling_ends_a_job_for_good_wherever_it_is(run_core):
    async def scenario(core):
        running = await core.submit(LONG, key="a")
        await started(core, running)
        queued = [await core.submit(LONG.model_copy(update={"num": 4}), key="a") for _ in range(3)]
        for job in (queued[2], running, *queued[:2]):
            assert (await core.cancel(job.id, key="a")).state == "cancelled"
        while core.status().load:
            await asyncio.sleep(0.005)
        assert core.status().waiting == 0
        done = await core.finished((await core.submit(QUICK, key="a")).id, key="a")
        assert (await core.cancel(done.id, key="a")).state == "done"
        return [job.state for job in await core.jobs(key="a")]

    assert run_core(scenario) == ["done", *["cancelled"] * 4]


def test_events_tell_a_job_to_its_end_with_growing_ids(run_core):
    async def scenario(core):
        await core.submit(LONG.model_copy(update={"num": 4}), key="a", job_id="first")
        # Steps enough that who listens from the start is there before the preview is due.
        await core.submit(QUICK.model_copy(update={"previews": 1, "steps": 60}), key="b", job_id="x")
        heard = asyncio.ensure_future(collect(core.events("x", key="b", after=7)))
        await core.submit(LONG, key="a", job_id="last")
        told = asyncio.ensure_future(collect(core.events("last", key="a")))
        events = await heard
        await core.cancel("first", key="a")
        await core.cancel("last", key="a")
        return events, await told

    async def collect(events):
        return [event async for event in events]

    events, told = run_core(scenario, lanes=1)
    assert [event.id for event in events] == list(range(8, 8 + len(events)))
    assert events[-1].kind == "done"
    assert events[-1].data["pictures"][0]["steps"] == 60
    previews = [event for event in events if event.kind == "preview"]
    assert [Image.open(io.BytesIO(event.data["png"])).size for event in previews] == [(32, 32)]
    assert told[0].kind == "queued"
    assert told[-1].kind == "cancelled"


def test_a_stream_too_many_is_refused_before_it_begins(run_core):
    async def scenario(core):
        await core.submit(LONG, key="a", job_id="x")
        first = core.events("x", key="a")
        await anext(first)
        with pytest.raises(Refused) as caught:
            core.events("x", key="a")
        await first.aclose()
        again = core.events("x", key="a")
        kind = (await anext(again)).kind
        await core.cancel("x", key="a")
        return caught.value, kind

    error, kind = run_core(scenario, limits=Limits(watchers=1))
    assert (error.status, error.code) == (429, "too_many_streams")
    assert kind in ("queued", "step")


def test_a_deadline_ends_a_job(run_core):
    async def scenario(core):
        job = await core.submit(LONG.model_copy(update={"deadline_s": 0.05}), key="a")
        return await core.finished(job.id, key="a"), core.status().waiting

    job, waiting = run_core(scenario)
    assert (job.state, job.error["code"], waiting) == ("failed", "deadline", 0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"steps": 151}, "steps"),
        ({"guidance": 51.0}, "guidance"),
        ({"num": 17}, "num"),
        ({"width": 33}, "width"),
        ({"width": 2048, "height": 2048, "steps": 50}, "width"),
        ({"width": 64, "hires": {"scale": 2.0}}, "hires"),
        ({"clip_skip": 12}, "clip_skip"),
        ({"seed": 2**63 - 1, "num": 2}, "seed"),
        ({"prompt": "a b " * 700}, "prompt"),
        ({"negative": "a b " * 700}, "negative"),
        ({"prompt": "a <lora:nobody:1>"}, "adapters"),
        ({"height": 4096}, "height"),
        ({"solver": "magic"}, "solver"),
        ({"spacing": "odd"}, "spacing"),
        ({"eta": 0.5, "solver": "euler"}, "eta"),
        ({"karras": True, "solver": "ddim"}, "karras"),
        ({"strength": 0.5}, "strength"),
        ({"prompt": "x" * 4001}, "prompt"),
        ({"adapters": ({"name": "none", "weight": 1.0},)}, "adapters"),
        ({"deadline_s": 1e9}, "deadline_s"),
        ({"previews": 11}, "previews"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_the_fields_name(run_core, change, param):
    error = refused(run_core, PictureRequest(**{"prompt": "a horse", **change}))
    assert (error.status, error.param) == (422, param)


def test_a_blend_of_more_adapters_than_slots_is_refused_and_does_not_wait_for_ever(run_core, adapter_folder):
    blend = tuple(AdapterChoice(name=f"style{i}") for i in range(2))
    request = QUICK.model_copy(update={"adapters": blend})
    error = refused(run_core, request, adapters=adapter_folder, slots=1)
    assert (error.status, error.param, "at most 1" in error.message) == (422, "adapters", True)

    async def scenario(core):
        await core.submit(request, key="a", job_id="x")
        await core.drain(0.0)

    async def later(core):
        return await core.finished("x", key="a")

    run_core(scenario, adapters=adapter_folder, slots=2)
    job = run_core(later, adapters=adapter_folder, slots=1)
    assert job.state == "failed"
    assert "at most 1" in job.error["message"]


def test_the_largest_picture_allowed_is_said_and_served(run_core):
    """One of 2048 px had been let in where a step has room for 8 of 32 px, and held up everybody."""

    async def scenario(core):
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK.model_copy(update={"width": 2048, "guidance": 5.0}), key="a")
        said = re.search(r"at most (\d+) pixels with guidance, such as (\d+)x", caught.value.message)
        most, side = int(said[1]), int(said[2])
        over = QUICK.model_copy(update={"width": side + 8, "guidance": 5.0})
        with pytest.raises(Refused):
            await core.submit(over, key="a")
        done = await core.submit(over.model_copy(update={"width": side}), key="a")
        return most, side, (await core.finished(done.id, key="a")).state

    assert run_core(scenario) == (32 * 32 * 8 // 2, 64, "done")


def test_a_tag_names_an_adapter_whoever_asks(run_core, adapter_folder):
    """As it does in A1111's dialect; it had been a failed job, or words, in others."""

    async def scenario(core):
        drawn = []
        for more in (
            {"prompt": "a horse <lora:style1:0.5>", "negative": "grey <lora:style2:1>"},
            {
                "prompt": "a horse",
                "adapters": (AdapterChoice(name="style1", weight=0.5),),
                "negative": "grey",
            },
            {"prompt": "a horse", "negative": "grey"},
        ):
            job = await core.submit(QUICK.model_copy(update=more), key="a")
            await core.finished(job.id, key="a")
            [picture] = await core.pictures(job.id, key="a")
            drawn.append(Image.open(io.BytesIO(picture.png)))
        return drawn

    tagged, chosen, plain = run_core(scenario, adapters=adapter_folder)
    assert difference(tagged, chosen) == 0
    assert difference(tagged, plain) >= 5, "the control"


def test_adapters_of_every_kind_and_their_weights_by_row(run_core, small, adapter_folder, tmp_path):
    """A LoKr, a DoRA and a LoRA with weights of its own share calls; each is as its lone run."""
    style = read_adapter(adapter_folder / "style3.safetensors")
    draw = torch.Generator().manual_seed(1)
    soft = {
        name: replace(layer, magnitude=torch.rand(len(layer.up), generator=draw) + 0.5)
        for name, layer in style.layers.items()
    }
    blocks = {"lokr_w1": torch.randn(4, 4, generator=draw), "lokr_w2": torch.randn(8, 8, generator=draw)}
    path = next(p for p, one in adaptable(small).items() if one.weight.shape == (32, 32) and "to_q" in p)
    write_adapter(Adapter("soft", soft, kind="dora"), tmp_path / "soft.safetensors", kohya=True)
    kron = Adapter("kron", {path: Factors("lokr", blocks)}, kind="lokr")
    write_adapter(kron, tmp_path / "kron.safetensors", kohya=True)
    write_adapter(style, tmp_path / "style.safetensors")
    names = names_of(small)[0]
    lists = ",".join("0.5" if name.startswith("OUT") else "1" for name in names)
    tags = ["", "<lora:kron:1>", "<lora:soft:0.8>", "<lora:style:0.1:1>", f"<lora:style:1:lbw={lists}>"]

    async def scenario(core):
        jobs = [
            await core.submit(QUICK.model_copy(update={"prompt": f"a horse {tag}", "steps": 6}), key="a")
            for tag in tags
        ]
        over = [await core.finished(job.id, key="a") for job in jobs]
        assert [job.state for job in over] == ["done"] * len(tags), [job.error for job in over]
        drawn = [await core.pictures(job.id, key="a") for job in jobs]
        assert core.engine.library.dense_bytes == 32 * 32 * 4
        wrong = QUICK.model_copy(update={"prompt": "x <lora:style:1:lbw=1,2>"})
        with pytest.raises(Refused, match="2 block weights"):
            await core.submit(wrong, key="a")
        return [(Image.open(io.BytesIO(one.png)), one.parameters) for [one] in drawn]

    made = run_core(scenario, adapters=tmp_path, slots=4)
    given = {name: tmp_path / f"{name}.safetensors" for name in ("kron", "soft", "style")}
    for i, ((picture, told), tag) in enumerate(zip(made, tags, strict=True)):
        lone, plain = (
            sample.generate(
                small,
                f"a horse {some}",
                adapters=given if some else {},
                seed=told["seed"],
                steps=6,
                guidance=told["guidance"],
                optimise="none",
                notice=lambda _: None,
            )[0].image
            for some in (tag, "")
        )
        assert difference(picture, lone) <= 2
        assert difference(picture, plain) >= (0 if i == 0 else 3), "the control"


def test_an_adapter_that_needs_more_memory_than_there_may_be_is_refused(run_core, small, tmp_path):
    path, layer = next((p, one) for p, one in adaptable(small).items() if "to_q" in p)
    whole = Factors("full", {"diff": torch.ones(layer.weight.shape)})
    write_adapter(Adapter("whole", {path: whole}, kind="full"), tmp_path / "whole.safetensors", kohya=True)

    async def scenario(core):
        asked = QUICK.model_copy(update={"adapters": (AdapterChoice(name="whole"),)})
        job = await core.submit(asked, key="a")
        return (await core.finished(job.id, key="a")).error

    error = run_core(scenario, adapters=tmp_path, adapter_memory=1000)
    assert "'whole' (full) takes 0.0 MiB of differences as large as layers" in error["message"]
    assert "--adapter-memory" in error["message"]


def test_the_product_of_pixels_steps_and_pictures_is_bounded(run_core):
    limits = Limits(work=32 * 32 * 10 * 2 * 3)
    error = refused(run_core, PictureRequest(prompt="a", steps=10, num=4), limits=limits)
    assert (error.status, error.code, error.param) == (422, "over_limit", "num")


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(run_core):
    async def scenario(core):
        await core.submit(LONG.model_copy(update={"num": 4}), key="a")
        while core.status().waiting or not core.status().step_s:
            await asyncio.sleep(0.005)
        for _ in range(2):
            await core.submit(LONG.model_copy(update={"num": 2}), key="a")
        with pytest.raises(Refused) as other:
            await core.submit(LONG, key="a")
        await core.submit(LONG, key="b")  # one key's share is not all of the queue
        with pytest.raises(Refused) as full:
            await core.submit(LONG, key="c")
        for job in await core.jobs(key="a") + await core.jobs(key="b"):
            await core.cancel(job.id, key=job.key)
        return other.value, full.value

    other, full = run_core(scenario, limits=Limits(queue=5, queue_per_key=4), lanes=1)
    assert (other.status, other.code) == (429, "queue_full")
    assert "with key 'a'" in other.message
    assert "with key" not in full.message
    assert full.retry_after_s >= 1
    assert int(full.headers["Retry-After"]) >= 1


def test_a_key_that_comes_too_often_is_told_to_wait(run_core):
    async def scenario(core):
        jobs = [await core.submit(QUICK, key="a") for _ in range(2)]
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK, key="a")
        jobs.append(await core.submit(QUICK, key="b"))
        for job in jobs:
            await core.finished(job.id, key=job.key)
        return caught.value

    error = run_core(scenario, limits=Limits(rate_per_minute=12))
    assert (error.status, error.code) == (429, "rate_limited")
    assert "with key 'a'" in error.message
    assert 0 < error.retry_after_s <= 5


def test_who_comes_too_often_has_no_picture_opened(run_core):
    uploads = Uploads(image=b"no picture")
    wanted = QUICK.model_copy(update={"strength": 0.7})

    async def scenario(core):
        told = []
        for _ in range(3):
            with pytest.raises(Refused) as caught:
                await core.submit(wanted, key="a", uploads=uploads)
            told.append(caught.value.status)
        return told

    assert run_core(scenario, limits=Limits(rate_per_minute=12)) == [422, 422, 429]


def test_a_picture_to_start_from_is_kept_until_the_job_is_done_checked_and_used(run_core, small):
    image = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    bmp = io.BytesIO()
    image.save(bmp, "BMP")
    wanted = QUICK.model_copy(update={"strength": 0.7})

    async def scenario(core):
        uploads = Uploads(buffer.getvalue())
        job, twin = await asyncio.gather(
            *(core.submit(wanted, key="a", uploads=uploads, job_id="x") for _ in range(2))
        )
        assert twin.uid == job.uid
        assert core.results.uids() == [job.uid]
        await core.finished(job.id, key="a")
        assert [path.name for path in core.results.folder.glob("*/*/*")] == ["0.png"]
        codes = []
        for content in (b"", b"\x89PNG\r\n\x1a\n" + b"x" * 50, bmp.getvalue()):
            with pytest.raises(Refused) as caught:
                await core.submit(wanted, key="a", uploads=Uploads(content))
            codes.append((caught.value.status, caught.value.param))
        return (await core.pictures(job.id, key="a"))[0], codes

    picture, codes = run_core(scenario)
    lone = sample.generate(
        small,
        "a red circle",
        image=image,
        strength=0.7,
        steps=3,
        seed=5,
        optimise="none",
        notice=lambda _: None,
    )
    assert difference(Image.open(io.BytesIO(picture.png)), lone[0].image) <= 1
    assert codes == [(422, "image")] * 3


def test_an_upload_of_too_many_pixels_is_refused_before_it_is_decoded(run_core):
    buffer = io.BytesIO()
    Image.new("L", (4000, 4000)).save(buffer, "PNG")

    async def scenario(core):
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK, key="a", uploads=Uploads(buffer.getvalue()))
        return caught.value

    error = run_core(scenario, limits=Limits(upload_pixels=1000))
    assert (error.status, error.code, error.param) == (422, "over_limit", "image")


def test_a_broken_model_folder_is_a_state_and_no_hang(run_core, tmp_path):
    (tmp_path / "broken").mkdir()

    async def scenario(core):
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK, key="a")
        return core.trouble(), caught.value

    trouble, error = run_core(scenario, model=str(tmp_path / "broken"))
    assert trouble[0] == "broken"
    assert error.status == 503
    assert str(tmp_path) not in error.message + trouble[1]


def test_a_full_disk_is_a_state_and_passes(run_core):
    async def scenario(core):
        core.settings = core.settings.model_copy(update={"min_free_bytes": 2**62})
        await core._retention.sweep(core.limits, core.settings.min_free_bytes)
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK, key="a")
        trouble = core.trouble()
        core.settings = core.settings.model_copy(update={"min_free_bytes": 0})
        await core._retention.sweep(core.limits, core.settings.min_free_bytes)
        await core.finished((await core.submit(QUICK, key="a")).id, key="a")
        return caught.value, trouble

    error, trouble = run_core(scenario)
    assert (error.status, error.code) == (507, "storage")
    assert trouble[0] == "storage"


def test_pictures_wait_for_a_disk_that_takes_no_writes_and_are_not_lost(run_core, monkeypatch):
    """The folder of pictures is replaced by a file for a while: real writes that really fail."""

    async def scenario(core):
        folder = core.results.folder
        moved = folder.with_name("elsewhere")
        folder.rename(moved)
        folder.write_text("in the way")
        job = await core.submit(QUICK, key="a")
        while core.trouble() is None:
            await asyncio.sleep(0.01)
        seen = core.trouble()
        folder.unlink()
        moved.rename(folder)
        done = await core.finished(job.id, key="a")
        return seen, done.state, len(await core.pictures(job.id, key="a"))

    seen, state, count = run_core(scenario)
    assert seen[0] == "storage"
    assert (state, count) == ("done", 1)


def test_a_job_is_cancelled_before_the_model_is_there_and_after_it_was_set_aside(run_core):
    async def scenario(core):
        for name in ("x", "y"):
            await core.submit(LONG, key="a", job_id=name)
        await core.drain(0.0)
        return (await core.cancel("x", key="a")).state, core.status().jobs

    async def later(core):
        assert core.state == "loading"
        before = (await core.cancel("y", key="a")).state
        await core.loaded()
        return before, core.status().jobs, [job.state for job in await core.jobs(key="a")]

    assert run_core(scenario) == ("cancelled", 0)
    assert run_core(later, wait=False) == ("cancelled", 0, ["cancelled"] * 2)


def test_a_server_that_is_told_to_stop_does_not_wait_for_its_model(run_core, monkeypatch):
    arrives = threading.Event()
    monkeypatch.setattr("darkroom.serve.engine.loader.open_model", lambda *_: arrives.wait(120))
    start_s = time.monotonic()
    run_core(lambda core: core.drain(1.0), wait=False)
    assert time.monotonic() - start_s < 30
    arrives.set()


def test_a_cancellation_that_cannot_be_written_is_answered_and_tried_on(run_core, monkeypatch):
    monkeypatch.setattr("darkroom.serve.jobs.core.CANCEL_S", 0.1)

    async def scenario(core):
        end = core.store.end

        def full(*given):
            raise StorageError("the disk is full")

        job = await core.submit(LONG, key="a")
        monkeypatch.setattr(core.store, "end", full)
        with pytest.raises(Refused) as caught:
            await core.cancel(job.id, key="a")
        monkeypatch.setattr(core.store, "end", end)
        return caught.value, (await asyncio.wait_for(core.finished(job.id, key="a"), 20)).state

    error, state = run_core(scenario)
    assert (error.status, error.code, state) == (507, "storage", "cancelled")


def test_a_job_accepted_while_the_server_is_told_to_stop_is_kept_and_its_client_told_so(run_core):
    async def scenario(core):
        accept = core.store.accept

        def told_to_stop(*given):
            core.state = "draining"
            return accept(*given)

        core.store.accept = told_to_stop
        job = await core.submit(QUICK, key="a", job_id="x")
        with pytest.raises(Refused) as caught:
            await core.finished(job.id, key="a")
        await core.cancel(job.id, key="a")  # as the API does for a client that it could not serve
        return caught.value

    async def later(core):
        return (await core.finished("x", key="a")).state

    error = run_core(scenario)
    assert (error.status, error.code) == (503, "draining")
    assert error.retry_after_s
    assert run_core(later) == "done"


@pytest.mark.parametrize("state", ["done", "cancelled"])
def test_an_end_whose_acknowledgement_is_lost_is_told_and_stays(run_core, monkeypatch, state):
    async def scenario(core):
        end, lost = core.store.end, []

        def cut_off(uid, *given):
            future = end(uid, *given)
            if not lost:
                lost.append(future.result())
                raise StorageError("the connection is lost")
            return future

        monkeypatch.setattr(core.store, "end", cut_off)
        job = await core.submit(QUICK if state == "done" else LONG, key="a")
        if state == "cancelled":
            return (await core.cancel(job.id, key="a")).state, lost, core.results.uids()
        done = await asyncio.wait_for(core.finished(job.id, key="a"), 20)
        return done.state, lost, await core.pictures(job.id, key="a")

    told, lost, left = run_core(scenario)
    assert (told, lost, len(left)) == (state, [True], state == "done")


def test_what_was_kept_long_enough_goes(run_core):
    async def scenario(core):
        jobs = [await core.submit(QUICK.model_copy(update={"seed": i}), key="a") for i in range(3)]
        for job in jobs:
            await core.finished(job.id, key="a")
        one_bytes = len((await core.pictures(jobs[0].id, key="a"))[0].png)
        core.limits = core.limits.model_copy(update={"keep_bytes": int(one_bytes * 2.5)})
        await core._retention.sweep(core.limits, core.settings.min_free_bytes)
        by_size = {job.id for job in await core.jobs(key="a")}
        core.limits = core.limits.model_copy(update={"keep_s": 0.001})
        await core._retention.sweep(core.limits, core.settings.min_free_bytes)
        return [job.id for job in jobs], by_size, await core.jobs(key="a"), core.results.uids()

    ids, by_size, left, files = run_core(scenario)
    assert len(by_size) == 2
    assert ids[0] not in by_size or len(set(ids) - by_size) == 1
    assert left == []
    assert files == []


def test_draining_finishes_what_is_on_its_way_and_keeps_the_rest(run_core):
    async def scenario(core):
        running = await core.submit(PictureRequest(prompt="a", steps=40, seed=1, num=4), key="a")
        await started(core, running)
        waiting = await core.submit(LONG, key="a")
        attended = await core.submit(QUICK, key="a")
        with core.attended(attended):
            await core.drain(30)
        with pytest.raises(Refused) as caught:
            await core.submit(QUICK, key="a")
        states = {job.id: job.state for job in await core.jobs(key="a")}
        return [states[job.id] for job in (running, waiting, attended)], caught.value.status

    assert run_core(scenario, lanes=1) == (["done", "queued", "done"], 503)

    async def later(core):
        jobs = await core.jobs(key="a")
        return [(await core.finished(job.id, key="a")).state for job in jobs]

    assert run_core(later) == ["done"] * 3


def test_a_lost_device_hangs_nobody_and_loses_no_job(run_core, monkeypatch):
    async def scenario(core):
        async def lose(live_job):
            await started(core, live_job)

            def lost():
                raise SystemError("the device is gone")

            monkeypatch.setattr(core.engine, "_board", lost)
            with pytest.raises(Refused) as caught:
                await core.finished(live_job.id, key="a")
            return caught.value

        job = await core.submit(LONG, key="a", job_id="x")
        error = await asyncio.wait_for(lose(job), 20)
        with pytest.raises(Refused) as refused:
            await core.submit(QUICK, key="a")
        return error.status, refused.value.status, core.trouble()[0], (await core.get("x", key="a")).state

    assert run_core(scenario) == (503, 503, "broken", "running")

    async def later(core):
        return (await core.finished("x", key="a")).state

    assert run_core(later) == "done"


KEPT = PictureRequest(prompt="a red circle", steps=20, seed=5)


def kept_job(run_core, monkeypatch, error, seconds=30.0):
    """A job that was accepted before a restart, whose uploads cannot be read the first time; how it ends."""

    async def accept(core):
        await core.submit(KEPT, key="a", job_id="x")
        core._defer_all()

    run_core(accept)
    read, times = ResultWriter.read_uploads, []

    def fails_once(self, uid):
        times.append(uid)
        if len(times) == 1:
            raise error
        return read(self, uid)

    monkeypatch.setattr(ResultWriter, "read_uploads", fails_once)

    return run_core(lambda core: looked_at(core, seconds)), len(times)


async def looked_at(core, seconds):
    """The job when it is over, or as it is after so long."""
    end = time.monotonic() + seconds
    while not (job := await core.get("x", key="a")).over and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return job


@pytest.mark.parametrize(
    "error",
    [
        StorageError("the database is gone"),
        OSError(24, "Too many open files"),
        OSError(5, "Input/output error"),
        MemoryError(),
    ],
)
def test_a_kept_job_waits_for_a_machine_that_fails_just_now(run_core, monkeypatch, error):
    job, times = kept_job(run_core, monkeypatch, error)
    assert (job.state, times) == ("done", 2)


def test_a_kept_job_waits_for_a_store_that_fails_while_it_is_tried_again(run_core, monkeypatch):
    find, failed = JobStore.find_uid, []

    def fails_once(self, uid):
        failed.append(uid)
        if len(failed) == 1:
            raise StorageError("the database is gone")
        return find(self, uid)

    monkeypatch.setattr(core_module, "TAKE_UP_RETRY_S", 0.05)
    monkeypatch.setattr(JobStore, "find_uid", fails_once)
    job, times = kept_job(run_core, monkeypatch, OSError(24, "Too many open files"), 10.0)
    assert (job.state, times, len(failed)) == ("done", 3, 2)


def test_a_mistake_of_ours_ends_no_kept_job(run_core, monkeypatch, caplog):
    """It stays for the next process, and the log has the traceback; a request that is none any more ends."""
    job, times = kept_job(run_core, monkeypatch, ValueError("not in list"), 1.0)
    assert (job.over, times) == (False, 1)
    assert "cannot be taken up; it is kept" in caplog.text
    monkeypatch.undo()

    async def later(core):
        return (await core.finished("x", key="a")).state

    assert run_core(later) == "done"


def test_a_kept_job_beyond_a_new_bound_ends_with_the_reason(run_core):
    async def accept(core):
        await core.submit(KEPT, key="a", job_id="x")
        core._defer_all()

    run_core(accept)
    job = run_core(lambda core: looked_at(core, 30.0), limits=Limits(steps=2))
    assert (job.state, job.error) == (
        "failed",
        {"code": "not_possible_any_more", "message": "steps: at most 2"},
    )


@pytest.mark.parametrize("lost", ["image", "mask", "both", "changed", "nothing"])
def test_a_kept_job_whose_upload_is_lost_fails_and_draws_nothing_else(run_core, lost):
    image, mask = io.BytesIO(), io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).convert("RGB").save(image, "PNG")
    Image.linear_gradient("L").resize((32, 32)).save(mask, "PNG")
    uploads = Uploads(image.getvalue(), mask.getvalue())

    async def accept(core):
        await core.submit(KEPT, key="a", job_id="x", uploads=uploads)
        core._defer_all()
        return core.results.folder

    folder = run_core(accept)
    [image_file] = folder.glob("*/*/image.upload")
    for name in {"image": ["image"], "mask": ["mask"], "both": ["image", "mask"]}.get(lost, []):
        image_file.with_name(f"{name}.upload").unlink()
    if lost == "changed":
        image_file.write_bytes(mask.getvalue())
    job = run_core(lambda core: looked_at(core, 30.0))
    if lost == "nothing":
        assert (job.state, job.error) == ("done", None)
        return
    name, state = {"both": ("image", "gone"), "changed": ("image", "changed")}.get(lost, (lost, "gone"))
    message = f"{name}: the picture that came with the job is {state}"
    assert (job.state, job.error) == ("failed", {"code": "not_possible_any_more", "message": message})


def test_a_job_says_what_it_cost(run_core):
    async def scenario(core):
        job = await core.submit(QUICK, key="a")
        done = await core.finished(job.id, key="a")
        return done.cost, core.metrics.text().decode()

    cost, metrics = run_core(scenario, usd_per_hour=3.6)
    assert cost["usd"] == pytest.approx(cost["device_s"] / 1000, rel=1e-3)
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(lines["darkroom_usd_total"]) == pytest.approx(cost["usd"], rel=1e-3)
    assert float(lines["darkroom_pictures_total"]) == 1
    assert float(lines["darkroom_ready"]) == 1
    assert float(lines["darkroom_device_memory_bytes"]) > 1e7


def test_files_without_a_job_are_cleared_away_and_those_of_jobs_stay(run_core):
    async def scenario(core):
        await core.finished((await core.submit(QUICK, key="a", job_id="x")).id, key="a")
        core.results.write("ab" * 16, {"image.upload": b"left behind"})
        return len(core.results.uids())

    async def later(core):
        return core.results.uids(), (await core.get("x", key="a")).uid

    assert run_core(scenario) == 2
    uids, kept = run_core(later)
    assert uids == [kept]


def test_nothing_of_a_job_is_left_on_the_disk_when_it_was_kept_long_enough(run_core):
    secret = QUICK.model_copy(update={"prompt": "a letter to Sibylle Zwicky " * 40})

    async def scenario(core):
        folder = core.results.folder.parent
        for i in range(3):
            job = await core.submit(secret.model_copy(update={"seed": i}), key="a")
            await core.finished(job.id, key="a")

        def found():
            return [
                file.name for file in folder.rglob("*") if file.is_file() and b"Sibylle" in file.read_bytes()
            ]

        before = found()
        await core._retention.sweep(core.limits.model_copy(update={"keep_s": 0.001}), 0)
        await asyncio.wrap_future(core.store.probe())  # the log is emptied after the rows are gone
        return before, found(), stat.S_IMODE(folder.stat().st_mode)

    before, after, mode = run_core(scenario)
    assert {"0.png", "jobs.db-wal"} <= set(before)
    assert after == []
    assert sys.platform == "win32" or mode == 0o700


def test_files_that_cannot_be_deleted_keep_their_job_and_go_later(run_core, monkeypatch):
    async def scenario(core):
        jobs = [await core.submit(QUICK.model_copy(update={"seed": i}), key="a") for i in range(3)]
        for job in jobs:
            await core.finished(job.id, key="a")
        stuck, delete = jobs[1].uid, Results.delete
        limits = core.limits.model_copy(update={"keep_s": 0.001})

        def sticking(results, uid, names=None):
            if uid == stuck:
                raise PermissionError(1, "not now")
            delete(results, uid, names)

        with monkeypatch.context() as patched:
            patched.setattr(Results, "delete", sticking)
            await core._retention.sweep(limits, 0)
            left = [job.uid for job in await core.jobs(key="a")], core.results.uids()
        await core._retention.sweep(limits, 0)
        return stuck, left, core.results.uids(), await core.jobs(key="a")

    stuck, left, files, jobs = run_core(scenario)
    assert left == ([stuck], [stuck])
    assert (files, jobs) == ([], [])


def test_a_photograph_that_lies_on_its_side_is_drawn_from_upright_and_what_is_transparent_is_white(
    run_core, small
):
    upright = Image.linear_gradient("L").resize((24, 48)).convert("RGB")
    upright.paste((250, 20, 20), (0, 0, 24, 12))
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = io.BytesIO()
    upright.transpose(Image.Transpose.ROTATE_90).save(lying, "PNG", exif=exif)
    seen_through = io.BytesIO()
    hole = upright.convert("RGBA")
    hole.paste((0, 0, 0, 0), (0, 24, 24, 48))
    hole.save(seen_through, "PNG")
    on_white = upright.copy()
    on_white.paste((255, 255, 255), (0, 24, 24, 48))
    wanted = QUICK.model_copy(update={"strength": 0.5})

    async def scenario(core):
        made = []
        for content in (lying.getvalue(), seen_through.getvalue()):
            job = await core.submit(wanted, key="a", uploads=Uploads(content))
            await core.finished(job.id, key="a")
            made.append(Image.open(io.BytesIO((await core.pictures(job.id, key="a"))[0].png)))
        return made

    pictures = run_core(scenario)
    told = {"strength": 0.5, "steps": 3, "seed": 5, "optimise": "none", "notice": lambda _: None}
    for made, start, other in zip(pictures, (upright, on_white), (on_white, upright), strict=True):
        assert made.height > made.width
        lone, apart = (
            sample.generate(small, "a red circle", image=one, **told)[0].image for one in (start, other)
        )
        assert difference(made, lone) <= 1
        assert difference(made, apart) >= 3
