"""What the page has beyond prompt and settings, in a real browser: models, nets, grids, queue, history."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from darkroom.sample.control import MAPS
from serve.browser import ENTER, Browser
from serve.conftest import Server
from serve.nets import steering
from serve.studio import DONE, expose, reopened, sheet

TAB, UP = 9, 38


@pytest.fixture(scope="module")
def server(studio_server: Server) -> Server:
    return studio_server


def newest(server: Server) -> dict[str, Any]:
    job: dict[str, Any] = server.http.get("/jobs?limit=1").json()["jobs"][0]
    return job


def picture_of(page: Browser, expression: str) -> Image.Image:
    """A picture that the page has an address of: its pixels."""
    told = page.js(
        f"(async () => {{ const i = new Image(); i.src = {expression}; await i.decode();"
        "const c = new OffscreenCanvas(i.naturalWidth, i.naturalHeight);"
        "c.getContext('2d').drawImage(i, 0, 0);"
        "const b = await (await c.convertToBlob()).arrayBuffer(); return Array.from(new Uint8Array(b)); })()"
    )
    return Image.open(io.BytesIO(bytes(told)))


def newest_kept(page: Browser) -> Image.Image:
    """The file of the newest picture of the gallery."""
    told = page.js(
        "import('/page/keep.js').then(keep => keep.all()).then(all => all[0].blob.arrayBuffer())"
        ".then(bytes => Array.from(new Uint8Array(bytes)))"
    )
    return Image.open(io.BytesIO(bytes(told)))


def test_another_model_draws_and_a_picture_brings_its_own_back(page, server):
    assert page.js("[...document.querySelectorAll('#model-pick option')].map(o => o.value)") == [
        "small",
        "other",
    ]
    page.write("#prompt", "whose")
    page.set("#model-pick", "other")
    page.until("document.querySelector('#model').textContent === 'other'")
    assert page.js("document.querySelector('#prompt').value") == "whose"
    expose(page, "by the other", steps=2, seed=3)
    page.until(DONE)
    assert newest(server)["pictures"][0]["model"] == "other"
    reopened(page, server)
    assert page.js("document.querySelector('#model-pick').value") == "other"
    page.set("#model-pick", "small")
    page.until("document.querySelector('#model').textContent === 'small'")
    page.click("#sheet li .open")
    page.click("#viewer-settings")
    page.until("document.querySelector('#model').textContent === 'other'")
    assert page.js("document.querySelector('#lost').textContent") == ""


def test_a_net_shows_the_map_that_it_is_given(page, server, tmp_path):
    steering(3).save(tmp_path / "guide.png")
    page.set("#control-add", "edges")
    page.until("!!document.querySelector('#control-list li')")
    page.click("#generate")
    page.until("document.querySelector('#problem').textContent.includes('edges has no picture')")
    page.drop(tmp_path / "guide.png", ".control-pictures")
    page.set("#control-map-0", "invert")
    page.until("document.querySelector('img.control-map')?.alt.includes('Inverted')")
    shown = picture_of(page, "document.querySelector('img.control-map').src").convert("RGB")
    assert np.array_equal(np.asarray(shown), np.asarray(MAPS["invert"](steering(3))))
    page.set("#control-weight-0", 0.5)
    page.set("#control-mode-0", "soft")
    expose(page, "guided", steps=2, seed=1)
    page.until(DONE)
    [control] = newest(server)["request"]["controls"]
    assert (control["net"], control["map"], control["weight"]) == ("edges", "invert", 0.5)
    assert (control["soft"], control["guess"]) == (True, False)
    guided = server.http.get(f"/jobs/{newest(server)['id']}/pictures/0").content
    page.until("document.querySelector('#sheet li .open')?.ariaLabel.includes('guided')")
    page.click("#sheet li .open")
    page.until("document.querySelector('#viewer-facts').textContent.includes('Netsedges 0.5')")
    page.look(390, 844, phone=True)
    page.until("document.querySelector('#viewer-image').getBoundingClientRect().height > 300")
    page.look(1280, 900)
    page.js("document.querySelector('#viewer').close()")
    page.click("#control-list .link")
    expose(page, "guided", steps=2, seed=1)
    page.until(DONE)
    plain = server.http.get(f"/jobs/{newest(server)['id']}/pictures/0").content
    assert newest(server)["request"]["controls"] == []
    assert not np.array_equal(*(np.asarray(Image.open(io.BytesIO(one))) for one in (guided, plain)))


def test_a_grid_draws_each_pair_of_values_with_one_seed(page, server):
    page.write("#prompt", "in a grid")
    page.js("document.querySelector('#grid-box').open = true")
    page.set("#grid-x", "steps")
    page.write("#grid-x-values", "2, x")
    page.click("#grid-go")
    page.until("document.querySelector('#grid-x-values').ariaInvalid === 'true'")
    page.write("#grid-x-values", "2, 3")
    page.set("#grid-y", "guidance")
    page.write("#grid-y-values", "1.5, 7")
    page.click("#grid-go")
    page.until("document.querySelectorAll('.grid .exposure').length === 4")
    page.until("document.querySelector('.grid-card').dataset.state === 'done'")
    page.until("!document.querySelector('.grid-card a').hidden")
    made = [job["request"] for job in server.http.get("/jobs?limit=4").json()["jobs"]]
    assert {(one["steps"], one["guidance"]) for one in made} == {(2, 1.5), (3, 1.5), (2, 7), (3, 7)}
    assert len({one["seed"] for one in made}) == 1
    assert page.js("[...document.querySelectorAll('.grid th')].map(e => e.textContent)") == [
        "2",
        "3",
        "1.5",
        "7",
    ]
    saved = picture_of(page, "document.querySelector('.grid-card a').href")
    assert saved.width > 2 * 32
    assert sheet(page) == ["in a grid"] * 4


def test_prompts_of_before_come_back_by_list_and_by_key(page, server):
    for prompt in ("first words", "second words"):
        expose(page, prompt, steps=2)
        page.until(DONE)
    reopened(page, server)
    page.click("#history-open")
    page.write("#history-search", "first")
    assert page.js("document.querySelectorAll('#history-list button').length") == 1
    page.click("#history-list button")
    assert page.js("document.querySelector('#prompt').value") == "first words"
    page.js("document.querySelector('#prompt').focus()")
    told = {"key": "ArrowUp", "code": "ArrowUp", "windowsVirtualKeyCode": UP, "modifiers": 1}
    page.call("Input.dispatchKeyEvent", type="keyDown", **told)
    page.until("document.querySelector('#prompt').value === 'second words'")


def test_seeds_are_drawn_and_used_again(page, server):
    expose(page, "seeded", steps=2, seed=77)
    page.until(DONE)
    page.click("#seed-dice")
    assert page.js("document.querySelector('#seed').value") == ""
    page.click("#seed-again")
    assert page.js("document.querySelector('#seed').value") == "77"


def test_the_queue_is_in_reach_and_cancels(page, server):
    for name in ("one", "two", "three"):
        expose(page, name, steps=100, num=8)
    page.js("scrollTo(0, 1e6)")
    assert "3 jobs" in page.until("document.querySelector('#queue-count').textContent")
    box = page.js(
        "(() => { const b = document.querySelector('#queue-cancel').getBoundingClientRect();"
        "return [b.top, b.bottom, innerHeight]; })()"
    )
    assert 0 <= box[0] < box[1] <= box[2]
    page.click("#queue-cancel")
    page.until("document.querySelector('#queue-count').textContent.includes('2 jobs')")
    states = {
        job["request"]["prompt"]: job["state"] for job in server.http.get("/jobs?limit=3").json()["jobs"]
    }
    assert states["three"] == "cancelled"
    page.click("#queue-fold")
    assert page.js("document.querySelectorAll('#queue-list li').length") == 2
    page.click("#queue-cancel-all")
    page.until("document.querySelector('#queue').hidden")
    states = {
        job["request"]["prompt"]: job["state"] for job in server.http.get("/jobs?limit=3").json()["jobs"]
    }
    assert set(states.values()) == {"cancelled"}


def test_a_job_is_cancelled_that_the_server_has_not_yet_accepted(page, server):
    """Its cancel came first, found no such job, and the job was drawn all the same."""
    for name in ("one", "two"):
        expose(page, name, steps=100, num=8)
    page.js(
        "(() => { const ask = fetch; window.fetch = (url, how) => how?.method === 'PUT'"
        " ? new Promise((go) => setTimeout(go, 700)).then(() => ask(url, how)) : ask(url, how); })()"
    )
    expose(page, "late", steps=100, num=8)
    page.until("document.querySelector('#queue-count').textContent.includes('3 jobs')")
    page.click("#queue-cancel")
    page.until("document.querySelector('#queue-count').textContent.includes('2 jobs')")
    jobs = server.http.get("/jobs?limit=3").json()["jobs"]
    assert {job["request"]["prompt"]: job["state"] for job in jobs}["late"] == "cancelled"
    page.click("#queue-cancel-all")
    page.until("document.querySelector('#queue').hidden")


def test_the_gallery_is_searched_and_the_search_survives_a_reload(page, server):
    for prompt in ("a red horse", "a blue house"):
        expose(page, prompt, steps=2)
        page.until(DONE)
        page.until(f"document.querySelector('#sheet li .open')?.ariaLabel.includes({prompt!r})")
    page.write("#search", "blue hou")
    page.until("document.querySelectorAll('#sheet li').length === 1")
    reopened(page, server)
    assert sheet(page) == ["a blue house"]
    assert "1 of 2" in page.js("document.querySelector('#sheet-count').textContent")
    page.write("#search", "nothing has this")
    page.until("!document.querySelector('#nothing-found').hidden")


def test_a_picture_is_compared_and_upscaled(page, server):
    for seed in (1, 2):
        expose(page, "compared", steps=2, seed=seed)
        page.until(DONE)
    page.until("document.querySelectorAll('#sheet li').length === 2")
    page.click("#sheet li .open")
    other = page.js("document.querySelector('#compare-with').options[1].value")
    page.set("#compare-with", other)
    assert page.js("document.querySelector('#viewer-image').hidden")
    page.set("#compare-at", 25)
    assert (
        page.js("getComputedStyle(document.querySelector('#compare-over')).clipPath")
        == "inset(0px 75% 0px 0px)"
    )
    page.set("#compare-with", "")
    page.set("#upscaler", "4x_soft")
    page.set("#upscale-factor", "2")
    page.click("#upscale-go")
    page.until("document.querySelectorAll('#sheet li').length === 3")
    page.until("document.querySelector('#viewer-facts').textContent.includes('2 times by 4x_soft')")
    assert picture_of(page, "document.querySelector('#viewer-image').src").size == (64, 64)
    made = newest_kept(page)
    assert made.size == (64, 64)
    assert json.loads(made.info["darkroom"])["prompt"] == "compared"


ON_TOP = (
    "(() => { const e = document.querySelector('#toast'), b = e.getBoundingClientRect();"
    "e.style.pointerEvents = 'auto';"  # else no point hits it
    "return e.dataset.shown === 'true'"
    " && document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2) === e; })()"
)


def test_messages_are_above_an_open_dialog_and_in_it(page, server):
    """Below a modal dialog they would be covered, and no screen reader would read them out."""
    expose(page, "on top", steps=2)
    page.until(DONE)
    page.click("#sheet li .open")
    page.js("navigator.clipboard.writeText = () => Promise.resolve()")
    page.click("#viewer-share")
    page.until("document.querySelector('#viewer #told')?.textContent === 'The link is in the clipboard.'")
    page.until(ON_TOP)
    page.js("document.body.append(document.querySelector('#toast'))")  # the control: where it was before
    assert not page.js(ON_TOP)
    page.click("#viewer-start")
    page.until("document.querySelector('body > #told')?.textContent.includes('starts from this one')")
    page.until(ON_TOP)


def test_a_picture_is_seen_whole_in_a_phone_s_viewer(page, server):
    expose(page, "whole", steps=2)
    page.until(DONE)
    page.look(390, 844, phone=True)
    page.click("#sheet li .open")
    bottom = "document.querySelector({!r}).getBoundingClientRect().{}".format
    page.until(f"{bottom('#viewer-image', 'height')} > 300")
    assert page.js(f"{bottom('#viewer-image', 'bottom')} <= {bottom('.viewer-side', 'top')} + 1")
    assert page.js(f"{bottom('#viewer-close', 'bottom')} <= innerHeight")
    page.js("document.querySelector('#viewer-image').style.height = '200%'")  # the control
    page.js("document.querySelector('.viewer-picture').style.height = '8rem'")
    assert not page.js(f"{bottom('#viewer-image', 'bottom')} <= {bottom('.viewer-side', 'top')} + 1")


COVERED = (
    "(() => { const e = document.activeElement, b = e.getBoundingClientRect();"
    "const there = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);"
    "return there === e || e.contains(there) || there?.contains(e) && there.matches('label, summary')"
    " || e.classList.contains('hidden') ? null : e.id || e.textContent; })()"
)


def covered(page: Browser, last: str) -> list[str]:
    """What Tab brings below something else, from the top of the page to an element."""
    page.js("document.querySelector('.skip').focus()")
    found = []
    for _ in range(100):
        page.key("Tab", TAB)
        found.append(page.js(COVERED))
        if page.js(f"document.activeElement.id === {last!r}"):
            return [one for one in found if one]
    raise AssertionError(f"Tab never came to {last}")


def test_tab_brings_nothing_below_the_bar_with_generate(page, server):
    page.look(1280, 700)
    page.js("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert covered(page, "generate") == []
    page.js("document.querySelector('.bench').scrollTo(0, 0)")
    page.js("document.querySelector('.bench').style.scrollPadding = '0'")  # the control
    assert covered(page, "generate") != []


def test_jobs_that_wait_are_small_below_the_one_that_is_drawn(page, server):
    for name in ("first", "second"):
        expose(page, name, steps=150, num=8)
    box = "document.querySelector('.exposure[data-state={}]')?.getBoundingClientRect()".format
    page.until(f"{box('running')}?.top < {box('queued')}?.top")
    assert page.js(f"{box('queued')}.height") < page.js(f"{box('running')}.height") / 2
    page.click("#queue-cancel-all")
    page.until("document.querySelector('#queue').hidden")


def test_cancel_can_be_pressed_again_where_the_server_was_not_reached(page, server):
    expose(page, "on its way", steps=150, num=8)
    page.until("document.querySelector('.exposure')?.dataset.state === 'running'")
    page.js("window.reaches = window.fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.click("#queue-cancel")
    page.until("document.querySelector('#problem').textContent === 'The server cannot be reached.'")
    page.js("window.fetch = window.reaches")
    page.until("!document.querySelector('.exposure .soft').disabled")
    page.click(".exposure .soft")
    page.until("document.querySelector('#queue').hidden")
    assert newest(server)["state"] == "cancelled"


def test_a_link_has_the_settings(page, server):
    page.write("#prompt", "a linked äpple")
    page.set("#steps", 7)
    page.write("#seed", "9007199254740993")
    page.js("navigator.clipboard.writeText = text => { window.linked = text; return Promise.resolve(); }")
    page.click("#share")
    link = page.until("window.linked")
    page.call("Storage.clearDataForOrigin", origin=server.url, storageTypes="all")
    page.open("about:blank")
    page.open(link)
    page.until("document.querySelector('#prompt')?.value === 'a linked äpple'")
    assert page.js("['steps', 'seed'].map(id => document.getElementById(id).value)") == [
        "7",
        "9007199254740993",
    ]
    assert page.js("location.hash") == ""


def test_a_mask_is_undone_softened_zoomed_and_painted_by_keys(page, tmp_path):
    Image.new("RGB", (64, 64), "gray").save(tmp_path / "start.png")
    page.drop(tmp_path / "start.png", "#start")
    page.until("document.querySelector('#start').dataset.empty === 'false'")
    page.click("#mask-open")
    red = (
        "(() => { const c = document.querySelector('#mask-canvas'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) n += d[i] > d[i + 2] + 30; return n; })()"
    )
    assert page.js(red) == 0
    page.key(" ", 32)
    dot = page.until(red)
    assert page.js("!document.querySelector('#mask-brush').hidden")
    page.key("ArrowRight", 39)
    page.key(" ", 32)
    assert page.js(red) > dot
    page.key("z", 90, control=True)
    assert page.js(red) == dot
    page.set("#mask-blur", 4)
    assert page.js(red) != dot
    width = page.js("document.querySelector('#mask-canvas').getBoundingClientRect().width")
    page.set("#mask-zoom", 2)
    assert page.js("document.querySelector('#mask-canvas').getBoundingClientRect().width") == pytest.approx(
        2 * width, rel=0.02
    )
    page.click("#mask-undo")
    assert page.js(red) == 0


def test_a_canvas_is_extended_and_the_picture_stays(page, server, tmp_path):
    start = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    start.save(tmp_path / "start.png")
    page.drop(tmp_path / "start.png", "#start")
    page.until("document.querySelector('#start').dataset.empty === 'false'")
    page.click("#extend-open")
    page.set("#extend-right", 32)
    page.click("#extend-form .primary")
    page.until("document.querySelector('#width').value === '64'")
    expose(page, "more of it", steps=6)
    page.until(DONE)
    made = Image.open(io.BytesIO(server.http.get(f"/jobs/{newest(server)['id']}/pictures/0").content))
    assert made.size == (64, 32)
    change = np.abs(np.asarray(made.crop((0, 0, 32, 32))).astype(float) - np.asarray(start)).mean(axis=(0, 2))
    assert change[:20].mean() < 5
    continued = np.asarray(start)[:, -1:].astype(float)
    assert np.abs(np.asarray(made.crop((40, 0, 64, 32))).astype(float) - continued).mean() > 10


def test_the_routes_are_tried_with_a_form_and_say_their_keys(page, server):
    page.open(f"{server.url}/docs")
    page.until("document.documentElement.dataset.ready")
    schemes = server.http.get("/openapi.json").json()["components"]["securitySchemes"]
    assert {one["type"] for one in schemes.values()} == {"http", "apiKey"}
    page.write("#filter", "post /jobs")
    page.until("document.querySelectorAll('.route:not([hidden])').length === 1")
    page.click(".route:not([hidden]) summary")
    body = {"prompt": "tried", "steps": 2}
    page.until("!!document.querySelector('.route[open] textarea')")  # made once the browser says it is open
    page.write(".route[open] textarea", json.dumps(body))
    page.click(".route[open] .primary")
    page.until("document.querySelector('.route[open] .answer-line')?.textContent.startsWith('202')")
    assert newest(server)["request"]["prompt"] == "tried"
    page.write("#filter", "post /maps")
    page.click(".route:not([hidden]) summary")
    page.until("!!document.querySelector('.route[open]:not([hidden]) textarea')")
    page.write(".route[open]:not([hidden]) textarea", json.dumps({"image": _png(), "map": "invert"}))
    page.click(".route[open]:not([hidden]) .primary")
    page.until("!!document.querySelector('.route[open] .answer img')")


def _png() -> str:
    buffer = io.BytesIO()
    steering(1).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


UNNAMED = (
    "[...document.querySelectorAll('input, select, textarea, button, canvas, progress, img')]"
    ".filter(e => e.checkVisibility())"
    ".filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.hasAttribute('alt')"
    " || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML.slice(0, 120))"
)


def test_every_state_has_names_and_fits_a_phone(page, server, tmp_path):
    """Nets, grid, queue, history, viewer and mask, each as it is when it is open."""
    steering(3).save(tmp_path / "guide.png")
    expose(page, "named", steps=2)
    page.until(DONE)
    page.look(390, 844, phone=True)

    def fits(state: str) -> None:
        assert page.js(UNNAMED) == [], state
        assert page.js("document.documentElement.scrollWidth") <= 390, state

    page.js("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    page.set("#control-add", "edges")
    page.drop(tmp_path / "guide.png", ".control-pictures")
    page.until("!!document.querySelector('img.control-map')")
    fits("form")
    page.click("#history-open")
    fits("history")
    page.click("#history-close")
    page.click("#sheet li .open")
    fits("viewer")
    page.click("#viewer-start")
    page.until("document.querySelector('#start').dataset.empty === 'false'")
    page.click("#mask-open")
    fits("mask")
    page.click("#mask-done")
    page.click("#extend-open")
    fits("extend")
    page.click("#extend-cancel")
    page.key("Enter", ENTER, control=True)
    page.open(f"{server.url}/docs")
    page.until("document.documentElement.dataset.ready")
    fits("routes")
