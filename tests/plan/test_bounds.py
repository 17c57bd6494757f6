"""What holds of every plan: nothing negative, nothing above the peak, more work takes longer."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import pytest

from darkroom import hardware
from darkroom.errors import InputError
from darkroom.hardware.cards import cards, networks
from darkroom.hardware.prices import cost, price
from darkroom.plan import jobs, targets
from darkroom.plan.counts import Kernels, Line, Profile
from darkroom.plan.jobs import (
    GenerateJob,
    PrepareJob,
    TrainJob,
    Where,
    batch_seconds,
    largest_rows,
    plan_generating,
    plan_preparing,
    plan_training,
    step_seconds,
)
from darkroom.plan.roofline import (
    ARITHMETIC,
    ClusterSpec,
    Roofline,
    Software,
    all_reduce_s,
    default_cluster,
    efficiency,
    graphics,
    units_rate,
)
from darkroom.plan.serving import Request
from darkroom.plan.trace import ServingTarget, plan_rate
from darkroom.proof import tables as shipped
from darkroom.proof.tables import OthersStep

GPUS = [card for card in cards().values() if card.kind == "gpu"]
CPUS = [card for card in cards().values() if card.kind == "cpu"]
PRECISIONS = ("float32", "fp16", "bf16")
ENGINES = ("eager", "compile", "graphs")
ROWS = (1, 2, 3, 7, 16, 33, 128, 1000)


@pytest.fixture(scope="module")
def pictures():
    return shipped.picture_profile("bf16", "fused")


@pytest.fixture(scope="module")
def training():
    return shipped.others_profile(OthersStep("sd2", 512, encodes=False))


@pytest.mark.parametrize("card", [*GPUS, *CPUS], ids=lambda card: card.name)
def test_no_plan_is_negative_or_above_the_peak(card, pictures):
    for precision, engine, batch in itertools.product(PRECISIONS, ENGINES, (1, 64)):
        software = Software(precision, engine)
        plan = plan_generating(pictures, GenerateJob("generate", 100, batch, 30), Where(card), software)
        parts = dict(plan.step_s)
        total = parts.pop("total")
        assert all(value >= 0 for value in parts.values())
        assert sum(parts.values()) == pytest.approx(total)
        assert 0 < plan.mfu <= 1, (precision, engine, batch)
        assert plan.cost.kwh > 0
        assert plan.cost.usd is None or plan.cost.usd > 0
        assert 0 < plan.hours < math.inf


@pytest.mark.parametrize("card", GPUS, ids=lambda card: card.name)
def test_more_pictures_take_longer_and_hold_more(card, pictures):
    software, where = Software("fp16"), Where(card)
    taken = [batch_seconds(pictures, where, software, batch=rows, steps=30).total for rows in ROWS]
    assert taken == sorted(taken)
    assert len(set(taken[3:])) == len(taken[3:])  # from 7 pictures on the device is busy, not the host
    held = [sum(pictures.memory(rows).values()) for rows in ROWS]
    assert held == sorted(held)
    assert sum(pictures.memory(largest_rows(pictures, where)).values()) <= where.usable_bytes


def test_a_picture_costs_no_more_in_a_larger_batch(pictures):
    """But for what a cache no longer holds of it."""
    for card in GPUS:
        for bare, more in ((replace(card, cache_bytes=0.0), 1.001), (card, 1.15)):
            each = [
                batch_seconds(pictures, Where(bare), Software("fp16"), batch=rows, steps=30).total / rows
                for rows in ROWS
            ]
            assert all(later <= earlier * more for earlier, later in itertools.pairwise(each)), card.name


def test_float32_units_that_are_only_sometimes_at_work_are_not_counted_whole(pictures):
    """A 7900 XTX's 61 TFLOP/s of float32 do not draw faster than a 4090's 83: both need pairs to be full."""
    s = {
        name: batch_seconds(pictures, Where(cards()[name]), Software("float32"), batch=4, steps=9).total
        for name in ("RTX 4090", "RX 7900 XTX", "RTX 3090")
    }
    assert s["RTX 4090"] < s["RX 7900 XTX"] < s["RTX 3090"]


def test_a_card_that_is_better_in_all_is_not_slower(pictures, training):
    better = [
        (one, other)
        for one, other in itertools.permutations(GPUS, 2)
        if (one.architecture, graphics(one)) == (other.architecture, graphics(other))
        and one.year >= other.year
        and one.bandwidth_bytes_s >= other.bandwidth_bytes_s
        and one.cache_bytes >= other.cache_bytes
        and all(one.flops.get(name, 0) >= rate for name, rate in other.flops.items())
        and units_rate(one, "fp16") >= units_rate(other, "fp16")
        and "T4" not in (one.name, other.name)  # it has a share of its own
    ]
    assert len(better) > 20
    for one, other in better:
        for precision, rows in itertools.product(("float32", "fp16"), (1, 16)):
            software = Software(precision)
            assert (
                batch_seconds(pictures, Where(one), software, batch=rows, steps=9).total
                <= batch_seconds(pictures, Where(other), software, batch=rows, steps=9).total * 1.001
            ), (one.name, other.name, precision, rows)
            assert (
                step_seconds(training, Where(one), software, micro=rows, rows=rows).total
                <= step_seconds(training, Where(other), software, micro=rows, rows=rows).total * 1.001
            )


def test_half_precision_is_not_slower_and_fusing_helps(pictures):
    half, single = pictures, shipped.pictures_of_2022("float32")
    for card in GPUS:
        fast = batch_seconds(half, Where(card), Software("fp16"), batch=8, steps=20).total
        assert fast < batch_seconds(single, Where(card), Software("float32"), batch=8, steps=20).total
        engines = [
            batch_seconds(half, Where(card), Software("fp16", engine), batch=2, steps=20).total
            for engine in ENGINES
        ]
        assert engines == sorted(engines, reverse=True), card.name


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "network", sorted(name for name, one in networks().items() if one.scope == "between")
)
def test_devices_add_up(training, mode, network):
    job = TrainJob("train", 100, 4032, None)
    found = []
    for count in (1, 2, 3, 7, 8, 9, 64, 96, 1008):
        where = Where(cards()["A100-SXM4-80GB"], ClusterSpec(count, network=network, mode=mode))
        plan = plan_training(training, job, where, Software("bf16"))
        assert plan.fits
        assert 0 < plan.mfu <= 1
        assert all(value >= 0 for value in plan.step_s.values())
        found.append(plan)
    one = found[0]
    # None is faster than its share.
    # Shards leave room for larger micro-batches and share the update, which can gain a little more than that.
    least = one.cost.device_hours * (0.999 if mode == "ddp" else 0.9)
    assert all(plan.cost.device_hours >= least for plan in found)
    if mode == "fsdp":
        state = [plan.memory_bytes["optimiser"] + plan.memory_bytes["ema"] for plan in found]
        assert state == sorted(state, reverse=True)


def test_a_sum_over_more_devices_takes_longer():
    known = efficiency()
    for name in ("V100-SXM2-16GB", "A100-SXM4-40GB", "H100-SXM", "RTX 4090"):
        taken = [
            all_reduce_s(cards()[name], ClusterSpec(count), 3.4e9, known)
            for count in (1, 2, 4, 8, 16, 64, 1024)
        ]
        assert taken[0] == 0
        assert taken == sorted(taken)


def test_a_card_stands_in_its_usual_machine(training):
    """The network is the machine's, not of the chip's age: 32 4090 are no slower than 32 3090."""

    def seconds(name, **said):
        where = Where(cards()[name], default_cluster(cards()[name], 32, **said))
        return step_seconds(training, where, Software("bf16"), micro=8, rows=8).total

    usual = {
        name: default_cluster(cards()[name], 32)
        for name in ("RTX 3090", "RTX 4090", "A10G", "A100-SXM4-80GB", "H100-SXM", "MI300X", "GB200")
    }
    assert {usual[name].network for name in ("RTX 3090", "RTX 4090")} == {"TCP 10 Gbit"}
    assert usual["A10G"].network == "TCP 100 Gbit"
    assert usual["A100-SXM4-80GB"].network == "EFA 400 Gbit"
    assert usual["MI300X"].network == usual["H100-SXM"].network == "InfiniBand NDR 3200 Gbit"
    assert [usual[name].nodes for name in ("RTX 4090", "MI300X", "GB200")] == [8, 4, 1]
    assert seconds("RTX 4090") < seconds("RTX 3090")
    assert seconds("RTX 3090", machine="HGX A100") < seconds("RTX 3090")
    assert seconds("RTX 3090", network="TCP 100 Gbit", node_devices=8) < seconds("RTX 3090")


def test_a_card_has_the_memory_that_programs_see():
    """24 GiB on the box of a 4090 are 23.64 to a program, not 24 decimal GB; some of it is CUDA's own."""
    where = Where(cards()["RTX 4090"])
    assert where.total_bytes == pytest.approx(23.64 * 2**30)
    assert where.usable_bytes == pytest.approx((23.64 * 2**30 - 700e6) / 1.04)
    for card in GPUS:
        if card.link == "unified":  # a Mac's GPU has a part of the machine's memory
            continue
        share = card.memory_bytes / 2**30 / card.memory_gb
        decimal = card.memory_bytes / 1e9 / card.memory_gb
        assert 0.91 < share <= 1.0 or 0.97 < decimal <= 1.08, card.name
    five = {"2060", "2070", "2080", "3060", "3070", "3080", "3090", "4060", "4070", "4080", "4090", "5060",
            "5070", "5080", "5090"}  # fmt: skip
    assert all(targets.chosen_cards(name)[0].name == f"RTX {name}" for name in five)


def test_checkpointing_takes_less_memory_and_more_time():
    plain = shipped.others_profile(OthersStep("sd15", 512, 8, False))
    again = shipped.others_profile(OthersStep("sd15", 512, 8, True))
    where, software = Where(cards()["A100-SXM4-40GB"]), Software("fp16")
    for rows in (2, 8, 32):
        assert sum(again.memory(rows).values()) < sum(plain.memory(rows).values())
        assert (
            step_seconds(again, where, software, micro=rows, rows=rows).total
            > step_seconds(plain, where, software, micro=rows, rows=rows).total
        )


def test_a_server_needs_more_for_more_requests_and_for_less_patience(pictures):
    where, software = Where(cards()["L40S"]), Software("fp16")

    def needed(rate, latency):
        goal = ServingTarget(latency, rate)
        plan = plan_rate(Request(0.0, 512, 512, 30, 1.0), goal, pictures, where, software)
        assert plan.extra["busy"] < 1
        assert plan.fits == (plan.extra["latency_p95_s"] <= latency)
        return plan.extra["devices"]

    by_rate = [needed(rate, 10.0) for rate in (0.01, 0.1, 1, 3, 10, 100, 1000)]
    assert by_rate == sorted(by_rate)
    assert by_rate[-1] > 100
    by_patience = [needed(20.0, latency) for latency in (1.5, 2, 5, 10, 60, 600)]
    assert by_patience == sorted(by_patience, reverse=True)
    assert not plan_rate(
        Request(0.0, 512, 512, 30, 1.0), ServingTarget(0.01, 1), pictures, where, software
    ).fits


@pytest.mark.parametrize("card", GPUS, ids=lambda card: card.name)
def test_nothing_beats_the_roofline(card, pictures, training):
    """No kernel computes above the peak, nor moves what the last cache cannot hold faster than memory does.

    What the cache holds moves at most at five times that: the quickest caches' rate over their memory's.
    """
    for profile, precision, rows in itertools.product(
        (pictures, training), ("float32", "fp16", "bf16"), (1, 2, 8, 64, 1024)
    ):
        roofline = Where(card).roofline(Software(precision))
        for stage in dict.fromkeys(kernel.stage for kernel in profile.kernels):
            one = roofline.stage(profile, stage, rows)
            least = 0.0
            for kernel in profile.kernels:
                if kernel.stage != stage:
                    continue
                moved = kernel.bytes.at(rows)
                held = min(moved, card.cache_bytes)
                peak = roofline.peak(kernel.kind if kernel.kind in ARITHMETIC else "matmul")[0]
                memory = (moved - held + held / 5) / card.bandwidth_bytes_s
                least += kernel.calls * max(kernel.flops.at(rows) / peak, memory)
            assert one.compute + one.memory_bound >= least, (precision, rows, stage)


def test_only_what_a_cache_holds_moves_faster_than_memory(pictures):
    """The same traffic in kernels that a cache holds, and in kernels far beyond it."""
    for card in GPUS:
        roofline = Where(card).roofline(Software("bf16"))

        def rate(size, roofline=roofline):
            line = Line(size, 0.0)
            profile = Profile((Kernels("s", "elementwise", 1000, Line(0.0, 0.0), line),), (), {}, 0)
            start = 1000 * efficiency().of("kernel_s", "GPU")
            return 1000 * size / (roofline.stage(profile, "s", 1).memory_bound - start)

        assert rate(100 * card.cache_bytes) < card.bandwidth_bytes_s, card.name
        assert rate(card.cache_bytes / 2) > rate(4 * card.cache_bytes), card.name


def test_preparing_more_takes_longer_and_more_disk():
    profile = shipped.preparing_profile("sd2", 512, "bf16")
    profile = replace(profile, facts={"latent_bytes_a_row": 65536, "text_bytes_a_row": 0})
    found = [
        plan_preparing(profile, PrepareJob("prepare", number), Where(cards()["A10G"]), Software("fp16"))
        for number in (1, 1000, 10**9)
    ]
    assert [plan.hours for plan in found] == sorted(plan.hours for plan in found)
    assert found[2].sizes_bytes["latents"] == 65536e9


def test_too_many_devices_are_refused(training):
    where = Where(cards()["A100-SXM4-80GB"], ClusterSpec(65))
    with pytest.raises(InputError, match="global batch of 64"):
        plan_training(training, TrainJob("train", 1, 64, None), where, Software("bf16"))


def test_a_large_state_on_a_cpu_is_waited_for_at_each_save(training):
    """On a card it is copied, and written while training goes on; so is a small one."""

    def seconds(card, state):
        known = replace(training, facts={**training.facts, "checkpoint_bytes": state})
        job = TrainJob("train", 100, 4, 1, every_save=10)
        plan = plan_training(known, job, Where(cards()[card]), Software("float32"))
        bare = plan_training(replace(known, facts={}), job, Where(cards()[card]), Software("float32"))
        return plan.phases_s["checkpoint"] - bare.phases_s["checkpoint"]

    large, small = 5 * 10**9, 10**7
    assert seconds("CPU AVX-512 BF16", large) == pytest.approx(10 * seconds("A10G", large))
    assert seconds("CPU AVX-512 BF16", small) == pytest.approx(seconds("A10G", small))


def test_what_one_picture_does_not_fit_is_said(training):
    plan = plan_training(
        training, TrainJob("train", 1, 64, None), Where(cards()["RTX 3080"]), Software("fp16")
    )
    assert not plan.fits
    assert "not even one picture" in plan.notes[0]


@pytest.mark.parametrize(("name", "threads"), [("CPU AMX", 2), ("CPU AVX-512 BF16", 1)])
def test_a_core_costs_as_many_virtual_cpus_as_it_is_sold_as(name, threads):
    card, offer = cards()[name], price(name)
    spent = cost(card, 1.0, cores=8, offer=offer)
    assert spent.usd == pytest.approx(8 * threads * offer.usd_per_device_hour)
    assert spent.usd_spot == pytest.approx(8 * threads * offer.spot_usd_per_device_hour)
    own = cost(card, 1.0, cores=8, offer=price(name, usd_per_hour=0.5))
    assert own.usd == 0.5


def test_a_cpu_attends_in_float32():
    card = cards()["CPU AMX"]
    share = efficiency().of("attention", "CPU")
    assert Roofline(card, Software("bf16"))._rate("attention") == share * card.flops["float32"]
    assert Roofline(card, Software("bf16"))._rate("conv") > card.flops["float32"]


def test_a_cpu_class_holds_as_much_as_its_cores_have(training, monkeypatch):
    monkeypatch.setattr(jobs, "maps_large_folios", lambda: False)
    card = cards()["CPU AVX-512 BF16"]
    room = Where(card, cores=8)
    held = room.held({"weights": room.usable_bytes})
    assert sum(held.values()) == pytest.approx(8 * card.memory_bytes)
    assert 0.6e9 < held["process"] < 0.75e9
    monkeypatch.setattr(jobs, "maps_large_folios", lambda: True)
    assert 0.1e9 < room.held({})["process"] - held["process"] < 0.2e9  # pages that the system takes back
    assert Where(card, cores=8).usable_bytes == room.usable_bytes
    assert sum(Where(cards()["T4"]).held({"weights": 1e9}).values()) == 1e9  # a GPU's context is no tensor
    small = plan_training(training, TrainJob("train", 1, 1, None), Where(card, cores=4), Software("bf16"))
    assert not small.fits
    large = plan_training(training, TrainJob("train", 1, 1, None), Where(card, cores=32), Software("bf16"))
    assert large.fits


def test_threads_of_one_core_count_once(monkeypatch):
    found = hardware.machine()
    two = replace(
        found, devices=(), usable_cores=16.0, physical_cores=24, logical_cores=48, instructions=("avx512f",)
    )
    monkeypatch.setattr(sys.modules["darkroom.hardware.machine"], "machine", lambda: two)
    assert targets.here(targets.Target()).cores == 8


def test_reading_is_hidden_until_it_takes_longer_than_the_step(training):
    facts = {"latent_bytes_a_row": 32768, "text_bytes_a_row": 157_696}
    read = replace(training, facts=facts)
    job = TrainJob("train", 100, 256, None, reads=("latents", "text"))
    card, software = cards()["A100-SXM4-80GB"], Software("bf16")
    plain = plan_training(training, replace(job, reads=()), Where(card), software)
    hidden = plan_training(read, job, Where(card), software)
    assert hidden.step_s == plain.step_s
    assert 0.01 < hidden.extra["data_hidden_s"] < hidden.step_s["total"]
    slow = efficiency().with_values({("loader_bytes_s", "store"): 1e6})
    exposed = plan_training(read, job, Where(card, known=slow), software)
    assert exposed.step_s["total"] == pytest.approx(256 * (2.5e-5 + 190_464 / 1e6))
    assert exposed.step_s["data"] == pytest.approx(exposed.step_s["total"] - plain.step_s["total"])
