"""Peak memory and energy: watched things are seen, and watchers do not blind each other."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from darkroom.hardware import accelerator
from darkroom.hardware.meters import EnergyMeter, PeakMemory, bytes_a_touch, rapl, resident_bytes

MIB = 2**20


def test_a_peak_is_seen_after_it_is_over():
    peak = PeakMemory()
    before = resident_bytes()
    block = np.ones(25 * MIB)  # 200 MiB, touched
    del block
    assert peak.bytes() >= before + 190 * MIB
    assert resident_bytes() < before + 100 * MIB


def test_another_watchers_reset_does_not_hide_a_peak():
    outer = PeakMemory()
    before = resident_bytes()
    block = np.ones(25 * MIB)
    del block
    inner = PeakMemory()
    assert outer.bytes() >= before + 190 * MIB
    if inner.bytes() < before + 100 * MIB:  # the system lets the mark be reset
        inner.reset()
        assert outer.bytes() >= before + 190 * MIB
        outer.reset()
        assert outer.bytes() < before + 100 * MIB


def test_an_estimate_is_power_times_time_and_says_so():
    meter = EnergyMeter("cpu", power_w=50.0, num_devices=2)
    if meter.source.startswith("RAPL"):
        pytest.skip("this machine has a readable counter: there is no estimate")
    start = time.perf_counter()
    time.sleep(0.05)
    joules = meter.joules()
    assert joules == pytest.approx(100.0 * (time.perf_counter() - start), rel=0.2)
    assert meter.source == "estimate: 100 W rated power"


def test_nothing_known_is_unknown():
    meter = EnergyMeter("mps")
    if not meter.source.startswith("RAPL"):
        assert (meter.source, meter.joules()) == ("unknown", 0.0)


def test_a_cards_counter_is_found_by_its_own_name(monkeypatch):
    """CUDA_VISIBLE_DEVICES leaves torch others than NVML counts."""
    asked = []

    class Nvml:
        nvmlInit = staticmethod(lambda: None)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda name: (asked.append(name), name)[1])
        nvmlDeviceGetTotalEnergyConsumption = staticmethod(lambda handle: 2500)

    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    monkeypatch.setattr(accelerator, "uuid_of", lambda device: f"uuid-of-{device}")
    meter = EnergyMeter("cuda:1", num_devices=2)
    assert asked == ["GPU-uuid-of-cuda:1", "GPU-uuid-of-cuda:2"]
    assert (meter.source, meter._read()) == ("NVML (GPU only)", 5.0)


def test_counters_are_summed_over_packages_and_wrap_around(tmp_path):
    for i, micro_joules in enumerate((900_000, 100_000)):
        package = tmp_path / f"intel-rapl:{i}"
        package.mkdir()
        (package / "energy_uj").write_text(f"{micro_joules}\n")
        (package / "max_energy_range_uj").write_text("1000000\n")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a core's counter, already in its package's
    read = rapl(tmp_path)
    assert read is not None
    assert read() == 0.0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("150000\n")  # wrapped: 250,000 on
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("400000\n")
    assert read() == pytest.approx(0.55)
    assert read() == pytest.approx(0.55)


def test_no_counter_is_none(tmp_path):
    assert rapl(tmp_path) is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert rapl(tmp_path) is None


HOLES = """
import ctypes, sys
from darkroom.hardware.meters import resident_bytes, return_freed
KiB, block = 2**10, int(sys.argv[2]) * 2**10
if sys.argv[1] != "kept":
    assert return_freed(1024 * KiB, keep_top=sys.argv[1] == "but for the top")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(16 * 2**20))  # from here on glibc keeps blocks of up to 16 MiB, unless told otherwise
before = resident_bytes()
blocks = [libc.malloc(block) for _ in range(200 * 1024 * KiB // block)]
for one in blocks:
    ctypes.memset(one, 1, block)
half = slice(len(blocks) // 2, None) if sys.argv[3:] else slice(0, -1, 2)
for one in blocks[half]:  # those at the end; or every second, so that the last one lives on
    libc.free(one)
print((resident_bytes() - before) // 2**20)
"""


def held_mib(way: str, block_kib: int, *at_the_end: str, **variables: str) -> int:
    """Of 200 MiB in such blocks, half of which was freed: every second one, or those at the end."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = [sys.executable, "-c", HOLES, way, str(block_kib), *at_the_end]
    return int(subprocess.run(run, capture_output=True, text=True, check=True, env=own | variables).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_freed_blocks_among_others_are_given_back():
    """The half that was freed is held in holes, unless it is given back."""
    assert 190 <= held_mib("kept", 2048) <= 215
    assert 90 <= held_mib("returned", 2048) <= 115
    assert 90 <= held_mib("but for the top", 2048) <= 115


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_what_small_blocks_leave_at_the_end_of_the_heap_may_stay():
    """The next ones find it there, without being zeroed anew."""
    assert 90 <= held_mib("returned", 512, "at the end") <= 115
    assert 190 <= held_mib("but for the top", 512, "at the end") <= 215


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_whoever_has_smaller_blocks_given_back_by_glibcs_variables_keeps_it():
    smaller = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    assert 90 <= held_mib("returned", 256, **smaller) <= 115
    assert 190 <= held_mib("returned", 256) <= 215
    larger = {name: str(2**30) for name in smaller}
    assert 90 <= held_mib("returned", 2048, **larger) <= 115
    assert 190 <= held_mib("kept", 2048, **larger) <= 215


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
def test_what_a_touch_of_a_mapped_file_brings_is_measured(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(80 * MIB))
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    a_touch = bytes_a_touch(file)
    assert 4096 <= a_touch <= MIB
    (tmp_path / "link").symlink_to(file)
    assert bytes_a_touch(tmp_path / "link") == a_touch
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for place in range(0, len(mapped), 4096):
            mapped[place]
        assert bytes_a_touch(file) == a_touch, "what is mapped already does not count"
