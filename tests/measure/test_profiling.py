"""One iteration's parts: they fill it, and what is slow in the step is slow in the profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from darkroom import cli
from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.measure import training
from darkroom.measure.timing import read_csv
from darkroom.measure.training import profile_family
from darkroom.train.objective import Objective
from darkroom.train.step import Step

UNET = {"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 2, "layers_per_block": 1}
VAE = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def profiled(**more):
    return profile_family(
        "tiny", resolution=32, batch=2, case="plain", repeats=3, device="cpu", unet=UNET, **more
    )


def test_parts_follow_each_other_and_fill_the_iteration():
    found = profiled()
    assert len(found.iterations) == len(found.unwatched_s) == 3
    for one in found.iterations:
        assert [span.part for span in one.spans] == ["forward", "backward", "optimiser"]
        ends = [span.end_s for span in one.spans]
        assert [span.start_s for span in one.spans[1:]] == ends[:-1]
        assert one.seconds == ends[-1]
        assert one.peak_bytes == max(used for _, used in one.memory) > 0


class Clock:
    """Stands still but where it is moved on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def during(self, monkeypatch, owner, name: str, seconds: float) -> None:
        """A call of this takes so long from now on."""
        call = getattr(owner, name)

        def taking(*args, **kwargs):
            self.now += seconds
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, taking)


def test_time_is_found_in_the_part_that_took_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(training, "time", clock)
    clock.during(monkeypatch, Objective, "loss", 3.0)
    clock.during(monkeypatch, torch.Tensor, "backward", 5.0)
    clock.during(monkeypatch, Step, "_update", 2.0)
    found = profiled()
    for one in found.iterations:
        assert [one.of(part) for part in ("forward", "backward", "optimiser")] == [3.0, 5.0, 2.0]
        assert one.of("communication") == one.of("load") == 0
    assert found.unwatched_s == (10.0, 10.0, 10.0)
    assert dict(training.shares(found)) == {"forward": 0.3, "backward": 0.5, "optimiser": 0.2}
    rows = {row.case: row for row in found.rows()}
    assert rows["backward"].ratio == 0.5
    assert rows["iteration"].images_per_s == 0.2


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    for i in range(8):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (i * 30, 255 - i * 30, 90)).save(tmp_path / "pictures" / f"{i}.png")
        (tmp_path / "pictures" / f"{i}.txt").write_text(f"shade {i}")
    import_pictures(tmp_path / "pictures", Store.create(tmp_path / "store.lance"))
    content = {
        "task": "pretrain",
        "model": {"base": "tiny", "vae": VAE, "unet": UNET, "text_encoder": TEXT},
        "data": {"store": str(tmp_path / "store.lance"), "resolution": 16, "encode": "inline"},
        "train": {"global_batch": 8, "micro_batch": 4, "precision": "float32", "device": "cpu"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "recipe.yaml"


def test_a_recipe_is_drawn_by_the_command(tmp_path, recipe_file, capsys):
    out, picture = tmp_path / "rows.csv", tmp_path / "iteration.png"
    words = [
        "bench",
        "train",
        str(recipe_file),
        "--profile",
        str(picture),
        "--repeats",
        "2",
        "--out",
        str(out),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    assert str(picture) in capsys.readouterr().out
    rows = {row.case: row for row in read_csv(out)}
    assert {"iteration", "load", "encode", "forward", "backward", "optimiser"} <= rows.keys()
    assert "communication" not in rows
    assert rows["iteration"].images_per_s == pytest.approx(8 / rows["iteration"].median_s, rel=1e-3)
    assert rows["forward"].settings["micro_batch"] == 4
    with Image.open(picture) as image:
        assert image.width > 1000
        assert len(set(image.convert("RGB").resize((200, 100)).getdata())) > 50
