"""What can be set, by which name in files and which variable in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    name: str
    """In files."""
    variable: str
    """In the environment."""
    meaning: str
    default: str = ""
    """The value that counts where nobody says one."""
    unset: str = ""
    """For people: what counts where nobody says one and there is no such value."""
    aliases: tuple[str, ...] = ()
    """Other variables that mean the same; ``variable`` goes first."""
    choices: tuple[str, ...] = ()
    """All values that it can have; empty = any."""
    names_cluster: bool = False
    """Says where the cluster is: a context that says any of these says all of them."""

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that may say it, the first that does counts."""
        return (self.variable, *self.aliases)


RAY_TOKEN = Setting(
    name="ray_token",
    variable="ORCHESTRATOR_RAY_TOKEN",
    meaning="where the cluster's token is: file:/PATH, env:NAME, aws-secretsmanager:NAME or aws-ssm:NAME",
    aliases=("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"),
    names_cluster=True,
)
SETTINGS = (
    Setting(
        name="directory",
        variable="ORCHESTRATOR_DIRECTORY",
        meaning="the project's directory: store, MLflow database, stack",
        default=".orchestrator",
    ),
    Setting(name="store", variable="ORCHESTRATOR_STORE", meaning="object store URI", unset="store/ in directory"),
    Setting(
        name="store_shared",
        variable="ORCHESTRATOR_STORE_SHARED",
        meaning="whether all hosts of the cluster see the directory of a file:// store",
        default="false",
    ),
    Setting(
        name="namespace",
        variable="ORCHESTRATOR_NAMESPACE",
        meaning="Ray namespace of controller and runners",
        default="orchestrator",
    ),
    Setting(
        name="ray_address",
        variable="RAY_ADDRESS",
        meaning="an existing cluster to use; without any a local stack is started",
        aliases=("ORCHESTRATOR_RAY_ADDRESS",),
        names_cluster=True,
    ),
    Setting(
        name="dashboard_address",
        variable="RAY_API_SERVER_ADDRESS",
        meaning="a cluster to submit to through its dashboard: https://host:port",
        aliases=("ORCHESTRATOR_DASHBOARD_ADDRESS",),
        names_cluster=True,
    ),
    Setting(
        name="cluster",
        variable="ORCHESTRATOR_CLUSTER",
        meaning="name of the cluster in the store; with no address, submits go there through the store alone",
        unset="by its address",
        names_cluster=True,
    ),
    RAY_TOKEN,
    Setting(
        name="code",
        variable="ORCHESTRATOR_CODE",
        meaning="what a submit through the dashboard runs: image (what is installed there) or wheel (this code)",
        default="image",
        choices=("image", "wheel"),
    ),
    Setting(
        name="mlflow_tracking_uri",
        variable="MLFLOW_TRACKING_URI",
        meaning="where runs are published",
        unset="mlflow.db in directory",
    ),
    Setting(
        name="s3_endpoint_url",
        variable="AWS_ENDPOINT_URL_S3",
        meaning="S3-compatible server of all S3 clients",
        unset="AWS",
        aliases=("AWS_ENDPOINT_URL",),
    ),
    Setting(name="aws_profile", variable="AWS_PROFILE", meaning="profile of credentials", default="default"),
    Setting(name="aws_region", variable="AWS_REGION", meaning="region", aliases=("AWS_DEFAULT_REGION",)),
    Setting(
        name="s3_allowed_buckets",
        variable="ORCHESTRATOR_S3_ALLOWED_BUCKETS",
        meaning="comma-separated; any other bucket is refused",
        unset="all",
    ),
    Setting(
        name="prices",
        variable="ORCHESTRATOR_PRICES",
        meaning="YAML table of prices, as --prices FILE of plan, submit, forecast, status and report",
    ),
    Setting(
        name="notify_file",
        variable="ORCHESTRATOR_NOTIFY_FILE",
        meaning="YAML file with `notify:` for all sweeps of the cluster, read by its controller",
    ),
    Setting(
        name="allowed_uris",
        variable="ORCHESTRATOR_ALLOWED_URIS",
        meaning="URIs, below one of which every store, shard and file of a sweep must be",
        unset="all",
    ),
)
"""What the files may say."""


def setting_named(name: str) -> Setting | None:
    """The setting of a name."""
    return next((setting for setting in SETTINGS if setting.name == name), None)


def value_in(setting: Setting, variables: Mapping[str, str], variable: str) -> str:
    """What a variable says of a setting: Ray's own variables for tokens become references, never the token itself."""
    value = variables.get(variable, "")
    if setting is RAY_TOKEN and value:
        if variable == "RAY_AUTH_TOKEN_PATH":
            return f"file:{Path(value).expanduser().absolute()}"
        if variable == "RAY_AUTH_TOKEN":
            return "env:RAY_AUTH_TOKEN"
    return value


def as_reference(text: str) -> str:
    """``${file:/path}`` for ``file:/path``: shells replace the long form in double quotes, so both are taken."""
    return text if text.startswith("${") else f"${{{text}}}"
