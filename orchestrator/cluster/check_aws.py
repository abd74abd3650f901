"""Checks whether AWS offers what a launcher configuration asks for. Reads only; creates nothing."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.cluster.check_launcher import is_bought_on_spot, most_of
from orchestrator.core.checks import Check, ConcernError
from orchestrator.core.errors import UserError

_LIMIT_S = 40.0
NewClient = Callable[[str, str], Any]
"""Makes boto3's client from the name of a service and a region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDemand:
    """Instances of one type that the cluster may grow to."""

    node_type: str
    instance_type: str
    count: int
    is_head: bool
    is_spot: bool
    settings: Mapping[str, Any] = field(repr=False)


def new_client(service: str, region: str) -> Any:  # noqa: ANN401 - boto3 makes clients without a type
    """boto3's client, with the credentials that its chain finds."""
    import boto3
    from botocore.config import Config

    config = Config(retries={"mode": "standard", "max_attempts": 3}, connect_timeout=5, read_timeout=15)
    client: Any = boto3.client
    return client(service, region_name=region, config=config)


def aws_checks(config: Mapping[str, Any], make: NewClient = new_client) -> Iterator[Check]:
    """Region and zones are checked without an account; quotas and images are checked if there are credentials."""
    region = str((config.get("provider") or {}).get("region", ""))
    wanted = list(demands(config))

    def with_clear_errors(question: Callable[[], str]) -> Callable[[], str]:
        return lambda: _call_aws(question)

    yield Check(name="region", run=lambda: check_region(config))
    yield Check(
        name="account",
        run=with_clear_errors(lambda: _account(make("sts", region))),
        needs=("region",),
        limit_s=_LIMIT_S,
    )
    after = ("region", "account")
    questions = {
        "instance types": lambda: check_offers(wanted, config, make("ec2", region)),
        "quota": lambda: check_quotas(wanted, config, make("ec2", region), make("service-quotas", region)),
        "machine images": lambda: check_machine_images(wanted, make("ec2", region)),
        "roles": lambda: check_roles(wanted, make("iam", region)),
    }
    for name, question in questions.items():
        yield Check(name=name, run=with_clear_errors(question), needs=after, limit_s=_LIMIT_S)


def demands(config: Mapping[str, Any]) -> Iterator[InstanceDemand]:
    """The largest demand of the configuration, by node type."""
    for name, one in (config.get("available_node_types") or {}).items():
        settings: Mapping[str, Any] = one.get("node_config") or {}
        is_head = name == config.get("head_node_type")
        most = 1 if is_head else min(one.get("max_workers", math.inf), config.get("max_workers", 0))
        yield InstanceDemand(
            node_type=name,
            instance_type=str(settings.get("InstanceType", "")),
            count=int(most),
            is_head=is_head,
            is_spot=is_bought_on_spot(settings),
            settings=settings,
        )


def check_region(config: Mapping[str, Any]) -> str:
    """Raises ``UserError`` for a region that does not exist, or zones of another one. Makes no request."""
    import boto3

    provider: Mapping[str, Any] = config.get("provider") or {}
    region = str(provider.get("region", ""))
    known = sorted(boto3.session.Session().get_available_regions("ec2"))
    if region not in known:
        raise UserError(f"provider.region {region!r} is not a region of AWS; known: {', '.join(known)}")
    zones = [zone.strip() for zone in str(provider.get("availability_zone", "")).split(",") if zone.strip()]
    wrong = [zone for zone in zones if not re.fullmatch(re.escape(region) + r"(-[a-z0-9-]+-\d+)?[a-z]", zone)]
    if wrong:
        raise UserError(f"provider.availability_zone {', '.join(wrong)} is not in {region}; write {region}a, {region}b")
    return f"{region}, {len(zones) or 'all'} zone{'s' * (len(zones) != 1)}"


def check_offers(wanted: list[InstanceDemand], config: Mapping[str, Any], ec2: Any) -> str:  # noqa: ANN401 - boto3's
    """Raises ``UserError`` for instance types that no zone of the configuration has."""
    zones = [zone.strip() for zone in str(config["provider"].get("availability_zone", "")).split(",") if zone.strip()]
    types = sorted({one.instance_type for one in wanted})
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": types}]
    )
    offers = {(one["InstanceType"], one["Location"]) for page in pages for one in page["InstanceTypeOfferings"]}
    for one in types:
        places = sorted(location for name, location in offers if name == one)
        if not [place for place in places if not zones or place in zones]:
            remedy = f"its zones here are {', '.join(places)}" if places else "take another region or type"
            raise UserError(f"{one} is not offered in {', '.join(zones) or 'this region'}; {remedy}")
    return f"{', '.join(types)} are offered"


def check_quotas(
    wanted: list[InstanceDemand],
    config: Mapping[str, Any],
    ec2: Any,  # noqa: ANN401 - boto3's
    quotas: Any,  # noqa: ANN401 - boto3's
) -> str:
    """Raises ``UserError`` where the account's quota of vCPUs is below what the cluster may grow to."""
    sizes = _num_vcpus(wanted, ec2)
    pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="ec2")
    limits = {one["QuotaName"]: float(one["Value"]) for page in pages for one in page["Quotas"]}
    heads: dict[str, int] = defaultdict(int)
    workers: dict[str, list[tuple[int, int]]] = {}
    for one in wanted:
        name = next((name for name in limits if covers(name, one.instance_type, is_spot=one.is_spot)), "")
        if not name:
            raise ConcernError(
                f"no quota is known for {one.instance_type}; look at Service Quotas before a large sweep"
            )
        kinds, size = workers.setdefault(name, []), sizes[one.instance_type]
        if one.is_head:
            heads[name] += size
        else:
            kinds.append((size, one.count))
    needed = {name: heads[name] + most_of(kinds, config.get("max_workers", 0)) for name, kinds in workers.items()}
    short = [
        f"{name}: {limits[name]:.0f} of {count:.0f} vCPUs" for name, count in needed.items() if limits[name] < count
    ]
    if short:
        raise UserError(f"quota: {'; '.join(short)}; ask for more in Service Quotas, or lower max_workers")
    return ", ".join(f"{name}: {count:.0f} of {limits[name]:.0f} vCPUs" for name, count in needed.items())


def covers(quota: str, instance_type: str, *, is_spot: bool) -> bool:
    """Whether a quota counts a type, by its name: ``All P5 Spot Instance Requests`` counts ``p5.48xlarge``."""
    is_for_spot = quota.endswith("Spot Instance Requests")
    if is_for_spot != is_spot or not (is_for_spot or quota.startswith("Running On-Demand")):
        return False
    found = re.match(r"([a-z]+?)(\d+)", instance_type)
    if found is None:
        return False
    family, generation = found.group(1).upper(), found.group(2)
    words = set(re.findall(r"[A-Za-z]+\d*", quota))
    return bool(words & {family, f"{family}{generation}"})


def check_machine_images(wanted: list[InstanceDemand], ec2: Any) -> str:  # noqa: ANN401 - boto3's
    """Raises ``UserError`` for images that the account does not see in this region."""
    images = sorted({str(one.settings.get("ImageId", "")) for one in wanted} - {""})
    if not images:
        return "Ray's default image of the region"
    found = ec2.describe_images(Filters=[{"Name": "image-id", "Values": images}])["Images"]
    missing = sorted(set(images) - {one["ImageId"] for one in found})
    if missing:
        raise UserError(f"{', '.join(missing)} is not in this region; images are per region: take that one's id")
    return ", ".join(f"{one['ImageId']} ({one.get('Name', '')})" for one in found)


def check_roles(wanted: list[InstanceDemand], iam: Any) -> str:  # noqa: ANN401 - boto3's
    """Raises where a node would have no access to the bucket: its instance profile is missing, or is not named."""
    names = {one.node_type: (one.settings.get("IamInstanceProfile") or {}) for one in wanted}
    unnamed = [node_type for node_type, profile in names.items() if not profile]
    if unnamed:
        raise ConcernError(
            f"{', '.join(unnamed)} has no IamInstanceProfile, so no right to a bucket unless keys are copied there; "
            "infra/terraform/aws makes least-privilege profiles"
        )
    for profile in names.values():
        name = profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2]
        iam.get_instance_profile(InstanceProfileName=name)
    return "the instance profiles of all nodes exist"


def _account(sts: Any) -> str:  # noqa: ANN401 - boto3's
    return f"account {sts.get_caller_identity()['Account']}"


def _num_vcpus(wanted: list[InstanceDemand], ec2: Any) -> dict[str, int]:  # noqa: ANN401 - boto3's
    types = sorted({one.instance_type for one in wanted})
    found = ec2.describe_instance_types(InstanceTypes=types)["InstanceTypes"]
    return {one["InstanceType"]: int(one["VCpuInfo"]["DefaultVCpus"]) for one in found}


def _call_aws(question: Callable[[], str]) -> str:
    """Call AWS. Raises ``ConcernError`` if it cannot be asked, ``UserError`` if it refuses the request."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        return question()
    except NoCredentialsError as error:
        raise ConcernError(
            "not asked: there are no AWS credentials here; set AWS_PROFILE or log in, and ask again"
        ) from error
    except ClientError as error:
        details = error.response.get("Error", {})
        code, message = details.get("Code", ""), details.get("Message", "")
        if code in {"AccessDenied", "UnauthorizedOperation", "AccessDeniedException"}:
            raise ConcernError(
                f"not asked: these credentials may not {error.operation_name}; look it up in the console"
            ) from error
        raise UserError(f"AWS says {code}: {message}") from error
    except BotoCoreError as error:
        raise ConcernError(f"not asked: AWS does not answer ({type(error).__name__}); check the network") from error
