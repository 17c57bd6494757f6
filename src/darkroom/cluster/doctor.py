"""What is in order on a Ray cluster and what is not, each with the line that mends it.

`Probe` runs on the nodes and imports no torch there where there is no GPU.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darkroom.cluster.connect import TYPE, Cluster, connected, refuses
from darkroom.errors import InputError, MissingExtra
from darkroom.hardware.machine import Check
from darkroom.hardware.system import forget_cached

CHUNK_BYTES = 1 << 20
ACCEPT_S = 10.0
COMPARED = ("python", "darkroom", "ray", "torch", "diffusers", "transformers", "pylance", "pyarrow", "numpy")


@dataclass(frozen=True)
class About:
    """A node as its own processes see it."""

    host: str
    versions: dict[str, str]
    gpus: tuple[str, ...]  # names, as torch sees them
    cwd_seen: bool  # whether the driver's folder is there


class Probe:
    """An actor on a node."""

    def __init__(self) -> None:
        self._received = 0
        self._times: list[float] = []
        self._server: socket.socket | None = None

    def about(self, folder: str, counted: int) -> About:
        """What runs here. Imports torch, which takes a while, where there are GPUs or Ray counts some."""
        import darkroom
        from darkroom.hardware.machine import versions

        found = versions()
        found["darkroom"] = darkroom.__version__
        return About(
            host=socket.gethostname(),
            versions={name: found.get(name, "missing") for name in COMPARED},
            gpus=_gpus() if counted or _may_have_gpus() else (),
            cwd_seen=Path(folder).is_dir(),
        )

    def now(self) -> float:
        """This node's clock, in seconds since 1970."""
        return time.time()

    # ---- the network

    def listen(self, streams: int, token: bytes) -> int:
        """Take what comes over so many connections that begin with the token, and count it; the port."""
        self._received, self._times = 0, []
        self._server = socket.create_server(("", 0), backlog=streams)
        self._server.settimeout(ACCEPT_S)
        threading.Thread(target=self._accept, args=(self._server, streams, token), daemon=True).start()
        return int(self._server.getsockname()[1])

    def _accept(self, server: socket.socket, streams: int, token: bytes) -> None:
        with server, suppress(OSError):
            while streams:
                connection, _ = server.accept()
                connection.settimeout(ACCEPT_S)
                if connection.recv(len(token), socket.MSG_WAITALL) == token:
                    streams -= 1
                    threading.Thread(target=self._drain, args=(connection,), daemon=True).start()

    def _drain(self, connection: socket.socket) -> None:
        buffer, total = bytearray(CHUNK_BYTES), 0
        began = time.perf_counter()
        with connection, suppress(OSError):
            while count := connection.recv_into(buffer):
                total += count
        self._received += total
        self._times += [began, time.perf_counter()]

    def send(self, host: str, port: int, seconds: float, streams: int, token: bytes) -> str:
        """Send for so long; nothing, or why it could not be."""
        try:
            connections = [socket.create_connection((host, port), ACCEPT_S) for _ in range(streams)]
        except OSError as error:
            return str(error)
        until = time.perf_counter() + seconds
        threads = [threading.Thread(target=_pour, args=(one, until, token)) for one in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ""

    def received(self, streams: int) -> float:
        """Bytes a second that came in by all connections, from the first byte to the last."""
        until = time.perf_counter() + ACCEPT_S
        while len(self._times) < 2 * streams and time.perf_counter() < until:
            time.sleep(0.01)
        if len(self._times) < 2 * streams:
            return 0.0
        return self._received / (max(self._times) - min(self._times))

    # ---- storage

    def write(self, storage: str, name: str, size_bytes: int) -> tuple[float, str]:
        """Write a file of random bytes through to the storage: seconds, and its hash."""
        content = secrets.token_bytes(size_bytes)
        digest = hashlib.sha256(content).hexdigest()
        filesystem, root = opened(storage)
        began = time.perf_counter()
        if _is_local(filesystem):
            path = Path(root) / name
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        else:
            filesystem.pipe_file(f"{root}/{name}", content)
        return time.perf_counter() - began, digest

    def read(self, storage: str, name: str, digest: str) -> float:
        """Read what another node wrote: seconds. ValueError where it is not that."""
        filesystem, root = opened(storage)
        began = time.perf_counter()
        if _is_local(filesystem):
            with (Path(root) / name).open("rb") as file:
                forget_cached(file)  # not from this one's memory
                content = file.read()
        else:
            content = filesystem.cat_file(f"{root}/{name}")
        taken_s = time.perf_counter() - began
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{name} does not hold what was written")
        return taken_s

    def forget(self, storage: str, name: str) -> None:
        """Delete a file."""
        filesystem, root = opened(storage)
        with suppress(OSError):
            filesystem.rm_file(f"{root}/{name}")


def _may_have_gpus() -> bool:
    """Whether a driver has left a device file here; elsewhere than on Linux torch is asked."""
    devices = ("nvidiactl", "kfd", "dxg")  # NVIDIA's, AMD's, Windows' own Linux
    return sys.platform != "linux" or any(Path("/dev", name).exists() for name in devices)


def _gpus() -> tuple[str, ...]:
    from darkroom.hardware import machine

    return tuple(device.name for device in machine().devices)


def _pour(connection: socket.socket, until: float, token: bytes) -> None:
    content = memoryview(bytearray(CHUNK_BYTES))
    with connection, suppress(OSError):
        connection.sendall(token)
        while time.perf_counter() < until:
            connection.sendall(content)


def opened(storage: str) -> tuple[Any, str]:
    """The filesystem of a folder or an address, and the place in it. ImportError, ValueError as fsspec."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(storage)
    return filesystem, str(root).rstrip("/")


def _is_local(filesystem: Any) -> bool:
    """Whether it is a folder."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


ANSWER_S = 120.0  # torch is imported where there are GPUs
NETWORK_S = 1.0
STREAMS = 4
MOST_PAIRS = 16  # of nodes, between which the network is measured
MOST_WRITERS = 8
FILE_BYTES = 32 * 1024**2
SLOW_BITS = 5e9  # a second: gradients of 860 million weights in bf16 take 6 s in a ring at this rate
SKEW_S = 1.0
GIB = 1024**3


@dataclass
class Node:
    """A node, as Ray lists it and as it tells itself."""

    id: str
    ip: str
    resources: dict[str, float]
    probe: Any
    about: About | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return self.ip if self.about is None else f"{self.about.host} ({self.ip})"

    @property
    def type(self) -> str:
        """Its accelerator's type, as Ray names it."""
        return next((name.removeprefix(TYPE) for name in self.resources if name.startswith(TYPE)), "")


def doctor(
    address: str | None = None, *, accelerator: str | None = None, storage: str | None = None
) -> list[Check]:
    """Look at a cluster: what runs on its nodes, and how fast network and storage are between them.

    `storage` is a folder or an address that runs and stores are to lie on, this folder if not said. Takes
    some seconds a node. InputError where there is no cluster, one of another Ray, or none with the
    accelerator.
    """
    storage = storage or os.getcwd()
    _check_storage(storage)
    with connected(address, accelerator=accelerator) as cluster:
        nodes = _probed()
        there = [node for node in nodes if node.about is not None]
        checks = [_cluster(cluster), _authentication(cluster), *_silent(nodes)]
        if there:
            checks += [_versions(there), *_accelerators(there), _clock(there), _network(there)]
            checks += [_folder(there), *_storage(there, storage)]
        return checks


def _check_storage(storage: str) -> None:
    try:
        opened(storage)
    except ImportError as error:
        raise MissingExtra(str(getattr(error, "name", "") or "s3fs"), "s3") from error
    except ValueError as error:
        allowed = "a folder, or an address such as s3://bucket/prefix"
        raise InputError(f"--storage {storage} ({_line(error)})", allowed=allowed) from error


# ---- who is there


def _probed() -> list[Node]:
    """All nodes that Ray counts as alive, each asked by an actor on it."""
    import ray

    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    actor: Any = ray.remote(num_cpus=0, max_concurrency=4)(Probe)
    nodes = [
        Node(
            id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            resources=dict(node["Resources"]),
            probe=actor.options(scheduling_strategy=pinned(node["NodeID"], soft=False)).remote(),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    asked = [node.probe.about.remote(os.getcwd(), int(node.resources.get("GPU", 0))) for node in nodes]
    ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
    for node, answer in zip(nodes, asked, strict=True):
        try:
            node.about = ray.get(answer, timeout=0.1)
        except Exception as error:  # whatever happens on another machine is its finding
            node.error = _line(error)
    return nodes


def _cluster(cluster: Cluster) -> Check:
    planned = f"; an autoscaler may add {', '.join(sorted(cluster.planned))}" if cluster.planned else ""
    return Check("cluster", True, f"{cluster.line()}{planned}")


def _authentication(cluster: Cluster) -> Check:
    if cluster.local:
        return Check("authentication", True, "not needed: Ray on this machine alone")
    refused = refuses(cluster.address)
    mend = "set RAY_AUTH_MODE=token for 'ray start' on every node, and here: docs/scale.md, Security"
    if refused is None:
        detail = "not known: the cluster could not be called without a token"
    else:
        detail = "by token" if refused else "off: anyone who reaches the cluster's ports runs programs on it"
    return Check("authentication", bool(refused), detail, "" if refused else mend, optional=True)


def _silent(nodes: Sequence[Node]) -> Iterator[Check]:
    for node in nodes:
        if node.about is None:
            mend = "install darkroom there as here, or start it anew: ray stop, ray start --address HEAD:6379"
            yield Check("node", False, f"{node.name} does not answer: {node.error}", mend)


def _versions(nodes: Sequence[Node]) -> Check:
    """Whether the same is installed everywhere; where not, which nodes differ from most."""
    abouts = [(node, node.about.versions) for node in nodes if node.about is not None]
    usual = {name: Counter(v[name] for _, v in abouts).most_common(1)[0][0] for name in abouts[0][1]}
    odd = [
        f"{node.name} has {name} {has[name]}, most have {usual[name]}"
        for node, has in abouts
        for name in usual
        if has[name] != usual[name]
    ]
    if odd:
        more = f" (and {len(odd) - 3} more)" if len(odd) > 3 else ""
        mend = "install the same on all, as in requirements.lock: python make.py setup ray"
        return Check("versions", False, "; ".join(odd[:3]) + more, mend)
    versions = ", ".join(f"{name} {version}" for name, version in usual.items() if version != "missing")
    where = f"the same on all {len(abouts)} nodes: " if len(abouts) > 1 else ""
    return Check("versions", True, f"{where}{versions}")


def _accelerators(nodes: Sequence[Node]) -> Iterator[Check]:
    """GPUs by type; a finding for each node where Ray counts others than there are."""
    counted = Counter[tuple[str, str]]()
    for node in nodes:
        seen, rays = node.about.gpus if node.about is not None else (), int(node.resources.get("GPU", 0))
        counted.update((name, node.type) for name in seen)
        if len(seen) != rays:
            mend = f"start it with 'ray start --num-gpus {len(seen)}'"
            if len(seen) < rays:
                mend = f"install a CUDA build of torch there, or {mend}"
            yield Check("gpus", False, f"{node.name}: torch sees {len(seen)}, Ray counts {rays}", mend)
    kinds = [
        f"{count} x {name}" + (f" (type {kind})" if kind else "")
        for (name, kind), count in sorted(counted.items())
    ]
    without = Counter(node.type for node in nodes if node.type and not node.resources.get("GPU"))
    kinds += [f"{count} nodes of type {kind} without GPUs" for kind, count in sorted(without.items())]
    detail = "; ".join(kinds) or "none: encoders and training run on CPUs"
    yield Check("accelerators", True, detail, optional=True)


# ---- what lies between them


def _clock(nodes: Sequence[Node]) -> Check:
    """How far the clocks are apart, each compared with this machine's around a short call."""
    import ray

    offsets = []
    for node in nodes:
        tries = []
        for _ in range(5):
            began = time.time()
            theirs = ray.get(node.probe.now.remote())
            ended = time.time()
            tries.append((ended - began, theirs - (began + ended) / 2))
        around_s, offset_s = min(tries)
        offsets.append((offset_s, around_s / 2, node))
    (low, _, first), (high, _, last) = min(offsets, key=_offset), max(offsets, key=_offset)
    spread, error = high - low, max(error for _, error, _ in offsets)
    detail = f"at most {spread * 1e3:,.1f} ms apart (known to {error * 1e3:,.1f} ms)"
    if spread - 2 * error <= SKEW_S:
        return Check("clocks", True, detail)
    detail += f": {last.name} is ahead of {first.name}"
    return Check("clocks", False, detail, "run chrony on both: sudo systemctl enable --now chronyd")


def _offset(one: tuple[float, float, Node]) -> float:
    return one[0]


def _network(nodes: Sequence[Node]) -> Check:
    """Bytes between tasks on neighbouring nodes of a ring, one pair after the other."""
    if len(nodes) < 2:
        return Check("network", True, "one node: nothing goes over a network", optional=True)
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))[: MOST_PAIRS if len(nodes) > 2 else 1]
    rates, broken = [], []
    for sender, receiver in ring:
        rate, error = _rate(sender, receiver)
        pair = f"{sender.name} to {receiver.name}"
        rates.append((rate * 8, pair))
        broken += [f"{pair}: {error}"] if error else []
    if broken:
        mend = "open all TCP ports between the cluster's nodes (one security group that allows itself)"
        return Check("network", False, f"nothing goes from {broken[0]}", mend)
    slow, fast = min(rates), max(rates)
    detail = f"{_gbit(slow[0])} from {slow[1]}, the slowest of {len(rates)} pairs; fastest {_gbit(fast[0])}"
    mend = "place training nodes in one zone and placement group, with EFA or InfiniBand: docs/scale.md"
    return Check("network", slow[0] >= SLOW_BITS, detail, "" if slow[0] >= SLOW_BITS else mend, optional=True)


def _rate(sender: Node, receiver: Node) -> tuple[float, str]:
    """Bytes a second, or 0 and why."""
    import ray

    token = secrets.token_bytes(16)
    try:
        port = ray.get(receiver.probe.listen.remote(STREAMS, token))
        sent = sender.probe.send.remote(receiver.ip, port, NETWORK_S, STREAMS, token)
        if error := ray.get(sent, timeout=NETWORK_S + 60):
            return 0.0, error
        rate = ray.get(receiver.probe.received.remote(STREAMS), timeout=60)
    except ray.exceptions.RayError as error:
        return 0.0, _line(error)
    return rate, "" if rate else "what was sent did not arrive"


def _gbit(bits: float) -> str:
    return f"{bits / 1e9:.2f} Gbit/s"


# ---- storage


def _folder(nodes: Sequence[Node]) -> Check:
    without = [node.name for node in nodes if node.about is not None and not node.about.cwd_seen]
    if not without:
        return Check("folder", True, f"{os.getcwd()} is there on {'all nodes' if len(nodes) > 1 else 'it'}")
    detail = f"{os.getcwd()} is not there on {', '.join(without[:3])}"
    detail += f" and {len(without) - 3} more" if len(without) > 3 else ""
    return Check("folder", False, detail, "train in a folder that all nodes mount at the same place")


def _storage(nodes: Sequence[Node], storage: str) -> Iterator[Check]:
    """Files written by several nodes at once, each read and compared by the next one."""
    writers = list(nodes)[:MOST_WRITERS]
    names = [f".darkroom-doctor-{secrets.token_hex(8)}" for _ in writers]
    pairs = list(zip(writers, names, strict=True))
    try:
        done, failed = _each(
            [(node, node.probe.write.remote(storage, name, FILE_BYTES)) for node, name in pairs]
        )
        if failed:
            yield _not_stored(storage, "written by", failed)
            return
        yield _stored("write", storage, [seconds for seconds, _ in done], len(nodes))
        readers = [*writers[1:], writers[0]]
        reads = [
            (reader, reader.probe.read.remote(storage, name, digest))
            for reader, name, (_, digest) in zip(readers, names, done, strict=True)
        ]
        seconds, failed = _each(reads)
        if failed:
            yield _not_stored(storage, "what another node wrote is not read by", failed)
        else:
            yield _stored("read", storage, seconds, len(nodes))
    finally:
        _each([(node, node.probe.forget.remote(storage, name)) for node, name in pairs])


def _each(calls: Sequence[tuple[Node, Any]]) -> tuple[list[Any], list[tuple[Node, str]]]:
    """What came of the calls, and those nodes where nothing did."""
    import ray

    done, failed = [], []
    for node, call in calls:
        try:
            done.append(ray.get(call, timeout=ANSWER_S))
        except Exception as error:  # whatever happens on another machine is its finding
            failed.append((node, _line(getattr(error, "cause", None) or error)))
    return done, failed


def _stored(verb: str, storage: str, seconds: Sequence[float], of: int) -> Check:
    rate = FILE_BYTES / statistics.median(seconds) / 1e6
    all_rate = FILE_BYTES * len(seconds) / max(seconds) / 1e6
    detail = f"{storage}: {rate:,.0f} MB/s a node"
    if of > 1:
        who = f"{len(seconds)} of {of} nodes" if len(seconds) < of else f"{of} nodes"
        detail += f", {all_rate:,.0f} MB/s in all ({who} at once)"
    return Check(f"storage {verb}", True, detail)


def _not_stored(storage: str, what: str, failed: Sequence[tuple[Node, str]]) -> Check:
    node, error = failed[0]
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    message = f"{storage}: cannot be {what}" if what.startswith("written") else f"{storage}: {what}"
    mend = "mount one folder on all nodes, or give an address that their role may write: --storage s3://..."
    return Check("storage", False, f"{message} {node.name}{more}: {error}", mend)


def _line(error: BaseException) -> str:
    """An error of another machine in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]
