"""What `deploy/` says for servers fits what the server does: options, ports, paths, metrics, grace times."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml
from test_training_files import DEPLOY

from darkroom import models
from darkroom.cli.application import app
from darkroom.serve.api.app import OPEN_PATHS
from darkroom.serve.metrics import Metrics
from darkroom.serve.settings import Limits
from needs import missing

KUBERNETES = DEPLOY / "kubernetes"
CLOSING_S = 10


def deployment() -> dict[str, Any]:
    return dict(next(iter(yaml.safe_load_all((KUBERNETES / "base" / "server.yaml").read_text()))))


def kserve() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kserve.yaml").read_text()))


def pods() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pod's spec and its one container."""
    found = [deployment()["spec"]["template"]["spec"], kserve()["spec"]["predictor"]]
    return [(pod, pod["containers"][0]) for pod in found]


def test_the_grace_time_fits_the_drain_and_probes_need_no_key():
    for pod, container in pods():
        [drain] = [int(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--drain=")]
        pause = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1])
        assert pod["terminationGracePeriodSeconds"] >= pause + drain + CLOSING_S
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    unit = (DEPLOY / "darkroom.service").read_text()
    [stop] = re.findall(r"TimeoutStopSec=(\d+)", unit)
    [drain] = re.findall(r"--drain (\d+)", unit)
    assert int(stop) >= int(drain) + CLOSING_S


def test_pods_are_closed_up():
    for pod, container in pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        closed = container["securityContext"]
        assert closed["readOnlyRootFilesystem"] is True
        assert closed["allowPrivilegeEscalation"] is False
        assert closed["capabilities"] == {"drop": ["ALL"]}
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert written == {"/state", "/tmp"}


def test_every_option_is_one_of_serve_s():
    known = {name for one in typer.main.get_command(app).commands["serve"].params for name in one.opts}
    [command] = re.findall(r"^CMD \[(.*)\]$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    overlay = yaml.safe_load((KUBERNETES / "shared" / "kustomization.yaml").read_text())
    texts = [*(" ".join(container["args"]) for _, container in pods()), command, *words_of_the_unit()]
    texts += [one["patch"] for one in overlay["patches"] if "patch" in one]
    texts += re.findall(r"--path-prefix|--public-url", (DEPLOY / "nginx.conf").read_text())
    options = re.findall(r"(?<![\w-])--[a-z-]+", " ".join(texts))
    assert len(set(options)) >= 14
    assert set(options) <= known


def test_metrics_are_scraped_where_they_are_without_a_key():
    template = deployment()["spec"]["template"]
    container = template["spec"]["containers"][0]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    told = template["metadata"]["annotations"]
    assert told["prometheus.io/scrape"] == "true"
    assert int(told["prometheus.io/port"]) == ports["metrics"]
    assert f"--metrics-port={ports['metrics']}" in container["args"]
    [service] = [
        one
        for one in yaml.safe_load_all((KUBERNETES / "base" / "server.yaml").read_text())
        if one["kind"] == "Service"
    ]
    monitor = next(iter(yaml.safe_load_all((KUBERNETES / "monitoring" / "monitor.yaml").read_text())))
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_dashboard_alerts_and_scaling_name_metrics_that_there_are():
    text = Metrics().text().decode()
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    board = json.loads((KUBERNETES / "monitoring" / "grafana-dashboard.json").read_text())
    told = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = list(yaml.safe_load_all((KUBERNETES / "monitoring" / "monitor.yaml").read_text()))[1]
    told += [rule["expr"] for rule in rules["spec"]["groups"][0]["rules"]]
    scaling = next(iter(yaml.safe_load_all((KUBERNETES / "shared" / "scaling.yaml").read_text())))
    told += [one["pods"]["metric"]["name"] for one in scaling["spec"]["metrics"]]
    named = {name for one in told for name in re.findall(r"\b(?:darkroom|process)_\w+", one)}
    assert len(named) >= 18
    assert named <= known, named - known


def test_the_limits_of_the_deployment_are_limits():
    told = yaml.safe_load((KUBERNETES / "base" / "limits.yaml").read_text())
    assert Limits.model_validate(told).queue_s == 600
    commented = "\n".join(
        line.removeprefix("# ")
        for line in (KUBERNETES / "base" / "limits.yaml").read_text().splitlines()
        if line.startswith(("# keys", "#   "))
    )
    assert Limits.model_validate(yaml.safe_load(commented)).keys["trial"].pictures_per_day == 100


def test_a_body_as_large_as_the_server_takes_passes_the_proxies():
    most = f"{Limits().body_bytes // 2**20}"
    assert f"client_max_body_size {most}m;" in (DEPLOY / "nginx.conf").read_text()
    assert f"max_size {most}MiB" in (DEPLOY / "Caddyfile").read_text()


@pytest.mark.nightly
def test_kustomize_builds_every_overlay():
    if shutil.which("kubectl") is None:
        missing("no kubectl here")
    built = {}
    for name in ("base", "shared", "monitoring"):
        ran = subprocess.run(
            ["kubectl", "kustomize", KUBERNETES / name], capture_output=True, text=True, check=True
        )
        built[name] = {one["kind"]: one for one in yaml.safe_load_all(ran.stdout)}
    pod = built["shared"]["Deployment"]["spec"]["template"]["spec"]
    assert {"--shared", "--jobs=$(DARKROOM_JOBS)"} <= set(pod["containers"][0]["args"])
    [state] = [volume for volume in pod["volumes"] if volume["name"] == "state"]
    assert state == {"name": "state", "emptyDir": {}}
    assert "replicas" not in built["shared"]["Deployment"]["spec"], "the autoscaler's to say"
    assert {"HorizontalPodAutoscaler", "PodDisruptionBudget"} <= set(built["shared"])
    assert "PersistentVolumeClaim" not in built["shared"]
    assert "PersistentVolumeClaim" in built["base"]
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= set(built["monitoring"])


@pytest.mark.nightly
def test_systemd_and_caddy_take_their_files(tmp_path):
    for program in ("systemd-analyze", "caddy"):
        if shutil.which(program) is None:
            missing(f"no {program} here: apt-get install systemd caddy")
    unit = (DEPLOY / "darkroom.service").read_text().replace("/opt/darkroom/bin/darkroom", "/bin/true")
    (tmp_path / "darkroom.service").write_text(unit)
    ran = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "darkroom.service"], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    (tmp_path / "darkroom.service").write_text(unit.replace("TimeoutStopSec=65", "TimeoutStopSec=soon"))
    bad = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "darkroom.service"], capture_output=True, text=True
    )
    assert "Failed to parse" in bad.stderr
    told = ["caddy", "adapt", "--validate", "--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile"]
    subprocess.run(told, capture_output=True, check=True)


@pytest.mark.nightly
def test_page_api_and_events_pass_a_real_nginx_below_a_path(tmp_path):
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if nginx is None:
        missing("no nginx here: apt-get install nginx-light")
    small = {"unet": {"block_out_channels": [16, 32]}, "vae": {"block_out_channels": [8, 16, 16]}}
    models.save(models.create("tiny", seed=1, overrides=small), tmp_path / "model")
    log = (tmp_path / "log").open("w+")
    words = ["serve", str(tmp_path / "model"), "--port", "0", "--path-prefix", "/pictures"]
    words += ["--state", str(tmp_path / "state"), "--allow-host", "pictures.example"]
    server = subprocess.Popen(
        [sys.executable, "-c", "from darkroom.cli.application import main; main()", *words], stderr=log
    )
    front = None
    try:
        port = wait_for(
            lambda: re.findall(r"listening on http://127.0.0.1:(\d+)", (tmp_path / "log").read_text())
        )
        front = subprocess.Popen([nginx, "-p", str(tmp_path), "-c", str(nginx_file(tmp_path, port[0]))])
        url = "http://127.0.0.1:18943/pictures"
        told = {"Host": "pictures.example"}
        wait_for(lambda: answers(f"{url}/ready", told))
        page = httpx.get(f"{url}/", headers=told).text
        for path in re.findall(r'(?:src|href)="(page/[^"]+)"', page):
            assert httpx.get(f"{url}/{path}", headers=told).status_code == 200
        large = "A" * (3 * 2**20)  # over nginx's default of 1 MiB
        body = {"prompt": "a", "steps": 2, "image": large}
        assert httpx.post(f"{url}/jobs", json=body, headers=told, timeout=60).status_code == 422
        answer = httpx.put(f"{url}/jobs/x", json={"prompt": "a", "steps": 3}, headers=told)
        assert answer.status_code == 202
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), "nginx's own"
        events = httpx.get(f"{url}/jobs/x/events", headers=told, timeout=60).text
        assert "event: done" in events
        wanted = {"prompt": "a", "num_inference_steps": 2, "response_format": "url"}
        made = httpx.post(f"{url}/v1/images/generations", json=wanted, headers=told, timeout=60).json()
        assert made["data"][0]["url"].startswith("http://pictures.example/pictures/signed/")
    finally:
        for process in (front, server):
            if process is not None:
                process.terminate()
                process.wait(30)


def nginx_file(folder: Path, port: str) -> Path:
    """The shipped file as a whole configuration, without TLS, on ports of this test."""
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"\s*ssl_\w+ [^;]+;", "", text).replace("listen 443 ssl;", "listen 127.0.0.1:18943;")
    text = text.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{port};")
    temp = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
    whole += f"events {{}}\nhttp {{ access_log off; {temp}\n{text}\n}}\n"
    file = folder / "nginx.conf"
    file.write_text(whole)
    return file


def answers(url: str, headers: dict[str, str]) -> bool:
    try:
        return httpx.get(url, headers=headers).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(look: Any, within_s: float = 120) -> Any:
    """What `look` finds, once it finds something."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError("nothing came")


def words_of_the_unit() -> list[str]:
    """The command that systemd starts; it goes on where a line ends with a backslash."""
    [command] = re.findall(
        r"^ExecStart=((?:.*\\\n)*.*)", (DEPLOY / "darkroom.service").read_text(), re.MULTILINE
    )
    return shlex.split(command.replace("\\\n", " "))


def test_words_of_the_unit_parse():
    words = words_of_the_unit()
    assert words[-2:] == ["--drain", "45"], "the last line is read too"
    command = typer.main.get_command(app).commands["serve"]
    command.make_parser(command.context_class(command, info_name="serve")).parse_args(words[2:])
