"""The Ray cluster files are what Ray and KubeRay take, and start darkroom with flags that it has."""

from __future__ import annotations

import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from test_training_files import DEPLOY, VALUES, check

from darkroom.cluster.connect import TYPE

CLUSTER_FIELDS = {
    *("authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions"),
    *("headGroupSpec", "headServiceAnnotations", "managedBy", "networkPolicy", "rayVersion", "suspend"),
    *("tlsOptions", "upgradeStrategy", "workerGroupSpecs"),
}
GROUP_FIELDS = {
    *("groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "priority"),
    *("rayStartParams", "replicas", "resources", "scaleStrategy", "suspend", "template"),
}
"""Of KubeRay 1.6's CRD (docs.ray.io, KubeRay CRD API reference)."""


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.fixture
def cluster() -> dict[str, Any]:
    return read("ray-cluster.yaml")[0]


def valid(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` reads it, checked by Ray's own schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    validate_config(prepared)
    return prepared


def test_ray_up_takes_the_cluster_file(cluster) -> None:
    import jsonschema

    made = valid(cluster)
    assert set(made["available_node_types"]) == {"head", "cpu", "small-gpu", "large-gpu"}
    groups = [
        group["max_workers"] for name, group in cluster["available_node_types"].items() if name != "head"
    ]
    assert made["max_workers"] == sum(groups)
    broken = json.loads(json.dumps(cluster))
    broken["available_node_types"]["cpu"]["resources"] = {"CPU": "many"}
    with pytest.raises(jsonschema.ValidationError, match="is not of type 'integer'"):
        valid(broken)
    with pytest.raises(jsonschema.ValidationError, match="worker_nodes_of_old"):
        valid({**cluster, "worker_nodes_of_old": {}})


def test_each_group_is_what_the_engine_asks_for(cluster) -> None:
    groups = cluster["available_node_types"]
    assert groups["head"]["resources"] == {"CPU": 0}
    assert "GPU" not in groups["cpu"]["resources"]
    for name in ("small-gpu", "large-gpu"):
        [kind] = [key for key in groups[name]["resources"] if key.startswith(TYPE)]
        assert kind.removeprefix(TYPE) in known_accelerators()
    spot = {name for name, group in groups.items() if "InstanceMarketOptions" in group["node_config"]}
    assert spot == {"cpu", "small-gpu"}
    interfaces = groups["large-gpu"]["node_config"]["NetworkInterfaces"]
    assert {interface["InterfaceType"] for interface in interfaces} == {"efa"}


def known_accelerators() -> set[str]:
    from ray.util.accelerators import accelerators

    return {value for value in vars(accelerators).values() if isinstance(value, str)}


def test_nothing_is_exposed_and_the_token_is_asked_for(cluster) -> None:
    head, worker = (
        " ".join(cluster["head_start_ray_commands"]),
        " ".join(cluster["worker_start_ray_commands"]),
    )
    assert "--dashboard-host=127.0.0.1" in head
    assert "0.0.0.0" not in (DEPLOY / "ray-cluster.yaml").read_text()
    assert head.count("RAY_AUTH_MODE=token") == worker.count("RAY_AUTH_MODE=token") == 1
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    kube = (DEPLOY / "kuberay.yaml").read_text()
    raycluster, policy, job = read("kuberay.yaml")
    # The dashboard listens for the whole pod network there: who reaches it is the policy's to say.
    labels = {"matchLabels": {"ray.io/cluster": raycluster["metadata"]["name"]}}
    assert (policy["kind"], policy["spec"]["podSelector"]) == ("NetworkPolicy", labels)
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own, others = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": labels}]}
    names = [list(one["podSelector"]["matchLabels"].values()) for one in others["from"]]
    assert names == [[job["metadata"]["name"]], ["kuberay-operator"]]
    assert others["ports"] == [{"port": 8265}]
    assert raycluster["spec"]["authOptions"] == {"mode": "token"}
    assert raycluster["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not re.search("type: LoadBalancer|kind: Ingress|type: NodePort|AWS_SECRET", kube)


def test_ray_start_has_the_flags(cluster) -> None:
    from ray.scripts.scripts import cli

    for line in [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]:
        for words in re.findall(r"ray ((?:start|drain-node) [^;&]*)", line):
            verb, *given = shlex.split(words)
            has = {option for each in cli.commands[verb].params for option in each.opts}
            flags = {word.partition("=")[0] for word in given if word.startswith("--")}
            assert flags <= has, flags - has
            assert flags
    assert "--no-such" not in {option for each in cli.commands["start"].params for option in each.opts}


def test_the_environment_for_the_network_reaches_the_workers(cluster) -> None:
    from darkroom.cluster.connect import CARRIED_BEGIN

    worker = " ".join(cluster["worker_start_ray_commands"])
    large = read("kuberay.yaml")[0]["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]
    names = {entry["name"] for entry in large["env"]}
    ours = "RAY_worker_niceness"
    assert names == {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", ours}
    assert all(name.startswith(CARRIED_BEGIN) and f"{name}=" in worker for name in names - {ours})


def test_rays_workers_have_the_priority_of_any_other_process(cluster) -> None:
    """Ray's own default costs a tenth of a step beside a busy driver."""
    for lines in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert " RAY_worker_niceness=0" in " ".join(cluster[lines])
    spec = read("kuberay.yaml")[0]["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        [container] = group["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


class Metadata(BaseHTTPRequestHandler):
    """A machine's metadata, with a notice once `noticed` is set."""

    noticed = False

    def do_PUT(self) -> None:
        self._answer(200, "a-token")

    def do_GET(self) -> None:
        there = self.noticed and self.headers["X-aws-ec2-metadata-token"] == "a-token"
        self._answer(200 if there else 404, '{"action": "terminate"}')

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


def test_a_spot_notice_drains_the_node_with_what_the_image_has(cluster, monkeypatch) -> None:
    """The image is Python's slim one, which has no curl."""
    from ray.scripts.scripts import cli

    from darkroom.cluster.notice import drain_command, noticed

    worker = " ".join(cluster["worker_start_ray_commands"])
    assert "python -m darkroom.cluster.notice --address $RAY_HEAD_IP:6379" in worker
    assert "curl" not in worker
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert not noticed(address)
        monkeypatch.setattr(Metadata, "noticed", True)
        assert noticed(address)
        server.shutdown()
    assert not noticed("http://127.0.0.1:9")
    hook = read("kuberay.yaml")[0]["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]
    told = hook["lifecycle"]["preStop"]["exec"]["command"][2].partition(";")[0]
    for _, verb, *given in (drain_command("head:6379"), shlex.split(told)):
        with cli.commands[verb].make_context(verb, list(given)) as context:
            assert context.params["reason"] == "DRAIN_NODE_REASON_PREEMPTION"


def test_kuberay_gets_only_fields_that_it_knows() -> None:
    raycluster, _, job = read("kuberay.yaml")
    assert (raycluster["apiVersion"], raycluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = raycluster["spec"]
    assert set(spec) <= CLUSTER_FIELDS
    assert spec["rayVersion"] == ray.__version__
    assert [group["groupName"] for group in spec["workerGroupSpecs"]] == ["cpu", "small-gpu", "large-gpu"]
    for group in [spec["headGroupSpec"] | {"groupName": "head"}, *spec["workerGroupSpecs"]]:
        assert set(group) <= GROUP_FIELDS | {"serviceType"}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
        if "resources" in group["rayStartParams"]:
            [kind] = json.loads(json.loads(group["rayStartParams"]["resources"]))
            assert kind.removeprefix(TYPE) in known_accelerators()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": raycluster["metadata"]["name"]}
    assert set(job["spec"]) == {"clusterSelector", "submissionMode", "entrypoint"}  # no backoffLimit with one


@pytest.mark.parametrize("name", ["ray-cluster.yaml", "kuberay.yaml"])
def test_darkroom_is_started_with_flags_that_it_has(name: str) -> None:
    text = " ".join((DEPLOY / name).read_text().split())
    [words] = re.findall(r"darkroom (train [^'&]*?)(?='| &&|$)", text)
    check(shlex.split(words.replace("recipe.yaml", VALUES["RECIPE"])))
    with pytest.raises(Exception, match="No such option"):
        check([*shlex.split(words.replace("recipe.yaml", VALUES["RECIPE"])), "--no-such"])


def test_every_command_of_the_page_is_one() -> None:
    """docs/scale.md from a laptop to a cluster: verbs, options and recipe keys exist."""
    text = (DEPLOY.parent / "docs" / "scale.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^    darkroom (.*)$", text, re.MULTILINE)
    assert len(commands) >= 10
    for command in commands:
        words = shlex.split(command, comments=True)
        check([VALUES["RECIPE"] if word == "recipe.yaml" else word for word in words])
    with pytest.raises(Exception, match="No such option"):
        check([*shlex.split(commands[0]), "--no-such"])


def test_ray_of_the_image_is_ray_of_the_project() -> None:
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    assert f"ray=={ray.__version__}" in lock.replace("[data,train,serve]", "")
