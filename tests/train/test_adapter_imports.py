"""An adapter is put in without torchao, which PEFT imports to see whether a layer's weight is one of its."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
from peft.tuners.lora import torchao as peft_lora

from darkroom import models
from darkroom.models.outline import outlined
from darkroom.recipe.sections import AdapterSettings
from darkroom.train.tasks import lora
from darkroom.train.tasks.lora import add_adapters

SETTINGS = AdapterSettings(targets="qv", rank=2)


class _Imported(Exception):
    """torchao was imported."""


class _Watch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchao is there, and importing it is noticed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "torchao" else None

    def exec_module(self, module: ModuleType) -> None:
        raise _Imported


@pytest.fixture
def _not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not imported torchao, with PEFT as it comes."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Watch(), *sys.meta_path])
    monkeypatch.setattr(peft_lora, "is_torchao_available", lambda: True)


def with_adapters() -> models.Model:
    model = outlined("tiny", ("unet",))
    add_adapters(model, SETTINGS)
    return model


@pytest.mark.usefixtures("_not_imported")
def test_torchao_is_not_imported_for_an_adapter() -> None:
    model = with_adapters()
    assert model.unet is not None
    assert sum(name.endswith("lora_A.default.weight") for name, _ in model.unet.named_parameters()) > 0
    assert "torchao" not in sys.modules


@pytest.mark.usefixtures("_not_imported")
def test_without_that_peft_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_ask_loaded_torchao", lambda: None)
    with pytest.raises(_Imported):
        with_adapters()


def test_where_it_is_loaded_peft_looks_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_lora, "is_torchao_available", lambda: True)
    lora._ask_loaded_torchao()
    lora._ask_loaded_torchao()  # wrapped once
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    assert peft_lora.is_torchao_available()
    monkeypatch.delitem(sys.modules, "torchao")
    assert not peft_lora.is_torchao_available()
