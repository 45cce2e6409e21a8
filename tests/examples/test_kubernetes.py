"""The manifest for Kubernetes: its fields are those of the API, and its two pods make one deployment."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.examples.manifest_schemas import BY_KIND
from tests.examples.serve_command import arguments, parsed
from vllm_moe_modular.settings import from_environment
from vllm_moe_modular.testing.serving import vllm_version

jsonschema = pytest.importorskip("jsonschema", reason="vLLM brings it")
yaml = pytest.importorskip("yaml", reason="vLLM brings it")

FOLDER = ROOT / "examples" / "kubernetes"
MANIFEST = FOLDER / "two_hosts.yaml"
DOCUMENTS = {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}
GROUP = DOCUMENTS["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
PODS = {role: GROUP[f"{role}Template"] for role in ("leader", "worker")}
GPUS_PER_HOST = 8


def container(role: str) -> dict[str, Any]:
    (only,) = PODS[role]["spec"]["containers"]
    return only


def problems(document: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(BY_KIND[document["kind"]])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("kind", BY_KIND)
def test_every_field_is_one_of_the_api(kind: str) -> None:
    assert problems(DOCUMENTS[kind]) == []
    assert set(DOCUMENTS) == set(BY_KIND)


BREAKAGES = {
    "a misspelt field": ("leaderWorkerTemplate", "worker_template", {}),
    "a policy that there is not": ("leaderWorkerTemplate", "restartPolicy", "Always"),
    "a size in words": ("leaderWorkerTemplate", "size", "2"),
    "a pod without containers": ("leaderWorkerTemplate", "workerTemplate", {"spec": {}}),
}


@pytest.mark.parametrize(("where", "key", "value"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_the_schema_finds(where: str, key: str, value: object) -> None:
    spec = DOCUMENTS["LeaderWorkerSet"]["spec"]
    broken = {**DOCUMENTS["LeaderWorkerSet"], "spec": {**spec, where: {**spec[where], key: value}}}
    assert len(problems(broken)) == 1


def test_both_pods_read_the_file_of_the_examples() -> None:
    data = yaml.safe_load(DOCUMENTS["ConfigMap"]["data"]["serving.yaml"])
    assert data == yaml.safe_load((ROOT / "examples" / "serving" / "two_hosts.yaml").read_text())
    for role, pod in PODS.items():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(role)["volumeMounts"]}
        assert set(mounts) == set(volumes)
        assert volumes["serving"]["configMap"]["name"] == DOCUMENTS["ConfigMap"]["metadata"]["name"]
        assert f"--config {mounts['serving']}/serving.yaml" in container(role)["args"][0]


@pytest.mark.parametrize("role", PODS)
def test_a_pod_has_what_a_rank_needs(role: str) -> None:
    pod, only = PODS[role], container(role)
    env = {variable["name"]: variable["value"] for variable in only["env"]}
    assert from_environment(env).enabled
    resources = only["resources"]
    assert {resources[kind]["nvidia.com/gpu"] for kind in ("requests", "limits")} == {str(GPUS_PER_HOST)}
    (shm,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in only["volumeMounts"]
    # Variables that Kubernetes makes of Services must not look like settings.
    assert pod["spec"]["enableServiceLinks"] is False


def test_the_leader_alone_is_asked_over_http() -> None:
    leader, worker = container("leader"), container("worker")
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert ports[leader[probe]["httpGet"]["port"]] == 8000
        assert probe not in worker
    service = DOCUMENTS["Service"]["spec"]
    assert service["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": DOCUMENTS["LeaderWorkerSet"]["metadata"]["name"],
        **PODS["leader"]["metadata"]["labels"],
    }
    assert {port["targetPort"] for port in service["ports"]} <= set(ports)


def test_the_two_commands_make_one_deployment(tmp_path: Path) -> None:
    """Each pod's shell line is run as its container would, with the variables that LeaderWorkerSet gives it."""
    if vllm_version(sys.executable)[:2] == (0, 11):
        pytest.skip("files and pages are for today's releases")
    config = tmp_path / "serving.yaml"
    config.write_text(DOCUMENTS["ConfigMap"]["data"]["serving.yaml"])
    calls = []
    for index, role in enumerate(PODS):
        command = [*container(role)["command"], *container(role)["args"]]
        env = {"LWS_LEADER_ADDRESS": "moe-0.moe.default", "LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": "2"}
        serve, *words = arguments(command, env, tmp_path)
        assert serve == "serve"
        calls.append([str(config) if word.endswith("/serving.yaml") else word for word in words])
    leader, worker = parsed(calls)
    different = {key for key in leader if leader[key] != worker[key]}
    assert different == {"headless", "data_parallel_start_rank"}
    assert worker["headless"]
    assert worker["data_parallel_start_rank"] == leader["data_parallel_size_local"] == GPUS_PER_HOST
    assert leader["data_parallel_size"] == GROUP["size"] * GPUS_PER_HOST
    assert leader["data_parallel_address"] == "moe-0.moe.default"


def test_the_image_has_a_release_that_was_served_on_a_gpu() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    (release,) = re.findall(r"^FROM \S+:v(\S+)$", dockerfile, flags=re.MULTILINE)
    images = {container(role)["image"] for role in PODS}
    assert images == set(re.findall(r" -t (\S+) ", dockerfile)) == {f"vllm-moe-modular:{release}"}
    assert f"| {release} | on one GPU," in (ROOT / "docs" / "eras.md").read_text()


def test_the_image_copies_what_is_there() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
