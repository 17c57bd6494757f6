"""Bounds at their very edge: what is allowed is let in, one more is refused with the field's name."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from darkroom import models
from darkroom.serve.engine.tickets import ENLARGE_COST
from darkroom.serve.jobs.active import Rates
from darkroom.serve.jobs.admission import (
    check_controls,
    check_limits,
    check_shape,
    check_texts,
    check_uploads,
    checked_picture,
    new_record,
)
from darkroom.serve.request import MAX_SEED, ControlChoice, ControlUpload, PictureRequest, Refused, Uploads
from darkroom.serve.settings import Limits


def refused(call: Any, *arguments: Any, **more: Any) -> Refused | None:
    try:
        call(*arguments, **more)
    except Refused as error:
        return error
    return None


@pytest.mark.parametrize(
    ("field", "limit", "allowed", "over"),
    [
        ("prompt", {"prompt_chars": 5}, "12345", "123456"),
        ("negative", {"prompt_chars": 5}, "12345", "123456"),
        ("num", {"pictures": 3}, 3, 4),
        ("steps", {"steps": 7}, 7, 8),
        ("guidance", {"guidance": 9.0}, 9.0, 9.1),
        ("width", {"side_pixels": 64}, 64, 72),
        ("height", {"side_pixels": 64}, 64, 72),
        ("previews", {"previews": 2}, 2, 3),
        ("deadline_s", {"deadline_s": 5.0}, 5.0, 5.5),
    ],
)
def test_a_limit_is_what_is_still_allowed(field: str, limit: dict[str, Any], allowed: Any, over: Any) -> None:
    def asked(value: Any) -> PictureRequest:
        return PictureRequest(**{"prompt": "a", field: value})

    assert refused(check_limits, asked(allowed), Limits(**limit)) is None
    error = refused(check_limits, asked(over), Limits(**limit))
    assert error is not None
    assert (error.status, error.param) == (422, field)


@pytest.mark.parametrize("weight", [2.0, -2.0])
def test_an_adapters_weight_has_the_same_bound_on_both_sides(weight: float) -> None:
    def asked(weight: float) -> PictureRequest:
        return PictureRequest.model_validate({"prompt": "a", "adapters": [{"name": "ink", "weight": weight}]})

    limits = Limits(adapter_weight=2.0)
    assert refused(check_limits, asked(weight), limits) is None
    assert refused(check_limits, asked(weight * 1.01), limits) is not None


def test_a_key_has_ten_seconds_worth_and_then_its_even_rate() -> None:
    rates = Rates(per_minute=30)
    assert [refused(rates.take, "a", 0.0) for _ in range(5)] == [None] * 5
    late = refused(rates.take, "a", 0.0)
    assert late is not None
    assert late.retry_after_s == pytest.approx(2.0)
    assert refused(rates.take, "b", 0.0) is None
    # A refusal costs nothing: two seconds later the next is there, and no more than that one.
    assert refused(rates.take, "a", 2.0) is None
    assert refused(rates.take, "a", 2.0) is not None
    assert [refused(rates.take, "a", 1000.0) for _ in range(6)].count(None) == 5


def test_an_upload_may_have_as_many_pixels_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 4)).save(file, "PNG")
    assert checked_picture(file.getvalue(), Limits(upload_pixels=32), "image").size == (8, 4)
    error = refused(checked_picture, file.getvalue(), Limits(upload_pixels=31), "image")
    assert error is not None
    assert (error.status, error.code) == (422, "over_limit")
    error = refused(checked_picture, file.getvalue()[:40], Limits(), "mask")
    assert error is not None
    assert (error.code, error.param) == ("invalid_picture", "mask")

    def without_memory(_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", without_memory)
    with pytest.raises(MemoryError):  # the server's trouble, no 422
        checked_picture(file.getvalue(), Limits(), "image")


def test_steps_and_work_count_both_passes(tmp_path: Path) -> None:
    model = models.create("tiny", parts=("unet", "vae", "text_encoder", "tokenizer"), seed=1)
    hires = {"scale": 2.0, "strength": 1.0, "steps": 6}
    request = PictureRequest.model_validate({"prompt": "a", "steps": 2, "guidance": 1.0, "hires": hires})
    shape = check_shape(model, request, Limits(steps=6))
    assert shape.larger is not None
    assert refused(check_shape, model, request, Limits(steps=4)) is not None
    cost = round(shape.whole_cost)
    assert refused(check_shape, model, request, Limits(work=cost)) is None
    over = refused(check_shape, model, request, Limits(work=cost - 1))
    assert over is not None
    assert over.code == "over_limit"
    both = request.model_copy(update={"num": 2})
    assert refused(check_shape, model, both, Limits(work=cost)) is not None


def test_a_jobs_row_has_the_work_of_all_its_pictures_and_when_it_is_due() -> None:
    """What the servers that share a queue count and bound."""
    model = models.create("tiny", parts=("unet", "vae", "text_encoder", "tokenizer"), seed=1)
    told = {"prompt": "a", "steps": 4, "guidance": 1.0, "num": 3, "deadline_s": 60.0, "priority": "high"}
    request = PictureRequest.model_validate(told)
    shape = check_shape(model, request, Limits())
    began_s = time.time()
    record = new_record("u", "s", "k", "j", "d", request, shape)
    assert (record.num, record.work) == (3, 3 * shape.whole_cost)
    assert record.due_s == record.created_s + 60.0
    assert began_s <= record.created_s <= time.time()
    usual = request.model_copy(update={"num": 1, "deadline_s": None, "priority": "normal"})
    other = new_record("u", "s", "k", "j", "d", usual, shape)
    assert (other.num, other.work, other.due_s) == (1, shape.whole_cost, None)
    assert record.priority > other.priority
    assert (record.state, record.result, record.uid, record.key, record.id) == ("queued", {}, "u", "k", "j")


@pytest.mark.parametrize(("solver", "calls"), [("heun", 13), ("dpmpp_sde", 13), ("pndm", 8), ("euler", 7)])
def test_steps_are_counted_as_they_are_asked_for(small: models.Model, solver: str, calls: int) -> None:
    """A solver of two calls a step may take as many steps as another; its calls count as work."""

    def asked(steps: int, **more: Any) -> PictureRequest:
        told = {"prompt": "a", "steps": steps, "guidance": 1.0, "solver": solver}
        return PictureRequest.model_validate({**told, **more})

    shape = check_shape(small, asked(7), Limits(steps=7))
    assert (shape.steps, shape.cost) == (calls, calls * shape.pixels)
    assert refused(check_shape, small, asked(7), Limits(work=round(shape.whole_cost) - 1)) is not None
    second = {"hires": {"scale": 2.0, "strength": 0.5, "steps": 14}}
    both = check_shape(small, asked(7, **second), Limits(steps=7))
    assert both.larger is not None
    assert both.larger.solver_steps == shape.solver_steps
    for steps, more in ((9, {}), (7, {"hires": {**second["hires"], "steps": 18}})):
        over = refused(check_shape, small, asked(steps, **more), Limits(steps=7))
        assert over is not None
        assert (over.status, over.code, over.param) == (422, "over_limit", "steps")


def test_an_upscaling_network_before_the_second_pass_is_work_too() -> None:
    model = models.create("tiny", parts=("unet", "vae", "text_encoder", "tokenizer"), seed=1)

    def cost(upscaler: str) -> float:
        hires = {"scale": 1.0, "strength": 1.0, "upscaler": upscaler}
        told = {"prompt": "a", "steps": 1, "guidance": 1.0, "width": 64, "height": 64, "hires": hires}
        return check_shape(model, PictureRequest.model_validate(told), Limits()).whole_cost

    assert cost("4x_soft") == cost("lanczos") + ENLARGE_COST * 64 * 64


def test_texts_that_change_at_every_step_are_bounded_together(small: models.Model) -> None:
    def asked(prompts: int, texts: int) -> PictureRequest:
        changing = "[".join(["", *(f"a:b:{i + 1}]" for i in range(texts - 1))])
        prompt = " AND ".join(f"{i} {changing}" for i in range(prompts))
        return PictureRequest(prompt=prompt, weighting="a1111", steps=150, guidance=1.0)

    assert refused(check_texts, small, asked(1, 90)) is None
    error = refused(check_texts, small, asked(16, 40))
    assert error is not None
    assert (error.status, error.param) == (422, "prompt")
    assert "256 parts" in error.message


def test_pictures_of_a_kept_job_that_are_gone_or_changed_are_named() -> None:
    """Nothing else is drawn in their stead."""
    model = models.create("tiny", parts=("unet", "vae", "text_encoder", "tokenizer"), seed=1)
    request = PictureRequest(prompt="a", steps=1, guidance=1.0)
    shape = check_shape(model, request, Limits())
    came = Uploads(b"start", b"mask")
    record = new_record("u", "s", "k", "j", "d", request, shape, came)
    assert refused(check_uploads, record, came) is None
    assert refused(check_uploads, new_record("u", "s", "k", "j", "d", request, shape), came) is None
    for left, named in ((Uploads(b"start", b"MASK"), "mask.*changed"), (Uploads(b"start"), "mask.*gone")):
        with pytest.raises(Refused, match=named) as caught:
            check_uploads(record, left)
        assert (caught.value.status, caught.value.code) == (422, "upload_lost")
    assert refused(check_uploads, record, None) is not None


def test_controls_and_their_pictures_are_of_one_number() -> None:
    model = models.create("tiny", parts=("unet", "vae", "text_encoder", "tokenizer"), seed=1)
    shape = check_shape(model, PictureRequest(prompt="a", steps=1, guidance=1.0), Limits())
    one = (ControlChoice(net="edges"),)
    for controls, pictures in (((), (ControlUpload(b"a"),)), (one, ())):
        request = PictureRequest(prompt="a", steps=1, guidance=1.0, controls=controls)
        over = refused(check_controls, request, Uploads(controls=pictures), Limits(), None, shape)
        assert over is not None
        assert (over.status, over.code, over.param) == (422, "missing_field", "controls")
    plain = PictureRequest(prompt="a", steps=1, guidance=1.0)
    assert refused(check_controls, plain, None, Limits(), None, shape) is None


@pytest.mark.parametrize("name", ["seed", "variation_seed"])
def test_the_last_pictures_seed_may_be_the_largest_and_no_more(small: models.Model, name: str) -> None:
    def asked(seed: int | None, num: int) -> Refused | None:
        told = {"prompt": "a", "steps": 1, "guidance": 1.0, "num": num, name: seed}
        return refused(check_shape, small, PictureRequest.model_validate(told), Limits())

    assert asked(MAX_SEED - 3, 4) is None
    over = asked(MAX_SEED - 2, 4)
    assert over is not None
    assert (over.status, over.code, over.param) == (422, "over_limit", name)
    assert asked(MAX_SEED, 1) is None
    assert asked(None, 4) is None
    assert asked(2**61, 4) is None
