"""OpenAI's own client against a real server."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import httpx
import openai
import pytest
from PIL import Image

from darkroom import sample
from serve.conftest import Server, difference

QUICK = {"num_inference_steps": 4, "seed": 5}


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory) -> Iterator[Server]:
    started = Server(model_folder, tmp_path_factory.mktemp("openai") / "state")
    yield started.ready()
    started.kill()


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def image(b64: str | None) -> Image.Image:
    assert b64 is not None
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def test_pictures_are_those_that_generate_makes(client, small):
    made = client.images.generate(prompt="a horse", n=2, size="32x32", model="small", extra_body=QUICK)
    lone = sample.generate(small, "a horse", steps=4, seed=5, num=2, optimise="none", notice=lambda _: None)
    assert (made.size, made.output_format) == ("32x32", "png")
    for one, other in zip(made.data, lone, strict=True):
        assert difference(image(one.b64_json), other.image) <= 1


def test_a_url_leads_to_the_picture_from_anywhere(client, small):
    made = client.images.generate(prompt="a horse", n=2, response_format="url", extra_body=QUICK)
    lone = sample.generate(small, "a horse", steps=4, seed=5, num=2, optimise="none", notice=lambda _: None)
    for one, other in zip(made.data, lone, strict=True):
        assert one.b64_json is None
        found = httpx.get(one.url)  # as it stands: nothing is known of the server
        assert difference(Image.open(io.BytesIO(found.content)), other.image) <= 1


def test_formats(client):
    for name in ("jpeg", "webp"):
        made = client.images.generate(
            prompt="a horse", output_format=name, output_compression=50, extra_body=QUICK
        )
        assert image(made.data[0].b64_json).format == name.upper()


def test_partial_pictures_come_before_the_whole_one(client):
    stream = client.images.generate(
        prompt="a horse", stream=True, partial_images=2, extra_body={**QUICK, "num_inference_steps": 12}
    )
    events = list(stream)
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    first, last = image(events[0].b64_json), image(events[-1].b64_json)
    assert first.size == last.size == (32, 32)
    assert difference(first, last) >= 3
    assert events[-1].usage.total_tokens == 0


def test_edits_start_from_a_picture(client, small):
    start = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    mask = Image.new("RGBA", (32, 32), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 16, 32))  # what is transparent is painted anew
    files = []
    for one in (start, mask):
        buffer = io.BytesIO()
        one.save(buffer, "PNG")
        files.append(("picture.png", buffer.getvalue(), "image/png"))
    made = client.images.edit(image=files[0], prompt="a horse", extra_body={**QUICK, "strength": 0.8})
    told = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None, "strength": 0.8}
    lone = sample.generate(small, "a horse", image=start, **told)[0]
    assert difference(image(made.data[0].b64_json), lone.image) <= 1
    masked = client.images.edit(image=files[0], mask=files[1], prompt="a horse", extra_body=QUICK)
    painted = image(masked.data[0].b64_json).convert("RGB")
    assert difference(painted.crop((20, 0, 32, 32)), start.crop((20, 0, 32, 32))) <= 12
    assert difference(painted.crop((0, 0, 12, 32)), start.crop((0, 0, 12, 32))) >= 10


def test_variations_start_from_a_picture_and_need_no_prompt(client, small):
    start = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    buffer = io.BytesIO()
    start.save(buffer, "PNG")
    more = {**QUICK, "strength": 0.6}
    made = client.images.create_variation(image=buffer.getvalue(), n=2, size="32x32", extra_body=more)
    told = {"steps": 4, "seed": 5, "optimise": "none", "notice": lambda _: None, "num": 2}
    lone = sample.generate(small, "", image=start, strength=0.6, **told)
    plain = sample.generate(small, "", image=start, strength=0.9, **told)
    for one, other, away in zip(made.data, lone, plain, strict=True):
        assert difference(image(one.b64_json), other.image) <= 1
        assert difference(image(one.b64_json), away.image) >= 3
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.create_variation(image=b"no picture", extra_body=QUICK)
    assert caught.value.param == "image"


def test_further_pictures_need_a_net_that_shows_them(client):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    with pytest.raises(openai.BadRequestError, match="IP-Adapter") as caught:
        client.images.edit(image=[buffer.getvalue()] * 2, prompt="a horse", extra_body=QUICK)
    assert caught.value.param == "image"
    with pytest.raises(openai.BadRequestError, match="at most"):
        client.images.edit(image=[buffer.getvalue()] * 9, prompt="a horse", extra_body=QUICK)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "darkroom"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


@pytest.mark.parametrize(
    ("given", "error", "param"),
    [
        ({"model": "large"}, openai.NotFoundError, "model"),
        ({"size": "33x32"}, openai.BadRequestError, "width"),
        ({"size": "big"}, openai.BadRequestError, "size"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"extra_body": {"lora_path": "/x"}}, openai.BadRequestError, "lora_path"),
        ({"extra_body": {"guidance_scale": "7"}}, openai.BadRequestError, "guidance_scale"),
    ],
)
def test_mistakes_are_errors_the_client_knows(client, given, error, param):
    with pytest.raises(error) as caught:
        client.images.generate(prompt="a horse", **given)
    assert caught.value.param == param
    assert caught.value.type
