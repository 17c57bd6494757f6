"""Published tables beside darkroom's figures: every table is there, and every figure is the one behind it."""

from __future__ import annotations

import copy
import csv
import re

import pytest

from darkroom.cli.application import main
from darkroom.hardware import machine
from darkroom.hardware.prices import price
from darkroom.measure.timing import Measurement, append_csv
from darkroom.proof import published
from darkroom.proof.drawings import DRAWINGS, five_plots
from darkroom.proof.page import SYSTEMS, five_cells, number, price_parts, write_five_systems
from darkroom.proof.published import validate

LATENCY = "latency (Lambda)"
CASE = "A100-PCIE-80GB, half, batch 4"


@pytest.fixture(scope="module")
def proof():
    return validate().to_dict()


def written(path):
    with path.open(newline="") as file:
        return {(row["table"], row["case"]): row for row in csv.DictReader(file)}


def batch_row(**changes):
    """What `bench batch` writes of four pictures on the card of CASE."""
    settings = {"model": "sd15", "size": "512x512", "steps": 50, "batch": 4, "precision": "fp16"}
    row = {
        "benchmark": "batch",
        "case": "fp16",
        "settings": settings | changes.pop("settings", {}),
        "median_s": 14.5,  # two prompts a repeat
        "images_per_s": 8 / 14.5,
        "device": "NVIDIA A100 80GB PCIe",
        "machine": "another",
    }
    return Measurement(**(row | changes))


def test_every_table_and_every_cell_is_on_the_page(tmp_path, proof):
    page, beside = write_five_systems(tmp_path / "page.html", proof=proof)
    text, cells = page.read_text(), written(beside)
    assert {name for name, _ in cells} == set(published.TABLES)
    assert len(cells) == sum(len(found["rows"]) for found in proof["tables"])
    for found in proof["tables"]:
        assert f">{found['table']}</h3>" in text
        for row in found["rows"]:
            cell = cells[found["table"], row["case"]]
            assert float(cell["retold"]) == row["predicted"]
            assert float(cell["published"]) == row["published"]
            assert f">{number(row['predicted'])}</td>" in text
            assert cell["today_how"] == ("planned" if cell["today"] else "")


def test_every_row_is_as_wide_as_its_header(tmp_path, proof):
    page, _ = write_five_systems(tmp_path / "page.html", proof=proof)
    tables = re.findall(r"<table.*?</table>", page.read_text(), re.DOTALL)
    assert len(tables) >= len(published.TABLES)
    for table in tables:
        rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        assert len({len(re.findall(r"<t[hd][ >]", row)) for row in rows}) == 1
    assert "USD an hour of one card" in page.read_text()


def test_no_column_is_empty_and_no_figure_is_written_as_computers_do(tmp_path, proof):
    page, _ = write_five_systems(tmp_path / "page.html", proof=proof)
    columns = set()
    for table in re.findall(r"<table><thead>.*?</table>", page.read_text(), re.DOTALL):
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("<tr>")[1:]]
        header, *cells = rows
        columns.add(tuple(header))
        assert all(any(column) for column in zip(*cells, strict=True)), header
        assert not [cell for row in cells for cell in row if re.search(r"\de[+-]\d|-0\.0%", cell)]
    assert {"darkroom today" in header for header in columns} == {True, False}


def test_a_changed_number_is_seen(tmp_path, proof):
    changed = copy.deepcopy(proof)
    row = next(row for found in changed["tables"] if found["table"] == LATENCY for row in found["rows"])
    row["predicted"] = 1.2345
    first, first_csv = write_five_systems(tmp_path / "a.html", proof=proof)
    second, second_csv = write_five_systems(tmp_path / "b.html", proof=changed)
    differ = [key for key, cell in written(first_csv).items() if cell != written(second_csv)[key]]
    assert differ == [(LATENCY, row["case"])]
    assert "published then" in first.read_text()
    assert ">1.234</td>" in second.read_text() or ">1.235</td>" in second.read_text()
    assert ">1.234</td>" not in first.read_text()


def test_a_table_that_misses_its_bound_says_so(tmp_path, proof):
    missing = sum(not found["holds"] for found in proof["tables"])
    page, _ = write_five_systems(tmp_path / "a.html", proof=proof)
    assert page.read_text().count("Misses its bound") == missing
    broken = copy.deepcopy(proof)
    next(found for found in broken["tables"] if found["holds"])["holds"] = False
    page, _ = write_five_systems(tmp_path / "b.html", proof=broken)
    assert page.read_text().count("Misses its bound") == missing + 1


def test_dollars_stand_at_todays_price_too(proof):
    cells = {(cell["table"], cell["case"]): cell for cell in five_cells(proof)}
    cell = cells["costs (MosaicML)", "8 A100, inline, USD"]
    offer = price("A100-SXM4-40GB")
    assert cell["published_at_todays_price"] == pytest.approx(99_000 * offer.usd_per_device_hour / 2)
    assert cell["price_as_of"] == offer.as_of.isoformat()
    for (table, case), cell in cells.items():
        assert ("price_as_of" in cell) == (cell["unit"] == "USD")
        if cell["unit"] == "USD":
            assert sum(share for _, _, share in price_parts(table, case)) == pytest.approx(1)
    online = price_parts("costs from their rates (Anyscale)", "phase 1 online, USD, from their rate")
    assert online[1][2] == pytest.approx(76.8 * 40 * 1.212 / 16_275)


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({}, 7.25),
        ({"settings": {"batch": 3}}, None),
        ({"settings": {"steps": 20}}, None),
        ({"settings": {"model": "sdxl"}}, None),
        ({"settings": {"precision": "int8"}}, None),
        ({"device": "NVIDIA H200"}, None),
    ],
)
def test_only_the_same_work_on_the_same_card_takes_a_cells_place(proof, changes, figure):
    cells = {(c["table"], c["case"]): c for c in five_cells(proof, [batch_row(**changes)])}
    taken = [key for key, cell in cells.items() if cell.get("today_how", "planned") != "planned"]
    if figure is None:
        assert taken == []
        return
    assert taken == [(LATENCY, CASE)]
    cell = cells[LATENCY, CASE]
    assert cell["today"] == pytest.approx(figure)
    assert cell["today_how"] == "measured on A100-PCIE-80GB"
    assert cell["error"] == pytest.approx(
        cell["retold"] / 10.04 - 1
    )  # the retelling's, not of what was measured


def test_rows_of_this_machine_are_measured_here(proof):
    cells = five_cells(proof, [batch_row(machine=machine().name)])
    said = [cell["today_how"] for cell in cells if cell.get("today_how", "planned") != "planned"]
    assert said == ["measured here"]


def test_darkroom_today_is_its_own_software_with_an_interval(proof):
    cells = {(c["table"], c["case"]): c for c in five_cells(proof)}
    cell = cells[LATENCY, CASE]
    assert cell["today_low"] < cell["today"] < cell["today_high"]
    assert cell["today"] < 0.8 * cell["retold"]  # fused attention, channels last
    assert (
        "today" not in cells[LATENCY, "A100-PCIE-80GB, single, batch 4"]
    )  # other work: half precision there
    assert "today" not in cells["images/s (MosaicML)", "8 A100, 512 px, encoders inline"]
    stored = cells["images/s (MosaicML)", "8 A100, 512 px, pre-encoded"]
    assert stored["today_low"] < stored["today"] < stored["today_high"]


def test_every_drawing_finds_its_cells(proof):
    cells = list(five_cells(proof))
    for system in SYSTEMS:
        plots = list(five_plots(system, cells))
        assert len(plots) == len(DRAWINGS[system]) > 0
        assert not any("…" in plot for plot in plots)  # no label is cut off
        assert all("<svg" in plot for plot in plots)


def test_the_verb_writes_both_and_lays_measured_rows_beside(tmp_path, capsys):
    append_csv(tmp_path / "rows.csv", [batch_row()])
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--five-systems", str(tmp_path / "rows.csv"), "--out", str(page)])
    assert stopped.value.code == 0
    assert "page.csv" in capsys.readouterr().out
    assert "measured on A100-PCIE-80GB" in page.read_text()
    assert "batch · rows.csv" in page.read_text()
    assert written(page.with_suffix(".csv"))[LATENCY, CASE]["today_how"].startswith("measured")


def test_a_source_that_is_no_table_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--five-systems", str(tmp_path / "no.csv")])
    assert stopped.value.code == 2
    assert "no.csv" in capsys.readouterr().err
