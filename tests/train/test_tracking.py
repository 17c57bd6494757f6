"""What Weights & Biases holds of a run, read back from the files that it writes offline."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from darkroom.errors import MissingExtra, RecipeError
from darkroom.recipe.sections import TrackSettings
from darkroom.run import Run
from darkroom.train.run import train
from darkroom.train.tracking import check_tracker

BLOCK, HEADER = 32 * 1024, 7  # a log of LevelDB's format, after seven bytes of its own


def records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: chunks of [checksum 4, length 2, kind 1, data], none over a block."""
    data, at, parts = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def history(run: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order, all sessions one after the other."""
    from wandb.proto import wandb_internal_pb2 as protocol

    rows = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for content in records(file):
            record = protocol.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


def test_offline_runs_hold_what_metrics_hold(recipe_of, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra 'track' is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    more = ("track.wandb=emoji", "data.holdout=4", "sample.every=4", "train.log_every=1")
    run = tmp_path / "run"
    train(recipe_of("autoencoder", *more, "train.steps=2"), out=run, console=lambda line: None)
    train(recipe_of("autoencoder", *more), out=run, console=lambda line: None)
    shown = history(run)
    losses = {row["step"]: row["loss"] for row in shown if "loss" in row}
    said = {row["step"]: row["loss"] for row in Run(run).metrics() if "loss" in row}
    assert len(losses) == 4
    assert losses == pytest.approx(said)
    assert [row["samples._type"] for row in shown if "samples._type" in row] == ["image-file"] * 2
    names = {file.name.rpartition("-")[2] for file in run.glob("wandb/offline-run-*")}
    assert names == {(run / "wandb-id").read_text().strip()}  # both sessions are one run there


def test_it_is_refused_without_package_or_key(monkeypatch, tmp_path):
    settings = TrackSettings(wandb="emoji")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(
        RecipeError, match=r"^track.wandb: 'emoji', but there is no API key; run `wandb login`"
    ):
        check_tracker(settings)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    check_tracker(settings)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_tracker(settings)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(MissingExtra, match=r"^wandb is not installed; pip install '\.\[track\]'$"):
        check_tracker(settings)
