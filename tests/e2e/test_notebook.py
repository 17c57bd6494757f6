"""The notebook of docs/notebooks, executed whole: a toy model learns real photographs of a dog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

from darkroom import models
from darkroom.data.importers.job import import_pictures
from darkroom.evaluate.job import read_scores
from darkroom.recipe import make_recipe
from darkroom.train.run import train

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "fine_tune_and_generate.ipynb"
WORDS = "a photo of sks dog in the snow, on the beach, a watercolour painting, in a garden"


def small_copies(photographs: Path, folder: Path, caption: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    for path in sorted(photographs.glob("*.jpg"))[:4]:
        with Image.open(path) as image:
            image.thumbnail((96, 96))
            name = f"{photographs.name}-{path.stem}"
            image.save(folder / f"{name}.jpg")
        if caption:
            (folder / f"{name}.txt").write_text(caption)
    return folder


@pytest.fixture(scope="module")
def settings(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a reader sets: a toy model, photographs, and an extractor trained on other subjects."""
    subjects = shared_data / "dreambooth"
    if not (subjects / "dog").is_dir():
        pytest.skip(f"the photographs are missing: no folder {subjects / 'dog'}")
    root = tmp_path_factory.mktemp("notebook")
    models.save(
        models.create("tiny", seed=3, tokenizer=models.train_tokenizer([WORDS] * 3, vocab_size=640)),
        root / "model",
    )
    small_copies(subjects / "dog", root / "photos")
    for name in ("cat2", "teapot"):
        others = small_copies(subjects / name, root / "others", f"a photo of a {name}")
    import_pictures(others, root / "others.lance")
    network = {"width": 8, "levels": 2, "embedding": 32, "buckets": 128}
    extractor = {
        "task": "extractor",
        "data": {"store": str(root / "others.lance"), "resolution": 32, "crop": "random"},
        "objective": {"extractor": {"network": network}},
        "train": {"steps": 2, "global_batch": 4, "precision": "float32"},
    }
    made = train(make_recipe(extractor), out=root / "extractor", console=lambda _: None)
    given = {"MODEL": root / "model", "PHOTOS": root / "photos", "STEPS": 60, "EXTRACTOR": made.model}
    return {f"DARKROOM_NOTEBOOK_{name}": str(value) for name, value in given.items()}


def execute(notebook: Any, folder: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    return client.execute()


def pictures_of(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", ()))


@pytest.mark.nightly
def test_the_notebook_runs_whole(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = execute(nbformat.read(NOTEBOOK, as_version=4), tmp_path, settings, monkeypatch)
    shown = [pictures_of(cell) for cell in done.cells if cell.cell_type == "code"]
    assert shown == [0, 1, 1, 0, 4, 0, 1]

    adapter = models.read_adapter(tmp_path / "runs" / "notebook" / "run" / "adapter.safetensors")
    assert {layer.down.shape[0] for layer in adapter.layers.values()} == {8}
    assert any(bool(layer.up.any()) for layer in adapter.layers.values())  # it starts as zeros
    scores = read_scores(tmp_path / "runs" / "notebook" / "scores.csv")
    assert [score.metric for score in scores] == ["dino", "clip-i", "clip-t", "drift"] * 2
    assert all(-1 <= score.value <= 2 for score in scores)  # cosines, and 1 - a cosine; no NaN passes
    base, tuned = scores[:4], scores[4:]
    assert base[3].value == pytest.approx(0, abs=1e-6)
    assert tuned[3].value > base[3].value + 1e-6
    assert base[0].model_sha256 != tuned[0].model_sha256
    assert len(list((tmp_path / "runs" / "notebook" / "pictures").glob("*.png"))) == 5  # and their grid


@pytest.mark.nightly
def test_a_broken_cell_fails(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "import_pictures(PHOTOS" in code[1].source
    code[1].source = code[1].source.replace("import_pictures(PHOTOS", "import_pictures(PHOTOS / 'none'")
    with pytest.raises(CellExecutionError, match="none"):
        execute(notebook, tmp_path, settings, monkeypatch)


def test_it_is_kept_with_what_it_printed_and_small() -> None:
    """Executed once, so that a reader sees what to expect; nothing of the machine that did it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert NOTEBOOK.stat().st_size < 300_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [pictures_of(cell) for cell in code] == [0, 1, 1, 0, 4, 0, 1]
    assert all(cell.outputs and cell.execution_count for cell in code[1:])
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    assert "Traceback" not in text
