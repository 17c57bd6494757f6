"""benchmarks/gpu.py: rows at once, cases that fail or hang, going on, wheels; and the cases on a CPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import warm
from darkroom.measure.timing import append_csv, read_csv
from scripts import load_script

make = load_script("make.py")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STUB = """
import json, sys, time
for name, _ in json.loads(sys.argv[1]):
    print("BEGIN", name, flush=True)
    if name == "crash":
        sys.exit(3)
    if name == "hang":
        time.sleep(60)
    print("END done", flush=True)
"""

WITHOUT_STORES = """
from importlib.machinery import PathFinder
absent, find = {"lance", "pyarrow", "zstandard", "matplotlib"}, PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in absent else find(name, *more)
"""


@pytest.fixture(scope="module")
def gpu():
    return load_script("benchmarks/gpu.py")


@pytest.fixture(scope="module")
def cases():
    return load_script("benchmarks/gpu_cases.py")


def test_a_crash_and_a_hang_end_their_case_alone(gpu, tmp_path):
    """Each in a worker of its own kind; the next case goes on in a new one."""
    names = ("crash", "fine", "hang", "last")
    some = [gpu.Case(name, 1, "") for name in names]
    workers, noted = [], {}

    class Quick(gpu.Worker):
        def next_line(self, within_s):
            return super().next_line(min(within_s, 5.0))

    def start(left):
        told = json.dumps([(case.name, 1) for case in left])
        workers.append(Quick([sys.executable, "-S", "-c", STUB, told], {}))
        return workers[-1]

    def note(case, why):
        noted[case.name] = why

    found = {case.name: how for case, how in gpu.run(some, gpu.time.monotonic() + 100, start, note)}
    assert found == {
        "crash": "failed: the worker ended with 3",
        "fine": "done",
        "hang": "failed: no end within its limit",
        "last": "done",
    }
    assert set(noted) == {"crash", "hang"}
    assert len(workers) == 3
    assert all(worker.process.poll() is not None for worker in workers)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes have no groups on Windows")
def test_what_a_worker_started_ends_with_it(gpu):
    """A server that a case has running would hold the card in the next one; an ordinary kill leaves it."""
    code = (
        "import os, subprocess, sys, time; os.setsid()\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )

    def started() -> tuple[object, int]:
        worker = gpu.Worker([sys.executable, "-S", "-c", code], {})
        return worker, int(worker.next_line(30.0))

    worker, pid = started()
    worker.process.kill()
    worker.process.wait()
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # the control
    assert worker.end() == -9
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).wait(10) is None
    worker, pid = started()
    worker.end()
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).wait(10) is None


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="a child is killed with its group")
def test_a_worker_ends_with_a_parent_that_is_killed(gpu):
    """Killed for its time or memory, the script says nothing to its worker; the control ends only by hand."""
    load = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; "
    found = {}
    for name, call in (("told", "gpu.end_with_parent(); "), ("control", "")):
        child = f"import os, time; os.setsid(); {load}{call}print(os.getpid(), flush=True); time.sleep(60)"
        parent = f"{load}w = gpu.Worker([sys.executable, '-S', '-c', {child!r}], {{}}); "
        parent += "print(w.next_line(30.0), flush=True); w.next_line(60.0)"
        process = subprocess.Popen([sys.executable, "-S", "-c", parent], stdout=subprocess.PIPE, text=True)
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.communicate()
        try:
            worker.wait(10 if call else 1)
            found[name] = "ended"
        except psutil.TimeoutExpired:
            worker.kill()
            found[name] = "went on"
    assert found == {"told": "ended", "control": "went on"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--out FILE.csv says where"),
        (["--out", "{}"], "is a folder"),
        (["--out", "{}/rows.csv", "--after", "{}/none.csv"], "none.csv is no file"),
        (["--out", "{}/rows.csv", "--minutes", "0.5"], "too short"),
        (["--out", "{}/rows.csv", "--minutes", "nan"], "too short"),
    ],
)
def test_what_cannot_be_is_said_before_anything_takes_time(gpu, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setattr(gpu, "lacks", lambda *_: pytest.fail("it was looked for packages first"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *(word.format(tmp_path) for word in words)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_worker_that_never_begins_ends_the_call(gpu):
    def start(left):
        return gpu.Worker([sys.executable, "-S", "-c", "raise SystemExit(7)"], {})

    with pytest.raises(SystemExit, match="the worker ended with 7"):
        list(gpu.run([gpu.Case("one", 1, "")], gpu.time.monotonic() + 100, start, lambda c, why: None))


def test_half_an_hour_is_two_to_four_calls_with_what_decides_first(gpu):
    calls = gpu.calls(gpu.CASES, 9)
    assert 2 <= len(calls) <= 4
    assert all(sum(case.about_s for case in some) + gpu.START_S <= 9 * 60 for some in calls)
    first = [case.name for case in calls[0]]
    assert first[:2] == ["smoke", "card"]
    assert {"sd15-b1-graphs", "sd2-train", "sdxl-batch"} <= set(first)
    assert len(gpu.calls(gpu.CASES, 5)) > len(calls)


def test_every_case_that_is_planned_can_be_made(gpu, cases):
    assert {case.name for case in gpu.CASES} == set(cases.CASES)


def test_wheels_and_folders_of_packages_go_first(gpu, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "HERE = 'by wheel'\n")
    environ = gpu.environment(wheels)
    code = "import carried; print(carried.HERE)"
    told = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "by wheel"
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "carried.py").write_text("HERE = 'by folder'\n")
    assert gpu.unpacked(folder) == folder
    with pytest.raises(SystemExit, match="is no folder"):
        gpu.unpacked(tmp_path / "none")


def test_the_machines_own_torch_is_never_carried(gpu, tmp_path):
    """Neither in the list for pip, which names all that is needed else, nor out of a folder of wheels."""
    pinned = dict(line.split("==") for line in gpu.closed(gpu.needs()))
    assert {"diffusers", "pydantic-core", "starlette", "anyio", "torchao", "nvidia-ml-py"} <= pinned.keys()
    assert pinned["diffusers"] == importlib.metadata.version("diffusers")
    assert not {"torch", "triton", "nvidia-cublas", "pylance", "ray"} & pinned.keys()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("torch", "nvidia_cudnn_cu13", "nvidia_ml_py", "carried"):
        with zipfile.ZipFile(wheels / f"{name}-2.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
    assert {file.stem for file in gpu.unpacked(wheels).glob("*.py")} == {"nvidia_ml_py", "carried"}


def test_what_torch_reads_once_is_set_for_all_workers(gpu, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert gpu.environment(None)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert gpu.environment(None)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_what_failed_is_made_again_where_asked(gpu, cases, tmp_path, monkeypatch, capsys):
    lab = cases.Lab("cpu", True, tmp_path / "rows.csv")
    over = {"card": "done; 1 rows", "smoke": "done; 3 rows, 2 failed, in 1 s", "serve": "failed: no end"}
    for name, how in over.items():
        append_csv(lab.out, [lab.row(gpu.BENCHMARK, name, note=how)])
    command = ["gpu.py", "--plan", *(word for name in over for word in ("--case", name))]
    command += ["--out", str(lab.out)]

    def planned(*more: str) -> set[str]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        gpu.main()
        lines = capsys.readouterr().out.splitlines()
        return {line.split()[0] for line in lines if line.startswith("  ")}

    assert planned() == set()
    assert planned("--again") == {"smoke", "serve"}


def test_what_lacks_is_named(gpu, monkeypatch):
    """With nothing installed but Python itself, every package is missing, and none with all."""
    bare = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    bare_path = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    monkeypatch.setattr(gpu, "CHECK", bare_path + gpu.CHECK)
    missing = gpu.lacks(sys.executable, bare, "cpu")
    assert {line.split(">=")[0] for line in gpu.needs()} <= {line.split(">=")[0] for line in missing}
    assert "torch with device cpu" in missing


def test_what_is_too_old_or_too_new_is_named(gpu, monkeypatch, capfd):
    """A rented machine has a diffusers of its own, and a torch that cannot be changed."""
    version = importlib.metadata.version("pillow")
    major = int(version.partition(".")[0])
    bounds = {
        f"pillow>={major + 1}": False,
        f"pillow>={major},<{major}.0.1": version.startswith(f"{major}.0.0"),
    }
    bounds |= {f"pillow>={major - 1},<{major}": False, f"pillow>={major},<{major + 1}": True, "pillow": True}
    monkeypatch.setattr(gpu, "needs", lambda: list(bounds))
    told = gpu.lacks(sys.executable, dict(os.environ), "cpu")
    assert told == {line: f"{version} is installed" for line, fits in bounds.items() if not fits}
    assert "older" not in capfd.readouterr().err
    monkeypatch.setattr(gpu, "torch_floor", lambda: "99.1")
    assert gpu.lacks(sys.executable, dict(os.environ), "cpu") == told, "it is tried all the same"
    assert "that torch is older than 99.1" in capfd.readouterr().err


def test_a_case_writes_its_rows_and_is_not_made_again(gpu, cases, tmp_path):
    lab = cases.Lab("cpu", True, tmp_path / "far" / "rows.csv")
    assert cases.make("card", lab).startswith("done; 37 rows")
    rows = read_csv(lab.out)
    assert [row.case for row in rows[:5]] == [
        "product",
        "bandwidth",
        "launch",
        "convolution",
        "convolution, channels last",
    ]
    assert [row.case for row in rows[5:13]] == [
        f"attention 8 x 64 x 40, {kernel}{also}"
        for kernel in ("as PyTorch chooses", "flash", "cudnn", "efficient")
        for also in ("", ", forward")
    ]
    measured = [row for row in rows[:-1] if not row.note]
    assert all(row.settings["rate"] > 0 for row in measured)
    none = [row.case for row in rows[:-1] if row.note.startswith("cannot: No viable")]
    refused = {case.removesuffix(", forward").rpartition(", ")[2] for case in none}
    assert not [row.note for row in rows if row.note.startswith("failed")]
    assert refused == {"cudnn", "efficient"}  # kernels that no CPU has
    assert gpu.done_in([lab.out]).keys() == {"card"}
    assert gpu.done_in([tmp_path / "none.csv"]) == {}


def test_a_case_that_fails_is_a_row_that_says_why(gpu, cases, tmp_path, monkeypatch):
    def failing(lab):
        yield lab.row("x", "one")
        raise ValueError("no kernel image")

    monkeypatch.setitem(cases.CASES, "card", failing)
    lab = cases.Lab("cpu", True, tmp_path / "rows.csv")
    assert cases.make("card", lab).startswith("failed: ValueError: no kernel image; 1 rows")
    assert [row.case for row in read_csv(lab.out)] == ["one", "card"]
    assert gpu.done_in([lab.out])["card"].startswith("failed: ValueError")


def test_an_operation_that_fails_leaves_the_others_of_its_case(cases, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(cases.torch.Tensor, "mul_", broken)
    rows = list(cases.card(cases.Lab("cpu", True, tmp_path / "rows.csv")))
    failed = {row.case for row in rows if row.note == "failed: RuntimeError: no kernel image"}
    assert failed == {"bandwidth", "launch"}
    assert sum("rate" in row.settings for row in rows) >= 7


def test_rows_that_fail_are_counted_where_a_case_ends(cases, tmp_path, monkeypatch, caplog):
    def one_works(lab):
        def breaks():
            raise ValueError("no kernel image")

        yield from cases.tried(lab, "x", {"works": dict, "train fp16": breaks})

    monkeypatch.setitem(cases.CASES, "card", one_works)
    lab = cases.Lab("cpu", True, tmp_path / "rows.csv")
    assert cases.make("card", lab).startswith("done; 2 rows, 1 failed, in ")
    assert [record.getMessage() for record in caplog.records] == ["train fp16 failed"]
    rows = {row.case: row.note for row in read_csv(lab.out)}
    assert rows["train fp16"] == "failed: ValueError: no kernel image"
    assert rows["works"] == "works"


def test_resuming_is_bit_exact_and_proves_it(cases, tmp_path):
    rows = list(cases.resume(cases.Lab("cpu", True, tmp_path / "rows.csv")))
    assert [row.case for row in rows] == ["default kernels", "deterministic kernels"]
    assert all(row.settings["bit_exact"] and row.settings["moved"] for row in rows)


def test_two_cases_of_the_script_on_a_cpu(gpu, tmp_path, monkeypatch, capsys):
    """From its command line to rows, with a worker of its own; what is done is not made again."""
    processes = SimpleNamespace(Popen=warm.Popen, PIPE=warm.PIPE)
    monkeypatch.setattr(gpu, "subprocess", processes)
    monkeypatch.setattr(gpu, "lacks", lambda *_: {})
    monkeypatch.setattr(gpu, "environment", lambda wheels: dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    out = tmp_path / "rows.csv"
    command = ["gpu.py", "--device", "cpu", "--tiny", "--case", "card", "--case", "sd2-train"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    gpu.main()
    assert {how.split(";")[0] for how in gpu.done_in([out]).values()} == {"done"}
    rows = read_csv(out)
    assert [row.case for row in rows if row.benchmark == gpu.BENCHMARK] == ["card", "sd2-train"]
    [train] = [row for row in rows if row.benchmark == "pretrain"]
    assert train.images_per_s > 0
    assert "2 of 2 cases are over" in capsys.readouterr().err
    gpu.main()
    assert "nothing is left" in capsys.readouterr().err
    assert len(read_csv(out)) == len(rows)


@pytest.mark.nightly
def test_the_whole_script_on_a_cpu(gpu, tmp_path):
    """As it is called on a card, at tiny sizes, every case; what stores are read with is not there."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(WITHOUT_STORES)
    out = tmp_path / "rows.csv"
    names = [case.name for case in gpu.CASES]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--tiny", "--minutes", "120"]
    command += ["--out", str(out), "--wheels", str(packages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7300, check=False)
    assert done.returncode == 0, done.stderr
    over = gpu.done_in([out])
    assert over.keys() == set(names)
    assert {how.split(";")[0] for how in over.values()} == {"done"}, over
    made = [row for row in read_csv(out) if row.benchmark != gpu.BENCHMARK]
    assert {row.case: row.note for row in made if row.note.startswith("failed")} == {}
    counted = [row.settings for row in made if "graph_breaks" in row.settings]
    assert [told["graph_breaks"] for told in counted] == [0] * len(counted)
    assert len(counted) == 4
    again = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "nothing is left" in again.stderr


@pytest.mark.nightly
def test_the_script_on_another_torch(gpu, tmp_path):
    """torch 2.11 on Python 3.12, which machines are lent with; left out where neither can be had."""
    env = tmp_path / "env"
    python = env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    uv = (sys.executable, "-m", "uv")
    settings = make.pip_settings(make.listed_by_pip(sys.executable))
    places = make.uv_options({**settings, "constraint": ""})
    packages = [*gpu.closed(gpu.needs()), "torch==2.11.*"]
    for command in (
        (*uv, "venv", "--python", "3.12", str(env)),
        (*uv, "pip", "install", "--python", str(python), *packages, *places),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            pytest.skip(f"no torch 2.11 on Python 3.12: {done.stderr.strip()[-200:]}")
    out = tmp_path / "rows.csv"
    command = [str(python), str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--tiny", "--minutes", "120"]
    names = ("smoke", "card", "sd15-b1", "sd2-train", "profile", "memory", "resume")
    command += [*(word for name in names for word in ("--case", name)), "--out", str(out)]
    environ = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=7300, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch 2.11" in done.stderr
    over = gpu.done_in([out])
    assert {name: how.split(";")[0] for name, how in over.items()} == dict.fromkeys(names, "done")
    made = [row for row in read_csv(out) if row.note.startswith("failed")]
    assert {row.case: row.note for row in made} == {}
