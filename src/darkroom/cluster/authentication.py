"""Ray's token: a local Ray gets one of its own, and a cluster that wants one is called with the user's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from darkroom.cluster.private_ray import read_settings_anew, token
from darkroom.errors import InputError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
STRANGER_S = 6.0
"""So long a cluster may take to answer; `ray.init` would wait for most of a minute."""
MEND = f"put the cluster's token into ~/.ray/auth_token, or set {TOKEN} or {TOKEN_PATH}"


def refuses(address: str, bearer: str = "") -> bool | None:
    """Whether a cluster refuses a call that brings this token, or none; None where it cannot be asked."""
    answer = _answer_to(address, bearer)
    return answer == "UNAUTHENTICATED" if answer in ("OK", "UNAUTHENTICATED") else None


def _answer_to(address: str, bearer: str) -> str:
    """The name of gRPC's status; empty where there is no gRPC."""
    try:
        import grpc  # type: ignore[import-untyped]
    except ImportError:
        return ""
    call = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
    metadata = [("authorization", f"Bearer {bearer}")] if bearer else None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(call)(b"", timeout=STRANGER_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _check_answers(address: str, answer: str) -> None:
    """InputError where something listens that is no cluster, or one that hangs. One that wants TLS cannot be
    asked in this way."""
    tls = os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true")
    if answer in ("DEADLINE_EXCEEDED", "UNAVAILABLE", "UNIMPLEMENTED") and not tls:
        why = f"within {STRANGER_S:g} s" if answer == "DEADLINE_EXCEEDED" else "as one"
        raise InputError(
            f"something listens at {address} and does not answer {why}: no Ray cluster, or one that hangs",
            mend="look at it with 'ray status', or give another --ray-address",
        )


@contextmanager
def local_token() -> Iterator[None]:
    """Within, a Ray that is started here has a token, and what Ray keeps of it is forgotten afterwards.

    Ray turns token authentication on for a cluster that `ray.init` starts and, where the user has no token,
    writes one into the home. Every cluster of this user would want it from then on, so this process brings
    one of its own that is written nowhere. RAY_AUTH_MODE=disabled is left as it is.
    """
    brings = {} if os.environ.get(MODE, "token").lower() != "token" or _users_token() else _own()
    with _settings(**brings):
        yield


@contextmanager
def admitted(address: str) -> Iterator[None]:
    """Within, this process may call the cluster at HOST:PORT. InputError where that wants another token."""
    cluster, mode = f"the Ray cluster at {address}", os.environ.get(MODE, "").lower()
    answer = _answer_to(address, "")
    _check_answers(address, answer)
    if answer != "UNAUTHENTICATED":
        if mode == "token" and not _users_token():
            raise InputError(f"{MODE}=token, and there is no token here", mend=f"{MEND}, or unset {MODE}")
        with _settings():
            yield
        return
    if mode not in ("", "token"):
        raise InputError(f"{cluster} wants a token, and {MODE}={os.environ[MODE]}", mend=f"set {MODE}=token")
    bearer = _users_token()
    if not bearer:
        raise InputError(f"{cluster} wants a token, and there is none here", mend=MEND)
    if refuses(address, bearer):
        raise InputError(f"{cluster} refuses the token from {_where()}", mend=MEND)
    with _settings(**{MODE: "token"}):
        yield


def _own() -> dict[str, str]:
    return {MODE: "token", TOKEN: secrets.token_hex(32)}


def _users_token() -> str:
    """The user's token as Ray finds it; InputError where a file that is named has none."""
    import ray

    read_settings_anew()
    try:
        return token()
    except ray.exceptions.AuthenticationError as error:
        raise InputError(f"{error.message}", mend=MEND) from None


def _where() -> str:
    """Where the user's token is, in the order in which Ray looks."""
    if os.environ.get(TOKEN):
        return f"${TOKEN}"
    return os.environ.get(TOKEN_PATH) or "~/.ray/auth_token"


@contextmanager
def _settings(**brings: str) -> Iterator[None]:
    """Within, these variables are set; Ray sets the mode too, so afterwards both are as they were."""
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    os.environ.update(brings)
    read_settings_anew()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        read_settings_anew()
