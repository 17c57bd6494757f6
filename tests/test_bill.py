"""The bill: parts, sums over sessions, money at a dated price, whole on the disk."""

from __future__ import annotations

import threading
import time
from datetime import date

import numpy as np
import pytest
from pydantic import ValidationError

from darkroom.bill import Bill, Meter, format_bytes, format_number, format_seconds, format_usd
from darkroom.hardware import machine
from darkroom.hardware.system import process_age_s


def test_parts_are_timed_and_a_part_inside_is_taken_out_of_the_outer_one():
    meter = Meter("cpu")
    with meter.part("train"):
        time.sleep(0.05)
        with meter.part("sample"):
            time.sleep(0.1)
        time.sleep(0.05)
    bill = meter.bill()
    assert 0.1 <= bill.parts["train"] < 0.3
    assert 0.1 <= bill.parts["sample"] < 0.3
    assert sum(bill.parts.values()) == pytest.approx(bill.wall_s, rel=1e-6)
    with pytest.raises(InterruptedError), meter.part("train"):
        _sleep_and_fail()
    assert meter.bill().parts["train"] >= bill.parts["train"] + 0.05
    with meter.part("wait"):
        time.sleep(0.02)
    assert meter.bill().parts["wait"] >= 0.02


def _sleep_and_fail():
    time.sleep(0.05)
    raise InterruptedError


def test_what_no_part_was_open_for_is_other_and_all_parts_are_the_wall_time():
    meter = Meter("cpu")
    time.sleep(0.05)
    with meter.part("train"):
        time.sleep(0.02)
    bill = meter.bill()
    assert bill.parts["other"] >= 0.05
    assert sum(bill.parts.values()) == pytest.approx(bill.wall_s, rel=1e-6)
    assert bill.wall_s - bill.parts["train"] >= 0.05  # so without 'other' they are not


def test_a_process_that_is_the_jobs_counts_from_its_start():
    age_s = process_age_s()
    whole, own = Meter("cpu", usd_per_hour=3.6, whole_process=True).bill(), Meter("cpu").bill()
    assert age_s <= whole.parts["start"] <= whole.wall_s
    assert whole.usd == pytest.approx(whole.wall_s * 0.001)
    assert sum(whole.parts.values()) == pytest.approx(whole.wall_s, rel=1e-6)
    assert "start" not in own.parts
    assert own.wall_s < age_s


def test_money_is_device_hours_times_the_price_and_dated():
    meter = Meter("cpu", usd_per_hour=3.6)
    time.sleep(0.05)
    bill = meter.bill()
    assert bill.device_hours == pytest.approx(bill.wall_s / 3600)
    assert bill.usd == pytest.approx(bill.wall_s * 0.001)
    assert bill.price_as_of == date.today()
    assert "by the user" in (bill.price_source or "")
    assert f"as of {date.today()}" in bill.line()


def test_a_cpu_costs_as_many_virtual_cpus_as_may_be_used():
    from darkroom.hardware.prices import price

    here = machine()
    bill = Meter("cpu").bill()
    offer = price(here.cpu_class)
    if offer is None:  # nobody in the table rents out such a CPU: no money is made up
        assert bill.usd_per_hour is None
        assert bill.usd is None
    else:
        assert bill.usd_per_hour == pytest.approx(offer.usd_per_device_hour * here.usable_cores)
    assert here.cpu in bill.device
    assert bill.kwh is not None
    assert bill.kwh_source is not None


def test_peak_memory_is_seen():
    meter = Meter("cpu")
    before = meter.bill().peak_memory_bytes
    block = np.ones(20 * 2**20)
    del block
    assert meter.bill().peak_memory_bytes >= before + 100 * 2**20


def test_sessions_add_up(tmp_path):
    path = tmp_path / "bill.json"
    assert Bill.load(path) is None
    for session in (1, 2, 3):
        meter = Meter("cpu", Bill.load(path), usd_per_hour=1.0)
        with meter.part("train"):
            meter.images += 10
            time.sleep(0.02)
        bill = meter.bill()
        assert (bill.sessions, bill.images) == (session, 10 * session)
        meter.bill().save(path)
    last = Bill.load(path)
    assert last is not None
    assert last.wall_s >= 0.06
    assert last.parts["train"] >= 0.06
    assert last.usd == pytest.approx(last.device_hours)
    assert last.usd_per_image == pytest.approx(last.usd / 30)
    assert meter.bill().sessions == 3  # asking twice is no new session


def test_sums_take_the_highest_peak_and_what_is_known():
    a = Bill(wall_s=10, usd=1.0, kwh=None, peak_memory_bytes=5, images=2, parts={"encode": 1.0}, sessions=1)
    b = Bill(wall_s=5, usd=None, kwh=0.5, kwh_source="RAPL", peak_memory_bytes=9, parts={"train": 2.0})
    both = a + b
    assert (both.wall_s, both.usd, both.kwh, both.kwh_source) == (15, 1.0, 0.5, "RAPL")
    assert (both.peak_memory_bytes, both.images, both.sessions) == (9, 2, 1)
    assert both.parts == {"encode": 1.0, "train": 2.0}
    assert (a + a).parts == {"encode": 2.0}
    assert a.parts == {"encode": 1.0}


def test_a_saved_bill_reads_back_equal_and_is_never_half_there(tmp_path):
    path = tmp_path / "bill.json"
    bill = Meter("cpu").bill()
    bill.save(path)
    assert Bill.load(path) == bill
    done = threading.Event()

    def save_often():
        for _ in range(100):
            bill.save(path)
        done.set()

    writer = threading.Thread(target=save_often)
    writer.start()
    reads = 0
    while not done.is_set():
        assert Bill.load(path) == bill
        reads += 1
    writer.join()
    assert reads > 0
    assert [file.name for file in tmp_path.iterdir()] == ["bill.json"]


def test_a_damaged_bill_is_an_error_not_a_zero(tmp_path):
    (tmp_path / "bill.json").write_text('{"wall_s": 1')
    with pytest.raises(ValidationError):
        Bill.load(tmp_path / "bill.json")


def test_the_line_says_all_that_is_known():
    bill = Bill(
        wall_s=3725,
        device_hours=8.278,
        device="A100-SXM4-40GB",
        num_devices=8,
        usd=22.72,
        usd_per_hour=2.745,
        price_as_of=date(2026, 7, 15),
        kwh=3.1,
        kwh_source="NVML (GPU only)",
        peak_memory_bytes=30 * 2**30,
        images=100_000,
        sessions=2,
    )
    line = bill.line()
    for part in ("1 h 02 min", "8.28 device-hours", "USD 22.72", "USD 2.75 a device-hour as of 2026-07-15",
                 "3.1 kWh", "30.0 GiB", "100,000 images", "2 sessions"):  # fmt: skip
        assert part in line
    assert "about" not in line
    assert line.index("device-hours") < line.index("USD")
    assert "days old" in bill.price_note(date(2027, 1, 1))
    assert "days old" not in bill.price_note(date(2026, 8, 1))
    assert "USD" not in bill.model_copy(update={"usd": None}).line()


def test_figures_are_short_and_right():
    assert [format_seconds(s) for s in (0.0123, 48.2, 185, 7800)] == [
        "0.0123 s",
        "48.2 s",
        "3 min 05 s",
        "2 h 10 min",
    ]
    assert [format_usd(usd) for usd in (0, 1234.5, 0.103, 0.0034, 0.000083)] == [
        "USD 0.00", "USD 1,234.50", "USD 0.103", "USD 0.0034", "USD 0.000083"]  # fmt: skip
    assert [format_bytes(n) for n in (380 * 2**20, 1.4 * 2**30)] == ["380 MiB", "1.4 GiB"]


def test_numbers_have_no_exponent():
    assert [format_number(v, 2) for v in (100.0, 99.6, 9.96, 12, 1.234, 0.0123)] == [
        "100", "100", "10", "12", "1.2", "0.012",
    ]  # fmt: skip
    assert [format_number(v) for v in (1234.6, 99.96, 12.34, 0.5)] == ["1,235", "100", "12.3", "0.5"]
