"""What `cluster check` asks of clouds, answered by stand-ins; Ray's own bootstrap of clusters/aws.yaml on a mock."""

from __future__ import annotations

import copy
from pathlib import Path

import boto3
import pytest
import yaml
from botocore.exceptions import NoCredentialsError
from botocore.stub import Stubber

from orchestrator.cluster.check_aws import (
    aws_checks,
    check_machine_images,
    check_offers,
    check_quotas,
    check_region,
    check_roles,
    covers,
    demands,
)
from orchestrator.cluster.check_gcp import (
    check_machines,
    check_project,
    check_quota,
    check_zone,
    gcp_checks,
    gpus_of,
)
from orchestrator.core.checks import ConcernError, Verdict, run_checks
from orchestrator.core.errors import UserError

CLUSTERS = Path(__file__).parents[2] / "clusters"
VCPUS = {"m7i.xlarge": 4, "p5.4xlarge": 16, "p5.48xlarge": 192, "c6id.8xlarge": 32}
QUOTAS = {
    "All P5 Spot Instance Requests": 1536.0,
    "Running On-Demand P instances": 384.0,
    "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests": 256.0,
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 64.0,
}


@pytest.fixture
def aws():
    return yaml.safe_load((CLUSTERS / "aws.yaml").read_text())


@pytest.fixture
def gcp():
    config = yaml.safe_load((CLUSTERS / "gcp.yaml").read_text())
    config["provider"]["project_id"] = "my-lab-123"
    return config


@pytest.fixture
def fake_credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def quotas_client(fake_credentials):
    def client(**values):
        made = boto3.client("service-quotas", region_name="us-east-1")
        stub = Stubber(made)
        listed = [{"QuotaName": name, "Value": value} for name, value in {**QUOTAS, **values}.items()]
        stub.add_response("list_service_quotas", {"Quotas": listed}, {"ServiceCode": "ec2"})
        stub.activate()
        return made

    return client


@pytest.fixture
def ec2(fake_credentials):
    def client(method, response):
        made = boto3.client("ec2", region_name="us-east-1")
        stub = Stubber(made)
        stub.add_response(method, response)
        stub.activate()
        return made

    return client


@pytest.fixture
def sized(ec2):
    types = [{"InstanceType": name, "VCpuInfo": {"DefaultVCpus": count}} for name, count in VCPUS.items()]
    return ec2("describe_instance_types", {"InstanceTypes": types})


def test_region_that_does_not_exist_is_refused_without_asking(aws):
    aws["provider"]["region"] = "us-eest-1"
    with pytest.raises(UserError, match=r"'us-eest-1' is not a region of AWS; known: .*us-east-1"):
        check_region(aws)


def test_zone_of_another_region_is_refused_without_asking(aws):
    aws["provider"]["availability_zone"] = "us-east-1a,eu-west-1b"
    with pytest.raises(UserError, match="eu-west-1b is not in us-east-1"):
        check_region(aws)


def test_region_and_zones_of_the_shipped_file_are_right(aws):
    assert check_region(aws) == "us-east-1, 1 zone"


def test_demand_is_what_the_cluster_may_grow_to(aws):
    found = {one.node_type: (one.count, one.is_spot) for one in demands(aws)}
    assert found == {"head": (1, False), "gpu-spot": (8, True), "gpu-on-demand": (2, False), "cpu-spot": (6, True)}


def test_quota_that_suffices_is_told(aws, sized, quotas_client):
    told = check_quotas(list(demands(aws)), aws, sized, quotas_client())
    assert "All P5 Spot Instance Requests: 1536 of 1536 vCPUs" in told


def test_quota_that_is_too_small_is_refused_with_what_is_needed(aws, sized, quotas_client):
    few = quotas_client(**{"All P5 Spot Instance Requests": 0.0})
    with pytest.raises(UserError, match="All P5 Spot Instance Requests: 0 of 1536 vCPUs; ask for more"):
        check_quotas(list(demands(aws)), aws, sized, few)


@pytest.mark.parametrize(("limit", "is_enough"), [(8 * 192 - 1, False), (8 * 192, True)])
def test_kinds_of_workers_share_the_bound_of_all_workers(aws, sized, quotas_client, limit, is_enough):
    """The head is none of them, and the largest workers take the most."""
    aws["max_workers"] = 8
    types = aws["available_node_types"]
    types["gpu-spot-small"] = copy.deepcopy(types["gpu-spot"]) | {"max_workers": 8}
    types["gpu-spot-small"]["node_config"]["InstanceType"] = "p5.4xlarge"
    client = quotas_client(**{"All P5 Spot Instance Requests": float(limit)})
    if is_enough:
        assert f"P5 Spot Instance Requests: {limit} of {limit} vCPUs" in check_quotas(
            list(demands(aws)), aws, sized, client
        )
        return
    with pytest.raises(UserError, match=f"P5 Spot Instance Requests: {limit} of 1536 vCPUs"):
        check_quotas(list(demands(aws)), aws, sized, client)


@pytest.mark.parametrize(
    ("quota", "instance_type", "is_spot", "counts"),
    [
        ("All P5 Spot Instance Requests", "p5.48xlarge", True, True),
        ("All P5 Spot Instance Requests", "p5.48xlarge", False, False),
        ("All P4, P3 and P2 Spot Instance Requests", "p4d.24xlarge", True, True),
        ("All P4, P3 and P2 Spot Instance Requests", "p5.48xlarge", True, False),
        ("Running On-Demand P instances", "p4d.24xlarge", False, True),
        ("All G and VT Spot Instance Requests", "g5.xlarge", True, True),
        ("Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", "m7i.xlarge", False, True),
        ("Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", "p5.48xlarge", False, False),
        ("Running Dedicated p5 Hosts", "p5.48xlarge", False, False),
    ],
)
def test_quota_counts_the_instance_types_of_its_name(quota, instance_type, is_spot, counts):
    assert covers(quota, instance_type, is_spot=is_spot) is counts


def test_instance_type_that_no_zone_has_is_refused_with_where_it_is(aws, ec2):
    offered = [{"InstanceType": name, "Location": "us-east-1f"} for name in VCPUS]
    client = ec2("describe_instance_type_offerings", {"InstanceTypeOfferings": offered})
    with pytest.raises(UserError, match=r"not offered in us-east-1a; its zones here are us-east-1f"):
        check_offers(list(demands(aws)), aws, client)


def test_machine_image_of_another_region_is_refused(aws, ec2):
    with pytest.raises(UserError, match="ami-REPLACE is not in this region"):
        check_machine_images(list(demands(aws)), ec2("describe_images", {"Images": []}))


def test_nodes_without_a_role_are_a_concern(aws):
    del aws["available_node_types"]["gpu-spot"]["node_config"]["IamInstanceProfile"]
    with pytest.raises(ConcernError, match="gpu-spot has no IamInstanceProfile"):
        check_roles(list(demands(aws)), None)


def test_account_without_credentials_is_said_to_be_not_asked(aws):
    def nobody(_service, _region):
        raise NoCredentialsError

    found = {result.name: result for result in run_checks(list(aws_checks(aws, nobody)))}
    assert found["region"].verdict is Verdict.OK
    for name in ("account", "quota", "instance types", "machine images", "roles"):
        assert found[name].verdict is Verdict.WARNING
        assert found[name].detail == "not asked: there are no AWS credentials here"


def test_wrong_region_keeps_everything_else_from_being_asked(aws):
    aws["provider"]["region"] = "nowhere"
    found = {result.name: result for result in run_checks(list(aws_checks(aws, lambda *_: pytest.fail("asked"))))}
    assert found["region"].verdict is Verdict.FAILED
    assert found["quota"].verdict is Verdict.SKIPPED


def test_right_that_is_missing_is_said_and_no_refusal(aws, fake_credentials):
    def client(service, region):
        made = boto3.client(service, region_name=region)
        stub = Stubber(made)
        method = {"sts": "get_caller_identity", "iam": "get_instance_profile"}.get(service, "describe_images")
        stub.add_client_error(method, "UnauthorizedOperation")
        stub.activate()
        return made

    found = {result.name: result for result in run_checks(list(aws_checks(aws, client)))}
    assert found["account"].verdict is Verdict.WARNING
    assert "may not GetCallerIdentity" in found["account"].detail


@pytest.fixture
def bootstrapped(aws, fake_credentials, monkeypatch, tmp_path):
    """The configuration after Ray's own preparation on a mock of EC2 and IAM."""
    from moto import mock_aws
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.util import prepare_config

    monkeypatch.setenv("HOME", str(tmp_path))
    with mock_aws():
        client, iam = boto3.client("ec2", region_name="us-east-1"), boto3.client("iam", region_name="us-east-1")
        vpc = client.describe_vpcs()["Vpcs"][0]["VpcId"]
        group = client.create_security_group(GroupName="pretraining-cluster", Description="x", VpcId=vpc)["GroupId"]
        for name in ("pretraining-head", "pretraining-worker"):
            iam.create_instance_profile(InstanceProfileName=name)
        subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]
        for one in aws["available_node_types"].values():
            cards = one["node_config"].get("NetworkInterfaces")
            if cards is None:
                one["node_config"]["SecurityGroupIds"] = [group]
            for card in cards or ():
                card["SubnetId"], card["Groups"] = subnet, [group]
        yield bootstrap_aws(prepare_config(copy.deepcopy(aws))), group


def test_aws_file_bootstraps_with_rays_own_code(bootstrapped):
    config, group = bootstrapped
    types = config["available_node_types"]
    assert set(types) == {"head", "gpu-spot", "gpu-on-demand", "cpu-spot"}
    for one in types.values():
        node = one["node_config"]
        assert node["SubnetIds"]
        assert set(node["SecurityGroupIds"]) == {group}  # none of Ray's own, which lets ssh in from anywhere
        assert node["KeyName"]
    assert Path(config["auth"]["ssh_private_key"]).stat().st_mode & 0o077 == 0


def test_gcp_zone_of_another_region_is_refused(gcp):
    gcp["provider"]["availability_zone"] = "europe-west4-b"
    with pytest.raises(UserError, match=r"europe-west4-b is not in provider\.region 'us-central1'; write europe-west4"):
        check_zone(gcp)
    gcp["provider"]["availability_zone"] = "us-central1"
    with pytest.raises(UserError, match="is not a zone"):
        check_zone(gcp)


def test_gcp_machines_of_the_shipped_file_are_right(gcp):
    assert check_machines(gcp) == "n2-standard-4, a3-highgpu-8g, n2-standard-32"


def test_gcp_machine_with_other_gpus_than_promised_is_refused(gcp):
    gcp["available_node_types"]["gpu-spot"]["resources"]["GPU"] = 4
    with pytest.raises(UserError, match="gpu-spot promises 4 GPUs, but a3-highgpu-8g would have 8"):
        check_machines(gcp)


def test_gcp_machine_with_gpus_that_are_not_known_is_a_concern(gcp):
    gcp["available_node_types"]["gpu-spot"]["node_config"]["machineType"] = "a9-highgpu-8g"
    with pytest.raises(ConcernError, match="the number of GPUs of a9-highgpu-8g is not known here"):
        check_machines(gcp)
    gcp["available_node_types"]["cpu-spot"]["resources"]["GPU"] = 1  # n2 has none
    with pytest.raises(UserError, match="cpu-spot promises 1 GPUs, but n2-standard-32 would have 0"):
        check_machines(gcp)


def test_gcp_machine_with_gpus_that_would_be_moved_is_refused(gcp):
    del gcp["available_node_types"]["gpu-on-demand"]["node_config"]["scheduling"]
    with pytest.raises(UserError, match="onHostMaintenance: TERMINATE"):
        check_machines(gcp)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"machineType": "a3-highgpu-8g"}, {"nvidia-h100-80gb": 8}),
        ({"machineType": "a2-megagpu-16g"}, {"nvidia-tesla-a100": 16}),
        ({"machineType": "a4-highgpu-8g"}, {"nvidia-b200": 8}),
        ({"machineType": "g2-standard-4"}, {"nvidia-l4": 1}),
        ({"machineType": "g2-standard-24"}, {"nvidia-l4": 2}),
        ({"machineType": "g2-standard-32"}, {"nvidia-l4": 1}),
        ({"machineType": "g2-standard-96"}, {"nvidia-l4": 8}),
        ({"machineType": "n2-standard-4"}, {}),
        (
            {
                "machineType": "n1-standard-8",
                "guestAccelerators": [{"acceleratorType": "projects/p/zones/z/nvidia-tesla-t4", "acceleratorCount": 2}],
            },
            {"nvidia-tesla-t4": 2},
        ),
    ],
)
def test_gcp_gpus_are_those_of_the_machine_or_attached(settings, expected):
    assert gpus_of(settings) == expected


@pytest.mark.parametrize("project", [None, "", "REPLACE-PROJECT", "ab"])
def test_gcp_file_without_a_project_is_refused(gcp, project):
    gcp["provider"]["project_id"] = project
    with pytest.raises(UserError, match="is not a project id"):
        check_project(gcp)


def test_gcp_quota_is_compared_by_market(gcp):
    asked = []

    def fetch(url, **limits):
        asked.append(url)
        return {"quotas": [{"metric": metric, "limit": limit} for metric, limit in limits.items()]}

    enough = {"PREEMPTIBLE_NVIDIA_H100_GPUS": 64, "NVIDIA_H100_GPUS": 16}
    assert (
        check_quota(gcp, lambda url: fetch(url, **enough))
        == "PREEMPTIBLE_NVIDIA_H100_GPUS: 64 of 64, NVIDIA_H100_GPUS: 16 of 16"
    )
    assert asked == ["https://compute.googleapis.com/compute/v1/projects/my-lab-123/regions/us-central1"]
    with pytest.raises(UserError, match="PREEMPTIBLE_NVIDIA_H100_GPUS: 8 of 64"):
        check_quota(gcp, lambda url: fetch(url, **{**enough, "PREEMPTIBLE_NVIDIA_H100_GPUS": 8}))
    with pytest.raises(ConcernError, match="tells no quota NVIDIA_H100_GPUS"):
        check_quota(gcp, lambda url: fetch(url, PREEMPTIBLE_NVIDIA_H100_GPUS=64))
    gcp["max_workers"] = 8  # of both kinds together
    gcp["available_node_types"]["more"] = gcp["available_node_types"]["gpu-spot"]
    assert "PREEMPTIBLE_NVIDIA_H100_GPUS: 64 of 64" in check_quota(gcp, lambda url: fetch(url, **enough))
    with pytest.raises(UserError, match="PREEMPTIBLE_NVIDIA_H100_GPUS: 63 of 64"):
        check_quota(gcp, lambda url: fetch(url, **{**enough, "PREEMPTIBLE_NVIDIA_H100_GPUS": 63}))


@pytest.mark.parametrize(
    ("gpu", "metric"),
    [("nvidia-tesla-a100", "A100"), ("nvidia-a100-80gb", "A100_80GB"), ("nvidia-h100-mega-80gb", "H100_MEGA")],
)
def test_gcp_quota_of_a_type_is_found_among_those_of_the_region(gcp, gpu, metric):
    limits = {f"NVIDIA_{one}_GPUS": 640 for one in ("A100", "A100_80GB", "H100", "H100_MEGA", "L4")}
    limits |= {f"PREEMPTIBLE_{one}": limit for one, limit in limits.items()}
    for one in gcp["available_node_types"].values():
        if one["node_config"].get("guestAccelerators") or gpus_of(one["node_config"]):
            one["node_config"]["guestAccelerators"] = [{"acceleratorType": gpu, "acceleratorCount": 8}]
    found = check_quota(gcp, lambda _: {"quotas": [{"metric": name, "limit": limit} for name, limit in limits.items()]})
    assert {part.partition(":")[0].removeprefix("PREEMPTIBLE_") for part in found.split(", ")} == {
        f"NVIDIA_{metric}_GPUS"
    }


def test_gcp_quota_is_not_asked_of_a_wrong_project(gcp):
    gcp["provider"]["project_id"] = None
    found = {result.name: result for result in run_checks(list(gcp_checks(gcp, lambda _url: pytest.fail("asked"))))}
    assert found["project"].verdict is Verdict.FAILED
    assert found["quota"].verdict is Verdict.SKIPPED
