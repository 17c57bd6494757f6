"""The guard and the connections before it, with real sockets: bounds for who has no key, and who may come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from darkroom.cluster.serve import OnRay
from darkroom.cluster.serve import app as app_on_ray
from darkroom.errors import InputError
from darkroom.serve.api.app import OPEN_PATHS, answering, configured
from darkroom.serve.api.guard import Guard, Keys, make_key
from darkroom.serve.metrics import Metrics
from darkroom.serve.settings import Limits

ORIGIN = "https://pictures.example"


class Behind:
    """An application that says who came and how much; at `/held` only when it is let."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.held = threading.Semaphore(0)
        """One more for each that came to `/held`, its body read."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = (await receive())["body"]
        if scope["path"] == "/held":
            self.held.release()
        while scope["path"] == "/held" and not self.open.is_set():
            await asyncio.sleep(0.01)
        told = json.dumps({"key": scope["state"]["key"], "bytes": len(body)}).encode()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(told))],
            }
        )
        await send({"type": "http.response.body", "body": told})


class Listening:
    """A guarded application on loopback, served as `darkroom serve` does."""

    def __init__(self, guard: Any, limits: Limits) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = self._socket.getsockname()
        self._server = uvicorn.Server(configured(guard, limits))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def connect(self, said: bytes = b"") -> socket.socket:
        there = socket.create_connection(self.address, timeout=10)
        there.sendall(said)
        return there

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=10, **more)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def key(tmp_path) -> str:
    return make_key(tmp_path / "keys", "anna")


@pytest.fixture
def guarded(tmp_path, key) -> Iterator[Callable[..., tuple[Listening, Behind]]]:
    """Listens with keys and the limits given."""
    started: list[tuple[Listening, Behind]] = []

    def start(**limits: Any) -> tuple[Listening, Behind]:
        told, behind = Limits(**limits), Behind()
        keys = Keys(tmp_path / "keys")
        guard = Guard(behind, metrics=Metrics(), keys=keys, limits=told, open_paths=OPEN_PATHS)
        started.append((Listening(guard, told), behind))
        return started[-1]

    yield start
    for listening, behind in started:
        behind.open.set()
        listening.close()


def closed_within(there: socket.socket, seconds: float) -> bool:
    """Whether the other side closes the connection without a word."""
    there.settimeout(seconds)
    try:
        return there.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_silent_connections_make_room_and_are_closed(guarded):
    listening, _ = guarded(connections=8, head_s=3)
    silent = [listening.connect() for _ in range(40)]
    assert listening.get("/live").status_code == 200
    left = [one for one in silent if not closed_within(one, 0.05)]
    assert len(left) <= 8, "the others made room"
    assert all(closed_within(one, 6) for one in left)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(guarded):
    listening, _ = guarded(head_s=0.6)
    there = listening.connect(b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: ")
    start = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - start < 5:
            there.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - start < 3


def test_an_idle_connection_is_closed_and_one_in_use_is_not(guarded, key):
    listening, behind = guarded(head_s=0.3, idle_s=1)
    ask = f"GET /held HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n".encode()
    there = listening.connect(ask)
    assert not closed_within(there, 0.8)
    behind.open.set()
    there.settimeout(5)
    assert there.recv(1000).startswith(b"HTTP/1.1 200")
    assert not closed_within(there, 0.5), "kept for the next request"
    assert closed_within(there, 3)


@pytest.mark.parametrize("path", ["/live", "/", "/signed/0/0.png"])
@pytest.mark.parametrize("length", ["Content-Length: 16777216", "Transfer-Encoding: chunked"])
def test_without_a_key_no_body_is_waited_for(guarded, path, length):
    listening, _ = guarded()
    there = listening.connect(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
    there.settimeout(5)
    assert there.recv(1000).startswith(b"HTTP/1.1 413")


def test_bodies_have_one_bound_together(guarded, key):
    listening, behind = guarded(bodies_bytes=100_000)
    headers = {"X-API-Key": key}
    first = threading.Thread(
        target=lambda: httpx.post(f"{listening.url}/held", content=b"x" * 60_000, headers=headers, timeout=20)
    )
    first.start()
    assert behind.held.acquire(timeout=20)
    told = httpx.post(f"{listening.url}/a", content=b"x" * 60_000, headers=headers)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "busy")
    assert int(told.headers["Retry-After"]) >= 1
    assert httpx.post(f"{listening.url}/a", content=b"x" * 30_000, headers=headers).json()["bytes"] == 30_000
    behind.open.set()
    first.join()
    assert httpx.post(f"{listening.url}/a", content=b"x" * 60_000, headers=headers).status_code == 200


def test_requests_under_way_are_bounded_and_health_goes_on(guarded, key):
    listening, behind = guarded(requests=3)
    headers = {"X-API-Key": key}
    ask = f"GET /held HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n".encode()
    held = [listening.connect(ask) for _ in range(3)]
    assert all(behind.held.acquire(timeout=5) for _ in held)
    told = listening.get("/a", headers=headers)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "busy")
    assert listening.get("/live").status_code == 200
    behind.open.set()
    assert all(one.recv(20).startswith(b"HTTP/1.1 200") for one in held)
    assert listening.get("/a", headers=headers).json()["key"] == "anna"


def answer(guard: Any, method: str, path: str, client: str = "127.0.0.1", **headers: str) -> httpx.Response:
    """What a guarded application says to a client of an address."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(guard, client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
            return await asking.request(
                method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
            )

    return asyncio.run(ask())


def test_without_keys_the_peer_counts_and_not_only_the_name_it_says():
    guard = Guard(Behind(), metrics=Metrics(), keys=None, limits=Limits())
    assert answer(guard, "GET", "/jobs").status_code == 200
    assert answer(guard, "GET", "/jobs", "::1").status_code == 200
    assert answer(guard, "GET", "/jobs", host="evil.example").status_code == 403
    told = answer(guard, "GET", "/jobs", "192.0.2.7", host="localhost")
    assert (told.status_code, told.json()["error"]["code"]) == (403, "foreign_address")


def test_on_a_platform_without_keys_only_its_routes_and_health_answer():
    paths = {"open_paths": ("/live",), "platform_paths": ("/health", "/predict")}
    guard = Guard(Behind(), metrics=Metrics(), keys=None, limits=Limits(), **paths)
    for method, path in (("POST", "/predict"), ("GET", "/health"), ("GET", "/live")):
        assert answer(guard, method, path, "192.0.2.7", host="vertex.internal").status_code == 200
    for path in ("/jobs", "/metrics", "/v1/images/generations", "/sdapi/v1/txt2img", "/signed/0/0.png", "/"):
        told = answer(guard, "POST", path, host="localhost")
        assert (told.status_code, told.json()["error"]["code"]) == (403, "closed"), path


def test_pages_of_named_origins_may_ask_and_read_the_answer(tmp_path, key):
    keys = Keys(tmp_path / "keys")
    limits, metrics = Limits(), Metrics()
    guard = Guard(Behind(), metrics=metrics, keys=keys, limits=limits, origins=[ORIGIN])
    asked = answering(guard, [ORIGIN + "/"])
    told = {"access_control_request_method": "PUT", "access_control_request_headers": "authorization"}
    allowed = answer(asked, "OPTIONS", "/jobs/x", origin=ORIGIN, **told)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "PUT" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    read = answer(asked, "GET", "/jobs", origin=ORIGIN, authorization=f"Bearer {key}")
    assert (read.status_code, read.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "Origin" in read.headers["vary"]
    assert answer(asked, "GET", "/jobs", origin=ORIGIN).status_code == 401
    for origin in ("https://evil.example", "null", ORIGIN + ".evil.example"):
        refused = answer(asked, "OPTIONS", "/jobs/x", origin=origin, **told)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        refused = answer(asked, "GET", "/jobs", origin=origin, authorization=f"Bearer {key}")
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)


def test_replicas_on_ray_are_not_deployed_without_keys():
    args = OnRay.model_validate({"settings": {"model": "m", "jobs": "postgresql+psycopg://a@b/c"}})
    with pytest.raises(InputError, match="key_file"):
        app_on_ray(args)


@pytest.mark.parametrize(
    ("client", "keys", "headers", "address"),
    [
        ("127.0.0.1", False, {"host": "localhost:8000"}, "http://localhost:8000"),
        ("127.0.0.1", False, {"host": "[::1]:8000"}, "http://[::1]:8000"),
        ("127.0.0.1", True, {"host": "a.example", "x-forwarded-proto": "https"}, "https://a.example"),
        ("127.0.0.1", True, {"host": "x", "x-forwarded-host": "b.example"}, "http://b.example"),
        ("127.0.0.1", False, {"host": "localhost", "x-forwarded-host": "evil.example"}, "http://localhost"),
        ("127.0.0.1", False, {"host": "localhost", "x-forwarded-host": "own.example"}, "http://own.example"),
        (
            "10.0.0.9",
            True,
            {"host": "a", "x-forwarded-host": "evil", "x-forwarded-proto": "https"},
            "http://a",
        ),
        ("127.0.0.1", True, {"host": "a/b?", "x-forwarded-proto": "javascript"}, "http://127.0.0.1:80"),
        ("127.0.0.1", True, {"host": 'a"><script>'}, "http://127.0.0.1:80"),
    ],
)
def test_the_address_is_the_one_that_the_client_used_as_far_as_it_can_be_trusted(
    tmp_path, key, client, keys, headers, address
):
    told = Keys(tmp_path / "keys") if keys else None
    guard = Guard(Behind(), metrics=Metrics(), keys=told, limits=Limits(), hosts=("own.example",))
    scope = {"client": (client, 1), "scheme": "http", "server": ("127.0.0.1", 80)}
    assert guard._address(scope, headers) == address


def test_a_key_is_added_to_a_file_whose_last_line_an_editor_left_open(tmp_path):
    file = tmp_path / "keys"
    first = make_key(file, "anna")
    file.write_text(file.read_text().rstrip("\n"))
    second = make_key(file, "bert")
    keys = Keys(file)
    assert (keys.name_of(first), keys.name_of(second)) == ("anna", "bert")


def test_one_of_several_keys_leaves_half_of_all_requests_to_the_others(guarded, key, tmp_path):
    other = make_key(tmp_path / "keys", "bert")
    listening, behind = guarded(requests=4)
    ask = f"GET /held HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n\r\n".encode()
    held = [listening.connect(ask) for _ in range(2)]
    for _ in held:
        assert behind.held.acquire(timeout=10)
    told = listening.get("/one-more", headers={"X-API-Key": key})
    assert (told.status_code, told.json()["error"]["code"]) == (429, "too_many_requests")
    assert told.headers["retry-after"] == "5"
    assert listening.get("/its", headers={"X-API-Key": other}).status_code == 200
    behind.open.set()
    for there in held:
        assert there.recv(1000).startswith(b"HTTP/1.1 200")
    assert listening.get("/one-more", headers={"X-API-Key": key}).status_code == 200
