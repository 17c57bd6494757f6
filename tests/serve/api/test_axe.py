"""axe-core on each state of the pages, in a real browser: none breaks a rule of its own list.

The file of axe-core (MPL 2.0) is not kept here: a package of the extra `dev` brings it. DARKROOM_AXE names a
newer one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import axe_core_python
import pytest
from PIL import Image

from serve.browser import ENTER, Browser
from serve.conftest import Server
from serve.nets import steering
from serve.studio import DONE, expose

LOOKS = [
    pytest.param(1280, 900, "dark", False, id="dark"),
    pytest.param(1280, 900, "light", False, id="light"),
    pytest.param(390, 844, "dark", True, id="phone"),
]


@pytest.fixture(scope="module")
def axe() -> str:
    named = os.environ.get("DARKROOM_AXE")
    path = Path(named) if named else Path(axe_core_python.__file__).with_name("axe.min.js")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(studio_server: Server) -> Server:
    return studio_server


def violations(page: Browser, axe: str) -> list[str]:
    """What axe finds wrong with the page as it is: rule, element and why."""
    page.js("document.getAnimations().forEach(one => { try { one.finish(); } catch { one.cancel(); } })")
    if not page.js("!!window.axe"):
        page.js(f"{axe}; true")
    newer = page.js("axe.getRules().some(rule => rule.ruleId === 'target-size')")  # since axe-core 4.5
    rules = {"target-size": {"enabled": True}} if newer else {}
    told = page.js(
        f"axe.run(document, {{resultTypes: ['violations'], rules: {json.dumps(rules)}}})"
        ".then(found => found.violations.flatMap(one => one.nodes.map(node =>"
        " `${one.id}: ${node.target} ${node.failureSummary.replaceAll('\\n', ' ')}`.slice(0, 400))))"
    )
    return [str(one) for one in told]


def test_axe_sees_what_is_wrong(page, axe):
    """The control: a button without a name and pale text are found, each by its rule."""
    expose(page, "done", steps=2)
    page.until(DONE)
    assert violations(page, axe) == []
    page.js(
        "document.querySelector('main').insertAdjacentHTML('beforeend',"
        ' \'<button id="nameless"></button><p id="pale">pale</p>\');'
        "const s = new CSSStyleSheet(); s.replaceSync('#pale { color: #888; background: #999; }');"
        "document.adoptedStyleSheets = [s];"
    )
    found = violations(page, axe)
    assert any(one.startswith("button-name: #nameless") for one in found)
    assert any(one.startswith("color-contrast: #pale") for one in found)


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "height", "theme", "phone"), LOOKS)
def test_no_state_of_the_page_breaks_a_rule(page, server, axe, tmp_path, width, height, theme, phone):
    page.look(width, height, theme=theme, phone=phone)
    steering(3).save(tmp_path / "guide.png")
    Image.new("RGB", (64, 64), "gray").save(tmp_path / "start.png")
    found: dict[str, list[str]] = {}

    def look(state: str) -> None:
        if wrong := violations(page, axe):
            found[state] = wrong

    look("empty")
    for steps, state in walk(page, server, tmp_path):
        steps()
        look(state)
    assert found == {}, "\n".join(f"{state}: {one}" for state, wrong in found.items() for one in wrong)


Steps = list[tuple[Callable[[], object], str]]


def walk(page: Browser, server: Server, folder: Path) -> Steps:
    """What leads from each state of the page to the next."""

    def draws() -> None:
        expose(page, "on its way", steps=150, num=4)
        page.until("document.querySelector('.exposure')?.dataset.state === 'running'")

    def cancelled() -> None:
        page.click("#queue-cancel-all")
        page.until("document.querySelector('#queue').hidden")

    def done() -> None:
        for seed in (1, 2):
            expose(page, "done", steps=2, num=1, seed=seed)
            page.until(DONE)

    def refused() -> None:
        page.set("#width", 33)
        page.key("Enter", ENTER, control=True)
        page.until("document.querySelector('#problem').textContent")
        page.errors.clear()  # the browser notes the answer 422

    def mended() -> None:
        page.set("#width", 32)

    def all_open() -> None:
        page.js("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        page.set("#control-add", "edges")
        page.drop(folder / "guide.png", ".control-pictures")
        page.until("!!document.querySelector('img.control-map')")
        page.set("#adapter-add", "style1")

    def found_nothing() -> None:
        page.write("#search", "nowhere")
        page.until("!document.querySelector('#nothing-found').hidden")

    def grid() -> None:
        page.write("#search", "")
        page.set("#grid-x", "steps")
        page.write("#grid-x-values", "2, 3")
        page.set("#grid-y", "guidance")
        page.write("#grid-y-values", "1, 5")
        page.click("#grid-go")
        page.until("document.querySelector('.grid-card')?.dataset.state === 'done'")

    def compared() -> None:
        page.set("#compare-with", page.js("document.querySelector('#compare-with').options[1].value"))

    def started() -> None:
        page.set("#compare-with", "")
        page.click("#viewer-start")
        page.until("document.querySelector('#start').dataset.empty === 'false'")

    def routes() -> None:
        page.open(f"{server.url}/docs")
        page.until("document.documentElement.dataset.ready")

    def watched() -> None:
        page.open(f"{server.url}/server")
        page.until("document.querySelector('#state').dataset.state === 'ready'")

    def open_routes() -> None:
        page.js("[...document.querySelectorAll('.route')].slice(0, 6).forEach(e => { e.open = true; })")

    return [
        (draws, "drawing"),
        (lambda: page.click("#queue-fold"), "queue"),
        (cancelled, "cancelled"),
        (done, "done"),
        (refused, "error"),
        (mended, "mended"),
        (all_open, "settings"),
        (found_nothing, "nothing found"),
        (grid, "grid"),
        (lambda: page.click("#history-open"), "history"),
        (lambda: page.click("#history-close"), "history closed"),
        (lambda: page.click("#help-open"), "help"),
        (lambda: page.click("#help-close"), "help closed"),
        (lambda: page.click("#key-open"), "key"),
        (lambda: page.click("#key-cancel"), "key closed"),
        (lambda: page.click("#sheet li .open"), "gallery picture"),
        (compared, "compare"),
        (started, "start"),
        (lambda: page.click("#mask-open"), "mask editor"),
        (lambda: page.click("#mask-done"), "masked"),
        (lambda: page.click("#extend-open"), "extend"),
        (lambda: page.click("#extend-cancel"), "extended"),
        (watched, "server"),
        (routes, "routes"),
        (open_routes, "route"),
    ]
