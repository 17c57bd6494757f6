"""Ray's token, against a server that answers as a cluster with one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKEN, OTHER = "ab" * 32, "cd" * 32
SCRIPT = """
import json, os, socket, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from darkroom.cluster import connect
from darkroom.cluster.connect import admitted, local_token, refuses
from darkroom.cluster.private_ray import token
from darkroom.errors import InputError

class Cluster(grpc.GenericRpcHandler):
    def service(self, details):
        bearer = dict(details.invocation_metadata).get("authorization")
        def answer(request, context):
            if bearer != "Bearer " + sys.argv[1]:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid or missing authentication token")
            return b""
        return grpc.unary_unary_rpc_method_handler(answer)

def joining(**given):
    os.environ.update(given)
    try:
        with admitted(address):
            found = [os.environ.get("RAY_AUTH_MODE"), token()]
    except InputError as error:
        found = str(error).replace(address, "HERE")
    told = [found, {name: os.environ[name] for name in os.environ if name.startswith("RAY_AUTH")}]
    for name in given:
        del os.environ[name]
    return told

def local():
    with local_token():
        return [os.environ.get("RAY_AUTH_MODE"), token()]

server = grpc.server(ThreadPoolExecutor(2), handlers=[Cluster()])
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
told = {"stranger": refuses(address), "bearer": refuses(address, sys.argv[1]), "none": joining()}
told["local"] = [local(), local()]
told["variable"] = joining(RAY_AUTH_TOKEN=sys.argv[1])
told["wrong"] = joining(RAY_AUTH_TOKEN=sys.argv[2])
told["disabled"] = joining(RAY_AUTH_TOKEN=sys.argv[1], RAY_AUTH_MODE="disabled")
told["no file"] = joining(RAY_AUTH_TOKEN_PATH="/nonexistent")
told["home before"] = os.listdir(Path.home())
(Path.home() / ".ray").mkdir()
(Path.home() / ".ray" / "auth_token").write_text(sys.argv[1])
told["home"] = joining()
told["local with home"] = local()
server.stop(None).wait()
told["gone"] = refuses(address)
connect.STRANGER_S = 0.5
silent = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{silent.getsockname()[1]}"
told["silent"] = joining()[0]
told["tls"] = joining(RAY_USE_TLS="1")[0]
web = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
threading.Thread(target=web.serve_forever, daemon=True).start()
address = f"127.0.0.1:{web.server_port}"
told["web"] = joining()[0]
other = grpc.server(ThreadPoolExecutor(2))  # with no service of Ray's
address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
other.start()
told["grpc"] = joining()[0]
other.stop(None).wait()
print(json.dumps(told))
"""


def test_a_cluster_that_wants_a_token_gets_the_users_or_says_so(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, TOKEN, OTHER],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | {"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["stranger"], told["bearer"], told["gone"]) == (True, False, None)
    assert told["silent"].startswith("something listens at HERE and does not answer within 0.5 s: no Ray")
    assert told["web"].startswith("something listens at HERE and does not answer")
    assert told["grpc"].startswith("something listens at HERE and does not answer as one: no Ray cluster")
    assert told["tls"][1] == TOKEN, "asked without TLS, which it may want"
    mend = "put the cluster's token into ~/.ray/auth_token, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    assert told["none"] == [f"the Ray cluster at HERE wants a token, and there is none here; {mend}", {}]
    assert told["variable"] == [["token", TOKEN], {"RAY_AUTH_TOKEN": TOKEN}]
    assert told["wrong"][0] == f"the Ray cluster at HERE refuses the token from $RAY_AUTH_TOKEN; {mend}"
    assert "wants a token, and RAY_AUTH_MODE=disabled; set RAY_AUTH_MODE=token" in told["disabled"][0]
    assert (
        "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nonexistent" in told["no file"][0]
    )
    assert told["home"] == [["token", TOKEN], {}]
    (mode, first), (_, second) = told["local"]
    assert mode == "token"
    assert len(first) == len(second) == 64
    assert first != second
    assert told["home before"] == []
    assert told["local with home"][1] == TOKEN  # 'ray status' of the same user may look
