"""The card of a model that adapters were merged into has the sources and licences of all of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml

from darkroom import models
from darkroom.models.adapters.adapter import Adapter, Layer
from darkroom.models.adapters.read import read_adapter, write_adapter
from darkroom.models.card import MOST_NOTED, SOURCES, SourceCount, sources_in_header, sources_of

OVERRIDES = {"unet": {"block_out_channels": [16, 32]}, "vae": {"block_out_channels": [8, 16, 16]}}
CATS = SourceCount("a.lance", "cats", 3, "CC-BY-4.0")
DOGS = SourceCount("a.lance", "dogs | wolves", 2, "unknown")
BASE_CARD = "---\nlicense: cc-by-4.0\n---\n# Old\n\n| a.lance | birds | 7 | CC-BY-4.0 |\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a card."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    models.save(models.create("tiny", seed=1, overrides=OVERRIDES), folder)
    return folder


def adapter_of(name: str, metadata: dict[str, str]) -> Adapter:
    layer = Layer(torch.zeros(1, 16), torch.zeros(16, 1))
    path = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    return Adapter(name, {path: layer}, metadata=metadata)


def merged(base: Path, to: Path, *adapters: Adapter) -> str:
    """The card of the model that these are merged into, from files."""
    pairs = []
    for one in adapters:
        file = to.parent / f"{one.name}.safetensors"
        write_adapter(one, file)
        pairs.append((read_adapter(file), 0.8))
    models.export_merged(base, to, pairs)
    return (to / "README.md").read_text()


def licence_of(card: str) -> str:
    head = yaml.safe_load(card.split("---")[1])
    return str(head["license"])


def test_sources_and_licences_of_adapters_and_base_are_in_the_card(base: Path, tmp_path: Path) -> None:
    known = adapter_of("cats", sources_in_header([CATS]))
    text = merged(base, tmp_path / "first", known)
    assert "| a.lance | cats | 3 | CC-BY-4.0 |" in text
    assert "| CC-BY-4.0 | 3 |" in text
    assert "# first\nplain with adapters merged in" in text
    assert f"| cats | 0.8 | {read_adapter(tmp_path / 'cats.safetensors').sha256} |" in text
    assert "It has no card" in text
    assert licence_of(text) == "other", "what the base was trained on is not known"
    assert str(tmp_path) not in text
    assert str(base) not in text

    carded = tmp_path / "carded"
    models.export_model(base, carded)
    (carded / "README.md").write_text(BASE_CARD)
    text = merged(carded, tmp_path / "second", known)
    assert licence_of(text) == "cc-by-4.0"
    assert "| a.lance | birds | 7 | CC-BY-4.0 |" in text
    assert text.count("license:") == 1

    unknown = adapter_of("dogs", sources_in_header([DOGS]) | {"modelspec.license": "CC-BY-4.0"})
    foreign = adapter_of("foreign", {"modelspec.license": "MIT"})
    text = merged(carded, tmp_path / "third", known, unknown, foreign)
    assert licence_of(text) == "other", "the control: one of them is not known"
    assert r"| a.lance | dogs \| wolves | 2 | unknown |" in text
    assert "| foreign | not in the adapter's file | unknown | MIT |" in text
    assert "| MIT | 0 and more |" in text


@pytest.mark.parametrize(
    "header",
    [
        "no json",
        "7",
        "[]",
        "[[1]]",
        '["abcd"]',
        '[["s", "x", -1, "MIT"]]',
        '[["s", "x", true, "MIT"]]',
        "[" * 5000,
    ],
)
def test_a_header_that_says_nothing_readable_is_unknown(header: str) -> None:
    [found] = sources_of(adapter_of("odd", {SOURCES: header}))
    assert (found.pictures, found.licence) == (None, "unknown")


def test_a_header_of_a_stranger_adds_no_lines_and_no_paths() -> None:
    row = ["/home/ada/a.lance", "cats\n# Title", 3, r"C:\Users\ada\LICENSE"]
    [found] = sources_of(adapter_of("a", {SOURCES: json.dumps([row])}))
    assert found == ("a.lance", "cats # Title", 3, "LICENSE")


def test_of_many_sources_the_smallest_are_summed_by_licence() -> None:
    many = [SourceCount("s", f"{i:04}", 10 + i, ("MIT", "CC0-1.0")[i % 2]) for i in range(MOST_NOTED + 4)]
    header = sources_in_header(many)
    found = sources_of(adapter_of("a", header))
    assert found[-2:] == [("", "2 further sources", 11 + 13, "CC0-1.0"), ("", "2 further sources", 22, "MIT")]
    assert sum(one.pictures or 0 for one in found) == sum(one.pictures or 0 for one in many)
    assert sources_of(adapter_of("a", sources_in_header(many[:3]))) == many[:3]
    gone = dataclasses.replace(adapter_of("a", {}), metadata={})
    assert sources_of(gone)[0].pictures is None
