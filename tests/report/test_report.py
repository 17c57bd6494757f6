"""The report: one file that loads nothing, with what a run has and without what it lacks."""

from __future__ import annotations

import re
from datetime import date
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from darkroom.bill import Bill
from darkroom.errors import InputError
from darkroom.hardware.machine import environment
from darkroom.measure.timing import Measurement, append_csv
from darkroom.report.html import Curve, curves, smooth, smoothing, thin
from darkroom.report.runs import write_report
from darkroom.run import Run

TIMESTEPS = (62, 437, 937)


def make_run(path, *, steps=300, lr=2e-4, rich=True):
    """A run written by the same functions as a real one."""
    recipe = (
        f"task: pretrain\nmodel: {{base: tiny}}\noptim: {{lr: {lr}}}\ntrain: {{steps: {steps}, seed: 0}}\n"
    )
    run = Run.create(path, recipe, environment())
    draws = np.random.default_rng(0)
    rows = []
    for step in range(1, steps + 1):
        loss = 0.1 + np.exp(-step / 50)
        row = {
            "step": step,
            "loss": loss * draws.uniform(0.9, 1.1),
            "lr": lr,
            "grad_norm": 1 / step,
            "images_per_s": 400.0,
        }
        if rich and step % 100 == 0:
            row["heldout_loss"] = loss
            row["heldout_loss_by_timestep"] = {str(t): loss * (1.2 - t / 1000) for t in TIMESTEPS}
        rows.append(row)
    run.log(*rows)
    if rich:
        for step in (100, 200, 300):
            Image.new("RGB", (64, 32), (step % 256, 80, 80)).save(run.samples / f"step-{step:08d}.png")
        Bill(
            wall_s=90,
            device_hours=0.025,
            device="a device",
            usd=0.0025,
            usd_per_hour=0.1,
            price_source="a cloud",
            price_as_of=date(2026, 7, 15),
            peak_memory_bytes=2**30,
            images=steps * 8,
            parts={"train": 80.0, "sample": 5.0},
            sessions=1,
        ).save(path / "bill.json")
    return run


class Page(HTMLParser):
    """What a page holds: tags, texts, and addresses it would load."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "link", "br", "path", "use", "rect"):
            self.open.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")
        ]

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        self.texts.append(data)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def rich_page(tmp_path):
    make_run(tmp_path / "shapes")
    return Page(write_report(tmp_path / "shapes", tmp_path / "report.html").read_text())


def test_a_run_is_told_whole(rich_page):
    text = rich_page.text
    wanted = [
        *("shapes", "Loss", "Held-out loss by timestep", "t 437", "Learning rate and gradient norm"),
        *("Throughput", "Samples by step", "step 300", "step 100", "Bill", "Where the time went"),
        *("USD 0.0025", "2026-07-15", "Settings", "optim", "0.0002", "Environment", "torch"),
    ]
    for part in wanted:
        assert part in text, part
    assert rich_page.tags.count("svg") == 5
    assert rich_page.tags.count("img") == 3
    assert rich_page.open == []


PLAN = {
    "device": "CPU AVX2",
    "count": 1,
    "precision": "float32",
    "batch": {"global": 8, "micro": 8, "accumulation": 1},
    "step_s": {"total": 0.01},
    "images_per_s": 800.0,
    "peak_bytes": 2**29,
    "hours": 0.0125,
    "cost": {"usd": 0.005},
    "steps": 600,
    "line": "planned",
}


def test_the_plan_stands_beside_what_was_measured(tmp_path):
    run = make_run(tmp_path / "shapes")
    assert "Planned and measured" not in Page(write_report(run.path, tmp_path / "a.html").read_text()).text
    run.set_plan(PLAN)
    text = Page(write_report(run.path, tmp_path / "b.html").read_text()).text
    told = text[text.index("Planned and measured") : text.index("Where the time went")]
    for line in (
        "step time 0.01 s 0.02 s -50%",
        "images/s 800 400 +100%",
        "peak memory 512 MiB 1.0 GiB -50%",
        "time 22.5 s 90 s -75%",  # half of the planned steps were made
        "cost USD 0.0025 USD 0.0025 +0%",
        "global 8, micro 8",
        "made as the run began",
        "89% was training",
    ):
        assert line in told, line


def test_a_plan_that_was_not_kept_is_made_for_the_report(tmp_path, monkeypatch):
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path / "cache"))
    run = make_run(tmp_path / "shapes", steps=40)
    run.set_recipe(
        "task: pretrain\nmodel: {base: tiny}\ndata: {store: x.lance, resolution: 64}\n"
        "train: {steps: 40, global_batch: 8, precision: float32}\n"
    )
    text = Page(write_report(run.path, tmp_path / "a.html", plan=True).read_text()).text
    assert "made for this report" in text
    assert "global 8, micro" in text


def test_nothing_is_loaded_from_elsewhere(rich_page):
    outside = [address for address in rich_page.addresses if not address.startswith(("data:", "#"))]
    assert outside == []
    assert "script" not in rich_page.tags
    assert "link" not in rich_page.tags


def test_no_address_in_styles_either(tmp_path):
    make_run(tmp_path / "shapes")
    text = write_report(tmp_path / "shapes", tmp_path / "report.html").read_text()
    assert "@import" not in text
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)\)", text))
    # Names of XML vocabularies are no addresses to load; any other would be.
    assert set(re.findall(r"https?://[^\"' <)]+", text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # fmt: skip


def test_plots_follow_the_theme_of_the_page(tmp_path):
    make_run(tmp_path / "shapes")
    text = write_report(tmp_path / "shapes", tmp_path / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for svg in svgs:
        assert "var(--" in svg
        colours = set(re.findall(r"(?:fill|stroke): ?(#[0-9a-f]{6})", svg))
        assert colours <= {"#ffffff"}, colours  # a colour that does not follow would vanish in the dark
        assert not re.search(r'<svg[^>]* width="[\d.]+pt"', svg)


def test_a_bare_run_leaves_out_what_it_lacks(tmp_path):
    make_run(tmp_path / "bare", rich=False, steps=3)
    page = Page(write_report(tmp_path / "bare", tmp_path / "report.html").read_text())
    assert "Loss" in page.text
    for part in ("Held-out", "Samples", "Bill", "None", "nan"):
        assert part not in page.text, part


def test_a_run_that_has_not_started_is_told_too(tmp_path):
    Run.create(tmp_path / "new", "task: pretrain\ntrain: {steps: 5}\n", {})
    page = Page(write_report(tmp_path / "new", tmp_path / "report.html").read_text())
    assert "Settings" in page.text
    assert "svg" not in page.tags


def test_several_runs_lie_over_each_other_and_differences_stand_first(tmp_path):
    make_run(tmp_path / "a" / "run", lr=2e-4)
    make_run(tmp_path / "b" / "run", lr=1e-4, rich=False, steps=100)
    page = Page(
        write_report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "r.html").read_text()
    )
    assert "a/run" in page.text
    assert "b/run" in page.text
    assert page.text.index("optim.lr") < page.text.index("model.base")
    assert page.texts.count("Loss") == 1  # one plot for both
    assert page.tags.count("svg") == 5


SECRET = ("/home/ada/secret", "C:\\\\ada\\\\secret")


@pytest.mark.parametrize("place", SECRET)
def test_a_report_tells_names_of_places_and_not_the_way_there(tmp_path, place):
    """It is one file to send to somebody."""
    recipe = f'''
task: lora
model: {{base: "{place}/sd15"}}
data: {{sets: [{{folder: "{place}/cats", repeats: 2}}], prompt: "a / b, c"}}
'''
    noted = environment() | {
        "store": {"version": 3, "contents": [{"files": "f932d975c52c9ba7"}], "chosen": "18bc283ecdae7de1"},
        "fingerprints": {"unet configuration": '{"act_fn": "silu"}'},
    }
    for name in ("one", "two"):
        Run.create(tmp_path / name, recipe.replace("sd15", name), noted)
    html = write_report([tmp_path / "one"], tmp_path / "r.html").read_text()
    assert "secret" not in html
    assert "act_fn" not in html
    assert "f932d975c52c9ba7" not in html
    texts = Page(html).texts
    assert {"one", "cats", "sets.0.folder", "sets.0.repeats", "a / b, c"} <= set(texts)
    both = Page(write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html").read_text())
    assert "secret" not in both.text
    assert both.text.index("model.base") < both.text.index("data.sets.0.folder")


def test_of_two_places_of_one_name_a_report_tells_both_whole(tmp_path):
    for name in ("one", "two"):
        Run.create(tmp_path / name, f"task: lora\nmodel: {{base: /data/{name}/sd15}}\n", environment())
    page = Page(write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "r.html").read_text())
    assert {"/data/one/sd15", "/data/two/sd15"} <= set(page.texts)


def test_measurements_become_plots_and_a_tidy_table(tmp_path):
    rows = [
        Measurement(benchmark="loader", case="plain", median_s=0.2, p10_s=0.19, p90_s=0.25, repeats=7,
                    images_per_s=1280.0, ratio=1.0, ratio_to="plain", machine="m", settings={"batch": 256}),
        Measurement(benchmark="loader", case="ours", median_s=0.1, p10_s=0.09, p90_s=0.12, repeats=7,
                    images_per_s=24050.0, ratio=0.5, ratio_to="plain", machine="m", settings={"batch": 256}),
        Measurement(benchmark="import", case="zip", median_s=2.0, repeats=5, machine="m"),
    ]  # fmt: skip
    append_csv(tmp_path / "rows.csv", rows)
    page = Page(write_report(tmp_path / "rows.csv", tmp_path / "r.html").read_text())
    assert page.tags.count("svg") == 3
    assert page.tags.count("table") == 2
    for part in ("24,050", "0.5x", "batch=256", "200 ms", "loader · rows.csv", "import · rows.csv"):
        assert part in page.text, part
    for column in ("MFU", "peak memory", "energy"):  # empty in all rows
        assert column not in page.text


def test_pictures_and_highlights_come_along(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (600, 600), "red").save(folder / "a red one.png")
    Image.effect_noise((900, 900), 80).convert("RGB").save(folder / "noise.png")  # too large to keep as it is
    page = Page(
        write_report(
            [folder], tmp_path / "r.html", title="Mine", highlights={"shape right": "91 %"}
        ).read_text()
    )
    assert "Mine" in page.text
    assert "91 %" in page.text
    assert [address.split(";")[0] for address in page.addresses] == ["data:image/png", "data:image/webp"]


def test_text_from_files_is_escaped(tmp_path):
    run = Run.create(tmp_path / "run", "task: '<script>alert(1)</script>'\ntrain: {steps: 5}\n", {})
    run.log({"step": 1, "loss": 1.0})
    (tmp_path / "<b>.png").parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "<img src=x>.png")
    page = Page(write_report([run.path, tmp_path / "<img src=x>.png"], tmp_path / "r.html").read_text())
    assert "script" not in page.tags
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize("name", ["nowhere", "empty", "notes.txt"])
def test_what_cannot_be_reported_on_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=name):
        write_report(tmp_path / name, tmp_path / "r.html")
    with pytest.raises(InputError):
        write_report([], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_smoothing_keeps_a_line_and_its_ends():
    line = np.full(500, 3.0)
    assert smooth(line, 8) == pytest.approx(line)
    noisy = 2.0 + np.random.default_rng(0).normal(0, 1, 5000)
    assert smooth(noisy, 50).std() < 0.2 * noisy.std()
    assert smooth(noisy[:3], 50).tolist() == noisy[:3].tolist()


def test_thinning_keeps_spikes_and_ends():
    x = np.arange(100_000.0)
    y = np.zeros_like(x)
    y[54_321] = 9.0
    few_x, few_y = thin(x, y)
    assert len(few_x) <= 1202
    assert few_y.max() == 9.0
    assert few_x[np.argmax(few_y)] == 54_321
    assert (few_x[0], few_x[-1]) == (0, 99_999)
    curve = Curve("a", x[:10], y[:10])
    assert thin(curve.x, curve.y)[0] is curve.x


def test_a_short_runs_smoothed_loss_is_no_single_point(tmp_path):
    """Four to sixty rows: the figure weighs the last few, and the first of them hardly."""
    for count in (4, 8, 20, 40):
        y = np.r_[np.ones(count - 1), 5.0]
        end = smooth(y, smoothing(count))[-1]
        assert 1.2 < end < 4.0
    assert smoothing(600) == 10
    assert smooth(np.array([1.0, 2.0, 5.0]), smoothing(3))[-1] == 5.0  # nothing to smooth
    run = make_run(tmp_path / "run", steps=8, rich=False)
    last = run.metrics()[-1]["loss"]
    write_report([run.path], tmp_path / "report.html")
    texts = Page((tmp_path / "report.html").read_text()).texts
    assert "smoothed, at the end" in texts
    assert f"{last:.4g}" not in texts


def marks_and_axis(svg):
    """Heights of all marks in a drawing, and where its axis ends."""
    marks = [float(y) for y in re.findall(r'<use [^>]*?y="([\d.]+)" style="fill: var\(--s\d\)', svg)]
    frame = re.search(r'<g id="patch_2">\s*<path d="([^"]*)"', svg)
    heights = [float(y) for _, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", frame[1])]
    return marks, min(heights), max(heights)


@pytest.mark.parametrize("value", [0.02, 0.9, 3.0])
def test_held_out_points_are_within_the_axis(value):
    draws = np.random.default_rng(0)
    raw = Curve("a", np.arange(1, 401.0), draws.uniform(0.4, 0.6, 400))
    held = Curve("a", np.array([100.0, 400.0]), np.array([0.5, value]))
    marks, top, bottom = marks_and_axis(curves([raw], label="x", held_out=[held]))
    assert len(marks) == 2
    assert all(top < mark < bottom for mark in marks)
    assert abs(marks[1] - marks[0]) > 1
