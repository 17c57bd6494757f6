"""Cards, CPU classes and networks: what the tables say and how a device's name finds its row."""

from __future__ import annotations

import pytest

from darkroom.hardware import cards
from darkroom.hardware.cards import find_card, mfu, networks, peak_flops

ISSUE_LIST = (
    *(
        "T4",
        "V100",
        "A10",
        "A10G",
        "L4",
        "L40S",
        "RTX3080",
        "RTX3090",
        "RTX4090",
        "RTX5090",
        "A5500",
        "A6000",
    ),
    *("RTX6000Ada", "RTX8000", "TITANRTX", "A100-PCIE-40GB", "A100-SXM4-40GB", "A100-PCIE-80GB"),
    *("A100-SXM4-80GB", "H100-PCIE", "H100-SXM", "H200", "B200", "GB200", "MI300X"),
)


@pytest.mark.parametrize("name", ISSUE_LIST)
def test_every_card_asked_for_is_there_with_a_source(name):
    card = find_card(name)
    assert card is not None
    assert card.kind == "gpu"
    assert card.source
    assert card.memory_bytes
    assert card.memory_bytes >= 10e9
    assert 50 <= card.power_w <= 1200
    assert card.link in networks() or card.link == "PCIe 3.0 x16"


@pytest.mark.parametrize(
    ("driver_name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "RTX 6000"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Radeon 7900 XTX", "RX 7900 XTX"),
        ("a10g", "A10G"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB 80GB", "A100-SXM4-80GB"),
        ("NVIDIA H100 SXM5 80GB", "H100-SXM"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA L40 48GB", "L40"),
        ("Tesla T4 16GB", "T4"),
    ],
)
def test_a_drivers_name_finds_its_row(driver_name, row):
    card = find_card(driver_name)
    assert card is not None
    assert card.name == row


def test_an_unknown_card_is_not_taken_for_another():
    assert find_card("Voodoo 2") is None
    assert peak_flops("Voodoo 2", "bf16") is None
    assert mfu(1e12, 1.0, "Voodoo 2", "bf16") is None


@pytest.mark.parametrize(
    "name",
    [
        "A100-8x",
        "8x A100",
        "2xT4",
        "A100 or H100",
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 NVL 2g.24gb",
        "A100-SXM4-40GB 80GB",
        "H100-SXM PCIe",
    ],
)
def test_a_name_that_only_contains_a_card_is_not_that_card(name):
    assert find_card(name) is None


@pytest.mark.parametrize(
    ("name", "row", "memory"),
    [
        ("Apple M2 16GB", "Apple M2 16GB", 2 / 3 * 16),
        ("m1 8 gb", "Apple M1 8GB", 2 / 3 * 8),
        ("M3 Max 64GB", "Apple M3 Max 64GB", 48),
        ("Apple M4 Pro (48 GB)", "Apple M4 Pro 48GB", 36),
        ("Apple M2 24GB", "Apple M2", 16),
        ("M2 Ultra", "Apple M2 Ultra", 144),
    ],
)
def test_an_apple_gpu_has_its_machines_memory(name, row, memory):
    card = find_card(name)
    assert card is not None
    assert card.name == row
    assert card.memory_bytes == pytest.approx(memory * 2**30, rel=1e-3)
    plain = find_card(row.partition("GB")[0].rpartition(" ")[0]) if row.endswith("GB") else card
    assert plain is not None
    assert card.flops == plain.flops


def test_apple_gpus_rates_are_those_of_their_cores():
    """2 FLOP a cycle of 128 units a core (applegpuinfo: 38 cores at 1.398 GHz are 13.6 TFLOPS)."""
    rates = {name: peak_flops(f"Apple {name}", "float32") for name in ("M2", "M2 Pro", "M2 Max", "M2 Ultra")}
    assert rates["M2 Max"] == pytest.approx(38 * 256 * 1.398e9, rel=1e-3)
    assert rates["M2 Ultra"] == pytest.approx(2 * rates["M2 Max"], rel=1e-3)
    assert rates["M2"] == pytest.approx(rates["M2 Pro"] * 10 / 19, rel=1e-2)
    guessed = [card.name for card in cards().values() if "fp32_tflops" in card.guessed]
    assert {"Apple M3", "Apple M4 Max"} <= set(guessed)
    assert not {"Apple M1", "Apple M2 Max"} & set(guessed)


@pytest.mark.parametrize("name", ["Apple M2 32GB", "Tesla M4", "M40", "Apple M1 4GB", "Apple M9 16GB"])
def test_what_is_no_apple_gpu_is_not_taken_for_one(name):
    assert find_card(name) is None


def test_rates_are_dense_and_in_flops():
    assert peak_flops("A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("H100", "fp16") == pytest.approx(989.4e12)
    assert peak_flops("RTX 3090", "fp16") == 71e12  # accumulated in float32, as training does
    assert peak_flops("RTX 3090", "fp16_acc16") == 142e12
    assert peak_flops("T4", "bf16") == peak_flops("T4", "float32") == pytest.approx(8.1e12)
    assert peak_flops("CPU AVX-512 BF16", "bf16", cores=2) == pytest.approx(0.448e12)
    assert peak_flops("A100", "fp4") is None


def test_rates_do_not_fall_with_narrower_numbers():
    for card in cards().values():
        # The B300's tensor cores have little int8, for more of fp4.
        formats = ("float32", "tf32", "bf16") + (("int8",) if card.name != "B300" else ())
        order = [card.flops.get(name) for name in formats]
        known = [rate for rate in order if rate is not None]
        assert known == sorted(known), card.name


def test_mfu_is_the_share_of_the_peak():
    # 128 A100 at 1618.4 images/s (MosaicML's table), with 2.41 TFLOP an image at 512 px.
    used = mfu(2.41e12, 1618.4, "A100-SXM4-40GB", "bf16", num_devices=128)
    assert used == pytest.approx(2.41e12 * 1618.4 / (128 * 312e12))
    assert used == pytest.approx(0.0977, abs=1e-3)


def test_networks_have_plausible_bandwidth():
    table = networks()
    assert table["NVLink 3"].bandwidth_bytes_s == 300e9
    assert table["EFA 400 Gbit"].bandwidth_bytes_s == 50e9
    assert all(1e9 <= row.bandwidth_bytes_s <= 1e12 and row.source for row in table.values())
