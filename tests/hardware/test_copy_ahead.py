"""Sets of tensors sent ahead: copied once, waited for, never taken for another set."""

from __future__ import annotations

import pytest
import torch

from clocked_streams import CPU, Clocked
from darkroom.hardware import accelerator
from darkroom.hardware.copy_ahead import CopyAhead


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    made = Clocked()
    monkeypatch.setattr(accelerator, "new_stream", lambda device: made.copying)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: made.current)
    return made


ONE, OTHER = ({"weight": torch.full((4,), value), "bias": torch.full((2,), value)} for value in (1.0, 2.0))


def test_what_was_sent_is_what_arrives_and_is_copied_once(clocked: Clocked) -> None:
    copies = CopyAhead(CPU)
    with clocked:
        copies.send("one", ONE)
        assert clocked.copies == 2
        arrived = copies.arrive("one", ONE)
        assert (arrived["weight"] + arrived["bias"].sum()).tolist() == [3.0] * 4
    assert clocked.copies == 2
    assert clocked.wrong == []
    assert all(arrived[name] is not ONE[name] for name in ONE)


def test_another_set_than_was_sent_is_copied_then(clocked: Clocked) -> None:
    copies = CopyAhead(CPU)
    with clocked:
        copies.send("one", ONE)
        arrived = copies.arrive("other", OTHER)
        assert (arrived["weight"] * 2).tolist() == [4.0] * 4
        again = copies.arrive("other", OTHER)  # nothing was sent
        assert (again["weight"] * 2).tolist() == [4.0] * 4
    assert clocked.copies == 6
    assert clocked.wrong == []


def test_what_is_read_without_asking_is_seen(clocked: Clocked) -> None:
    """The control."""
    copies = CopyAhead(CPU)
    with clocked:
        copies.send("one", ONE)
        assert copies._sent is not None
        copies._sent.tensors["weight"] + 1
    assert any("before its weights are there" in one for one in clocked.wrong)


def test_a_device_of_one_stream_copies_when_asked() -> None:
    copies = CopyAhead(CPU)
    copies.send("one", ONE)
    assert copies._sent is None
    assert torch.equal(copies.arrive("other", OTHER)["weight"], OTHER["weight"])
