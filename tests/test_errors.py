"""What is said of other libraries' errors, and whose fault they are."""

from __future__ import annotations

import pytest
import torch
from pydantic import BaseModel, Field, ValidationError, field_validator

from darkroom import models
from darkroom.errors import InputError, allowed_of, fault_of, first_fault, first_line


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


class Frame(BaseModel):
    """Fields whose mistakes are told in our words or, where there are none, in the library's."""

    width: float = Field(1.0, ge=0.5, le=2)
    side: int = Field(8, multiple_of=8)
    title: str = Field("a", max_length=3)
    other: dict[str, int] = {}

    @field_validator("title")
    @classmethod
    def _plain(cls, title: str) -> str:
        if title == "no":
            raise ValueError("a title that says no")
        return title


@pytest.mark.parametrize(
    ("field", "value", "fault", "allowed"),
    [
        ("width", 0.2, "must be at least 0.5", "at least 0.5"),
        ("width", 3, "must be at most 2", "at most 2"),
        ("width", "wide", "must be a number", "a number"),
        ("side", 9, "must be a multiple of 8", "a multiple of 8"),
        ("side", 8.5, "must be a whole number", "a whole number"),
        ("title", "long", "must have at most 3 characters", "at most 3 characters"),
        ("title", "no", "a title that says no", "a title that says no"),
        ("other", 1, "must be an object with fields", "an object with fields"),
    ],
)
def test_a_mistake_in_a_field_is_told_in_our_words(field, value, fault, allowed):
    with pytest.raises(ValidationError) as caught:
        Frame(**{field: value})
    mistakes = caught.value.errors()
    assert (fault_of(mistakes[0]), allowed_of(mistakes[0])) == (fault, allowed)
    assert first_fault(mistakes) == f"{field}: {fault}"
