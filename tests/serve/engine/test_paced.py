"""On a card at most two steps are on their way, a step's time is that of the card, and what another stream
makes for a step is there before it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import torch

from darkroom.sample.backends import open_backend
from darkroom.sample.denoise import tensors_in
from darkroom.serve.engine.batch import AHEAD, Between, Paced, places_for
from darkroom.serve.engine.loop import Engine
from darkroom.serve.engine.runner import shape_of
from darkroom.serve.engine.tickets import EngineJob
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import HiresChoice, PictureRequest


class Card:
    """Takes steps one by one, as a card does: a launch returns at once."""

    def __init__(self) -> None:
        self.launched, self.done, self.most = 0, 0, 0
        self._changed = threading.Condition()

    def launch(self) -> None:
        with self._changed:
            self.launched += 1
            self.most = max(self.most, self.launched - self.done)

    def finish(self) -> None:
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def event(self):
        return Mark(self)

    def wait(self, upto: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.done >= upto, 20)


class Mark:
    def __init__(self, card: Card) -> None:
        self._card, self._at = card, 0

    def record(self) -> None:
        self._at = self._card.launched

    def synchronize(self) -> None:
        self._card.wait(self._at)


def most_on_their_way(steps) -> int:
    """Of eight steps that a slow card takes."""
    card = steps[0]
    over = threading.Event()

    def slowly() -> None:
        while not over.is_set():
            time.sleep(0.005)
            if card.done < card.launched:
                card.finish()

    thread = threading.Thread(target=slowly)
    thread.start()
    for _ in range(8):
        steps[1].put(card.launch)
        steps[1].pace()
    over.set()
    thread.join()
    return card.most


def test_two_steps_are_launched_and_no_more():
    card = Card()
    assert most_on_their_way((card, Paced(card.event))) == AHEAD == 2
    unpaced = Card()
    assert most_on_their_way((unpaced, Between())) > 2  # the control


def test_a_cpu_is_not_paced():
    steps, aside = places_for(torch.device("cpu"), 1, 1)
    try:
        assert not isinstance(steps, Paced)
        steps.pace()
    finally:
        aside.close()
        steps.close()


def test_one_thread_calls_an_accelerator_of_one_stream():
    """Metal ends a process whose threads both call it."""
    assert [type(one) for one in places_for(torch.device("mps"), 1, 1)] == [Between, Between]


class Noted(Between):
    """Notes what the engine does, in its order, and the tensors that it takes over."""

    def __init__(self, notes: list[str]) -> None:
        self.notes, self.tensors = notes, []
        self.engine: Engine | None = None

    def put(self, task) -> None:
        self.notes.append("begun")
        task()

    def settle(self) -> None:
        handed = len(self.engine._arrived) + len(self.engine._queue)
        self.notes.append("settled" if not handed else "settled too late")

    def taken(self, tensors) -> None:
        self.notes.append("taken")
        self.tensors += tensors


def test_what_a_task_made_is_settled_before_a_step_may_read_it(small):
    """Text states, and the latents of a second pass: made on a stream of their own, read on the steps'."""
    notes: list[str] = []
    aside, steps = Noted(notes), Between()
    steps.put = lambda task: (notes.append("step"), task())
    backend, over = open_backend("torch", small, optimise="none"), []
    told = {"began": lambda work: None, "drawn": lambda *_: None, "made": over.append}
    listener = SimpleNamespace(**told, failed=lambda work, error: over.append(error))
    engine = Engine(backend.model or small, backend, capacity=4, metrics=Metrics(), places=(steps, aside))
    aside.engine = engine
    request = PictureRequest(prompt="a horse", steps=2, hires=HiresChoice(scale=2, strength=0.5))
    work = EngineJob("a", "key", request, shape_of(small, request), listener)
    engine.submit(work)
    while not over:
        engine._round()
    assert over == [work]
    # Prepared and two steps; made larger, prepared anew, and at half strength one step.
    assert [note for note in notes if note != "begun"] == [
        *("settled", "taken", "step", "step"),
        *("settled", "settled", "taken", "step"),
    ]
    taken = {id(tensor) for tensor in aside.tensors}
    row = work.tickets[0].row
    assert row.negative is not None
    assert {id(row.positive.text_LD), id(row.negative.text_LD)} <= taken


def test_all_tensors_of_a_row_are_found():
    inner = SimpleNamespace(not_a_tensor=torch.zeros(1))
    x, y = torch.zeros(2), torch.zeros(3)
    assert [id(one) for one in tensors_in([x, {"a": (y, None)}, inner, "text"])] == [id(x), id(y)]
