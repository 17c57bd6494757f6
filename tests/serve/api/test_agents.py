"""Agents draw, edit and list through MCP, with the official SDK's own client against a real server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from PIL import Image

from darkroom import sample
from darkroom.serve.api.guard import make_key
from needs import missing
from serve.api.conftest import base64_of
from serve.conftest import Server, difference
from serve.nets import steering


@pytest.fixture(scope="module")
def there(model_folder, adapter_folder, tmp_path_factory):
    """A server with MCP and a key."""
    if find_spec("mcp") is None:
        missing("no mcp here: pip install '.[mcp]'")
    folder = tmp_path_factory.mktemp("agents")
    key = make_key(folder / "keys", "alice")
    options = ("--mcp", "--adapters", str(adapter_folder), "--api-key-file", str(folder / "keys"))
    server = Server(model_folder, folder / "state", *options)
    server.http.headers["Authorization"] = f"Bearer {key}"
    yield server.ready(), key
    server.kill()


def called(there: Any, scenario: Callable[[Any], Awaitable[Any]], key: str | None = None) -> Any:
    """What a scenario gets with the SDK's client."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    server, own = there

    async def whole() -> Any:
        headers = {"Authorization": f"Bearer {own if key is None else key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            transport = streamable_http_client(f"{server.url}/mcp", http_client=http)
            async with Client(transport) as client:
                return await scenario(client)

    return asyncio.run(whole())


def test_the_job_of_an_agent_whose_connection_ends_is_cancelled(there):
    """By the protocol of 2025, in which a call cannot be given up otherwise."""
    server, key = there
    arguments = {"prompt": "a", "num": 16, "steps": 150}
    call = {"name": "draw", "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: {server.url[7:]}\r\nAuthorization: Bearer {key}\r\n"
        "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
        f"MCP-Protocol-Version: 2025-06-18\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    def latest() -> Any:
        return server.http.get("/jobs?limit=1").json()["jobs"][:1]

    earlier = latest()
    host, port = server.url[7:].split(":")
    with socket.create_connection((host, int(port))) as agent:
        agent.sendall((head + body).encode())
        while latest() == earlier or latest()[0]["state"] != "running":
            time.sleep(0.02)
    start = time.monotonic()
    while latest()[0]["state"] == "running":
        assert time.monotonic() - start < 10, "drawn for nobody"
        time.sleep(0.02)
    assert latest()[0]["state"] == "cancelled"


def opened(content: Any) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(content.data)))


def test_agents_draw_and_edit_as_generate_does_and_list_what_there_is(there, small):
    start = steering(3).convert("RGB")

    async def scenario(client: Any) -> Any:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        told = {"prompt": "a horse", "steps": 4, "seed": 5, "guidance": 4.0}
        drawn = await client.call_tool("draw", {**told, "num": 2, "adapters": {"style1": 0.5}})
        edited = await client.call_tool("edit", {**told, "image": base64_of(start), "strength": 0.6})
        listed = await client.call_tool("list_models", {})
        return tools, drawn.content, edited.content, listed.content

    tools, drawn, edited, listed = called(there, scenario)
    assert set(tools) == {"draw", "edit", "list_models"}
    assert tools["draw"].input_schema["required"] == ["prompt"]
    common: dict[str, Any] = {"steps": 4, "seed": 5, "guidance": 4.0, "notice": lambda _: None}
    plain = sample.generate(small, "a horse", **common)[0].image
    [other] = sample.generate(small, "a horse", image=start, strength=0.6, **common)
    assert [one.type for one in drawn] == ["image", "image", "text"]
    assert [one["seed"] for one in json.loads(drawn[-1].text)] == [5, 6]
    assert difference(opened(drawn[0]), plain) >= 3, "the adapter is of effect"
    assert difference(opened(edited[0]), other.image) <= 2
    assert difference(opened(edited[0]), plain) >= 3
    assert "style1" in json.loads(listed[0].text)["adapters"]


def test_what_cannot_be_is_told_to_the_agent_and_strangers_are_kept_out(there):
    async def scenario(client: Any) -> Any:
        wrong = [
            await client.call_tool("draw", {"prompt": "a", "adapters": {"nobody": 1.0}}),
            await client.call_tool("draw", {"prompt": "a", "width": 33}),
            await client.call_tool("edit", {"prompt": "a", "image": "no picture"}),
        ]
        assert all(one.is_error for one in wrong)
        return [one.content[0].text for one in wrong]

    unknown, size, picture = called(there, scenario)
    assert "no adapter 'nobody' here" in unknown
    assert "33" in size
    assert "image" in picture
    server, key = there
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    for given, status in ({}, 401), ({"Authorization": "Bearer wrong"}, 401):
        assert httpx.post(f"{server.url}/mcp", json=body, headers=given).status_code == status
    foreign = {"Authorization": f"Bearer {key}", "Origin": "https://elsewhere.example"}
    assert httpx.post(f"{server.url}/mcp", json=body, headers=foreign).status_code == 403
