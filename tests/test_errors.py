"""What is said of other libraries' errors, and whose fault they are."""

from __future__ import annotations

import pytest
import torch

from darkroom import models
from darkroom.errors import InputError, first_line


def test_the_first_line_of_a_message_that_says_something():
    assert first_line(ValueError("two\nlines")) == "two"
    assert first_line(ValueError("\n  \n below\n")) == "below"
    assert first_line(RuntimeError()) == first_line(RuntimeError("\n")) == "RuntimeError"


def test_a_card_without_memory_is_no_mistake_of_who_names_it(monkeypatch):
    """CUDA makes its context at the first tensor: on a card that others have filled, that fails."""

    def refusing(error):
        def empty(*_, **__):
            raise error

        return empty

    for full in (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory\nmore"),
    ):
        monkeypatch.setattr(torch, "empty", refusing(full))
        with pytest.raises(type(full), match="out of memory"):
            models.device("cpu")
    monkeypatch.setattr(torch, "empty", refusing(AssertionError()))
    with pytest.raises(InputError, match="device 'cpu': AssertionError"):
        models.device("cpu")
    monkeypatch.undo()
    with pytest.raises(InputError, match="device 'colour'"):
        models.device("colour")
