"""Bounds at their very edge: what is allowed is let in, one more is refused with the field's name."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from darkroom import models
from darkroom.models.adapters.bank import Bank
from darkroom.models.upscaler import Upscalers
from darkroom.sample.control import MAPS
from darkroom.serve.engine.adapters import Library
from darkroom.serve.engine.nets import Nets
from darkroom.serve.engine.tickets import ENLARGE_COST, Shape, png_of
from darkroom.serve.jobs.active import Rates
from darkroom.serve.jobs.admission import (
    check_adapters,
    check_controls,
    check_job_id,
    check_limits,
    check_load,
    check_map,
    check_net_names,
    check_shape,
    check_texts,
    check_uploads,
    check_upscaler,
    checked_picture,
    digest_of,
    new_record,
    opened_images,
    served_maps,
    with_tags_read,
)
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import MAX_SEED, ControlChoice, ControlUpload, PictureRequest, Refused, Uploads
from darkroom.serve.settings import KeyLimits, Limits
from sample.conftest import CAPTIONS, SMALL_XL
from serve.nets import steering, write_nets, write_network

TEXTS = ("text_encoder", "tokenizer")
Said = tuple[int, str, str, str | None]


def said(call: Any, *arguments: Any, **more: Any) -> Said | None:
    """Status, code, message and field of a refusal."""
    error = refused(call, *arguments, **more)
    return None if error is None else (error.status, error.code, error.message, error.param)


def asked(**told: Any) -> PictureRequest:
    return PictureRequest.model_validate({"prompt": "a", "steps": 4, "guidance": 1.0, **told})


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


@pytest.mark.parametrize(
    ("shape", "at", "most"),
    [
        (Shape(32, 32, 4, 1), 1.0, "921 pixels, such as 24x24"),
        (Shape(32, 32, 4, 2), 2.0, "921 pixels with guidance, such as 24x24"),
        (Shape(64, 64, 4, 4), 16.0, "3686 pixels with 3 prompts joined by AND, such as 56x56"),
        (Shape(96, 32, 4, 1, nets=2), 6.0, "2765 pixels, such as 48x48"),
    ],
)
def test_a_pictures_load_may_be_the_largest_and_no_more(
    small: models.Model, shape: Shape, at: float, most: str
) -> None:
    """Loads are in pictures of the model's own 32 by 32 pixels; what would do is said."""
    assert said(check_load, small, shape, at) is None
    message = f"size: {shape.width}x{shape.height} is too large for this server; at most {most}"
    assert said(check_load, small, shape, at * 0.9001) == (422, "over_limit", message, "width")
    second = Shape(8, 8, 4, shape.evaluations, larger=shape)
    assert said(check_load, small, second, at) is None
    assert said(check_load, small, second, at * 0.9001) == (422, "over_limit", message, "hires")


def test_a_prompts_texts_may_have_256_parts_together(small: models.Model) -> None:
    def parts(text: int, num: int) -> str:
        return " BREAK ".join([str(text), *"a" * (num - 1)])

    def prompt(last: int) -> PictureRequest:
        """Of 15 times 16 parts and some, and one of nothing against them."""
        texts = [*(parts(i, 16) for i in range(15)), parts(15, last)]
        return asked(prompt=" AND ".join(texts), weighting="a1111")

    assert said(check_texts, small, prompt(15)) is None
    message = "17 texts to encode; allowed: 256 parts of the encoder's length"
    assert said(check_texts, small, prompt(16)) == (422, "over_limit", f"prompt: {message}", "prompt")

    def negative(last: int, steps: int | None = 16) -> PictureRequest:
        """Another text at each of 16 steps, and the prompt of nothing."""
        texts = [*(parts(i, 16) for i in range(15)), parts(15, last)]
        changing = "".join(
            f"[{text}::{i + 1}]" if not i else f"[[{text}::{i + 1}]:{i}]" for i, text in enumerate(texts)
        )
        return asked(negative=changing, weighting="a1111", steps=steps)

    assert said(check_texts, small, negative(16, steps=15)) is None  # the last is never read
    assert said(check_texts, small, negative(15, steps=None)) is None
    assert said(check_texts, small, negative(15)) is None
    assert said(check_texts, small, negative(16)) == (422, "over_limit", f"negative: {message}", "negative")


def test_layers_are_skipped_as_far_as_the_encoder_with_the_fewest_goes() -> None:
    """SDXL's states are of the layer before the last as it is."""
    deep = {"text_encoder": {"num_hidden_layers": 5}}
    wide = models.train_tokenizer(CAPTIONS, vocab_size=600)
    both = {
        **SMALL_XL,
        "text_encoder": {**SMALL_XL["text_encoder"], "num_hidden_layers": 6},
        "text_encoder_2": {**SMALL_XL["text_encoder_2"], "num_hidden_layers": 5},
    }
    xl_parts = ("unet", *TEXTS, "text_encoder_2", "tokenizer_2")
    one = models.create("tiny", parts=TEXTS, overrides=deep, seed=1)
    two = models.create("sdxl", parts=xl_parts, overrides=both, tokenizer=wide, seed=1)
    for model, most in ((one, 4), (two, 3)):
        assert said(check_texts, model, asked(clip_skip=most)) is None
        message = f"clip_skip: at most {most} with this model"
        assert said(check_texts, model, asked(clip_skip=most + 1)) == (
            422,
            "over_limit",
            message,
            "clip_skip",
        )


def test_a_tag_adds_to_what_was_asked_of_its_adapter() -> None:
    def read(
        prompt: str, *adapters: dict[str, Any]
    ) -> list[tuple[str, float, float | None, tuple[float, ...]]]:
        found = with_tags_read(asked(prompt=prompt, adapters=adapters))
        return [(one.name, one.weight, one.text_weight, one.blocks) for one in found.adapters]

    assert read("a <lora:ink>") == [("ink", 1.0, None, ())]
    assert read("a <lora:ink:0.5>") == [("ink", 0.5, None, ())]
    assert read("a <lora:ink:0.5:2>") == [("ink", 2.0, 0.5, ())]
    assert read("a <lora:ink:unet=0.25>") == [("ink", 0.25, 1.0, ())]
    given = {"name": "ink", "weight": 5.0, "text_weight": 0.75}
    assert read("a <lora:ink:0.5:2> <lora:wax:3>", given) == [("ink", 7.0, 1.25, ()), ("wax", 3.0, None, ())]
    assert read("<lora:ink:4> a <lora:ink:2>") == [("ink", 6.0, None, ())]
    blocks = "lbw=1,0.5"
    assert read(f"<lora:ink:4:{blocks}> a <lora:ink:2:{blocks}>") == [("ink", 6.0, None, (1.0, 0.5))]


def test_tags_leave_the_texts_and_mistakes_in_them_are_the_prompts() -> None:
    both = with_tags_read(asked(prompt="a <lora:ink:2> b", negative="c <lora:wax>"))
    assert (both.prompt, both.negative, [one.name for one in both.adapters]) == ("a b", "c", ["ink"])
    assert with_tags_read(asked(negative="<lora:wax>")).negative is None
    assert with_tags_read(asked(prompt="a <lora:ink>", negative="c")).negative == "c"
    plain = asked(negative="")
    assert with_tags_read(plain) is plain
    twice = asked(prompt="a <lora:ink>", adapters=[{"name": "ink"}, {"name": "ink"}])
    assert with_tags_read(twice) is twice
    other = "prompt: <lora:ink> twice with other blocks; name it once"
    wrong = asked(prompt="<lora:ink:1:lbw=1,0> <lora:ink:1:lbw=1,1>")
    assert said(with_tags_read, wrong) == (422, "invalid_value", other, "prompt")
    far = "prompt: <lora:NAME:WEIGHT> with a name, and a weight of -100 to 100"
    assert said(with_tags_read, asked(prompt="<lora:ink:100>")) is None
    for prompt in ("<lora:ink:100.5>", "<lora:ink:60> <lora:ink:40.5>", "<lora:>"):
        assert said(with_tags_read, asked(prompt=prompt)) == (422, "invalid_value", far, "prompt")


def test_an_adapter_that_is_not_there_is_told_from_those_that_are(
    small: models.Model, adapter_folder: Path
) -> None:
    def check(*names: str, known: Any = ("wax", "ink"), library: Any = None, **more: Any) -> Said | None:
        request = asked(adapters=[{"name": name, **more} for name in names])
        return said(check_adapters, request, library, known)

    def no(name: str, allowed: str) -> Said:
        message = f"adapters: no adapter '{name}' here; allowed: {allowed}"
        return 422, "unknown_adapter", message, "adapters"

    assert check() is None
    assert check("ink", "wax") is None
    assert check("tar") == no("tar", "ink, wax")
    assert check("tar", known=()) == no("tar", "none")
    many = [f"a{i:02}" for i in range(21)]
    assert check("tar", known=many[:20]) == no("tar", ", ".join(many[:20]))
    assert check("tar", known=many) == no("tar", ", ".join(many[:20]) + ", ...")
    assert check("t" * 101) == no("t" * 100, "ink, wax")
    twice = (422, "invalid_value", "adapters: each may be named once", "adapters")
    assert check("ink", "wax", "ink") == twice
    library = Library(adapter_folder, Bank(small, slots=1, max_rank=8), Metrics(), lambda: None)
    assert check("style0", known=library.names(), library=library) is None
    wrong = check("style0", known=library.names(), library=library, blocks=[1.0, 0.0])
    assert wrong is not None
    assert (wrong[:2], wrong[3]) == ((422, "unusable_adapter"), "adapters")
    assert wrong[2].startswith("adapters: 2 block weights; allowed: ")


def test_maps_are_known_by_name_and_numbers() -> None:
    served = served_maps()
    assert [one for one in MAPS if one != "canny"] == [one for one in served if one != "canny"]
    for name in (*served, "blur:2.5", "scribble:40"):
        assert said(check_map, name) is None
    allowed = f"allowed here: {', '.join(served)}"
    for name, shown in (("depth", "depth"), ("blur:x", "blur:x"), ("n" * 41, "n" * 40), ("t\u00e9", "t?")):
        message = f"controls: map '{shown}'; {allowed}"
        assert said(check_map, name) == (422, "invalid_value", message, "controls")


def test_a_picture_comes_before_its_mask_and_strength() -> None:
    image, mask = png_of(Image.new("RGB", (8, 4))), png_of(Image.new("L", (4, 2)))
    plain, strong = asked(), asked(strength=0.5)

    def lone(name: str) -> Said:
        return 422, "invalid_value", f"{name}: only with a picture to start from", name

    for uploads in (None, Uploads()):
        assert opened_images(plain, uploads, Limits()) == (None, None)
        assert said(opened_images, strong, uploads, Limits()) == lone("strength")
    assert said(opened_images, plain, Uploads(mask=mask), Limits()) == lone("mask")
    assert said(opened_images, strong, Uploads(mask=mask), Limits()) == lone("strength")
    start, none = opened_images(strong, Uploads(image), Limits())
    assert start is not None
    assert (start.size, none) == ((8, 4), None)
    start, where = opened_images(plain, Uploads(image, mask), Limits())
    assert start is not None
    assert where is not None
    assert (start.size, where.size) == ((8, 4), (4, 2))
    over = (422, "over_limit", "mask: at most 7 pixels", "mask")
    assert said(opened_images, plain, Uploads(image, mask), Limits(upload_pixels=7)) == over
    over = (422, "over_limit", "image: at most 31 pixels", "image")
    assert said(opened_images, plain, Uploads(image, mask), Limits(upload_pixels=31)) == over


@pytest.mark.parametrize(
    ("told", "param"),
    [
        ({"width": 33}, "width"),
        ({"solver": "x"}, "solver"),
        ({"solver": "euler", "eta": 0.5}, "eta"),
        ({"solver": "ddim", "karras": True}, "karras"),
        ({"spacing": "q"}, "spacing"),
        ({"solver": "lcm", "steps": 51}, "steps"),
    ],
)
def test_the_field_that_a_mistake_is_about_is_named(
    small: models.Model, told: dict[str, Any], param: str
) -> None:
    error = refused(check_shape, small, asked(**told), Limits())
    assert error is not None
    assert (error.status, error.code, error.param) == (422, "invalid_value", param)


def test_a_mistake_of_the_models_own_is_about_no_field(small: models.Model) -> None:
    odd = replace(small, scheduler={**small.scheduler, "thresholding": "odd"})
    error = refused(check_shape, odd, asked(), Limits())
    assert error is not None
    assert (error.status, error.code, error.param) == (422, "invalid_value", None)
    assert error.message.startswith("the model's scheduler sets thresholding to odd")


def test_what_goes_with_a_picture_alone_is_refused_without_one(small: models.Model) -> None:
    image, mask = Image.new("RGB", (32, 32)), Image.new("L", (32, 32), 255)
    part = {"only_masked": 4}
    content = {"masked_content": "fill"}
    assert said(check_shape, small, asked(**part), Limits(), image, mask=mask) is None
    assert said(check_shape, small, asked(**content), Limits(), image, mask=mask) is None

    def wrong(message: str, param: str) -> Said:
        return 422, "invalid_value", message, param

    alone = wrong("only_masked without a mask", "mask")
    assert said(check_shape, small, asked(**part), Limits()) == alone
    assert said(check_shape, small, asked(**part), Limits(), image) == alone
    dark = Image.new("L", (32, 32), 0)
    assert said(check_shape, small, asked(), Limits(), image, mask=dark) is None
    nothing = wrong("a mask with nothing white; paint white what is to be drawn anew", "mask")
    assert said(check_shape, small, asked(**part), Limits(), image, mask=dark) == nothing
    other = wrong("a mask of 64x32 for a picture of 32x32; allowed: the same shape", "mask")
    assert said(check_shape, small, asked(), Limits(), image, mask=Image.new("L", (64, 32))) == other
    message = "masked_content: only with a picture and its mask"
    assert said(check_shape, small, asked(**content), Limits(), image) == wrong(message, "masked_content")
    hires = asked(hires={"scale": 2.0})
    assert said(check_shape, small, hires, Limits()) is None
    message = "hires: not with a picture to start from; give a larger size"
    assert said(check_shape, small, hires, Limits(), image) == wrong(message, "hires")


def test_sides_and_work_are_said_with_their_bounds(small: models.Model) -> None:
    hires = asked(hires={"scale": 2.0})
    assert said(check_shape, small, hires, Limits(side_pixels=64)) is None
    over = (422, "over_limit", "size: at most 63 pixels a side", "hires")
    assert said(check_shape, small, hires, Limits(side_pixels=63)) == over
    for side in ({"width": 64, "height": 8}, {"width": 8, "height": 64}):
        assert said(check_shape, small, asked(**side), Limits(side_pixels=64)) is None
        over = (422, "over_limit", "size: at most 63 pixels a side", "width")
        assert said(check_shape, small, asked(**side), Limits(side_pixels=63)) == over
    # 32 x 32 pixels in 4 steps
    start = "pixels x U-Net calls x pictures (guidance counts twice): "
    for num, work, field in ((1, 4096, "width"), (2, 8192, "num")):
        assert said(check_shape, small, asked(num=num), Limits(work=work)) is None
        message = f"{start}{float(work):.4g}, at most {float(work - 1):.4g}"
        assert said(check_shape, small, asked(num=num), Limits(work=work - 1)) == (
            422,
            "over_limit",
            message,
            field,
        )


def test_a_keys_queue_and_day_bound_the_pictures_of_a_job() -> None:
    def most(num: int, **told: Any) -> None:
        limits = Limits(**told)
        assert said(check_limits, asked(num=num), limits, "k") is None
        over = (422, "over_limit", f"num: at most {num} pictures", "num")
        assert said(check_limits, asked(num=num + 1), limits, "k") == over

    most(3, pictures=3, queue=4, queue_per_key=5, pictures_per_day=6)
    most(3, pictures=9, queue=3, queue_per_key=5, pictures_per_day=6)
    most(3, pictures=9, queue=9, queue_per_key=3, pictures_per_day=6)
    most(3, pictures=9, queue=9, queue_per_key=9, pictures_per_day=3)
    most(5, pictures=9, queue=9, queue_per_key=3, keys={"k": KeyLimits(queue=5)})


def test_how_many_adapters_and_nets_and_how_heavy_has_bounds() -> None:
    inks = [{"name": f"ink{i}"} for i in range(3)]
    nets = [{"net": f"edges{i}"} for i in range(3)]
    for name, given in (("adapters", inks), ("controls", nets)):
        assert said(check_limits, asked(**{name: given[:2]}), Limits(**{name: 2})) is None
        over = (422, "over_limit", f"{name}: at most 2 {name}", name)
        assert said(check_limits, asked(**{name: given}), Limits(**{name: 2})) == over
    over = (422, "over_limit", "guidance: at most 9.5", "guidance")
    assert said(check_limits, asked(guidance=9.6), Limits(guidance=9.5)) == over
    heavy = (422, "over_limit", "adapters: weights of -2.5 to 2.5", "adapters")
    for told in ({"weight": 2.5}, {"text_weight": -2.5}, {"blocks": [0.0, 2.5]}):
        some = [{"name": "wax"}, {"name": "ink", **told}]
        assert said(check_limits, asked(adapters=some), Limits(adapter_weight=2.5)) is None
        assert said(check_limits, asked(adapters=some), Limits(adapter_weight=2.49)) == (
            *heavy[:2],
            heavy[2].replace("2.5", "2.49"),
            heavy[3],
        )


@pytest.mark.parametrize(
    ("job_id", "allowed"), [("a", True), ("a-_9", True), ("a" * 64, True), ("a" * 65, False)]
)
def test_a_jobs_id_has_64_characters_at_most(job_id: str, allowed: bool) -> None:
    message = "a job's id is 1 to 64 letters, digits, '-' or '_'"
    assert said(check_job_id, job_id) == (None if allowed else (422, "invalid_id", message, "job_id"))


def test_a_digest_is_of_all_that_was_said_and_stays() -> None:
    """Kept jobs have it in their rows: what is not said of a later field must not count."""
    plain = PictureRequest(prompt="a horse", steps=4, seed=1)
    first = "ba498ef75e533c5dddae9ab09366e914bd63640dcf1a991a46caf04fc4096a52"
    assert digest_of(plain, None) == first
    assert digest_of(plain, None, [plain]) == first
    spelt = '{"prompt": "a horse", "steps": 4, "seed": 1, "variation_strength": 0.0, "hires": null}'
    assert digest_of(PictureRequest.model_validate_json(spelt), None) == first
    steered = plain.model_copy(update={"controls": (ControlChoice(net="edges"),)})
    assert digest_of(steered, None) == "fec0ecef7b2991bff246ee2050725e4df8aa55d37ad2d84c7b396f21b4119d48"
    told: list[dict[str, Any]] = [
        {"hires": {"scale": 2.0}},
        {"model": "other"},
        {"only_masked": 0},
        {"exponential": False},
        {"variation_strength": 0.5},
        {"masked_content": "fill"},
        {"adapters": [{"name": "ink"}]},
        {"adapters": [{"name": "ink", "text_weight": 0.0}]},
        {"adapters": [{"name": "ink", "blocks": [0.0]}]},
        {"controls": [{"net": "edges"}]},
        {"controls": [{"net": "edges", "soft": True}]},
    ]
    others = [PictureRequest.model_validate({**plain.model_dump(), **one}) for one in told]
    digests = [digest_of(one, None) for one in others]
    digests += [digest_of(plain, None, [plain, others[0]]), digest_of(plain, None, [plain, others[1]])]
    digests += [digest_of(plain, Uploads(b"a", b"b")), digest_of(plain, Uploads(b"b", b"a"))]
    digests += [digest_of(plain, Uploads(b"a")), digest_of(plain, Uploads())]
    assert len({first, *digests}) == 1 + len(digests)


@pytest.fixture(scope="module")
def nets(small: models.Model, tmp_path_factory: pytest.TempPathFactory) -> Nets:
    """Those of a folder, of which memory takes two."""
    folder = tmp_path_factory.mktemp("nets")
    write_nets(folder, small, models.create("tiny", seed=1))
    found = Nets(folder, small, torch.device("cpu"), torch.float32, 0, lambda: None)
    found.most_bytes = 2 * 4 * found.describe("edges").num_weights
    return found


def test_nets_and_their_pictures_are_looked_at_one_by_one(small: models.Model, nets: Nets) -> None:
    image, mask = png_of(steering(1)), png_of(Image.new("L", (32, 32), 255))
    fits = Shape(32, 16, 4, 1)

    def check(
        *given: tuple[str, bytes, bytes | None], shape: Shape = fits, limits: Any = None, **more: Any
    ) -> Said | None:
        request = asked(controls=[{"net": net, **more} for net, _, _ in given])
        uploads = Uploads(controls=tuple(ControlUpload(*pictures) for _, *pictures in given))
        return said(check_controls, request, uploads, limits or Limits(), nets, shape)

    def no(code: str, message: str, param: str) -> Said:
        return 422, code, message, param

    edges, face = ("edges", image, None), ("face", image, mask)
    assert check(edges) is None
    assert check(face) is None
    assert check(("face", image, None)) is None
    assert check(edges, ("depth", image, None)) is None
    together = check(edges, ("depth", image, None), ("pose", image, None))
    assert together is not None
    assert (together[:2], together[3]) == ((422, "over_limit"), "controls")
    assert together[2].startswith("controls: edges, depth, pose: ")
    masked = "controls: a mask for controlnet 'edges'; allowed: masks of IP-Adapters and of map inpaint"
    assert check(face, ("edges", image, mask)) == no("unusable_control", masked, "controls.1")
    unread = "no PNG, JPEG or WebP picture that can be read"
    for given, name in ((("face", b"x", mask), "image"), (("face", image, b"x"), "mask")):
        param = f"controls.1.{name}"
        assert check(edges, given) == no("invalid_picture", f"{param}: {unread}", param)
    size, sketch = nets.describe("sketch").size_unit, ("sketch", image, None)
    assert size > 4
    assert check(sketch, shape=Shape(2 * size, size, 4, 1)) is None
    for wide, high in ((size + 4, size), (size, size + 4), (4, 4)):
        message = f"controls: size {wide}x{high} with t2i-adapter 'sketch'"
        over = no(
            "unusable_control",
            f"{message}; allowed: sides that are multiples of {size}",
            "controls.0",
        )
        assert check(sketch, shape=Shape(wide, high, 4, 1)) == over
        assert check(sketch, shape=Shape(size, size, 4, 1, Shape(wide, high, 4, 1))) == over
        assert check(edges, shape=Shape(wide, high, 4, 1)) is None
    foreign = check(edges, ("foreign", image, None))
    assert foreign is not None
    assert (foreign[:2], foreign[3]) == ((422, "unusable_control"), "controls.1")
    message = f"controls: map 'q'; allowed here: {', '.join(served_maps())}"
    assert check(edges, map="q") == no("invalid_value", message, "controls")
    without = said(
        check_controls,
        asked(controls=[{"net": "edges"}]),
        Uploads(controls=(ControlUpload(image),)),
        Limits(),
        None,
        fits,
    )
    assert without == no("unknown_net", "controls: this server has no nets (--controls)", "controls")


def test_nets_of_a_model_that_is_not_loaded_are_known_by_name() -> None:
    request = asked(controls=[{"net": "edges"}, {"net": "n" * 101}])
    assert said(check_net_names, request, ["edges", "n" * 101]) is None
    message = f"controls: no net '{'n' * 100}' here"
    assert said(check_net_names, request, ["edges"]) == (422, "unusable_control", message, "controls")


def test_an_upscaler_is_called_by_its_own_name(tmp_path: Path) -> None:
    write_network(tmp_path / "soft.safetensors")
    upscalers = Upscalers(tmp_path, torch.device("cpu"))

    def check(name: str) -> Said | None:
        return said(check_upscaler, asked(hires={"scale": 2.0, "upscaler": name}), upscalers)

    for name in ("latent", "lanczos", "soft"):
        assert check(name) is None
    assert said(check_upscaler, asked(), upscalers) is None
    for name in ("SOFT", "soft "):
        assert check(name) == (422, "unknown_upscaler", "hires: it is called soft", "hires")
    message = "hires: no upscaler 'hard' here; allowed: soft; or latent, lanczos"
    assert check("hard") == (422, "unknown_upscaler", message, "hires")
