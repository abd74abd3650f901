"""Checks of a cluster before it exists. Each returns what it found, or what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.cluster.kinds import ClusterFile, ClusterKind, ask_tool, find_tool
from orchestrator.cluster.start_stop import argument_of
from orchestrator.core.checks import Check
from orchestrator.core.errors import UserError

_LIMIT_S = 40.0


def slurm_checks(file: ClusterFile) -> Iterator[Check]:
    """Check that Slurm is installed, and let it test the script without queueing it."""
    yield Check(name="tools", run=lambda: f"sbatch is {find_tool('sbatch')}")
    yield Check(name="slurm", run=lambda: _test_only(file), needs=("tools",), limit_s=_LIMIT_S)


def _test_only(file: ClusterFile) -> str:
    return ask_tool(["sbatch", "--test-only", argument_of(file.path)]).strip() or "Slurm would take it"


def cluster_checks(file: ClusterFile) -> Iterator[Check]:
    """The checks of one cluster file, those that need nothing but the file first."""
    if file.kind is ClusterKind.RAY:
        from orchestrator.cluster.check_launcher import launcher_checks

        yield from launcher_checks(file)
        yield from _provider_checks(file)
    elif file.kind is ClusterKind.KUBERNETES:
        from orchestrator.cluster.check_kubernetes import kubernetes_checks

        yield from kubernetes_checks(file)
    else:
        yield from slurm_checks(file)


def _provider_checks(file: ClusterFile) -> Iterator[Check]:
    if file.provider == "aws":
        from orchestrator.cluster.check_aws import aws_checks

        yield from aws_checks(file.config)
    elif file.provider == "gcp":
        from orchestrator.cluster.check_gcp import gcp_checks

        yield from gcp_checks(file.config)
    elif file.provider != "local":
        yield Check(name="provider", run=lambda: _unknown(file.provider))


def _unknown(provider: str) -> str:
    raise UserError(f"nothing is known of provider {provider!r} here; its region, quotas and prices are not checked")
