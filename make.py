"""Set darkroom up, run it and check it, the same on Linux, macOS and Windows: `python make.py help`.

Needs Python 3.11 to 3.14 and nothing else; the Makefile only calls it. Packages go into the virtual
environment .venv, in the versions and with the SHA-256 hashes of requirements.lock, by uv (by pip where uv
cannot be had). The build of torch is chosen by what the machine has. From the top: what each command runs,
torch, the lock, installing, commands.
"""

from __future__ import annotations

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 14):  # before what only these can import
    version = sys.version.split()[0]
    print(
        f"this is Python {version}; allowed: 3.11 to 3.14, as in: make PYTHON=python3.12 ...", file=sys.stderr
    )
    sys.exit(2)

import ast
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent
WINDOWS = os.name == "nt"
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if WINDOWS else "bin/python")
READY = VENV / ".ready"
LOCK = ROOT / "requirements.lock"
UV = "uv==0.13.9"
CYCLONEDX = "cyclonedx-bom>=7.2,<8"

# What each command runs -----------------------------------------------------------------------------------

LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."))
TYPES = (("mypy",),)
# What only other systems have: `test` alone, because each takes half a minute where nothing is cached.
TYPES_ELSEWHERE = tuple(
    ("mypy", "--platform", name, "--cache-dir", f".mypy_cache/{name}")
    for name in ("linux", "darwin", "win32")
    if name != sys.platform
)
CPUINFO = Path("/proc/cpuinfo")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
# Three on two cores, for now one and now another waits for a server, a kill or a cluster.
# A worker that dies names its test and ends the run: with one in its place the run was seen to wait for ever.
WORKERS = ("-n", "3", "--max-worker-restart", "0")
IN_ORDER = ("--dist", "loadgroup", "--no-loadscope-reorder")  # the order is that of tests/nightly.py
# The GPU script's rehearsal, which compiles, may take two hours; elsewhere a test of half an hour hangs.
LONG = ("-o", "faulthandler_timeout=9000")
Line = tuple[tuple[str, ...], dict[str, str]]  # arguments of pytest, and what it gets in the environment
PYTEST: dict[str, list[Line]] = {
    "test": [((*WORKERS, "--dist", "loadgroup", "-m", "not nightly", "--durations", "10"), {})],
    "check": [((*WORKERS, "--dist", "loadgroup", "-m", "not nightly"), {})],
    "nightly": [
        ((*WORKERS, *IN_ORDER, *LONG, "-m", "nightly", "--durations", "20"), {}),
        ((*WORKERS, "tests/sample", "tests/measure", "tests/serve", "-m", "not nightly"), AVX2),
    ],
}
TEST_EXTRAS = ("all", "dev", "docs")  # of pyproject.toml; the quickstart needs none
LEFT_BY_RUNS = (".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build", "dist")

HELP = """python make.py COMMAND, or make COMMAND:
  quickstart   pictures -> model -> pictures -> report, in minutes on a CPU
  setup        the virtual environment .venv with what the quickstart needs; `setup serve onnx` adds extras
  test         lint, types for Linux, macOS and Windows, and the tests
  check        lint, types and the quick tests of what changed against main
  docs         the documentation's site, in build/site
  nightly      the long proofs, then pictures and serving once more with AVX2 instructions only
  lint         lint and types
  format       mend the formatting
  lock         resolve requirements.lock again; `lock --upgrade` takes newer versions
  locked       print what the lock has for extras, for pip --require-hashes: `locked serve onnx`
  chaos        kill, fill up and lock out whatever writes; resumable, see benchmarks/chaos.py
  sbom         what is installed, with licences and hashes, as CycloneDX in build/sbom.json
  clean        remove .venv and caches
What follows `quickstart`, `test` or `docs` goes to darkroom, pytest or mkdocs.
--dry-run prints the commands alone.
TORCH=cpu|cuda|rocm7.2|xpu|...   the build of torch; unset: by what the machine has
INSTALLER=pip                    without uv"""


class Refused(Exception):
    """What the user can mend, in one line; exit code 2."""


class Failed(Exception):
    """A command that did not succeed; its exit code goes on."""


def say(line: str) -> None:
    print(f"[darkroom] {line}", flush=True)


def shown(command: tuple[str, ...]) -> str:
    """As it could be typed from the project's root."""
    words = [word.replace(str(ROOT) + os.sep, "") for word in command]
    return subprocess.list2cmdline(words) if WINDOWS else shlex.join(words)


# torch ----------------------------------------------------------------------------------------------------

TORCH_BUILDS = re.compile(r"cpu|cuda|cu\d{3}|rocm\d+(\.\d+)*|xpu")
CUDA = "cu130"  # the CUDA of the build that PyPI has for Linux
PYTORCH = "https://download.pytorch.org/whl/"


def torch_build(
    environ: dict[str, str], platform: str = sys.platform, root: Path = Path("/")
) -> tuple[str, str]:
    """The build of torch for this machine (cpu, cuda, rocm, or a name that uv knows), and why."""
    asked = environ.get("TORCH", "").strip().lower()
    if asked:
        if not TORCH_BUILDS.fullmatch(asked):
            raise Refused(f"TORCH={asked}; allowed: cpu, cuda, or a build's name such as cu126, rocm7.2, xpu")
        return asked, f"TORCH={asked}"
    if platform == "darwin":
        return "cpu", "the one build for macOS; it has MPS for Apple's GPUs"
    driver = nvidia_driver(environ, root)
    if driver:
        return "cuda", f"an NVIDIA driver: {driver}; TORCH=cpu for the smaller build"
    if platform == "linux" and shutil.which("rocm_agent_enumerator", path=environ.get("PATH")):
        return "rocm", "AMD's ROCm: rocm_agent_enumerator; TORCH=cpu for the smaller build"
    if platform == "linux" and (runtime := intel_runtime(root)):
        return "xpu", f"Intel's GPU and its runtime: {runtime}; TORCH=cpu for the smaller build"
    return "cpu", "no NVIDIA driver and no ROCm here; TORCH=cuda, rocm7.2 or xpu for a build with a GPU"


def nvidia_driver(environ: dict[str, str], root: Path = Path("/")) -> str:
    """How the driver shows itself; empty without one."""
    version = root / "proc/driver/nvidia/version"
    if version.exists():
        return str(version)
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ""
    try:  # in an image without a driver the program may be there alone
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"nvidia-smi, {answer.stdout.splitlines()[0].split(' (')[0]}" if "GPU 0" in answer.stdout else ""


def intel_runtime(root: Path = Path("/")) -> str:
    """The library by which torch reaches Intel's GPUs, where there is one of them.

    Nearly every laptop has such a GPU: who means to compute on it has installed the library.
    """
    vendors = (root / "sys/class/drm").glob("renderD*/device/vendor")
    if not any(file.read_text(encoding="ascii").strip() == "0x8086" for file in vendors):
        return ""
    places = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")
    found = [file for place in places for file in sorted((root / place).glob("libze_intel_gpu.so*"))]
    return str(found[0]) if found else ""


def is_of_build(version: str, build: str, platform: str = sys.platform) -> bool:
    """Whether a version of torch, such as 2.13.0+cpu, is of a build. On Linux PyPI's own has CUDA."""
    label = version.partition("+")[2]
    if build == "cuda":
        return label.startswith("cu") or (not label and platform == "linux")
    if build == "rocm":
        return label.startswith("rocm")
    if build == "cpu":
        return label == "cpu" or (not label and platform != "linux")
    return label == build


def backend_of(build: str, has_driver: bool) -> str:
    """What uv's --torch-backend is told: `auto` finds the CUDA or ROCm that fits the driver."""
    if build == "rocm" or (build == "cuda" and has_driver):
        return "auto"
    return CUDA if build == "cuda" else build


# The lock -------------------------------------------------------------------------------------------------


class Pin(NamedTuple):
    """A package of the lock: a version, where it applies, hashes, and the extras that need it."""

    name: str
    requirement: str
    hashes: tuple[str, ...]
    extras: frozenset[str]

    @property
    def text(self) -> str:
        """As the lock has it, for pip and uv."""
        return " \\\n    ".join((self.requirement, *self.hashes))

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2].partition(";")[0].strip()

    @property
    def sha256(self) -> tuple[str, ...]:
        """The hashes as hexadecimal digits."""
        return tuple(one.removeprefix("--hash=sha256:") for one in self.hashes)


BASE, TOOL = "base", "make"  # in the place of an extra: what every command needs, and what installs it
PIN = re.compile(r"^((\S+?)==[^\\\n]+?)((?: \\\n    --hash=\S+)*)\n    # for (.+)$", re.MULTILINE)


def read_pins(text: str) -> list[Pin]:
    return [
        Pin(name, requirement, tuple(re.findall(r"--hash=\S+", hashes)), frozenset(extras.split(", ")))
        for requirement, name, hashes, extras in PIN.findall(text)
    ]


def locked_pins(extras: tuple[str, ...] | list[str]) -> list[Pin]:
    """What the lock has for the base and some extras, and for building darkroom itself."""
    known = optional_dependencies()
    if unknown := sorted(set(extras) - set(known)):
        raise Refused(f"no extra {', '.join(unknown)}; allowed: {', '.join(known)}")
    wanted = {BASE, *extras}
    if "all" in extras:  # which names others: darkroom-sd[serve,...]
        wanted |= set(known["all"][0].partition("[")[2].rstrip("]").split(","))
    return [pin for pin in read_pins(LOCK.read_text(encoding="utf-8")) if pin.extras & wanted]


def locked_text(pins: list[Pin]) -> str:
    """The pins that have hashes, for --require-hashes; torch's build is chosen apart."""
    return "".join(f"{pin.text}\n" for pin in pins if pin.hashes)


def optional_dependencies() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["optional-dependencies"])


# Installing -----------------------------------------------------------------------------------------------


def pip_settings(listed: str) -> dict[str, str]:
    """`pip config list` as one table; the environment's variables win, as they do for pip."""
    found = [re.fullmatch(r"(\S+?)\.([\w-]+)=(.*)", line.strip()) for line in listed.splitlines()]
    rows = [(match[1], match[2], str(ast.literal_eval(match[3]))) for match in found if match]
    order = {"global": 0, "install": 1, ":env:": 2}
    rows = sorted((row for row in rows if row[0] in order), key=lambda row: order[row[0]])
    return {name: value for _, name, value in rows if value}


@functools.cache
def listed_by_pip(python: str) -> str:
    command = [python, "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def uv_options(settings: dict[str, str]) -> list[str]:
    """Where pip is configured to find packages, as options of uv, which reads none of pip's files."""
    options = ["--default-index", settings["index-url"]] if "index-url" in settings else []
    for name, option in (
        ("extra-index-url", "--index"),
        ("find-links", "--find-links"),
        ("constraint", "--constraint"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        for value in settings.get(name, "").split():
            options += [option, value]
    if "extra-index-url" in settings:
        options += ["--index-strategy", "unsafe-best-match"]  # as pip: the best of all indexes
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options += ["--no-index"]
    return options


class Machine:
    """Runs commands, or with `dry` only prints them."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.environ = {"GOMP_SPINCOUNT": "10000", **os.environ}
        # OpenMP threads that spin without end starve each other on a busy small machine.

    def run(self, *command: str, add: dict[str, str] | None = None) -> None:
        variables = "".join(f"{name}={value} " for name, value in (add or {}).items())
        print(f"$ {variables}{shown(command)}", flush=True)
        if not self.dry:
            code = subprocess.call(command, cwd=ROOT, env={**self.environ, **(add or {})})
            if code:
                raise Failed(code)

    def run_at_once(self, *commands: tuple[str, ...]) -> None:
        """All at the same time; what each prints comes in their order. The first that failed is raised."""
        for command in commands:
            print(f"$ {shown(command)}", flush=True)
        if self.dry:
            return
        how: dict[str, Any] = {
            "cwd": ROOT,
            "env": self.environ,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        started = [subprocess.Popen(command, text=True, **how) for command in commands]
        for command, process in zip(commands, started, strict=True):
            print(f"{shown(command)}: {process.communicate()[0]}", end="", flush=True)
        codes = [process.returncode for process in started if process.returncode]
        if codes:
            raise Failed(codes[0])

    def keep_bytecode(self) -> None:
        """In .venv, where the user wants none beside the sources: each new process would compile it anew."""
        if self.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
            self.environ.setdefault("PYTHONPYCACHEPREFIX", str(VENV / "bytecode"))

    def works(self, *command: str) -> bool:
        try:
            self.run(*command)
        except Failed:
            return False
        return True

    def output(self, *command: str, errors: bool = False) -> str:
        """What a command that changes nothing prints; empty where it fails."""
        stderr = subprocess.STDOUT if errors else subprocess.DEVNULL
        try:
            return subprocess.check_output(command, cwd=ROOT, env=self.environ, stderr=stderr, text=True)
        except (OSError, subprocess.CalledProcessError):
            return ""


class Installer:
    """uv, told where pip would look; or pip."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.settings = pip_settings(listed_by_pip(str(PYTHON if PYTHON.exists() else sys.executable)))
        self.is_uv = machine.environ.get("INSTALLER", "uv") != "pip" and self._get_uv()
        if "cert" in self.settings:
            machine.environ.setdefault("SSL_CERT_FILE", self.settings["cert"])
        if "proxy" in self.settings:
            machine.environ.setdefault("ALL_PROXY", self.settings["proxy"])

    def _get_uv(self) -> bool:
        if f"uv {UV.partition('==')[2]}" in self.machine.output(str(PYTHON), "-m", "uv", "--version"):
            return True
        pins = [pin for pin in read_pins(LOCK.read_text(encoding="utf-8")) if TOOL in pin.extras]
        hashed = self._file("uv", locked_text(pins))
        if self.machine.works(*self._pip(), "--quiet", "--require-hashes", "--no-deps", "-r", hashed):
            return True
        say("uv could not be had: pip goes on alone, which takes longer")
        return False

    @staticmethod
    def _pip() -> tuple[str, ...]:
        return str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"

    def _file(self, name: str, text: str) -> str:
        """A file of requirements in .venv."""
        path = VENV / f"locked-{name}.txt"
        if not self.machine.dry:
            path.write_text(text, encoding="utf-8")
        return str(path)

    def command(self, *words: str) -> tuple[str, ...]:
        if not self.is_uv:
            return (*self._pip(), *words)
        uv = (str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON))
        settings = dict(self.settings)
        if "--require-hashes" in words:  # with which uv takes no constraint but a pinned one
            settings.pop("constraint", None)
        return (*uv, *uv_options(settings), *words)

    def packages(self, extras: list[str]) -> None:
        """All but torch, each file by its hash; nothing is resolved anew."""
        hashed = self._file("packages", locked_text(locked_pins(extras)))
        self.machine.run(*self.command("--require-hashes", "--no-deps", "-r", hashed))

    def torch(self, build: str) -> None:
        """The locked version of torch in that build, unless it is there."""
        pins = read_pins(LOCK.read_text(encoding="utf-8"))
        versions = self._file("versions", "".join(f"{pin.requirement}\n" for pin in pins))
        wanted = ("--constraint", versions, "torch==" + locked("torch"))
        there = installed("torch")
        if there.partition("+")[0] == locked("torch") and is_of_build(there, build):
            return
        if not self._found_by_pip(wanted, build):
            if self.machine.works(*self.command(*self._from_pytorch(build), *wanted)):
                return
            if build not in ("cpu", "cuda"):
                raise Refused(
                    f"no {build} build of {wanted[-1]} could be had; TORCH=cpu installs the one for CPUs"
                )
            say(f"no {build} build could be had from PyTorch's index: taking the one that pip would take")
        self.machine.run(*self.command(*wanted))

    def _found_by_pip(self, wanted: tuple[str, ...], build: str) -> bool:
        """Whether the places that pip looks in by itself have that build."""
        if sys.platform == "darwin" or (sys.platform == "win32" and build == "cpu"):
            return True  # PyPI's
        places = {"index-url", "extra-index-url", "find-links", "no-index"} & set(self.settings)
        if not self.is_uv:
            return bool(places) or build == "cuda"
        found = None
        if places:
            ask = self.command("--dry-run", "--no-deps", *wanted)
            found = re.search(r"\+ torch==(\S+)", self.machine.output(*ask, errors=True))
        return found is not None and is_of_build(found[1], build)

    def _from_pytorch(self, build: str) -> tuple[str, ...]:
        backend = backend_of(build, bool(nvidia_driver(self.machine.environ)))
        if self.is_uv:
            return "--torch-backend", backend
        return "--extra-index-url", PYTORCH + (CUDA if backend == "auto" else backend)

    def darkroom(self) -> None:
        """The checkout itself; then no package may lack one that it names."""
        self.machine.run(*self.command("--no-deps", "--no-build-isolation", "--editable", "."))
        uv = ("uv", "pip", "check", "--quiet", "--python", str(PYTHON))
        self.machine.run(str(PYTHON), "-m", *(uv if self.is_uv else ("pip", "check", "--quiet")))


def locked(package: str) -> str:
    found = re.search(rf"^{package}==([^\s;]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise Refused(f"{LOCK.name} pins no {package}")
    return found[1]


def site_packages() -> Path:
    found = sorted(VENV.glob("Lib/site-packages" if WINDOWS else "lib/python*/site-packages"))
    return found[0] if found else VENV


def installed(package: str) -> str:
    """The version in .venv; empty where there is none."""
    found = sorted(site_packages().glob(f"{package}-*.dist-info"))
    return found[-1].name[len(package) + 1 : -len(".dist-info")] if found else ""


# Commands -------------------------------------------------------------------------------------------------


def setup(machine: Machine, extras: tuple[str, ...] = ()) -> None:
    """.venv with darkroom's packages and those of the extras; nothing to do where they are there."""
    built_for = sysconfig.get_platform().partition("-")[2] if WINDOWS else platform.machine()
    refuse_system(sys.platform, built_for)
    state = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    ready = read_ready()
    build, why = torch_build(machine.environ)
    asked = machine.environ.get("TORCH", "") and build
    if not asked and ready.get("asked"):
        build, why, asked = ready["asked"], "as asked for before", ready["asked"]
    if (ready.get("state"), ready.get("torch")) == (state, build) and set(extras) <= set(ready["extras"]):
        return
    locked_pins(extras)  # which refuses an extra that there is not
    start = time.monotonic()
    wanted = sorted({*extras, *ready.get("extras", [])})
    say(f"setting up .venv: Python {sys.version.split()[0]}, extras: {', '.join(wanted) or 'none'}")
    other_build = ready.get("torch", build) != build  # whose libraries would stay behind
    if other_build or not machine.output(str(PYTHON), "-m", "pip", "--version"):
        keep_own_venv()
        machine.run(sys.executable, "-m", "venv", "--clear", str(VENV))
    installer = Installer(machine)
    say(f"torch {locked('torch')}, build: {build} ({why})")
    try:
        installer.packages(wanted)
        installer.torch(build)
        installer.darkroom()
    except Failed:
        if installer.is_uv:
            say("the set-up stopped; with INSTALLER=pip in the environment it is done by pip alone")
        raise
    if not machine.dry:
        left = {"state": state, "torch": build, "asked": asked, "extras": wanted}
        READY.write_text(json.dumps(left), encoding="utf-8")
        packages, size = in_venv()
        say(
            f"ready in {time.monotonic() - start:.0f} s: {packages} packages, {size / 1e9:.1f} GB in .venv, "
            f"torch {installed('torch')}"
        )


def refuse_system(platform: str, processor: str) -> None:
    """Say at once where there are no wheels, before a resolver says it in a hundred lines."""
    if platform == "darwin" and processor == "x86_64":
        raise Refused(
            "this Python is for Intel's Macs, for which there is no torch; "
            "on Apple silicon install Python for arm64"
        )
    if platform == "win32" and processor != "amd64":
        raise Refused(
            f"this Python is for {processor or '32 bits'}, for which not every package is there; "
            "install Python for x86-64, which Windows on ARM runs too"
        )


def keep_own_venv() -> None:
    """Windows cannot delete a program that runs: half of .venv would be gone."""
    if WINDOWS and VENV.exists() and Path(sys.prefix).resolve() == VENV.resolve():
        raise Refused("this Python is .venv's own, which has to go: type `deactivate`, then the same again")


def read_ready() -> dict[str, Any]:
    """What the last set-up that ended left; empty where none did."""
    try:
        return dict(json.loads(READY.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def in_venv() -> tuple[int, int]:
    """Packages, and bytes of all files."""
    sizes = [os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(VENV) for name in names]
    return len(list(site_packages().glob("*.dist-info"))), sum(sizes)


def lint(machine: Machine, types: tuple[tuple[str, ...], ...] = TYPES) -> None:
    setup(machine, TEST_EXTRAS)
    for words in LINT:
        machine.run(str(PYTHON), "-m", *words)
    machine.run_at_once(*((str(PYTHON), "-m", *words) for words in types))


def tests(machine: Machine, command: str, more: tuple[str, ...]) -> None:
    """All of a command's parts, those after one that fails too; the first failure is raised at the end."""
    start, failed = time.monotonic(), None
    machine.keep_bytecode()
    try:
        for words, add in PYTEST[command]:
            if add == AVX2 and not has_more_than_avx2():
                say("this processor has nothing beyond AVX2: the tests of make test are not repeated")
                continue
            try:
                machine.run(str(PYTHON), "-m", "pytest", *words, *more, add=add)
            except Failed as error:
                failed = failed or error
    finally:
        say(f"{command}: {(time.monotonic() - start) / 60:.1f} minutes")
    if failed is not None:
        raise failed


def has_more_than_avx2() -> bool:
    """Whether `AVX2` takes instructions away; also where the system does not tell."""
    try:
        flags = CPUINFO.read_text(encoding="utf-8").split()
    except OSError:
        return True
    return not {"avx512f", "avx_vnni"}.isdisjoint(flags)


def check(machine: Machine) -> None:
    lint(machine)
    changed = changed_files(machine)
    if changed is None:
        say("no git here: the quick tests of everything")
        return tests(machine, "check", ())
    chosen = tests_of(changed, ROOT)
    if not chosen:
        return say("no tests: nothing changed against main that has some")
    return tests(machine, "check", tuple(chosen))


def changed_files(machine: Machine) -> list[str] | None:
    """Paths that differ from main, committed or not; None outside git."""
    if not machine.output("git", "rev-parse", "HEAD"):
        return None
    bases = [machine.output("git", "merge-base", "HEAD", name).strip() for name in ("origin/main", "main")]
    base = next((base for base in bases if base), "HEAD")
    new = machine.output("git", "ls-files", "--others", "--exclude-standard")
    return sorted({*machine.output("git", "diff", "--name-only", base).splitlines(), *new.splitlines()})


def tests_of(changed: list[str], root: Path) -> list[str]:
    """The tests of what changed: src/darkroom/X -> tests/X, src/darkroom/x.py -> tests/test_x.py."""
    chosen = set()
    for path in changed:
        parts = Path(path).parts
        if parts[:2] == ("src", "darkroom") and len(parts) > 2:
            name = parts[2]
            chosen |= {
                f"tests/test_{name}" if name.endswith(".py") else f"tests/{name}",
                "tests/test_import_rules.py",
            }
        elif parts[0] == "tests":
            is_test = parts[-1].startswith("test_") and parts[-1].endswith(".py")
            chosen.add(path if is_test or len(parts) == 2 else f"tests/{parts[1]}")
        elif path in ("make.py", "Makefile", "pyproject.toml", LOCK.name):
            chosen.add("tests/test_make.py")
        elif parts[0] in ("recipes", "deploy"):
            chosen.add({"recipes": "tests/recipe", "deploy": "tests/deploy"}[parts[0]])
    there = {
        path
        for path in chosen
        if (root / path).exists() and not path.endswith(("conftest.py", "needs.py", "home.py", "warm.py"))
    }
    return sorted(path for path in there if not {str(up) for up in Path(path).parents} & there)


LOCK_HEAD = """\
# The versions that are tested together, with the SHA-256 of each of their files, on Python 3.11 to 3.14,
# Linux (x86-64, ARM), macOS 14 (ARM) and Windows. `python make.py lock` writes it, `python make.py setup`
# installs it with hashes checked, `python make.py locked serve` prints what an extra needs for
# pip --require-hashes. `# for` names the extras that need a package. torch alone has no hashes: its build
# (CPU, CUDA, ROCm, XPU) is chosen by the machine. CUDA's libraries are left out: each build names its own.
"""
CUDA_LIBRARIES = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton\b)")
RESOLVED = re.compile(r"^((\S+?)==[^\\\n]+?)((?: \\\n    --hash=\S+)*)$", re.MULTILINE)  # as uv writes it


def lock(machine: Machine, more: tuple[str, ...]) -> None:
    """Resolve everything at once, then each extra within that, to know what needs which package."""
    setup(machine)
    work = ROOT / "build" / "lock"
    build, tool = str(work / "build.in"), str(work / "tool.in")
    if not machine.dry:
        work.mkdir(parents=True, exist_ok=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        Path(build).write_text("\n".join(project["build-system"]["requires"]) + "\n", encoding="utf-8")
        Path(tool).write_text(f"{UV}\n", encoding="utf-8")
    style = ("--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--quiet")
    places = uv_options(Installer(machine).settings)
    compile_ = (str(PYTHON), "-m", "uv", "pip", "compile", "--universal", "--python-version", "3.11", *style)
    whole = ("pyproject.toml", build, tool, "--all-extras", "--generate-hashes", "--output-file", str(LOCK))
    machine.run(*compile_, *places, *whole, *more)
    if machine.dry:
        return
    inputs = {BASE: ("pyproject.toml", build), TOOL: (tool,)}
    for extra in sorted(set(optional_dependencies()) - {"all"}):
        inputs[extra] = ("pyproject.toml", "--extra", extra)
    names = {}
    for extra, words in inputs.items():
        out = work / f"{extra}.txt"
        machine.run(*compile_, *places, *words, "--constraint", str(LOCK), "--output-file", str(out))
        names[extra] = {match[1] for match in RESOLVED.findall(out.read_text(encoding="utf-8"))}
    found = RESOLVED.findall(LOCK.read_text(encoding="utf-8"))
    LOCK.write_text(LOCK_HEAD + "".join(_lines_of_lock(found, names)), encoding="utf-8")


def _lines_of_lock(found: list[tuple[str, str, str]], names: dict[str, set[str]]) -> list[str]:
    """Each package with what needs it: the base, or the extras that bring it."""
    lines = []
    for requirement, name, hashes in found:
        if CUDA_LIBRARIES.match(name):
            continue
        needed = sorted(extra for extra in names if name in names[extra])
        extras = [BASE] if BASE in needed else needed
        lines.append(f"{requirement}{'' if name == 'torch' else hashes}\n    # for {', '.join(extras)}\n")
    return lines


CHECK_SBOM = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1], encoding="utf-8").read())
sys.exit(None if wrong is None else f"{sys.argv[1]} is no valid CycloneDX: {str(wrong)[:500]}")
"""


def sbom(machine: Machine) -> None:
    """The bill of materials of .venv, by CycloneDX's own tool in an environment of its own, with hashes, and
    checked against the schema.
    """
    setup(machine, ("all",))
    installer = Installer(machine)
    out = ROOT / "build" / "sbom.json"
    part = out.with_name("sbom.part.json")
    if not machine.dry:
        out.parent.mkdir(exist_ok=True)
    tool = (str(PYTHON), "-m", "uv", "tool", "run", *uv_options(installer.settings), "--from", CYCLONEDX)
    options = ("--spec-version", "1.6", "--pyproject", "pyproject.toml", "--output-reproducible")
    machine.run(*tool, "cyclonedx-py", "environment", str(PYTHON), *options, "--output-file", str(part))
    if not machine.dry:
        bill = json.loads(part.read_text(encoding="utf-8"))
        counts = add_hashes(bill, read_pins(LOCK.read_text(encoding="utf-8")), site_packages())
        part.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
        say(
            "{} components: {} with {}'s hashes, {} with their RECORD's".format(
                *counts[:2], LOCK.name, counts[2]
            )
        )
    machine.run(*tool, "python", "-c", CHECK_SBOM, str(part))
    if not machine.dry:
        part.replace(out)
    say(f"{out}: what is installed in .venv")


def add_hashes(bill: dict[str, Any], pins: list[Pin], packages: Path) -> tuple[int, int, int]:
    """Give a bill's components the lock's SHA-256 of their files, of which the set-up has installed one, and
    that of the list of files that was installed (RECORD); how many there are, and how many got each.

    Where the lock has one file alone its hash is the component's; several are those of a distribution.
    """
    locked_hashes = {(canonical(pin.name), pin.version): pin.sha256 for pin in pins}
    records = {
        tuple(folder.name.removesuffix(".dist-info").rpartition("-")[::2]): folder / "RECORD"
        for folder in packages.glob("*.dist-info")
    }
    records = {(canonical(name), version): path for (name, version), path in records.items()}
    by_lock = by_record = 0
    for component in bill.get("components", []):
        place = canonical(component["name"]), component.get("version", "")
        hashes = [{"alg": "SHA-256", "content": one} for one in locked_hashes.get(place, ())]
        if len(hashes) == 1:
            component["hashes"] = hashes
        if hashes:
            by_lock += 1
            link = {
                "type": "distribution",
                "url": f"https://pypi.org/project/{place[0]}/{place[1]}/",
                "comment": f"the files that {LOCK.name} allows, of which one is installed",
                "hashes": hashes,
            }
            component["externalReferences"] = [*component.get("externalReferences", []), link]
        record = records.get(place)
        if record is not None and record.is_file():
            by_record += 1
            digest = hashlib.sha256(record.read_bytes()).hexdigest()
            entry = {"name": "darkroom:RECORD:sha256", "value": digest}
            component["properties"] = [*component.get("properties", []), entry]
    return len(bill.get("components", [])), by_lock, by_record


def canonical(name: str) -> str:
    """A package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def clean(machine: Machine) -> None:
    keep_own_venv()
    for name in LEFT_BY_RUNS:
        say(f"removing {name}")
        if not machine.dry:
            shutil.rmtree(ROOT / name, ignore_errors=True)


def main(words: list[str]) -> int:
    dry = "--dry-run" in words
    command, *more = [word for word in words if word != "--dry-run"] or ["help"]
    machine = Machine(dry)
    rest = tuple(more)
    if command in ("lint", "check", "nightly", "format", "sbom", "clean", "help") and rest:
        raise Refused(f"{command} takes nothing more, and was given {' '.join(rest)}")
    if command == "setup":
        setup(machine, rest)
    elif command == "quickstart":
        setup(machine)
        machine.run(str(PYTHON), "-m", "darkroom", "quickstart", *rest)
    elif command == "test":
        lint(machine, (*TYPES, *TYPES_ELSEWHERE))
        tests(machine, "test", rest)
    elif command == "nightly":
        setup(machine, TEST_EXTRAS)
        tests(machine, "nightly", ())
    elif command == "docs":
        setup(machine, ("docs",))
        machine.run(str(PYTHON), "-m", "mkdocs", "build", "--quiet", *rest, add={"NO_MKDOCS_2_WARNING": "1"})
        say("the site is in build/site; open build/site/index.html")
    elif command == "format":
        setup(machine, TEST_EXTRAS)
        machine.run(str(PYTHON), "-m", "ruff", "check", "--fix", ".")
        machine.run(str(PYTHON), "-m", "ruff", "format", ".")
    elif command == "lock":
        lock(machine, rest)
    elif command == "locked":
        print(locked_text(locked_pins(rest)), end="")
    elif command == "chaos":
        setup(machine, TEST_EXTRAS)
        machine.run(str(PYTHON), "benchmarks/chaos.py", "--work", "build/chaos", *rest)
    elif command in ("lint", "check", "sbom", "clean"):
        {"lint": lint, "check": check, "sbom": sbom, "clean": clean}[command](machine)
    elif command == "help":
        print(HELP)
    else:
        raise Refused(f"no command {command}; python make.py help lists them")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Failed as error:
        sys.exit(error.args[0])
    except KeyboardInterrupt:
        sys.exit(130)
