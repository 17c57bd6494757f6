"""Parts laid into a file give the same numbers, and hold memory only while they run."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from darkroom.models.model import cast_opened
from darkroom.train import memory
from darkroom.train.memory import offload_mmap


def part() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 256).bfloat16())
    return made.requires_grad_(False).eval()


def run(module: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return module(x) if len(module) == 1 else module[2](module[:2](x).bfloat16())


def resident() -> int:
    """Bytes of mapped files without a name that are in memory."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"/#\d+ \(deleted\)\nSize:.*?\nRss:\s+(\d+) kB", text, re.S)
    return 1024 * sum(map(int, found))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1024)


def test_the_same_numbers_from_a_file_without_a_name(tmp_path: Path) -> None:
    module, x = part(), torch.randn(4, 256)
    before, weights = run(module, x), copy.deepcopy(module.state_dict())
    assert offload_mmap([module], tmp_path) > 4 * 256 * 512
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(run(module, x), before)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        module[0].weight[3] += 1  # a weight can still be changed
    assert not torch.equal(run(module, x), before)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps on this system")
def test_memory_is_held_only_while_a_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(256, 4096)).requires_grad_(False)
    start = resident()  # of other tests
    offload_mmap([module], tmp_path)
    assert resident() == start
    module(torch.randn(2, 256))
    assert resident() == start
    monkeypatch.setattr(memory, "_release", lambda _: None)
    module(torch.randn(2, 256))  # what it holds where it is not let go
    assert resident() >= start + 4 * 256 * 4096


def test_what_trains_and_what_is_little_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = part()
    module[0].requires_grad_(True)
    place = module[0].weight.data_ptr()
    offload_mmap([module], tmp_path)
    assert module[0].weight.data_ptr() == place
    assert module[0].weight.requires_grad
    monkeypatch.setattr(memory, "LEAST_BYTES", 1024**3)
    assert offload_mmap([part()], tmp_path) == 0


def test_a_folder_that_cannot_be_written_leaves_them_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    module, x = part(), torch.randn(4, 256)
    before = run(module, x)
    assert offload_mmap([module], file / "run") == 0
    assert torch.equal(run(module, x), before)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps on this system")
def test_casting_opened_weights_lets_go_of_their_file_on_the_way(tmp_path: Path) -> None:
    def held(name: str) -> int:
        found = re.findall(rf"{name}\nSize:.*?\nRss:\s+(\d+) kB", Path("/proc/self/smaps").read_text(), re.S)
        return 1024 * sum(map(int, found))

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512))
    save_file(made.state_dict(), tmp_path / "weights.safetensors")

    def opened() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512))
        module.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
        return module

    plain = copy.deepcopy(made).bfloat16().state_dict()
    ours, kept = opened(), opened()  # the second keeps its own mapping of the file
    masters = [param.data for param in kept.parameters()]
    cast_opened(kept, torch.bfloat16)
    assert held("weights.safetensors") < 1_000_000  # of the 8 MB that casting read
    assert all(torch.equal(a, b) for a, b in zip(masters, made.parameters(), strict=True))  # read anew
    assert held("weights.safetensors") > 8_000_000
    cast_opened(made, torch.bfloat16)  # of no file: the same numbers
    cast_opened(ours, torch.bfloat16)
    for module in (ours, kept, made):
        assert all(torch.equal(value, plain[name]) for name, value in module.state_dict().items())
