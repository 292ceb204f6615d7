"""The files in deploy/: that they parse, say what is true, and start a server that works."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from started import DEPLOY, PATIENCE, kvledger, run, started
from tiny_model import write_gguf

from kvledger.settings import Settings, load_settings
from kvledger.v1 import generation_pb2, generation_pb2_grpc

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order: name and the rest, lines joined, without comments."""
    text = "\n".join(
        line
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    )
    lines = text.replace("\\\n", " ").splitlines()
    split = [line.split(None, 1) for line in lines if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in split]


def final_stage() -> dict[str, str]:
    """The last instruction of each name in the stage that becomes the image."""
    found = instructions()
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return dict(found[last:])


def image_command() -> list[str]:
    """What the image runs."""
    stage = final_stage()
    command: list[str] = [*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])]
    assert command[0] == "kvledger"
    return command[1:]


def health_command() -> list[str]:
    """What the image's HEALTHCHECK runs."""
    command: list[str] = json.loads(final_stage()["HEALTHCHECK"].partition("CMD ")[2])
    assert command[0] == "kvledger"
    return command[1:]


def unit() -> dict[str, list[str]]:
    """The systemd unit's assignments, all of a name together."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "kvledger.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def unit_command() -> list[str]:
    """What systemd runs."""
    (command,) = unit()["ExecStart"]
    return shlex.split(command)[1:]


def manifests() -> dict[str, dict[str, Any]]:
    """The Kubernetes objects, by kind."""
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    assert isinstance(only, dict)
    return only


COMMANDS = {
    "Dockerfile": image_command,
    "kvledger.service": unit_command,
    "kubernetes.yaml": lambda: container()["args"],
}


def settings_of(name: str) -> Settings:
    """The settings that a deployed command line makes."""
    command = COMMANDS[name]()
    assert command[0] == "serve"
    return load_settings(command[1:], {})


def substituted(command: list[str], model: Path) -> list[str]:
    """The same command line with this test's model and a free port."""
    places = {"/models/model.gguf": str(model), "0.0.0.0:50051": "127.0.0.1:0"}
    assert places.keys() <= set(command)
    # A small pool, so that the test does not take a quarter of the machine's memory.
    return [*(places.get(word, word) for word in command), "--kv-blocks", "16"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_line_is_accepted(name: str) -> None:
    """A deployment would end at its first start, over a setting that was renamed."""
    settings = settings_of(name)
    settings.require_identity()
    assert not settings.reflects, "production describes itself to strangers"
    assert settings.log_format == "json"


def test_every_flag_in_deploy_exists() -> None:
    """A comment would send an operator to a setting that is not there."""
    known = set(FLAG.findall(run(kvledger("serve", "--help")).stdout))
    assert "--listen" in known
    known_to_health = set(FLAG.findall(run(kvledger("health", "--help")).stdout))
    assert set(FLAG.findall(" ".join(health_command()))) <= known_to_health
    for command in COMMANDS.values():
        assert {word.partition("=")[0] for word in command() if word[:2] == "--"} <= known
    # In comments; what belongs to docker, apt and pip stands in other lines.
    for path in DEPLOY.iterdir():
        for line in path.read_text().splitlines():
            comment = line.partition("# ")[2]
            if not re.search(
                r"\b(?:docker|useradd|pip|systemctl|install) |--read-only|^ +-v", comment
            ):
                assert set(FLAG.findall(comment)) <= known, f"{path.name}: {line}"


def test_the_image_holds_what_serves_and_nothing_that_builds() -> None:
    """A compiler in the image would serve whoever takes it over; so would the superuser."""
    found = instructions()
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    assert last > 0, "there is no stage before"
    stage = found[last:]
    assert [name for name, _ in stage if name == "RUN"] == [], "the last stage installs something"
    assert dict(stage)["FROM"] == found[0][1].removesuffix(" AS build")
    assert ("COPY", "--from=build /opt/kvledger /opt/kvledger") in stage
    user, _, group = dict(stage)["USER"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert dict(stage)["VOLUME"] == "/models"


def test_what_the_build_copies_is_there_and_not_ignored() -> None:
    """The image could not be built."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [
        word
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    ]
    assert "core" in sources
    for source in sources:
        assert (DEPLOY.parent / source).exists(), source
        assert f"!{source}" in ignored, source


def test_the_images_command_line_serves(tmp_path: Path) -> None:
    """The image would be built, start, and not work: its command line is this one."""
    model = write_gguf(tmp_path / "tiny.gguf")
    with started(substituted(image_command(), model)) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            request = generation_pb2.GenerateRequest(text="the", stop={"max_tokens": 3})
            responses = list(stub.Generate(request, timeout=PATIENCE))
            assert responses[-1].finished.usage.completion_tokens == 3
        check = [word.replace("127.0.0.1:50051", server.address) for word in health_command()]
        healthy = run(kvledger(*check))
        assert (healthy.returncode, healthy.stdout) == (0, "SERVING\n"), healthy.stderr
        assert run(kvledger(*check, "--service", "nothing.of.the.kind")).returncode == 1
        server.process.send_signal(getattr(signal, final_stage()["STOPSIGNAL"]))
        assert server.process.wait(PATIENCE) == 0
        assert run(kvledger(*check)).returncode == 1, "who is gone would be called healthy"
    assert [event["event"] for event in server.events][-1] == "stopped"


def test_the_units_command_line_serves_on_its_socket(tmp_path: Path) -> None:
    """The service would start under systemd and nobody reach it."""
    model = write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "kvledger.sock"
    places = {
        "unix:/run/kvledger/kvledger.sock": f"unix:{path}",
        "unix:/run/kvledger/operators.sock": f"unix:{tmp_path / 'operators.sock'}",
        "unix:/run/kvledger/metrics.sock": f"unix:{tmp_path / 'metrics.sock'}",
        "/var/lib/kvledger/model.gguf": str(model),
    }
    command = [places.get(word, word) for word in unit_command()]
    with started([*command, "--kv-blocks", "16"]) as server:
        for socket in (path, tmp_path / "operators.sock"):
            assert run(kvledger("health", "--server", f"unix:{socket}")).returncode == 0
        assert (tmp_path / "metrics.sock").is_socket()
        answer = run(kvledger("generate", "--server", f"unix:{path}", "--max-tokens=2", "the"))
        assert answer.returncode == 0, answer.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    assert [found.name for found in tmp_path.iterdir()] == ["tiny.gguf"]


def test_the_unit_leaves_time_to_drain_and_room_for_connections() -> None:
    """systemd would kill streams that may still run, or restart a wrong setting for ever."""
    found, settings = unit(), settings_of("kvledger.service")
    assert float(found["TimeoutStopSec"][0]) > settings.drain_timeout + 6
    assert int(found["LimitNOFILE"][0]) > 2 * settings.max_connections
    assert found["RestartPreventExitStatus"] == ["2"]
    assert found["User"] == ["kvledger"]
    hardening = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes"}
    assert {name: found[name][0] for name in hardening} == hardening
    for listen in settings.addresses.values():
        assert listen.startswith("unix:/run/kvledger/"), "the folder that it makes"
    assert len(settings.addresses) == 3


def test_probes_of_the_pod_ask_what_exists() -> None:
    """A pod would never get ready; or overload would restart it, and take every stream along."""
    port = int(settings_of("kubernetes.yaml").listen.rpartition(":")[2])
    probes = [container()[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    startup, readiness, liveness = probes
    assert startup["grpc"] == {"port": port}
    assert readiness["grpc"] == {"port": port, "service": "kvledger.v1.GenerationService"}
    assert liveness["tcpSocket"] == {"port": port}, "a probe that a full server still answers"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert all(probe["timeoutSeconds"] >= 5 for probe in probes)


def test_the_pod_is_closed_and_has_time_to_drain() -> None:
    """A pod that was taken over could write, or gain rights; or a rollout cut off answers."""
    settings = settings_of("kubernetes.yaml")
    rights = container()["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert f"{pod()['securityContext']['runAsUser']}:" in final_stage()["USER"]
    writable = [m["mountPath"] for m in container()["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["/run/kvledger"], "sockets, and nothing else"
    (run_folder,) = [v["emptyDir"] for v in pod()["volumes"] if v["name"] == "run"]
    assert run_folder["medium"] == "Memory"
    assert settings.operators_listen == "unix:/run/kvledger/operators.sock"
    before = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] > before + settings.drain_timeout + 6
    assert settings.kv_bytes is not None
    assert container()["resources"]["requests"] == container()["resources"]["limits"]
    assert str(settings.threads) == container()["resources"]["limits"]["cpu"]


def test_the_pod_can_be_reached_by_those_with_the_label_only() -> None:
    """Without an identity of callers, every pod of the cluster could use the server."""
    found = manifests()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    clients, collectors = policy["ingress"]
    assert clients["from"] == [{"podSelector": {"matchLabels": {"kvledger-client": "true"}}}]
    assert [port["port"] for port in clients["ports"]] == [50051]
    (who,) = collectors["from"]
    assert who["podSelector"] == {"matchLabels": {"kvledger-metrics": "true"}}
    assert [port["port"] for port in collectors["ports"]] == [9464]
    (port,) = found["Service"]["spec"]["ports"]
    assert port["targetPort"] in {p["name"] for p in container()["ports"]}


def test_collectors_are_sent_to_where_metrics_are() -> None:
    """A collector would find nothing, and every alert be silent."""
    template = manifests()["Deployment"]["spec"]["template"]["metadata"]
    metrics_listen = settings_of("kubernetes.yaml").metrics_listen
    assert metrics_listen is not None
    port = metrics_listen.rpartition(":")[2]
    assert template["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": port,
        "prometheus.io/path": "/metrics",
    }
    named = {p["name"]: p["containerPort"] for p in container()["ports"]}
    assert named["metrics"] == int(port)
    # The clients' service does not lead there.
    (only,) = manifests()["Service"]["spec"]["ports"]
    assert only["port"] != int(port)


def test_the_pods_probes_hear_that_it_serves(tmp_path: Path) -> None:
    """The names in the probes would be unknown to the server."""
    model = write_gguf(tmp_path / "tiny.gguf")
    with (
        started(substituted(image_command(), model)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for probe in (container()["startupProbe"], container()["readinessProbe"]):
            asked = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            answer = stub.Check(asked, timeout=PATIENCE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
