"""What darkroom uses of Ray that Ray does not promise to keep: every such name, and nothing of it elsewhere.

`private("name")` is looked up when it is needed. A Ray that lacks it is named in one line, with the version
that darkroom was tested with; tests compare every name and its parameters with the Ray that is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from darkroom.errors import DarkroomError

TESTED = "2.60.0"
LOG = logging.getLogger("darkroom.cluster")
_TRAIN = "ray.train.v2._internal"
_POLICY = f"{_TRAIN}.execution.scaling_policy"

NAMES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    # of the process that drives
    "node": ("ray._private.worker:_global_node", None),
    "Node.kill_log_monitor": ("ray._private.node:Node.kill_log_monitor", ("self", "check_alive")),
    "Node.get_logs_dir_path": ("ray._private.node:Node.get_logs_dir_path", ("self",)),
    "print_to_stdstream": ("ray._private.worker:print_to_stdstream", ("data", "ignore_prefix")),
    "bootstrap_address": ("ray._private.services:canonicalize_bootstrap_address", ("addr", "temp_dir")),
    # of the cluster
    "cluster_config": ("ray._private.state:state.get_cluster_config", ()),
    "free_by_node": ("ray._private.state:state.available_resources_per_node", ()),
    "draining": ("ray._private.state:state.get_draining_nodes", ()),
    # of its token
    "token_loader": ("ray._raylet:AuthenticationTokenLoader.instance", None),
    "load_config": ("ray._raylet:Config.initialize", None),
    # of Ray Train
    "RayTrainError": (f"{_TRAIN}.exceptions:RayTrainError", None),
    "train_context": (f"{_TRAIN}.execution.context:get_train_context", ()),
    "TorchTrainer": ("ray.train.torch:TorchTrainer", None),
    "TorchTrainer.callbacks": ("ray.train.torch:TorchTrainer._create_default_callbacks", ("self",)),
    "TorchTrainer.run": (
        "ray.train.torch:TorchTrainer._initialize_and_run_controller",
        ("self", "controller_init_kwargs"),
    ),
    "DatasetsCallback": (f"{_TRAIN}.callbacks.datasets:DatasetsCallback", None),
    "PlacementGroupCleanerCallback": (
        f"{_TRAIN}.callbacks.placement_group_callback:PlacementGroupCleanerCallback",
        None,
    ),
    "ControllerCallback": (f"{_TRAIN}.execution.callback:ControllerCallback", None),
    "ControllerCallback.started": (
        f"{_TRAIN}.execution.callback:ControllerCallback.after_controller_start",
        ("self", "train_run_context"),
    ),
    "WorkerGroupCallback": (f"{_TRAIN}.execution.callback:WorkerGroupCallback", None),
    "WorkerGroupCallback.started": (
        f"{_TRAIN}.execution.callback:WorkerGroupCallback.after_worker_group_start",
        ("self", "worker_group"),
    ),
    "ElasticScalingPolicy": (f"{_POLICY}:ElasticScalingPolicy", ("scaling_config",)),
    "ElasticScalingPolicy.count": (
        f"{_POLICY}:ElasticScalingPolicy._count_possible_workers",
        ("self", "reserved_resources"),
    ),
    "ElasticScalingPolicy.decide": (
        f"{_POLICY}:ElasticScalingPolicy.make_decision_for_running_worker_group",
        ("self", "worker_group_state", "worker_group_status"),
    ),
    "FixedScalingPolicy": (f"{_POLICY}:FixedScalingPolicy", ("scaling_config",)),
    "FixedScalingPolicy.started": (
        f"{_POLICY}:FixedScalingPolicy.after_controller_start",
        ("self", "train_run_context"),
    ),
    "FixedScalingPolicy.ask": (f"{_POLICY}:FixedScalingPolicy._maybe_send_resource_request", ("self",)),
    "NoopDecision": (f"{_POLICY}:NoopDecision", ()),
    "ResizeDecision": (f"{_POLICY}:ResizeDecision", ("num_workers", "resources_per_worker")),
    "DefaultFailurePolicy": (
        f"{_TRAIN}.execution.failure_handling:DefaultFailurePolicy",
        ("failure_config",),
    ),
    "DefaultFailurePolicy.decide": (
        f"{_TRAIN}.execution.failure_handling:DefaultFailurePolicy.make_decision",
        ("self", "training_failed_error"),
    ),
    "FailureDecision.RETRY": (f"{_TRAIN}.execution.failure_handling:FailureDecision.RETRY", None),
    "FailureDecision.RAISE": (f"{_TRAIN}.execution.failure_handling:FailureDecision.RAISE", None),
}
"""By the name used here: where Ray has it, and its parameters where darkroom relies on them."""


def private(name: str) -> Any:
    """One of NAMES; DarkroomError where the Ray that is installed has it no longer."""
    module, _, path = NAMES[name][0].partition(":")
    try:
        return attrgetter(path)(import_module(module))
    except (ImportError, AttributeError) as error:
        import ray

        raise DarkroomError(
            f"Ray {ray.__version__} has no {module}.{path}, which darkroom uses; "
            f"it was tested with Ray {TESTED}: pip install 'ray=={TESTED}'"
        ) from error


def to_extend(name: str) -> Any:
    """A class of NAMES, of which all methods that NAMES has of it are there to be replaced."""
    for method in NAMES:
        if method.startswith(f"{name}."):
            private(method)
    return private(name)


# ---- the process that drives


def stop_log_monitor() -> None:
    """End the process that brings workers' lines to the driver: it looks for them ten times a second."""
    private("Node.kill_log_monitor")
    private("node").kill_log_monitor(check_alive=False)


def logs_folder() -> Path:
    """Where the Ray of this machine writes its logs; they stay when it ends."""
    private("Node.get_logs_dir_path")
    return Path(private("node").get_logs_dir_path())


@contextmanager
def quiet() -> Iterator[None]:
    """Within, Ray's own messages are logged at level DEBUG: Ray prints them to stdout, where results go."""
    worker: Any = import_module("ray._private.worker")
    printed = private("print_to_stdstream")

    def logged(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        for line in data["lines"]:
            LOG.debug("(%s) %s", data["pid"], line)

    worker.print_to_stdstream = logged
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def running_cluster() -> str | None:
    """HOST:PORT of the cluster that runs on this machine, or that $RAY_ADDRESS names."""
    found: str | None = private("bootstrap_address")("auto")
    return None if found == "auto" else found


def token() -> str:
    """The token that Ray finds here: $RAY_AUTH_TOKEN, the file of $RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    found = private("token_loader")().get_raw_token(ignore_auth_mode=True)
    return found.decode() if isinstance(found, bytes) else str(found or "")


def read_settings_anew() -> None:
    """Have this process look again at the environment's mode and token: Ray looks once."""
    private("load_config")("")
    private("token_loader")().reset_cache()
