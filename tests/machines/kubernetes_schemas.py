"""Checks deploy/kubernetes against the published schemas; run by operator_files.sh in an environment of its own.

    python tests/machines/kubernetes_schemas.py [FOLDER OF KUBERAY'S DEFINITIONS]

What a schema does not know is refused, as an API server with strict field validation does.
"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}


def main(crds: Path | None) -> None:
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            check(document, crds, path.name)


def check(document: dict[str, Any], crds: Path | None, name: str) -> None:
    kind = document["kind"]
    if kind not in DEFINITIONS:
        validate_core(document)
        print(f"operator_files: {name}: the {kind} is what Kubernetes takes")
        return
    if crds is not None:
        schema = strict(definition(crds / DEFINITIONS[kind], document["apiVersion"].rpartition("/")[2]))
        jsonschema.Draft7Validator(schema).validate(document)
        print(f"operator_files: {name}: the {kind} is what KubeRay's definition takes")
    if kind == "RayCluster":
        for group in (document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": group["template"]["spec"]}
            validate_core(pod)
        print(f"operator_files: {name}: its pods are what Kubernetes takes")


def validate_core(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def definition(path: Path, version: str) -> dict[str, Any]:
    """Return the schema of a custom resource's version."""
    crd = yaml.safe_load(path.read_text("utf-8"))
    return next(each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == version)


def strict(schema: Any) -> Any:
    """Return a structural schema that refuses fields it does not name; those of metadata are Kubernetes' own."""
    if not isinstance(schema, dict):
        return [strict(each) for each in schema] if isinstance(schema, list) else schema
    made = {name: strict(each) for name, each in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    names_all = isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema
    if names_all and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
