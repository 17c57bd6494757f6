"""Functions of the operator's own: a checker that withholds, a marker that marks, a signer of files."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from darkroom.errors import InputError
from darkroom.sample import provenance
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import PictureRequest
from darkroom.serve.settings import ServeSettings, VertexRoutes
from needs import missing

QUICK = PictureRequest(prompt="a red circle", steps=20, seed=5, previews=5)
CHECKER = """
import io

from PIL import Image, ImageStat
from PIL.PngImagePlugin import PngInfo

from darkroom.serve.hooks import Withheld

SEEN = []


def checker(picture):
    SEEN.append(picture.parameters["seed"])
    if picture.parameters["seed"] == 7 and ImageStat.Stat(picture.image).stddev[0] > 0:
        raise Withheld("not fit to be shown")


def grey(picture):
    return picture.image.convert("L").convert("RGB")


def signer(picture):
    info = PngInfo()
    info.add_text("signature", "signed by the operator")
    buffer = io.BytesIO()
    picture.image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def faulty(picture):
    SEEN.append(picture.parameters["seed"])
    if picture.parameters["seed"] == 7:
        raise ValueError("/secret/path")


def broken(picture):
    raise ValueError("/secret/path")


def nonsense(picture):
    return b"no picture"


NAME = "a text"
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> Any:
    """The operator's module, where Python finds it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "operators_own.py").write_text(CHECKER)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    yield "operators_own"
    sys.modules.pop("operators_own", None)


def run_with(run_core: Any, *hooks: str, seeds: tuple[int, ...] = (5,)) -> list[Any]:
    async def scenario(core: Core) -> list[Any]:
        ended = []
        for seed in seeds:
            await core.submit(QUICK.model_copy(update={"seed": seed}), key="a", job_id=f"x{seed}")
            kinds = [event.kind async for event in core.events(f"x{seed}", key="a")]
            job = await core.finished(f"x{seed}", key="a")
            png = (await core.pictures(f"x{seed}", key="a"))[0].png if job.state == "done" else None
            ended.append((job, png, kinds))
        return ended

    return list(run_core(scenario, hooks=hooks))


def opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def test_a_checker_withholds_one_picture_and_nobody_sees_a_preview(module, run_core):
    fine, withheld = run_with(run_core, f"{module}:checker", seeds=(5, 7))
    assert sys.modules[module].SEEN == [5, 7]
    assert fine[0].state == "done"
    assert withheld[0].state == "failed"
    assert withheld[0].error == {"code": "withheld", "message": "not fit to be shown"}
    assert "preview" not in fine[2] + withheld[2]


REFUSED = (400, "withheld", "not fit to be shown")
BROKEN = (500, "failed", "the pictures could not be finished")


@pytest.mark.parametrize(("hook", "ends"), [("checker", REFUSED), ("faulty", BROKEN)])
def test_after_a_hook_s_refusal_or_fault_nothing_more_is_drawn(module, run_http, hook, ends):
    """Two of four pictures fit a step; the first is withheld while the others wait. No client is to ask again
    after a refusal."""

    async def scenario(core: Core, http: Any) -> Any:
        body = {"prompt": "a", "n": 4, "seed": 7, "num_inference_steps": 30, "guidance_scale": 5.0}
        told = await http.post("/v1/images/generations", json=body)
        [job] = (await http.get("/jobs")).json()["jobs"]
        while core.engine.load:
            await asyncio.sleep(0.01)
        return told, job, core.metrics.pictures._value.get(), core.engine.load, core.engine.waiting()

    told, job, drawn, load, waiting = run_http(scenario, hooks=(f"{module}:{hook}",), capacity=2)
    error = told.json()["error"]
    assert (told.status_code, error["code"], error["message"]) == ends
    assert (job["state"], job["error"]["code"]) == ("failed", ends[1])
    assert len(sys.modules[module].SEEN) < 4, "the control without a refusal sees all"
    assert (drawn, load, waiting) == (0, 0, 0)


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "order 66"}])
def test_after_a_refusal_nothing_more_is_drawn_of_a_request_of_several_jobs(module, run_http, headers):
    """Also where the request may be sent again: what was withheld would be withheld again."""

    async def scenario(core: Core, http: Any) -> Any:
        parameters = {"seed": 7, "num_inference_steps": 30, "guidance_scale": 5.0}
        body = {"instances": [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], "parameters": parameters}
        told = await http.post("/predict", json=body, headers=headers)
        while core.engine.load or core.engine.waiting():
            await asyncio.sleep(0.01)
        jobs = await core.jobs(key="platform")
        again = (await http.post("/predict", json=body, headers=headers)) if headers else told
        return told, again, sorted(job.state for job in jobs), core.metrics.pictures._value.get()

    routes = VertexRoutes(health="/health", predict="/predict", port=8080)
    settings = {"hooks": (f"{module}:checker",), "capacity": 2, "lanes": 1, "vertex": routes}
    told, again, states, drawn = run_http(scenario, **settings)
    for answer in (told, again):
        assert (answer.status_code, answer.json()["code"]) == (400, "withheld")
    assert states == ["cancelled", "cancelled", "failed"]
    assert drawn == 0, "the control without a refusal draws the second and third"
    assert sys.modules[module].SEEN[0] == 7
    assert len(sys.modules[module].SEEN) < 3


def test_previews_come_without_hooks(run_core):
    [(_, _, kinds)] = run_with(run_core)
    assert "preview" in kinds


def test_pictures_are_changed_and_signed_in_order(module, run_core):
    [(_, plain, _)] = run_with(run_core)
    [(_, png, _)] = run_with(run_core, f"{module}:grey", f"{module}:signer", f"{module}:broken", seeds=(6,))
    made = opened(png)
    assert made.info["signature"] == "signed by the operator"
    values = np.asarray(made.convert("RGB"))
    assert (values[..., 0] == values[..., 1]).all()
    assert (
        np.asarray(opened(plain).convert("RGB"))[..., 0] != np.asarray(opened(plain).convert("RGB"))[..., 1]
    ).any()


@pytest.mark.parametrize("name", ["broken", "nonsense"])
def test_a_hook_that_fails_fails_its_job_alone_and_tells_nothing(module, run_core, name):
    [(job, _, _)] = run_with(run_core, f"{module}:{name}")
    assert job.state == "failed"
    assert job.error == {"code": "failed", "message": "the pictures could not be finished"}


@pytest.mark.parametrize(
    "name", ["no_colon", "no.such.module:f", "operators_own:missing", "operators_own:NAME", ":f"]
)
def test_what_is_no_function_is_refused_at_the_start(module, tmp_path, name):
    with pytest.raises(InputError, match="--hook"):
        Core(ServeSettings(model="tiny", state=tmp_path / "state", hooks=(name,)))


def test_every_picture_says_that_it_was_made(run_core):
    [(_, png, _)] = run_with(run_core)
    image = opened(png)
    assert "trainedAlgorithmicMedia" in image.info["XML:com.adobe.xmp"]
    assert "darkroom" in image.info["parameters"]


def test_pictures_of_every_api_are_marked_with_their_job_and_signed(run_http, tmp_path):
    """Of 256 px, the least that is marked."""
    if not provenance.installed():
        missing("no c2pa-python here: pip install '.[provenance]'")
    body = {"width": 256, "height": 256, "seed": 3}

    async def scenario(core, http):
        native = {"prompt": "a", "steps": 1, "guidance": 1.0, **body}
        job = (await http.put("/jobs/a", json=native)).json()
        assert (await http.get("/jobs/a?wait_s=60")).json()["state"] == "done"
        uid = (await core.get(job["id"], key="local")).uid
        (tmp_path / "a.png").write_bytes((await http.get("/jobs/a/pictures/0")).content)
        wanted = {"inputs": "a", "parameters": {"num_inference_steps": 1, "guidance_scale": 1.0, **body}}
        answer = await http.post("/", json=wanted, headers={"Accept": "image/jpeg"})
        (tmp_path / "a.jpg").write_bytes(answer.content)
        edit = {**native, "image": base64.b64encode((tmp_path / "a.png").read_bytes()).decode()}
        await http.put("/jobs/b", json={**edit, "strength": 1.0})
        assert (await http.get("/jobs/b?wait_s=60")).json()["state"] == "done"
        (tmp_path / "b.png").write_bytes((await http.get("/jobs/b/pictures/0")).content)
        for name, how in (("c", {"upscaler_1": "Lanczos", "upscaling_resize": 2}), ("d", {})):
            answer = await http.post("/sdapi/v1/extra-single-image", json={"image": edit["image"], **how})
            (tmp_path / f"{name}.png").write_bytes(base64.b64decode(answer.json()["image"]))
        return str(uid)

    uid = run_http(scenario, provenance=True, capacity=128)
    png, jpeg, edited = (provenance.verify_picture(tmp_path / name) for name in ("a.png", "a.jpg", "b.png"))
    assert png.watermark == uid[:8]
    assert png.credentials == jpeg.credentials == edited.credentials == "valid"
    assert "created by small" in png.chain[0]
    assert "transcoded" in jpeg.chain[0]
    assert "created by small" in jpeg.chain[1]
    assert "edited by small" in edited.chain[0]
    assert "created by small" in edited.chain[1], "of the picture that it started from"
    for name, factor in (("c", 2), ("d", 1)):  # credentials and mark had been lost
        larger = provenance.verify_picture(tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as image, Image.open(tmp_path / "a.png") as first:
            assert image.size == (factor * first.width, factor * first.height)
        assert (larger.credentials, larger.watermark, larger.declared) == ("valid", uid[:8], True)
        assert "resized" in larger.chain[0]
        assert "created by small" in larger.chain[1]
    assert (tmp_path / "state" / "certificate.pem").stat().st_mode & 0o077 == 0
