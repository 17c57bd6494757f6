"""The one file for accelerators: what the table says, and calls that reach torch.accelerator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from darkroom import models
from darkroom.hardware import accelerator, machine
from darkroom.hardware.machine import Device
from darkroom.recipe.sections import TrainSettings
from darkroom.sample.optimisations import OPTIMISATIONS, optimise, precision
from darkroom.sample.optimisations.applied import ComputeTarget
from darkroom.train.jobs import set_kernels
from fake_card import fake_cuda


def test_every_kind_says_how_it_is_known() -> None:
    proofs = {accelerator.RUN, accelerator.SUBSTITUTED, accelerator.BELIEVED}
    assert set(accelerator.KINDS) == {"cuda", "rocm", "xpu", "mps"}
    assert {kind.proof for kind in (*accelerator.KINDS.values(), accelerator.CPU)} == proofs
    assert [kind.name for kind in accelerator.KINDS.values() if not kind.float64] == ["xpu", "mps"]
    other = accelerator.kind_of("hpu:1")
    assert (other.name, other.proof, other.makes) == ("hpu", accelerator.BELIEVED, accelerator.UNPROVEN)
    assert not other.float64
    assert accelerator.kind_of(torch.device("cpu")) is accelerator.CPU


def test_an_amd_card_is_called_cuda_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.kind_of("cuda:0").name == "cuda"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert accelerator.kind_of("cuda:0").name == "rocm"
    assert Device("rocm", 1, "MI300X", 1).torch_name == "cuda:1"
    assert [Device(kind, 0, "", 1).torch_name for kind in ("mps", "xpu", "cuda")] == [
        "mps",
        "xpu:0",
        "cuda:0",
    ]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[Any, ...]]]:
    """Puts a card of a kind under torch.accelerator; the calls that it gets come back."""

    def put(kind: str) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def answer(name: str, value: Any) -> Callable[..., Any]:
            return lambda *given: (calls.append((name, *map(str, given))), value)[1]

        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind)
        )
        answers = {"device_count": 2, "memory_allocated": 7, "max_memory_allocated": 9, "synchronize": None}
        answers |= {"get_memory_info": (3, 8), "empty_cache": None, "reset_peak_memory_stats": None}
        answers |= {"set_device_index": None}
        for name, value in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer(name, value))
        answers = {"current_allocated_memory": 5, "driver_allocated_memory": 6, "recommended_max_memory": 8}
        for name, value in (answers | {"empty_cache": None}).items():
            monkeypatch.setattr(torch.mps, name, answer(f"mps.{name}", value))
        for module in (torch.xpu, torch.cuda):
            monkeypatch.setattr(module, "get_device_name", lambda device: f"Card {device.index}")
            told = SimpleNamespace(total_memory=8, uuid="01-23")
            monkeypatch.setattr(module, "get_device_properties", lambda device, told=told: told)
        return calls

    return put


def test_cards_before_ampere_compute_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that they take bf16, which they emulate."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    for capability, chosen in {(7, 0): "fp16", (7, 5): "fp16", (8, 0): "bf16", (12, 0): "bf16"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert models.model.choose_precision("auto", torch.device("cuda", 0))[0] == chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert accelerator.has_bf16("cuda")


def test_ranks_talk_by_gloo_where_torch_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, backend in {True: "nccl", False: "gloo"}.items():
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda has=has: has)
        assert accelerator.collectives("cuda") == backend
        assert [accelerator.collectives(kind) for kind in ("cpu", "xpu", "mps")] == ["gloo", "xccl", None]


def test_what_another_stream_made_is_told_to_the_allocator(
    card: Callable[[str], list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made:
        def __init__(self, device: str) -> None:
            self.device, self.streams = torch.device(device), []

        def record_stream(self, stream: object) -> None:
            self.streams.append(stream)

    there, here = Made("cuda:1"), Made("cpu")
    accelerator.used_here(there, here)  # type: ignore[arg-type]
    assert (there.streams, here.streams) == ([], [])  # there is no card
    card("cuda")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    accelerator.used_here(there, here)  # type: ignore[arg-type]
    assert (there.streams, here.streams) == (["stream of cuda:1"], [])


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_card_with_memory_of_its_own(kind: str, card: Callable[[str], list[tuple[Any, ...]]]) -> None:
    calls = card(kind)
    assert [(device.kind, device.name, device.memory_bytes) for device in machine().devices] == [
        (kind, "Card 0", 8),
        (kind, "Card 1", 8),
    ]
    assert "get_memory_info" not in {name for name, *_ in calls}  # it would start both cards
    place = f"{kind}:1"
    assert accelerator.allocated_bytes(place) == 7
    assert accelerator.peak_allocated_bytes(place) == 9
    assert (accelerator.free_bytes(place), accelerator.total_bytes(place)) == (3, 8)
    calls.clear()
    accelerator.synchronize(place)
    accelerator.reset_peak(place)
    accelerator.empty_cache()
    accelerator.use(1)
    accelerator.synchronize("cpu")
    assert calls == [
        ("synchronize", place),
        ("reset_peak_memory_stats", place),
        ("empty_cache",),
        ("set_device_index", "1"),
    ]


def test_apples_memory_is_asked_by_its_own_calls(card: Callable[[str], list[tuple[Any, ...]]]) -> None:
    """torch.accelerator fails on them before torch 2.14."""
    calls = card("mps")
    [found] = machine().devices
    assert (found.kind, found.torch_name, found.memory_bytes) == ("mps", "mps", 8)
    assert accelerator.allocated_bytes("mps") == 5
    assert accelerator.free_bytes("mps") == 2
    accelerator.empty_cache()
    assert {name for name, *_ in calls} == {
        *("mps.recommended_max_memory", "mps.current_allocated_memory", "mps.driver_allocated_memory"),
        "mps.empty_cache",
    }
    assert models.model.choose_precision("auto", torch.device("mps"))[0] == "float32"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("INTERNAL ASSERT FAILED. Allocator for other is not a DeviceAllocator."),
        NotImplementedError("getMemoryInfo is not implemented for this allocator yet."),
    ],
)
def test_a_backend_from_outside_may_not_tell_its_memory(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch answers for one that is registered from Python; its own module may know better."""

    def not_told(device: object) -> tuple[int, int]:
        raise error

    monkeypatch.setattr(torch.accelerator, "get_memory_info", not_told)
    place = torch.device("privateuseone", 0)
    assert (accelerator.free_bytes(place), accelerator.total_bytes(place)) == (None, None)
    told = SimpleNamespace(mem_get_info=lambda device: (3, 8))
    monkeypatch.setattr(torch, "privateuseone", told, raising=False)
    assert (accelerator.free_bytes(place), accelerator.total_bytes(place)) == (3, 8)


def test_an_error_of_a_card_is_no_silence(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card("cuda")

    def lost(device: object) -> tuple[int, int]:
        raise RuntimeError("error: unspecified launch failure")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", lost)
    for place in ("cuda:0", "privateuseone:0"):
        with pytest.raises(RuntimeError, match="launch failure"):
            accelerator.free_bytes(place)


def test_without_one_nothing_is_asked() -> None:
    if accelerator.current() is not None:
        pytest.skip("this machine has an accelerator")
    assert accelerator.count() == 0
    accelerator.empty_cache()
    accelerator.use(3)
    assert not accelerator.capturing()
    assert accelerator.new_stream(torch.device("cpu")) is None
    with accelerator.on_stream(None):
        pass
    assert str(models.device("auto")) == "cpu"


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.zeros(3)
    assert accelerator.to_device(values, "cpu") is values
    assert accelerator.to_device(values, "meta").device.type == "meta"
    made = accelerator.new_tensor([1, 2], "cpu", torch.float32)
    assert (made.tolist(), made.dtype) == ([1.0, 2.0], torch.float32)
    assert accelerator.new_tensor([1, 2], "cpu").dtype == torch.int64


def test_amds_numbers_are_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RX 7900 calls itself (11, 0), an MI300X (9, 4): more than an H100's (9, 0)."""
    place = ComputeTarget(torch.device("cuda"), torch.float32)
    lacking = [OPTIMISATIONS[name].lacks for name in ("tf32", "fp8")]
    for number, works in {(9, 0): True, (7, 5): False}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=number: found)
        assert [lacks(place) is None for lacks in lacking] == [works, works]
    monkeypatch.setattr(torch.version, "hip", "7.1")
    for number in ((11, 0), (9, 4)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=number: found)
        assert all(lacks(place) for lacks in lacking)
        assert accelerator.capability("cuda") == (0, 0)


def test_float32_is_float32_on_a_card_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch rounds convolutions' factors unasked; a drawing would differ from a CPU's, and from a run's."""

    def rounded() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = rounded()
    try:
        torch.backends.cudnn.allow_tf32 = True  # PyTorch's own default
        models.device("cpu")
        assert rounded() == (False, True)
        with fake_cuda():
            models.device("cuda")
        assert rounded() == (False, False)
        applied = optimise(models.create("tiny"), "none", dtype=torch.float32)
        seen = []
        precision.tf32(applied, "")
        call = applied.inner[0](lambda *_: (seen.append(rounded()), torch.zeros(1))[1])
        call(*[torch.zeros(1)] * 3, {})
        assert (seen, rounded()) == ([(True, True)], (False, False))
        set_kernels(TrainSettings(steps=1, global_batch=1, tf32=True), torch.device("cuda"))
        assert rounded() == (True, True)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_of_threads_on_apples_gpu_one_is_at_work() -> None:
    turns, busy, most = accelerator.alone("mps"), [0], [0]

    def work() -> None:
        for _ in range(50):
            with turns, turns:
                busy[0] += 1
                most[0] = max(most[0], busy[0])
                time.sleep(0)
                busy[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (busy[0], most[0]) == (0, 1)
    for elsewhere in ("cpu", "cuda", "meta"):
        with accelerator.alone(elsewhere):
            other = threading.Thread(target=accelerator.alone(elsewhere).__enter__)
            other.start()
            other.join(20)
            assert not other.is_alive()


def test_a_thread_that_waits_for_apples_gpu_gets_it_from_one_that_never_rests() -> None:
    turns, over = accelerator.alone("mps"), threading.Event()

    def restless() -> None:
        while not over.is_set():
            with turns:
                sum(range(1000))

    thread = threading.Thread(target=restless, daemon=True)
    thread.start()
    for _ in range(20):
        with turns:
            pass
    over.set()
    thread.join(20)
    assert not thread.is_alive()
