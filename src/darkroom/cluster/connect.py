"""Joining a Ray cluster, the one that is there or one of this machine alone; the token that Ray asks for; and
which of its machines see a store's folder.

A local Ray gets a token of its own, and a cluster that wants one is called with the user's.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import darkroom
from darkroom.cluster.private_ray import (
    logs_folder,
    private,
    quiet,
    read_settings_anew,
    running_cluster,
    stop_log_monitor,
    token,
)
from darkroom.errors import DarkroomError, InputError, MissingExtra, StoreError

if TYPE_CHECKING:
    from darkroom.recipe.sections import DataSettings


LOCAL, AUTO = "local", "auto"
TYPE = "accelerator_type:"  # what Ray calls a node's resource that names its accelerator
NAMESPACE = "darkroom"
REACH_S = 5.0  # how long a cluster may take to answer
TRIES = 5  # at joining, about a second each, where what answers is no Ray; Ray's own 20 take 22 s
# What of the user's environment the workers get too. No secret: Ray shows a job's environment to all who can
# ask it, so credentials belong to the machines (a role, a mounted secret).
CARRIED = (
    *("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "WANDB_MODE"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "GLOO_SOCKET_IFNAME"),
)
CARRIED_BEGIN = ("FI_", "NCCL_")  # the network's own settings


@dataclass(frozen=True)
class Cluster:
    """What a cluster has, when it was looked at."""

    address: str
    nodes: int
    cpus: float
    gpus: float
    accelerators: Mapping[str, int] = field(default_factory=dict)  # nodes by type, as Ray names them
    planned: frozenset[str] = frozenset()  # types that an autoscaler may still bring
    ray: str = ""
    python: str = ""
    local: bool = False  # started for this process alone
    grows: bool = False  # set so: nodes come when they are asked for
    logs: Path | None = None  # where the Ray of this machine writes its logs

    @property
    def may_grow(self) -> bool:
        """Whether nodes that are not there may still come."""
        return self.grows or bool(self.planned)

    def line(self) -> str:
        """One line for the console."""
        kinds = ", ".join(f"{count} x {name}" for name, count in sorted(self.accelerators.items()))
        parts = [f"{self.nodes} nodes" if self.nodes != 1 else "1 node", f"{self.cpus:g} CPUs"]
        parts += [f"{self.gpus:g} GPUs"] if self.gpus else []
        parts += [f"accelerators by node: {kinds}"] if kinds else []
        where = "Ray on this machine" if self.local else f"Ray cluster {self.address}"
        return f"{where}: {', '.join(parts)} (Ray {self.ray})"

    def require(self, accelerator: str | None) -> None:
        """InputError unless a node has this accelerator, or an autoscaler may bring one."""
        if self.grows or accelerator is None or accelerator in {*self.accelerators, *self.planned}:
            return
        there = sorted({*self.accelerators, *self.planned})
        raise InputError(
            f"accelerator '{accelerator}' is not in the cluster",
            allowed=", ".join(there) if there else "none: no node names an accelerator",
            mend="start nodes of that type, ask for another (--accelerator), or say "
            "--wait-for-autoscaler where an autoscaler brings them",
        )

    def waits_for(self, accelerator: str | None) -> str:
        """One line where no node has this accelerator yet; else nothing."""
        if accelerator is None or accelerator in self.accelerators:
            return ""
        return f"waits for nodes of type {accelerator}: none is up"


def require_ray() -> Any:
    """The ray module; MissingExtra where it is not installed."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's own new way, without its warning
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    return ray


@contextmanager
def connected(
    address: str | None = None,
    *,
    accelerator: str | None = None,
    dashboard: bool = False,
    num_cpus: int | None = None,
    grows: bool = False,
) -> Iterator[Cluster]:
    """Within, this process drives a Ray cluster; `ray` may be used.

    `address`: `auto` or HOST:PORT joins the one there is, `local` starts one of this machine (with
    `num_cpus`, and its dashboard on localhost if asked); None takes $RAY_ADDRESS, and without it `local`.
    A connection that is there already is used and left open. InputError where no cluster answers, where
    it has another Ray or Python, or lacks the accelerator, unless it `grows`: an autoscaler brings nodes.
    SIGTERM is as Ctrl-C within, where the caller has no handler of its own.
    """
    ray = require_ray()
    if ray.is_initialized():
        cluster = describe(grows=grows)
        cluster.require(accelerator)
        yield cluster
        return
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    before = signal.getsignal(signal.SIGTERM)
    with ExitStack() as held:
        held.enter_context(quiet())
        if address == LOCAL:
            held.enter_context(local_token())
            start = partial(_start, ray, dashboard=dashboard, num_cpus=num_cpus)
        else:
            address = _checked_address(address)
            held.enter_context(admitted(address))
            start = partial(_join, ray, address)
        held.callback(_take_sigterm, before)
        held.callback(ray.shutdown)
        start()
        _take_sigterm(before if callable(before) else signal.default_int_handler)
        cluster = describe(local=address == LOCAL, grows=grows)
        cluster.require(accelerator)
        yield cluster


@contextmanager
def unless_set(name: str, value: str) -> Iterator[None]:
    """Within, an environment variable that Ray hands on has a value, where the user gave none."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _take_sigterm(handler: Any) -> None:
    """Ray's own answer to it is a dump of the stack and an abort."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _settings() -> dict[str, Any]:
    """Arguments of `ray.init` in both cases."""
    return {
        "runtime_env": {"env_vars": worker_environment()},
        "namespace": NAMESPACE,
        "log_to_driver": False,  # what a job has to say comes through its own console
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }


def _start(ray: Any, *, dashboard: bool, num_cpus: int | None) -> None:
    """A Ray of this machine alone."""
    # Ray would put its workers behind every other process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # It would start as many interpreters as there are CPUs before anything is asked of them.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    more = {"include_dashboard": dashboard, "dashboard_host": "127.0.0.1", "num_cpus": num_cpus}
    try:
        # What Ray collects of each process is for its dashboard.
        with nullcontext() if dashboard else unless_set("REPORTER_UPDATE_INTERVAL_MS", "3600000"):
            # It takes an address from the environment even where none is asked for.
            ray.init(address=LOCAL, **_settings(), **more)
    except Exception as error:  # Ray has no class of its own for this
        if (too_slow := _too_slow(error)) is None:
            raise
        raise too_slow from error
    stop_log_monitor()  # nobody reads what it would bring


def _join(ray: Any, address: str) -> None:
    try:
        with unless_set("RAY_gcs_server_port_wait_time_s", str(TRIES)):
            ray.init(address=address, **_settings())
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise _refused(ray, address, error) from error


def _too_slow(error: Exception) -> DarkroomError | None:
    """What a start that took longer than Ray allows is called, in one line; None for any other error."""
    message = " ".join(str(error).split())
    if "timed out" not in message.lower():
        return None
    return DarkroomError(
        f"Ray did not start on this machine within the time that it allows itself ({message[:100]}); is the "
        "machine busy, or short of memory? Start again, or start Ray once with 'ray start --head' and give "
        "--ray-address auto"
    )


def _checked_address(given: str) -> str:
    """HOST:PORT of a cluster that answers; InputError for an address of another kind, or where none does."""
    mend = "start one with 'ray start --head', give --ray-address HOST:6379, or local for this machine alone"
    address = given
    if given == AUTO:
        try:
            address = running_cluster() or ""
        except (ConnectionError, ValueError):  # an address in the environment that is none
            address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise InputError("there is no Ray cluster on this machine", mend=mend)
    if "://" in address:
        raise InputError(
            f"Ray address '{address}'",
            allowed="auto, local, HOST:PORT",
            mend="run the command on the cluster itself, or with 'ray job submit'",
        )
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise InputError(f"Ray address '{address}'", allowed="auto, local, HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster answers at {address} ({error})", mend=mend) from None
    return address


def _refused(ray: Any, address: str, error: Exception) -> InputError:
    """Why a cluster could not be joined, in one line."""
    message = str(error)
    if "ersion mismatch" in message:
        theirs = [line.split(":", 1)[1].strip() for line in message.splitlines() if line.startswith("    ")]
        other = f"Ray {theirs[0]} and Python {theirs[1]}" if len(theirs) >= 2 else "another Ray or Python"
        mine = ".".join(map(str, sys.version_info[:3]))
        return InputError(
            f"the Ray cluster at {address} runs {other}, "
            f"this machine Ray {ray.__version__} and Python {mine}",
            mend="install the same on both",
        )
    first = " ".join(message.split())[:200]
    return InputError(
        f"the Ray cluster at {address} cannot be joined from this machine ({first})",
        mend=f"run the command on one of its machines, or make this one one: ray start --address {address}",
    )


def describe(*, local: bool = False, grows: bool = False) -> Cluster:
    """The cluster that this process is connected to."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    total: dict[str, float] = {}
    accelerators: dict[str, int] = {}
    for node in alive:
        for name, amount in node["Resources"].items():
            total[name] = total.get(name, 0.0) + amount
            if name.startswith(TYPE):
                accelerators[name.removeprefix(TYPE)] = accelerators.get(name.removeprefix(TYPE), 0) + 1
    return Cluster(
        address=ray.get_runtime_context().gcs_address,
        nodes=len(alive),
        cpus=total.get("CPU", 0.0),
        gpus=total.get("GPU", 0.0),
        accelerators=accelerators,
        planned=_planned(),
        ray=ray.__version__,
        python=".".join(map(str, sys.version_info[:3])),
        local=local,
        grows=grows,
        logs=logs_folder(),
    )


def _planned() -> frozenset[str]:
    """Accelerators of the node groups that an autoscaler may start, where it has reported them to Ray.

    None of open-source Ray's autoscalers does: there `grows` says it.
    """
    config = private("cluster_config")()
    groups = config.node_group_configs if config is not None else ()
    return frozenset(
        name.removeprefix(TYPE)
        for group in groups
        if group.max_count
        for name in group.resources
        if name.startswith(TYPE)
    )


def worker_environment() -> dict[str, str]:
    """The variables that a worker starts with, wherever it is.

    `GOMP_SPINCOUNT` as darkroom sets it before torch is imported; PYTHONPATH so that a checkout that is not
    installed is found on machines that share the folder (elsewhere the path means nothing).
    """
    own = str(Path(darkroom.__file__).resolve().parents[1])
    paths = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    carried = {
        name: value for name, value in os.environ.items() if name in CARRIED or name.startswith(CARRIED_BEGIN)
    }
    return {"GOMP_SPINCOUNT": "10000", **carried, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


# ---- the token

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
    with _environment(**brings):
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
        with _environment():
            yield
        return
    if mode not in ("", "token"):
        raise InputError(f"{cluster} wants a token, and {MODE}={os.environ[MODE]}", mend=f"set {MODE}=token")
    bearer = _users_token()
    if not bearer:
        raise InputError(f"{cluster} wants a token, and there is none here", mend=MEND)
    if refuses(address, bearer):
        raise InputError(f"{cluster} refuses the token from {_where()}", mend=MEND)
    with _environment(**{MODE: "token"}):
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
def _environment(**brings: str) -> Iterator[None]:
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


# ---- the capacity of a cluster's nodes, and the message of a job that waits for more

WAIT_SAID_S = 15.0  # how often it is said that a job waits


@dataclass(frozen=True)
class Capacity:
    """What the nodes that workers may go to have: (CPUs, GPUs) of each."""

    nodes: tuple[tuple[float, float], ...]
    grows: bool = False  # more nodes come when they are asked for
    local: bool = False  # of a Ray that was started here and ends with the job

    @property
    def cpus(self) -> float:
        """Of all nodes."""
        return sum(cpus for cpus, _ in self.nodes)

    @property
    def gpus(self) -> float:
        """Of all nodes."""
        return sum(gpus for _, gpus in self.nodes)

    def holds(self, cpus: float, gpus: float) -> int:
        """How many workers of so many CPUs and GPUs fit, each whole on one node."""
        return sum(int(min(has[0] // cpus, has[1] // gpus if gpus else has[0] // cpus)) for has in self.nodes)

    @property
    def largest(self) -> str:
        """The node with the most GPUs, then CPUs, as words."""
        cpus, gpus = max(self.nodes, key=lambda has: has[::-1], default=(0.0, 0.0))
        return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def resources_of_nodes() -> list[dict[str, float]]:
    """What each node that lives has."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def capacity_of(cluster: Cluster, accelerator: str | None) -> Capacity:
    """The nodes that live, of a type where one is asked for."""
    fit = [has for has in resources_of_nodes() if accelerator is None or f"{TYPE}{accelerator}" in has]
    return Capacity(
        tuple((has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in fit), cluster.may_grow, cluster.local
    )


def waiting(what: str, cpus: float, gpus: float, accelerator: str | None) -> str:
    """That a job waits for workers or encoders: what each needs, and what is free on nodes of the type."""
    import ray

    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    fit = {node: has for node, has in nodes.items() if accelerator is None or f"{TYPE}{accelerator}" in has}
    left = private("free_by_node")()
    asked = {kind: amount for kind, amount in (("GPU", gpus), ("CPU", cpus)) if amount}
    needs = [f"{amount:g} {kind}s" for kind, amount in asked.items()]
    free = [
        f"{sum(left.get(node, {}).get(kind, 0) for node in fit):g} of "
        f"{sum(has.get(kind, 0) for has in fit.values()):g} {kind}s"
        for kind in asked
    ]
    if not asked:
        return f"waiting for {what} to start, which share this machine's CPUs with all else"
    of = f" on a node of type {accelerator} ({len(fit)} up)" if accelerator is not None else ""
    return f"waiting for {what} to start: each needs {' and '.join(needs)}{of}; free: {', '.join(free)}"


# ---- stores: nodes are asked before the work, and workers look where they run

ANSWER_S = 30.0  # how long all nodes together may take to answer
NAMED = 3  # machines that a line names


def stores_here(data: DataSettings) -> list[str]:
    """The folders of a recipe's stores that this machine sees, which others must see too."""
    stores = [data.store, *(one.store for one in data.stores)]
    return [str(Path(store).absolute()) for store in stores if store and Path(store).is_dir()]


def check_here(store: str) -> None:
    """StoreError where a store's folder is not on this machine."""
    if host := blind(store):
        raise _unseen(store, [host])


def blind(store: str) -> str:
    """This machine's name where a store's folder is not on it; else nothing."""
    return "" if "://" in store or Path(store).is_dir() else socket.gethostname()


def check_nodes(store: str, say: Callable[[str], None], *, answer_s: float = ANSWER_S) -> None:
    """StoreError where a store's folder is not on every node that may take work: one that has CPUs.

    The tasks that look take no CPU, so busy nodes answer too. Those that do not in time are said, and left to
    their first block. The driver's own node is not asked.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = {_look(store, node): node["NodeManagerHostname"] for node in nodes if node["NodeID"] != here}
    answers, silent = _answers(asked, answer_s)
    if without := sorted({*filter(None, answers)}):
        raise _unseen(store, without)
    if silent:
        say(f"{_named(sorted({*silent}))} did not tell within {answer_s:g} s whether {store} is there")


def _look(store: str, node: dict[str, Any]) -> Any:
    import ray

    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(blind).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(store)


def _answers(asked: dict[Any, str], answer_s: float) -> tuple[list[str], list[str]]:
    """What the nodes reported, and the names of those that reported nothing."""
    import ray

    if not asked:
        return [], []
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=answer_s)
    answers, silent = [], [asked[ref] for ref in late]
    for ref in late:
        ray.cancel(ref, force=True)
    for ref in done:
        try:
            answers.append(ray.get(ref))
        except ray.exceptions.RayError:  # the node went, or cannot start a worker: blocks tell why
            silent.append(asked[ref])
    return answers, silent


def _unseen(store: str, hosts: Sequence[str]) -> StoreError:
    return StoreError(
        f"{store} is not on {_named(hosts)}",
        mend="keep the store in a folder that every node mounts at the same place",
    )


def _named(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else ""
    return f"the machine{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:NAMED])}{more}"
