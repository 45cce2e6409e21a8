"""JSON schemas of what the manifests in `examples/kubernetes` use; a field that is not here is a typing error, or new.

Names, types, required fields and choices are those of the API: `leaderworkerset.x-k8s.io/v1` and core `v1`.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
DNS_LABEL: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def each(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY, "minProperties": 1}
METADATA = fields(("name",), name=DNS_LABEL, labels=LABELS)

PROBE = fields(
    ("httpGet",),
    httpGet=fields(("path", "port"), path={"type": "string", "pattern": "^/"}, port={"anyOf": [PORT, PORT_NAME]}),
    initialDelaySeconds={"type": "integer", "minimum": 0},
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)

CONTAINER = fields(
    ("name", "image"),
    name=DNS_LABEL,
    image=TEXT,
    command=each(TEXT),
    args=each(TEXT),
    env=each(fields(("name", "value"), name={"type": "string", "pattern": "^[A-Z_][A-Z0-9_]*$"}, value=TEXT)),
    ports=each(fields(("containerPort",), name=PORT_NAME, containerPort=PORT)),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=fields((), requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=each(
        fields(
            ("name", "mountPath"),
            name=DNS_LABEL,
            mountPath={"type": "string", "pattern": "^/"},
            readOnly={"type": "boolean"},
        )
    ),
)

VOLUME: Schema = {
    **fields(
        ("name",),
        name=DNS_LABEL,
        configMap=fields(("name",), name=DNS_LABEL),
        emptyDir=fields((), medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
        persistentVolumeClaim=fields(("claimName",), claimName=DNS_LABEL),
    ),
    "minProperties": 2,  # the name, and one source
    "maxProperties": 2,
}

POD_TEMPLATE = fields(
    ("spec",),
    metadata=fields((), labels=LABELS),
    spec=fields(
        ("containers",), containers=each(CONTAINER), volumes=each(VOLUME), enableServiceLinks={"type": "boolean"}
    ),
)

LEADER_WORKER_SET = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=METADATA,
    spec=fields(
        ("leaderWorkerTemplate",),
        replicas={"type": "integer", "minimum": 0, "maximum": 1_000_000},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=fields(
            ("workerTemplate",),
            size=COUNT,
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate=POD_TEMPLATE,
            workerTemplate=POD_TEMPLATE,
        ),
    ),
)

CONFIG_MAP = fields(
    ("apiVersion", "kind", "metadata", "data"),
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=METADATA,
    data={"type": "object", "additionalProperties": TEXT},
)

SERVICE = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=METADATA,
    spec=fields(
        ("selector", "ports"),
        selector=LABELS,
        ports=each(fields(("port",), name=PORT_NAME, port=PORT, targetPort={"anyOf": [PORT, PORT_NAME]})),
    ),
)

BY_KIND = {"LeaderWorkerSet": LEADER_WORKER_SET, "ConfigMap": CONFIG_MAP, "Service": SERVICE}
