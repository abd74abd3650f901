"""Checks of a configuration of Ray's cluster launcher, for any cloud."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.cluster.kinds import ClusterFile, find_tool
from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import UserError
from orchestrator.state.nodes import ZONE_LABEL
from orchestrator.state.spending import PRICE_LABEL, parse_price

MARKET_LABEL = "ray.io/market-type"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
EXPECTED_LABELS = (PRICE_LABEL, "domain")
_SCHEMA_LIMIT_S = 60.0  # importing Ray on a busy machine
# Addresses that RFC 5737 keeps for documentation, and the words that our files mark their gaps with.
_PLACEHOLDER = re.compile(r"\b(192\.0\.2\.\d+|198\.51\.100\.\d+|203\.0\.113\.\d+|REPLACE[-_A-Z]*)\b")

# Types with SSDs of their own. EC2: storage optimised ones, those with a `d` after the generation, and GPU instances of
# these families (Amazon EC2 User Guide, "Instance store volume limits", as known in 2025). Compute Engine: A2 ultra, A3
# and A4 have them attached, others say so in their name (Google, "Add Local SSD disks", looked up in November 2026).
_HAS_LOCAL_DISKS = re.compile(
    r"(i\d\w*|[a-z]+\d+[a-z]*d[a-z]*|p4de|p5\w*|p6\S*|g4dn|g5|g6e?|trn[12]\w*)\.|a2-ultragpu|a3-|a4x?-|\S*-lssd$"
)


def launcher_checks(file: ClusterFile) -> Iterator[Check]:
    """Checks of the file alone, of the files that it names, and of the programs that ``ray up`` starts."""
    yield Check(name="tools", run=_find_tools)
    yield Check(name="schema", run=lambda: validate(file.config), limit_s=_SCHEMA_LIMIT_S)
    yield Check(name="placeholders", run=lambda: find_placeholders(file.text))
    yield Check(name="secrets", run=lambda: _find_files(file))
    yield Check(name="images", run=lambda: compare_images(file.config))
    if file.provider != "local":  # there, nodes detect their own hardware
        yield Check(name="head", run=lambda: _check_head(file.config), needs=("schema",))
        yield Check(name="labels", run=lambda: check_labels(file.config), needs=("schema",))
        yield Check(name="cache", run=lambda: check_cache(file.config), needs=("schema",))
        yield Check(name="zones", run=lambda: check_zones(file.config), needs=("schema",))


def validate(config: Mapping[str, Any]) -> str:
    """Fill the configuration in and validate it with Ray's own code. Raises ``UserError``."""
    import click
    from jsonschema import ValidationError
    from ray import __version__ as ray_version
    from ray.autoscaler._private.util import prepare_config, validate_config

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            validate_config(prepare_config(dict(config)))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.absolute_path) or "the file"
        raise UserError(f"{place}: {error.message}; see Ray's reference of cluster configurations") from error
    except (ValueError, RuntimeError, KeyError, NotImplementedError, click.ClickException, SystemExit) as error:
        lines = output.getvalue().strip().splitlines()
        raise UserError(f"Ray {ray_version} refuses the file: {str(error) or (lines[-1] if lines else '')}") from error
    return f"valid for Ray {ray_version}"


def find_placeholders(text: str) -> str:
    """Raises ``UserError`` with the lines that still hold an example's value; comments do not count."""
    return refuse_placeholders([f"{value} in line {number}" for value, number in placeholders(text)])


def placeholders(text: str) -> Iterator[tuple[str, int]]:
    """Values of the example in a file, and their lines."""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _PLACEHOLDER.search(line.split(" #", 1)[0])
        if match and not line.lstrip().startswith("#"):
            yield match.group(), number


def refuse_placeholders(found: list[str]) -> str:
    """Raises ``UserError`` if there are any; ``found`` says what is where."""
    if found:
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise UserError(
            f"values of the example are still there: {', '.join(found[:8])}{more}; put your own in their place"
        )
    return "none of the example's values is left"


def compare_images(config: Mapping[str, Any]) -> str:
    """Raises where the nodes would run different images, or one that can change under its name."""
    docker: Mapping[str, Any] = config.get("docker") or {}
    common = docker.get("image", "")
    images = {"head": docker.get("head_image") or common, "workers": docker.get("worker_image") or common}
    for name, one in (config.get("available_node_types") or {}).items():
        own = (one.get("docker") or {}).get("worker_image")
        if own:
            images[name] = own
    different = sorted({image for image in images.values() if image})
    if not different:
        return "no images: every node installs the checkout that is copied to it"
    refuse_mismatched(images)
    return f"all nodes run {different[0]}"


def refuse_mismatched(images: Mapping[str, str]) -> None:
    """Raises for images that differ or are not named by digest; ``images`` by the nodes that run them."""
    if len(set(images.values())) > 1:
        shown = ", ".join(f"{who}: {image or 'none'}" for who, image in images.items())
        message = f"the images differ ({shown}); Ray and Python must be of one version on all nodes, and the code too: "
        raise UserError(f"{message}name one image")
    image = next(iter(images.values()), "")
    if "@sha256:" not in image:
        raise UserError(
            f"image {image!r} is not named by its digest: a tag may mean another image on a node that starts later, "
            "whose ranks would be refused; write image@sha256:..., as `docker push` prints it (in a kustomization "
            "digest: sha256:... in place of newTag)"
        )


def _find_tools() -> str:
    return f"ssh is {find_tool('ssh')}, rsync is {find_tool('rsync')}, ray is {find_tool('ray')}"


def _find_files(file: ClusterFile) -> str:
    """Checks that the files exist which are copied to the nodes, including secrets and the ssh key."""
    mounts: Mapping[str, str] = file.config.get("file_mounts") or {}
    key = (file.config.get("auth") or {}).get("ssh_private_key")
    paths = [*mounts.values(), *([key] if key else [])]
    missing = [path for path in paths if not Path(path).expanduser().exists()]
    if any(path.endswith("auth_token") for path in missing):
        raise UserError("there is no ~/.ray/auth_token; make it with: ray get-auth-token --generate")
    if missing:
        raise UserError(f"not on this machine: {', '.join(missing)}; file_mounts and auth name them")
    if not any(path.endswith("auth_token") for path in mounts.values()):
        raise ConcernError(
            "no auth token is copied to the nodes, so whoever reaches the head's port may run code there; "
            "mount ~/.ray/auth_token and set RAY_AUTH_MODE=token"
        )
    return f"{len(paths)} files and folders for the nodes are there"


def _check_head(config: Mapping[str, Any]) -> str:
    name = config.get("head_node_type", "")
    resources: Mapping[str, int] = (config.get("available_node_types") or {})[name].get("resources") or {}
    if resources.get("CPU") != 0 or resources.get("GPU", 0):
        message = f"{name} offers {dict(resources) or 'all that it has'}, so attempts would run beside the controller; "
        raise UserError(f"{message}give the head resources: {{CPU: 0}}")
    return f"{name} takes no work"


def check_labels(config: Mapping[str, Any]) -> str:
    """Checks that every kind of worker has correct labels by which the scheduler chooses nodes."""
    types: Mapping[str, Mapping[str, Any]] = config.get("available_node_types") or {}
    workers = {name: one for name, one in types.items() if name != config.get("head_node_type")}
    for name, one in workers.items():
        labels: Mapping[str, str] = one.get("labels") or {}
        has_gpus = bool((one.get("resources") or {}).get("GPU"))
        wanted = [MARKET_LABEL, *([ACCELERATOR_LABEL] if has_gpus else []), *EXPECTED_LABELS]
        missing = [label for label in wanted if label not in labels]
        if missing:
            raise UserError(f"{name} lacks the labels {', '.join(missing)}; without them `resources` cannot choose it")
        check_price(name, labels)
        is_spot = labels[MARKET_LABEL] == "spot"
        if is_spot != is_bought_on_spot(one.get("node_config") or {}):
            bought = "on demand" if is_spot else "on the spot market"
            raise UserError(f"{name} is labelled {labels[MARKET_LABEL]}, but is bought {bought}; make the two agree")
    return f"{len(workers)} kinds of workers say their accelerator, market, price and domain"


def check_cache(config: Mapping[str, Any]) -> str:
    """Raises ``UserError`` for workers without local disks: their cache would be on the root device.

    There it shares an EBS volume's or a persistent disk's few hundred MB/s with everything else, and fills it.
    """
    without = [
        f"{name} ({settings.get('InstanceType') or settings.get('machineType')})"
        for name, settings in _workers(config).items()
        if not has_local_disks(settings)
    ]
    if without:
        raise UserError(
            f"the cache of {', '.join(without)} would lie on the root device, because the machine has no local SSDs; "
            "take a type that has some (EC2: a `d` in its name; Compute Engine: A2 ultra, A3, -lssd), or add disks of "
            "type SCRATCH to it"
        )
    return "all workers have local SSDs for the cache"


def has_local_disks(settings: Mapping[str, Any]) -> bool:
    """Whether a node's configuration (EC2 or Compute Engine) gives a machine with local disks."""
    if any(disk.get("type") == "SCRATCH" for disk in settings.get("disks") or ()):
        return True
    return bool(_HAS_LOCAL_DISKS.match(str(settings.get("InstanceType") or settings.get("machineType") or "")))


def check_zones(config: Mapping[str, Any]) -> str:
    """Raises where a gang could be placed in several zones: GPU nodes of one type must be in one zone, with a label."""
    zones = [one.strip() for one in str((config.get("provider") or {}).get("availability_zone", "")).split(",")]
    types: Mapping[str, Mapping[str, Any]] = config.get("available_node_types") or {}
    gpus = {name: one for name, one in types.items() if (one.get("resources") or {}).get("GPU")}
    without_label = [name for name, one in gpus.items() if ZONE_LABEL not in (one.get("labels") or {})]
    if gpus and len(zones) > 1:
        raise UserError(
            f"provider.availability_zone names {len(zones)} zones, so that nodes of {', '.join(gpus)} may lie in any "
            "of them, and gangs with them; name one zone, or one node type with its own subnet for each"
        )
    if without_label:
        raise ConcernError(
            f"{', '.join(without_label)} has no label {ZONE_LABEL}, so the scheduler takes all zones for one; write it"
        )
    gpu_zones = sorted({str(one["labels"][ZONE_LABEL]) for one in gpus.values()})
    return f"GPUs are in {', '.join(gpu_zones)}; a gang lies in one zone" if gpu_zones else "no GPUs"


def _workers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The configurations of all kinds of nodes but the head's."""
    types: Mapping[str, Mapping[str, Any]] = config.get("available_node_types") or {}
    return {name: one.get("node_config") or {} for name, one in types.items() if name != config.get("head_node_type")}


def check_price(name: str, labels: Mapping[str, object]) -> None:
    """Raises ``UserError`` for a price that cannot be used for costs."""
    if parse_price(str(labels[PRICE_LABEL])) is None:
        raise UserError(
            f"{name} has the label {PRICE_LABEL}: {labels[PRICE_LABEL]!r}, which is not a number from 0 up; write what "
            'the whole node costs for an hour, such as "24.00", or what sweeps cost there stays unknown'
        )


def most_of(kinds: Iterable[tuple[int, int]], max_workers: int) -> int:
    """The most that the workers of a cluster take of one quota.

    ``kinds`` are those that it counts: what one worker takes, and how many of that kind there may be. All kinds
    together may have ``max_workers``, and the largest ones take the most.
    """
    taken, left = 0, max_workers
    for size, count in sorted(kinds, reverse=True):
        taken += size * min(count, left)
        left -= min(count, left)
    return taken


def is_bought_on_spot(node_config: Mapping[str, Any]) -> bool:
    """Whether a node's configuration (EC2 or Compute Engine) asks for a machine that the provider may reclaim."""
    market = (node_config.get("InstanceMarketOptions") or {}).get("MarketType")
    scheduling = node_config.get("scheduling") or {}
    parts = scheduling if isinstance(scheduling, list) else [scheduling]
    return market == "spot" or any(one.get("provisioningModel") == "SPOT" or one.get("preemptible") for one in parts)
