"""This machine: what control groups allow, what a run remembers, and that it keeps no secrets."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
from importlib import metadata

import psutil
import pytest
import torch

from darkroom.hardware import machine
from darkroom.hardware.machine import (
    Machine,
    cgroup_memory_limit,
    environment,
    git_commit,
    may_find_accelerator,
    torch_build,
    usable_cores,
)


def test_the_machine_is_what_the_system_says():
    here = machine()
    assert here.logical_cores == psutil.cpu_count()
    assert 0 < here.usable_cores <= here.logical_cores
    assert 0 < here.memory_available_bytes <= here.memory_bytes <= psutil.virtual_memory().total
    assert here.python == platform.python_version()
    assert here.torch == torch.__version__
    assert len(here.devices) == torch.cuda.device_count() or torch.backends.mps.is_available()
    assert here.cpu in here.name
    assert json.loads(json.dumps(here.to_dict()))["cpu_class"] == here.cpu_class


@pytest.mark.parametrize(
    ("instructions", "row"),
    [
        (("avx2",), "CPU AVX2"),
        (("avx2", "avx512f"), "CPU AVX-512"),
        (("avx2", "avx512f", "avx512_bf16"), "CPU AVX-512 BF16"),
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16"), "CPU AMX"),
        (("asimd", "sve"), "CPU SVE"),
    ],
)
def test_instructions_tell_the_class(instructions, row):
    here = Machine("x", 1, 1, 1.0, 1, 1, instructions, (), 1, "Linux", "3.11", "2.13")
    assert here.cpu_class == row


def test_what_torch_was_built_for_is_read_from_its_files():
    build = torch_build()
    for name in ("cuda", "hip", "xpu"):
        assert build[name] == getattr(torch.version, name), name
    assert build["__version__"] == torch.__version__
    assert may_find_accelerator(build) or torch.accelerator.current_accelerator(check_available=True) is None


@pytest.mark.skipif(platform.system() == "Darwin", reason="macOS is always asked through torch")
def test_an_accelerator_is_looked_for_where_torch_may_have_one(monkeypatch):
    none = {"cuda": None, "hip": None, "xpu": None}
    there = "libc.so.6" if platform.system() == "Linux" else "kernel32.dll"
    assert not may_find_accelerator(none, there)
    assert not may_find_accelerator({**none, "cuda": "13.0"}, "no-such-driver.so.1")
    assert may_find_accelerator({**none, "cuda": "13.0"}, there)
    assert may_find_accelerator({**none, "hip": "7.0"})
    assert may_find_accelerator({**none, "xpu": "2026.0"})
    monkeypatch.setattr(metadata, "entry_points", lambda group: [group])  # as a maker's package has one
    assert may_find_accelerator(none)


def make_group(root, kind, group, files):
    folder = root / kind / group
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_smallest_limit_of_nested_groups_counts_v2(tmp_path):
    make_group(tmp_path, "", "kube/pod/box", {"memory.max": "max\n", "cpu.max": "max 100000\n"})
    (tmp_path / "kube/pod/memory.max").write_text("4294967296\n")
    (tmp_path / "kube/memory.max").write_text("8589934592\n")
    (tmp_path / "kube/cpu.max").write_text("50000 100000\n")
    member = tmp_path / "member"
    member.write_text("0::/kube/pod/box\n")
    assert cgroup_memory_limit(tmp_path, member) == 4 * 2**30
    assert usable_cores(tmp_path, member) == 0.5


def test_limits_of_v1_are_read_and_unlimited_is_none(tmp_path):
    make_group(tmp_path, "memory", "docker/abc", {"memory.limit_in_bytes": "2147483648\n"})
    quota = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
    make_group(tmp_path, "cpu", "docker/abc", quota)
    member = tmp_path / "member"
    member.write_text("9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n")
    assert cgroup_memory_limit(tmp_path, member) == 2 * 2**30
    assert usable_cores(tmp_path, member) == min(1.5, usable_cores(tmp_path, tmp_path / "nowhere"))
    (tmp_path / "memory/docker/abc/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_memory_limit(tmp_path, member) is None
    assert cgroup_memory_limit(tmp_path, tmp_path / "nowhere") is None


def test_the_environment_keeps_versions_and_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_a_secret_value")
    found = environment()
    text = json.dumps(found)
    assert found["versions"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["machine"]["memory_bytes"] > 0
    assert "hf_a_secret_value" not in text
    assert "HF_TOKEN" not in text
    assert len(socket.gethostname()) < 3 or f'"{socket.gethostname()}"' not in text


def test_the_commit_of_a_folder_and_whether_it_changed(tmp_path):
    assert git_commit(tmp_path) is None

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert git_commit(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "file").write_text("two")
    found = git_commit(tmp_path)
    assert found is not None
    assert found["changed"]
