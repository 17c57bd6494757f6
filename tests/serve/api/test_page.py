"""The page in a real browser, and its files."""

from __future__ import annotations

import io
import json
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from darkroom import options
from darkroom.serve.api.app import PATHS
from serve.browser import ENTER, ESCAPE
from serve.conftest import Server
from serve.studio import DONE, expose, reopened, sheet

LONG = 100


def test_a_picture_develops_and_is_that_of_the_api(page, server):
    expose(page, "a horse", steps=LONG, seed=11, num=2)
    page.until("Number(document.querySelector('.exposure').dataset.previews) >= 2")
    assert page.js("document.querySelector('.frame img').src").startswith("data:image/png")
    assert re.search(r"step \d+ of 100", page.until("document.querySelector('.exposure .line').textContent"))
    page.until(DONE)
    page.until("document.querySelectorAll('#sheet li').length === 2")
    assert "pictures finished" in page.js("document.querySelector('#told').textContent")
    job = server.http.get("/jobs?limit=1").json()["jobs"][0]
    assert (job["request"]["seed"], job["request"]["num"], job["state"]) == (11, 2, "done")
    page.click("#sheet li .open")
    shown = page.js(
        "import('/page/keep.js').then(keep => keep.all()).then(all => all[0].blob.arrayBuffer())"
        ".then(bytes => Array.from(new Uint8Array(bytes)))"
    )
    assert bytes(shown) == server.http.get(f"/jobs/{job['id']}/pictures/0").content
    page.key("Escape", ESCAPE)
    page.until("!document.querySelector('#viewer').open")


def test_escape_cancels_on_the_server(page, server):
    expose(page, "to be cancelled", steps=LONG, num=8)
    page.until("Number(document.querySelector('.exposure progress').value) > 0")
    page.key("Escape", ESCAPE)
    page.until("!document.querySelector('.exposure')")
    newest = server.http.get("/jobs?limit=1").json()["jobs"][0]
    assert (newest["request"]["prompt"], newest["state"]) == ("to be cancelled", "cancelled")
    assert sheet(page) == []


@pytest.mark.nightly
def test_a_reload_keeps_pictures_form_and_the_job_on_its_way(page, server):
    expose(page, "kept", steps=4, seed=1)
    page.until(DONE)
    expose(page, "on its way", steps=LONG, num=8, seed="")
    reopened(page, server)
    assert page.js("document.querySelector('#prompt').value") == "on its way"
    page.until("document.querySelector('.exposure')?.ariaLabel === 'on its way'")
    assert "kept" in sheet(page)
    page.until("document.querySelectorAll('#sheet li').length === 9")
    reopened(page, server)
    assert sheet(page) == [*["on its way"] * 8, "kept"]


def test_a_dropped_png_gives_its_settings_back(page, server, tmp_path):
    request = {
        "prompt": "a dropped \u00e4pple",
        "negative": "blue",
        "steps": 7,
        "guidance": 3.5,
        "seed": 2**62,
    }
    adapters = [{"name": "style2", "weight": 0.5}]
    job = server.http.post("/jobs", json={**request, "solver": "euler_a", "adapters": adapters}).json()["id"]
    server.finished(job)
    file = tmp_path / "found.png"
    file.write_bytes(server.http.get(f"/jobs/{job}/pictures/0").content)
    page.drop(file, ".tray")
    page.until("document.querySelector('#prompt').value.startsWith('a dropped')")
    told = page.js(
        "Object.fromEntries(['prompt', 'negative', 'steps', 'guidance', 'seed', 'solver']"
        ".map(id => [id, document.getElementById(id).value]))"
    )
    assert told == {
        **{name: str(value) for name, value in request.items()},
        "solver": "euler_a",
    }
    assert page.js("document.querySelector('#adapter-list label').textContent") == "style2"
    page.key("Enter", ENTER, control=True)
    page.until(DONE)
    again = server.http.get("/jobs?limit=1").json()["jobs"][0]
    assert again["request"]["seed"] == 2**62
    made = [
        Image.open(io.BytesIO(server.http.get(f"/jobs/{one}/pictures/0").content))
        for one in (job, again["id"])
    ]
    assert np.abs(np.asarray(made[0]).astype(int) - np.asarray(made[1])).max() <= 1


CHIPS = "[...document.querySelectorAll('#also li')].map(e => e.firstChild.textContent)"


def test_what_the_form_has_no_field_for_is_shown_and_sent_along(page, server, tmp_path):
    request = {
        "prompt": "a (red:1.4) horse",
        "steps": 12,
        "guidance": 3.37,
        "seed": 5,
        "solver": "dpmpp_2m",
        "karras": True,
        "spacing": "trailing",
        "guidance_rescale": 0.3,
        "clip_skip": 1,
        "weighting": "a1111",
        "width": 32,
        "height": 32,
        "hires": {"scale": 1.5, "strength": 0.5, "steps": 6, "upscaler": "lanczos"},
    }
    job = server.http.post("/jobs", json=request).json()["id"]
    server.finished(job)
    file = tmp_path / "found.png"
    file.write_bytes(server.http.get(f"/jobs/{job}/pictures/0").content)
    page.drop(file, ".tray")
    page.until(f"{CHIPS}.length === 6")
    assert page.js(CHIPS) == [
        "Karras sigmas",
        "trailing timesteps",
        "guidance rescale 0.3",
        "clip skip 1",
        "weights as in A1111",
        "enlarged 1.5 times (lanczos), 50 % redone",
    ]
    assert page.js("document.querySelector('#lost').textContent") == ""
    reopened(page, server)
    assert len(page.js(CHIPS)) == 6
    page.key("Enter", ENTER, control=True)
    page.until(DONE)
    again = server.http.get("/jobs?limit=1").json()["jobs"][0]
    assert again["id"] != job
    assert {name: again["request"][name] for name in request} == request
    page.click("#also li:first-child button")
    page.until(f"{CHIPS}.length === 5")
    page.drop(plain_png(server, tmp_path), ".tray")
    page.until(f"{CHIPS}.length === 0 && document.querySelector('#also-box').hidden")


def plain_png(server: Server, folder: Path) -> Path:
    job = server.http.post("/jobs", json={"prompt": "plain", "steps": 2, "solver": "ddim"}).json()["id"]
    server.finished(job)
    (folder / "plain.png").write_bytes(server.http.get(f"/jobs/{job}/pictures/0").content)
    return folder / "plain.png"


def test_a_picture_of_a1111_is_restored_and_what_cannot_be_is_told(page, server, tmp_path):
    told = PngImagePlugin.PngInfo()
    told.add_text(
        "parameters",
        "a [red] horse <lora:style2:0.5> <lora:nobody:1>\nNegative prompt: fog\nSteps: 6, "
        "Sampler: DPM++ 2M Karras, CFG scale: 7, Seed: 3, Size: 32x24, Model hash: abc, Model: other, "
        "Clip skip: 2, ENSD: 31337, Version: v1.6.0",
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=told)
    page.drop(tmp_path / "a.png", ".tray")
    page.until(f"{CHIPS}.length === 3")
    assert page.js(CHIPS) == ["Karras sigmas", "clip skip 1", "weights as in A1111"]
    lost = page.js("document.querySelector('#lost').textContent")
    assert lost == "Not restored: ensd 31337, the model other, adapter nobody"
    page.look(390, 844, phone=True)
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.look(1280, 900)
    page.key("Enter", ENTER, control=True)
    page.until(DONE)
    made = server.http.get("/jobs?limit=1").json()["jobs"][0]["request"]
    expected = {
        "prompt": "a [red] horse",
        "negative": "fog",
        "steps": 6,
        "seed": 3,
        "solver": "dpmpp_2m",
        "karras": True,
        "clip_skip": 1,
        "weighting": "a1111",
        "width": 32,
        "height": 24,
        "adapters": [{"name": "style2", "weight": 0.5, "text_weight": None, "blocks": []}],
    }
    assert {name: made[name] for name in expected} == expected


def test_a_painted_mask_is_what_is_redone(page, server, tmp_path):
    start = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    start.save(tmp_path / "start.png")
    page.drop(tmp_path / "start.png", "#start")
    page.until("document.querySelector('#start').dataset.empty === 'false'")
    page.click("#mask-open")
    page.until("document.querySelector('#mask-dialog').open")
    page.set("#brush", 40)
    x, y, w, h = page.js(
        "(() => { const b = document.querySelector('#mask-canvas').getBoundingClientRect();"
        "return [b.x, b.y, b.width, b.height]; })()"
    )
    page.drag((x + 0.1 * w, y + 0.1 * h), (x + 0.1 * w, y + 0.9 * h))
    page.click("#mask-done")
    expose(page, "half of it", steps=6, strength=1)
    page.until(DONE)
    job = server.http.get("/jobs?limit=1").json()["jobs"][0]
    made = Image.open(io.BytesIO(server.http.get(f"/jobs/{job['id']}/pictures/0").content))
    small = np.asarray(start.resize(made.size)).astype(float)
    change = np.abs(np.asarray(made).astype(float) - small).mean(axis=(0, 2))
    width = made.width
    assert change[: width // 5].mean() > 10
    assert change[-width // 3 :].mean() < 5


def test_a_refusal_is_told_at_its_field(page):
    expose_nothing = "document.querySelector('#seed').ariaInvalid"
    page.write("#prompt", "a")
    page.write("#seed", "12x")
    page.key("Enter", ENTER, control=True)
    page.until(f"{expose_nothing} === 'true'")
    assert "seed" in page.js("document.querySelector('#problem').textContent")
    page.errors = [one for one in page.errors if "422" not in one]


def test_the_server_s_page_counts(page, server):
    page.open(f"{server.url}/server")
    page.until("document.querySelector('#state').dataset.state === 'ready'")
    page.until("document.querySelectorAll('#adapters tbody tr').length === 6")
    server.http.put("/jobs/watched", json={"prompt": "a", "steps": 150, "num": 8})
    page.until("document.querySelectorAll('#rows li').length > 0")
    assert re.fullmatch(r"\d+/150", page.js("document.querySelector('#rows .at').textContent"))
    server.http.delete("/jobs/watched")


def test_everything_has_a_name_and_fits_a_phone(page):
    unnamed = page.js(
        "[...document.querySelectorAll('input, select, textarea, button, canvas')].filter(e =>"
        " !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.getAttribute('aria-labelledby')))"
        ".map(e => e.id)"
    )
    assert unnamed == []
    page.look(390, 844, phone=True)
    assert page.js("document.documentElement.scrollWidth") <= 390
    lines = page.js(
        "new Set(['.brand', '#model', '.bar nav'].map(one =>"
        " Math.round(document.querySelector(one).getBoundingClientRect().bottom / 20))).size"
    )
    assert lines == 2, "the model's name stands beside the brand, the links below"


@pytest.mark.nightly
def test_a_key_is_asked_for_and_sent_with_everything(chromium, model_folder, tmp_path):
    from darkroom.serve.api.guard import make_key

    key = make_key(tmp_path / "keys", "anna")
    server = Server(model_folder, tmp_path / "state", "--api-key-file", str(tmp_path / "keys"))
    try:
        server.ready()
        chromium.look(1280, 900)
        chromium.open(f"{server.url}/")
        chromium.until("document.querySelector('#key-dialog').open")
        chromium.write("#key", key)
        chromium.key("Enter", ENTER)
        chromium.click("#key-form .primary")
        chromium.until("document.documentElement.dataset.ready")
        expose(chromium, "with a key", steps=20)
        chromium.until(DONE)
        chromium.until("document.querySelectorAll('#sheet li').length === 1")
        assert key not in chromium.js("JSON.stringify(localStorage)")
    finally:
        server.kill()
        chromium.errors.clear()


def test_nothing_comes_from_elsewhere_and_nothing_is_inline(http):
    for path, name in PATHS.items():
        answer = http.get(path)
        assert answer.status_code == 200
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script>", text)
        again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304
    shipped = {one.name for one in files("darkroom.serve").joinpath("page").iterdir()}
    assert shipped - {"__pycache__"} == {Path(name).name for name in PATHS.values()}


def test_the_page_has_the_solvers_that_the_server_has(run_http):
    """One table: `options.A1111_NAMES`."""

    async def scenario(core, http):
        return await http.get("/page/solvers.js"), await http.get("/page/png.js")

    made, reader = run_http(scenario)
    told = dict(re.findall(r"^export const (\w+) = (.*);$", made.text, re.M))
    assert json.loads(told["SOLVER_NAMES"]) == options.A1111_NAMES
    for name, solver in json.loads(told["SOLVERS"]).items():
        assert options.parse_solver(name) == (solver, None)
    assert made.headers["content-type"].startswith("text/javascript")
    assert 'import { AUTOMATIC, SCHEDULES, SOLVERS } from "./solvers.js";' in reader.text
    assert "dpmpp_2m" not in reader.text
