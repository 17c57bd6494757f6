"""docs/images/serve.png: the server's page in chromium, while a model draws three pictures and five are done.

    python benchmarks/emoji/page.py runs/emoji/model --size 64 --out docs/images/serve.png \
        --prompt "a red heart" --prompt "a cat face" --prompt "a blue fish" ...

The last prompt is the one being drawn when the picture is taken, the others are in the gallery.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from serve.browser import Browser  # noqa: E402
from serve.conftest import Server  # noqa: E402

SHAPE = (1360, 860)
SLOW = 60  # steps of the picture that is being drawn


def take(model: Path, prompts: list[str], size: int, work: Path) -> bytes:
    """Draw all but the last prompt, begin with that one, and take the picture at two thirds."""
    server = Server(model, work / "state").ready()
    browser = Browser(work / "chromium")
    try:
        browser.look(*SHAPE)
        browser.open(f"{server.url}/")
        browser.until("document.documentElement.dataset.ready")
        browser.set("#width", size)
        browser.set("#height", size)
        for seed, prompt in enumerate(prompts[:-1], 1):
            generate(browser, prompt, steps=25, seed=seed, num=1)
            browser.until(f"document.querySelectorAll('#sheet li').length === {seed}", timeout_s=300)
        generate(browser, prompts[-1], steps=SLOW, seed=7, num=3)
        step = "Number((/step (\\d+)/.exec(document.querySelector('.exposure .line')?.textContent) ?? [])[1])"
        browser.until(f"{step} >= {2 * SLOW // 3}", timeout_s=300)
        time.sleep(0.05)
        return browser.screenshot()
    finally:
        browser.close()
        server.kill()


def generate(browser: Browser, prompt: str, **settings: int) -> None:
    """Fill the form and press Ctrl-Enter."""
    for name, value in settings.items():
        browser.set(f"#{name}", value)
    browser.write("#prompt", prompt)
    browser.key("Enter", 13, control=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "serve.png")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told.out.write_bytes(take(told.model.resolve(), told.prompt, told.size, Path(folder)))


if __name__ == "__main__":
    main()
