"""The verbs where POSIX is taken away (`other_system`): each does what it does on Linux, to the end."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

import warm
from darkroom import models
from darkroom.data.store import Store
from darkroom.recipe.sections import Task
from serve.conftest import free_port
from train.conftest import BASE_WORDS, SIDE, TEXT, UNET, VAE, paint

PROGRAM = Path(__file__).parents[1] / "other_system.py"
ODD = "三 squares: “red” on blue? 100 %"
"""A caption that cp1252 cannot hold, with what no file name may hold."""
PNG, JPEG = b"\x89PNG", b"\xff\xd8\xff"


def start(*words: object, env: dict[str, str] | None = None) -> warm.Popen:
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    return warm.Popen(command, stdout=warm.PIPE, stderr=warm.STDOUT, env=env)


def darkroom(*words: object, code: int = 0) -> str:
    process = start(*words)
    out, _ = process.communicate()
    said = out.decode("cp1252")
    assert process.returncode == code, said
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, a store of them and a small model."""
    folder = tmp_path_factory.mktemp("other") / "Bücher 三"
    folder.mkdir()
    paint(folder / "pictures", 20)
    lines = (folder / "pictures" / "metadata.jsonl").read_text("utf-8").splitlines()
    first = json.loads(lines[0]) | {"text": ODD}
    lines[0] = json.dumps(first, ensure_ascii=False)
    (folder / "pictures" / "metadata.jsonl").write_text("\n".join(lines), "utf-8")
    darkroom("import", folder / "pictures", folder / "store.lance")
    tokenizer = models.train_tokenizer([BASE_WORDS] * 3, vocab_size=640)
    models.save(models.create("tiny", seed=3, tokenizer=tokenizer), folder / "base")
    return folder


def recipe(folder: Path, name: str, **content: Any) -> Path:
    told = {
        "data": {"store": str(folder / "store.lance"), "resolution": SIDE, "encode": "inline"},
        "optim": {"lr": 2e-3},
        "train": {"steps": 6, "global_batch": 4, "precision": "float32", "log_every": 1},
        "checkpoint": {"every": 2, "keep": 1},
        "sample": {"every": 6, "prompts": [ODD], "steps": 2},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(told | content, allow_unicode=True), "utf-8")
    return path


@pytest.mark.nightly
def test_what_is_taken_away_is_away(folder: Path) -> None:
    """The control of all others."""
    code = f"""
        import sys, os, tempfile, pathlib; sys.path.insert(0, {str(PROGRAM.parent)!r})
        import other_system; other_system.take_away()
        def fails(call):
            try:
                call()
            except (AttributeError, UnicodeError, OSError) as error:
                return type(error).__name__
        here = pathlib.Path({str(folder)!r}); a, b = here / "a", here / "b"
        a.write_text("x", encoding="utf-8"); b.write_text("y", encoding="utf-8")
        with a.open(encoding="utf-8"):
            print(fails(lambda: b.replace(a)), fails(a.unlink), fails(lambda: a.rename(here / "c")))
        print(fails(lambda: os.sched_getaffinity(0)), fails(lambda: os.fork()))
        print(fails(lambda: (here / "nul.txt").write_bytes(b"")))
        print(fails(lambda: (here / "d").write_text("三")), fails(lambda: print("三")))
        b.replace(a); a.unlink(); print("done")
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    done = warm.run([sys.executable, "-c", lines], stdout=warm.PIPE, stderr=warm.STDOUT, text=True)
    away, gone, name, unwritten, last = done.stdout.splitlines()
    assert away.split() == ["PermissionError"] * 3
    assert gone.split() == ["AttributeError"] * 2
    assert name == "OSError"
    assert unwritten.split() == ["UnicodeEncodeError"] * 2
    assert last == "done"


@pytest.mark.nightly
def test_quickstart(tmp_path: Path) -> None:
    darkroom("quickstart", tmp_path / "quick")
    assert (tmp_path / "quick" / "report.html").is_file()
    assert (tmp_path / "quick" / "gallery.png").is_file()


@pytest.mark.nightly
def test_data(folder: Path) -> None:
    darkroom("inspect", folder / "store.lance")
    darkroom("verify", folder / "store.lance")
    darkroom("prepare", folder / "store.lance", "--model", folder / "base", "--resolution", 16)
    again = darkroom("prepare", folder / "store.lance", "--model", folder / "base", "--resolution", 16)
    assert "0 rows encoded, 20 were done before" in again


@pytest.mark.nightly
def test_a_killed_training_goes_on(folder: Path) -> None:
    model = {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT}
    path, run = recipe(folder, "pretrain", task="pretrain", model=model), folder / "pretrain"
    process = start("train", path, "--out", run)
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    said = darkroom("train", path, "--out", run)
    assert re.search(r"going on after step \d of 6|nothing left", said)
    assert [found.name for found in run.glob("checkpoints/*")] == ["step-00000006"]
    assert list(run.glob("samples/*.png"))
    lengths = [
        len(str(path.relative_to(top))) for top in (run, folder / "store.lance") for path in top.rglob("*")
    ]
    assert 20 < max(lengths) <= 120, "room for a folder's own path below Windows' 260"
    darkroom("report", run, "--out", folder / "report.html")
    assert (folder / "report.html").is_file()


@pytest.mark.nightly
def test_lora_and_generate(folder: Path) -> None:
    path, run = recipe(folder, "lora", task="lora", model={"base": str(folder / "base")}), folder / "lora"
    darkroom("train", path, "--out", run)
    adapter = run / "adapter.safetensors"
    told = ["--steps", 2, "--size", "32", "--out", folder / "drawn"]
    darkroom("generate", folder / "base", ODD, *told)
    darkroom("generate", folder / "base", ODD, "--adapter", f"mine={adapter}", *told)
    one, other = (np.asarray(Image.open(file)) for file in sorted((folder / "drawn").glob("*.png"))[:2])
    assert one.shape == other.shape == (32, 32, 3)


@pytest.mark.nightly
def test_plan_and_doctor(folder: Path) -> None:
    assert "long paths" in darkroom("doctor", code=0)
    assert json.loads(darkroom("plan", folder / "pretrain.yaml", "--json"))


Body = dict[str, Any]
ASKED: dict[str, tuple[str, Body, Callable[[Any], str]]] = {
    "openai": ("/v1/images/generations", {"prompt": ODD}, lambda told: told["data"][0]["b64_json"]),
    "a1111": ("/sdapi/v1/txt2img", {"prompt": ODD, "steps": 2}, lambda told: told["images"][0]),
    "kserve": (
        "/v2/models/base/infer",
        {
            "inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": [ODD]}],
            "parameters": {"steps": 2},
        },
        lambda told: told["outputs"][0]["data"][0],
    ),
    "huggingface": ("/", {"inputs": ODD, "parameters": {"num_inference_steps": 2}}, lambda told: told),
    "vertex": (
        "/predict",
        {"instances": [{"prompt": ODD}], "parameters": {"num_inference_steps": 2}},
        lambda told: told["predictions"][0]["bytesBase64Encoded"],
    ),
}


def picture(http: httpx.Client, dialect: str) -> bytes:
    """What a dialect's route answers, as a picture's bytes."""
    path, body, within = ASKED[dialect]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    is_picture = answer.headers["content-type"].startswith("image/")
    return answer.content if is_picture else base64.b64decode(within(answer.json()))


@contextmanager
def served(model: Path, state: Path, *options: str, **variables: str) -> Iterator[httpx.Client]:
    """A server's client; at the end the server is told to stop by Ctrl-C, and stops in order."""
    port = free_port()
    told = {name: value.format(port=port) for name, value in variables.items()}
    where = () if told else ("--port", str(port))
    process = start("serve", model, *where, "--state", state, *options, env={**os.environ, **told})
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            until = time.monotonic() + 300
            while not is_ready(http):
                assert process.poll() is None, lines
                assert time.monotonic() < until, lines
                time.sleep(0.1)
            yield http
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, lines
    finally:
        if process.poll() is None:
            process.kill()
    reader.join(10)
    assert not [line for line in lines if b"Traceback" in line], lines


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.nightly
def test_serve(folder: Path, tmp_path: Path) -> None:
    with served(folder / "base", tmp_path / "state") as http:
        assert http.put("/jobs/one", json={"prompt": ODD, "steps": 2}).status_code == 202
        while (state := http.get("/jobs/one").json()["state"]) not in ("done", "failed"):
            time.sleep(0.05)
        assert state == "done"
        assert http.get("/jobs/one/pictures/0").content[:4] == PNG
        for dialect in ("openai", "a1111", "kserve", "huggingface"):
            assert picture(http, dialect)[:4] == PNG, dialect
        closed = http.post("/predict", json=ASKED["vertex"][1])
        assert closed.status_code in (404, 405), "the control: Vertex' route is not there by itself"
    assert os.listdir(tmp_path / "state")


@pytest.mark.nightly
def test_serve_as_vertex_runs_it(folder: Path, tmp_path: Path) -> None:
    told = {"AIP_HTTP_PORT": "{port}", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}
    with served(folder / "base", tmp_path / "state", "--vertex", **told) as http:
        assert picture(http, "vertex")[:3] == JPEG
        assert http.post("/v1/images/generations", json={"prompt": ODD}).status_code == 403


def tar_of(folder: Path) -> Path:
    """A WebDataset shard."""
    path = folder.parent / "00000.tar"
    with tarfile.open(path, "w") as archive:
        for i, file in enumerate(sorted(folder.glob("*.png"))):
            archive.add(file, f"{i:03d}.png")
            text = tarfile.TarInfo(f"{i:03d}.txt")
            text.size = len(ODD.encode())
            archive.addfile(text, io.BytesIO(ODD.encode()))
    return path


def table_of(folder: Path) -> Path:
    files = sorted(folder.glob("*.png"))
    table = pa.table({"image": [file.read_bytes() for file in files], "text": [ODD] * len(files)})
    pq.write_table(table, folder.parent / "pictures.parquet")
    return folder.parent / "pictures.parquet"


IMPORTS: dict[str, Callable[[Path], Path]] = {
    "zip": lambda folder: Path(shutil.make_archive(str(folder), "zip", folder)),
    "webdataset": tar_of,
    "parquet": table_of,
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", IMPORTS)
def test_each_kind_of_source_is_imported_and_deleted(folder: Path, kind: str) -> None:
    packed, path = IMPORTS[kind](folder / "pictures"), folder / f"{kind}.lance"
    darkroom("import", packed, path)
    store = Store.open(path)
    assert store.num_rows == 20
    [source] = store.sources()
    [one] = store.take([0], ["id"])["id"].to_pylist()
    darkroom("delete", path, "--id", one)
    darkroom("verify", path, "--purge")
    assert Store.open(path).num_rows == 19
    darkroom("delete", path, "--source", source)
    darkroom("verify", path, "--purge")
    assert Store.open(path).num_rows == 0


OTHER_TASKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "finetune": lambda folder: {},
    "distill": lambda folder: {},
    "dpo": lambda folder: {"data": subject(folder / "pairs")},
    "dreambooth": lambda folder: {"data": subject(folder / "pictures") | {"class_prompt": "a square"}},
    "dreambooth-lora": lambda folder: {"data": subject(folder / "pictures")},
    "textual-inversion": lambda folder: {
        "model": {"base": str(folder / "base"), "word": {"token": "<sks>", "initial": "square"}},
        "data": {name: value for name, value in subject(folder / "pictures").items() if name != "prompt"},
    },
    "autoencoder": lambda folder: {"model": {"base": "tiny", "vae": VAE}, "sample": {"every": 0}},
    "tiny-vae": lambda folder: {"model": {"base": "tiny", "vae": VAE}, "sample": {"every": 0}},
    "extractor": lambda folder: {
        "model": {},
        "data": {"store": str(folder / "store.lance"), "resolution": SIDE},
        "objective": {"extractor": {"network": {"width": 8, "levels": 2, "embedding": 32, "buckets": 128}}},
        "sample": {"every": 0},
    },
}


def subject(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "prompt": "a photo of sks square", "resolution": SIDE, "encode": "inline"}


@pytest.mark.nightly
@pytest.mark.parametrize("task", OTHER_TASKS)
def test_every_other_task(folder: Path, task: str) -> None:
    if task == "dpo":
        for kind in ("chosen", "rejected"):
            paint(folder / "pairs" / kind, 4)
    content = {"model": {"base": str(folder / "base")}} | OTHER_TASKS[task](folder)
    darkroom("train", recipe(folder, task, task=task, **content), "--out", folder / "runs" / task)
    darkroom("inspect", folder / "runs" / task)


def test_no_task_is_left_out() -> None:
    assert {*OTHER_TASKS, "pretrain", "lora"} == set(get_args(Task))


@pytest.mark.nightly
def test_weights_are_exported_signed_and_checked(folder: Path, tmp_path: Path) -> None:
    path = recipe(folder, "exported", task="lora", model={"base": str(folder / "base")})
    darkroom("train", path, "--out", tmp_path / "run")
    adapter = tmp_path / "run" / "adapter.safetensors"
    darkroom("keys", "make-signing-key", "--out", tmp_path / "signer.pem")
    key = ("--sign", tmp_path / "signer.pem")
    darkroom(
        "export", adapter, "--kohya", "--precision", "fp16", "--to", tmp_path / "for_comfy.safetensors", *key
    )
    darkroom("export", folder / "base", "--merge", f"{adapter}:0.8", "--to", tmp_path / "merged", *key)
    darkroom("export", folder / "base", "--single-file", "--to", tmp_path / "single.safetensors")
    for made in ("for_comfy.safetensors", "merged"):
        darkroom("verify", tmp_path / made, "--trust", tmp_path / "signer.pub.pem")
    with (tmp_path / "merged" / "model_index.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    assert "model_index.json" in darkroom(
        "verify", tmp_path / "merged", "--trust", tmp_path / "signer.pub.pem", code=1
    )
    darkroom("runs", "--root", tmp_path)
    darkroom("runs", "compare", tmp_path / "run", tmp_path / "run")


@pytest.mark.nightly
def test_pictures_of_every_kind(folder: Path, tmp_path: Path) -> None:
    """Signed by an odd name, from a file in UTF-16, on a sheet, from a picture, larger, from wildcards."""
    out, certificate = tmp_path / "drawn", tmp_path / "certificate.pem"
    told = ("--steps", 2, "--size", "32", "--out", out)
    darkroom("keys", "make-test-certificate", "--out", certificate, "--name", ODD)
    darkroom("generate", folder / "base", ODD, "--provenance", "--sign", certificate, *told)
    [first] = out.glob("*.png")
    assert ODD.encode("cp1252", "backslashreplace").decode("cp1252") in darkroom(
        "verify", first, "--trust", certificate
    )
    (tmp_path / "prompts.txt").write_bytes(f"{ODD}\na cat\n".encode("utf-16"))
    darkroom("generate", folder / "base", "--prompts", tmp_path / "prompts.txt", "--format", "jpeg", *told)
    darkroom("generate", folder / "base", ODD, "--grid", "guidance=1,3", *told)
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "thing.txt").write_text(ODD, "utf-8")
    cards = ("--wildcards", tmp_path / "cards", "--num", 2, "--format", "webp")
    darkroom("generate", folder / "base", "a __thing__", *cards, *told)
    darkroom("generate", folder / "base", "x", "--image", first, "--strength", 0.5, *told)
    darkroom("generate", folder / "base", "x", "--hires", "2:0.5", *told)
    kinds = [path.suffix for path in out.iterdir()]
    assert kinds.count(".webp") >= 2
    assert kinds.count(".jpg") >= 2
    assert kinds.count(".png") >= 5  # one, two and their sheet, and one each of the last two


@pytest.mark.nightly
def test_scores_and_measures(folder: Path, tmp_path: Path) -> None:
    """What is drawn for scores is kept by prompts that no file name may hold; a benchmark of each kind."""
    store = folder / "store.lance"
    content = OTHER_TASKS["extractor"](folder)
    darkroom(
        "train", recipe(tmp_path, "extractor", task="extractor", **content), "--out", tmp_path / "extractor"
    )
    drawn = ("--steps", 1, "--num", 1, "--size", 32, "--keep-pictures", tmp_path / "kept")
    scored = (
        "--reference",
        store,
        "--extractor",
        f"inception={tmp_path / 'extractor' / 'model'}",
        "--num-prompts",
        8,
    )
    words = ("evaluate", folder / "base", "--metrics", "fid,kid", "--prompts", store, *scored, *drawn)
    for _ in range(2):  # the second time all is there
        darkroom(*words, "--out", tmp_path / "scores.csv")
    rows = ("--out", tmp_path / "rows.csv", "--repeats", 5)
    darkroom("bench", "import", "--pictures", 60, *rows)
    darkroom("bench", "loader", "--rows", 600, *rows)
    darkroom("bench", "job-history", "--jobs", 200, *rows)
    darkroom("bench", "batch", folder / "base", "--most", 2, "--size", 32, "--steps", 2, *rows)
    darkroom("report", tmp_path / "rows.csv", "--out", tmp_path / "rows.html")
