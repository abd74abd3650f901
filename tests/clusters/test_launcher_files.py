"""The launcher configurations: valid for Ray's own code, and what `cluster check` says of broken ones."""

from __future__ import annotations

import copy
import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from orchestrator.backends.ray.capacity import node_groups
from orchestrator.cluster.check_launcher import (
    check_labels,
    compare_images,
    find_placeholders,
    has_local_disks,
    launcher_checks,
    validate,
)
from orchestrator.cluster.kinds import ClusterFile, ClusterKind, read_cluster
from orchestrator.core.checks import Verdict, run_checks
from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import NotFoundError, UserError

CLUSTERS = Path(__file__).parents[2] / "clusters"
FILES = sorted(CLUSTERS.glob("*.yaml"))
LAUNCHERS = [path for path in FILES if "cluster_name" in path.read_text()]
CLOUDS = [path for path in LAUNCHERS if path.stem in {"aws", "gcp"}]
WORKERS = {"gpu-spot", "gpu-on-demand", "cpu-spot"}


@pytest.fixture
def aws():
    return yaml.safe_load((CLUSTERS / "aws.yaml").read_text())


def file_of(config, path=CLUSTERS / "aws.yaml"):
    text = yaml.safe_dump(config)
    return ClusterFile(path=path, kind=ClusterKind.RAY, text=text, documents=(config,))


def verdicts(file):
    return {result.name: (result.verdict, result.detail) for result in run_checks(list(launcher_checks(file)))}


def test_launchers_are_all_found():
    assert {path.stem for path in LAUNCHERS} >= {"local", "aws", "gcp"}


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_launcher_file_is_valid_for_rays_own_code(path):
    assert validate(read_cluster(path).config).startswith("valid for Ray 2.")


def on_machine(command, home, tmp_path):
    """Run a command of clusters/local.yaml in a shell that has read ~/.bashrc, with a folder in place of /tmp."""
    variables = {"HOME": str(home), "PATH": os.environ["PATH"]}
    words = ["bash", "-c", f"source ~/.bashrc; RAY_TMPDIR=${{RAY_TMPDIR/#\\/tmp/{tmp_path}}}; ({command})"]
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=False)


def test_machines_reached_by_ssh_close_rays_folder_to_their_other_users(tmp_path):
    local = yaml.safe_load((CLUSTERS / "local.yaml").read_text())
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("# export PATH=$HOME/.venvs/pretraining/bin:$PATH\n")  # of an earlier release
    for _ in range(2):
        on_machine(local["setup_commands"][-1], home, tmp_path)
    assert (home / ".bashrc").read_text().count("RAY_TMPDIR=") == 1
    for commands in (local["head_start_ray_commands"], local["worker_start_ray_commands"]):
        close, *_, start = commands
        assert "--temp-dir=$RAY_TMPDIR/ray" in start
        assert "RAY_START_HOOK=orchestrator.stack.ray_hook.prepare_start" in start
        for _ in range(2):
            assert on_machine(close, home, tmp_path).returncode == 0
    (folder,) = tmp_path.glob("ray-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    done = on_machine(close, home, tmp_path)
    assert done.returncode == 1
    assert "is open to other users (it needs mode 0700)" in done.stderr
    folder.rmdir()
    folder.symlink_to(home, target_is_directory=True)  # somebody else's link to a folder of ours
    home.chmod(0o700)
    assert on_machine(close, home, tmp_path).returncode == 1


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_cloud_file_keeps_work_off_the_head_and_labels_its_workers(path):
    found = verdicts(read_cluster(path))
    assert found["head"][0] is found["labels"][0] is found["images"][0] is Verdict.OK
    assert found["cache"][0] is found["zones"][0] is Verdict.OK
    assert found["placeholders"][0] is Verdict.FAILED  # nobody's registry and bucket


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_cloud_file_grows_to_nodes_that_the_scheduler_can_choose(path):
    nodes = node_groups([yaml.safe_load(path.read_text())], str(path))
    assert len(nodes) == len(WORKERS)
    spot, on_demand, cpu = nodes
    h100 = Resources(cpus=8.0, gpus=8.0, accelerator="H100")
    assert spot.suits(Resources(cpus=1.0, accelerator="H100", gpus=1.0, spot=Spot.REQUIRE))
    assert on_demand.suits(Resources(cpus=1.0, accelerator="H100", gpus=1.0, spot=Spot.NEVER))
    assert not spot.suits(Resources(cpus=1.0, spot=Spot.NEVER))
    assert not cpu.suits(h100)
    assert spot.resources.gpus == 8.0
    assert "domain" in spot.labels


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_cloud_file_watches_for_notices_on_every_worker_and_tells_the_head_how_far_it_grows(path):
    config = yaml.safe_load(path.read_text())
    assert any("orchestrator.cluster.watch" in command for command in config["worker_start_ray_commands"])
    assert any(
        "ORCHESTRATOR_NODE_GROUPS=$HOME/ray_bootstrap_config.yaml" in c for c in config["head_start_ray_commands"]
    )
    assert any("--dashboard-host=127.0.0.1" in command for command in config["head_start_ray_commands"])
    assert "-e RAY_AUTH_MODE=token" in config["docker"]["run_options"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"InstanceType": "p5.48xlarge"}, True),
        ({"InstanceType": "c6id.8xlarge"}, True),
        ({"InstanceType": "m5dn.xlarge"}, True),
        ({"InstanceType": "i4i.large"}, True),
        ({"InstanceType": "c7i.8xlarge"}, False),
        ({"InstanceType": "p3.16xlarge"}, False),
        ({"machineType": "a3-highgpu-8g"}, True),
        ({"machineType": "c3-standard-88-lssd"}, True),
        ({"machineType": "n2-standard-32", "disks": [{"type": "PERSISTENT", "boot": True}]}, False),
        ({"machineType": "n2-standard-32", "disks": [{"type": "PERSISTENT"}, {"type": "SCRATCH"}]}, True),
        ({}, False),
    ],
)
def test_machines_with_local_disks_are_known(settings, expected):
    assert has_local_disks(settings) is expected


def test_worker_whose_cache_would_lie_on_its_root_device_is_refused(aws):
    aws["available_node_types"]["cpu-spot"]["node_config"]["InstanceType"] = "c7i.8xlarge"
    verdict, detail = verdicts(file_of(aws))["cache"]
    assert verdict is Verdict.FAILED
    assert "the cache of cpu-spot (c7i.8xlarge) would lie on the root device" in detail


def test_gpus_that_may_lie_in_several_zones_are_refused_and_zones_that_are_not_said_are_a_concern(aws):
    del aws["available_node_types"]["gpu-spot"]["labels"]["zone"]
    assert verdicts(file_of(aws))["zones"][0] is Verdict.WARNING
    aws["provider"]["availability_zone"] = "us-east-1a, us-east-1b"
    verdict, detail = verdicts(file_of(aws))["zones"]
    assert verdict is Verdict.FAILED
    assert "nodes of gpu-spot, gpu-on-demand may lie in any of them" in detail


def test_aws_gpus_have_an_efa_interface_on_each_card_near_each_other(aws):
    for name in ("gpu-spot", "gpu-on-demand"):
        node = aws["available_node_types"][name]["node_config"]
        cards = node["NetworkInterfaces"]
        assert [card["NetworkCardIndex"] for card in cards] == list(range(32))
        assert [card["InterfaceType"] for card in cards] == ["efa", *["efa-only"] * 31]
        assert [card["DeviceIndex"] for card in cards] == [0, *[1] * 31]
        assert node["Placement"] == {"GroupName": "pretraining-gpus"}
        assert aws["available_node_types"][name]["docker"]["worker_run_options"] == ["--device=/dev/infiniband"]
    assert "--ulimit memlock=-1:-1" in aws["docker"]["run_options"]


def test_google_workers_make_their_local_disks_one_cache(tmp_path):
    """The shipped command, with programs that only write down how they were called."""
    gcp = yaml.safe_load((CLUSTERS / "gcp.yaml").read_text())
    mount = gcp["initialization_commands"][0].replace("/dev/disk/by-id", str(tmp_path))
    called = tmp_path / "called"
    for name in ("sudo", "mountpoint"):
        program = tmp_path / name
        told = f'echo "{name} $*" >> {called}\n'
        program.write_text(f'#!/bin/sh\n{told}{"exit 1" if name == "mountpoint" else ""}\n[ "$1" != blkid ]\n')
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for number in range(3):
        (tmp_path / f"google-local-nvme-ssd-{number}").touch()
    subprocess.run(["bash", "-c", mount], env=environment, check=True)
    lines = called.read_text().splitlines()
    assert lines[0] == "mountpoint -q /mnt/cache"
    assert lines[1].startswith("sudo mdadm --create /dev/md0 --run --force --level=0 --raid-devices=3 ")
    assert lines[-1] == "sudo mount -o noatime,discard /dev/md0 /mnt/cache"
    assert any(line.startswith("sudo mkfs.ext4") for line in lines)


def test_aws_machines_take_no_old_metadata_tokens_and_encrypt_their_disks(aws):
    for one in aws["available_node_types"].values():
        assert one["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
        assert all(disk["Ebs"]["Encrypted"] for disk in one["node_config"]["BlockDeviceMappings"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config: config.update(max_workers="many"), "max_workers: 'many' is not of type 'integer'"),
        (lambda config: config.update(workers=3), "Additional properties are not allowed"),
        (lambda config: config.update(head_node_type="nobody"), "`head_node_type` must be one of"),
        (lambda config: config["available_node_types"]["gpu-spot"].update(min_workers=99), "smaller than the sum"),
        (lambda config: config["available_node_types"]["gpu-spot"].pop("node_config"), "node_config"),
    ],
)
def test_launcher_file_that_ray_refuses_is_refused_with_its_reason(aws, change, told):
    change(aws)
    with pytest.raises(UserError, match=told):
        validate(aws)


def test_placeholders_are_named_with_their_lines_and_comments_do_not_count():
    text = "# REPLACE this\nregion: eu\nhead_ip: 192.0.2.10 # REPLACE\nbucket: REPLACE-BUCKET\n"
    with pytest.raises(UserError, match=r"192\.0\.2\.10 in line 3, REPLACE-BUCKET in line 4;"):
        find_placeholders(text)
    assert find_placeholders("region: eu # REPLACE it\n") == "none of the example's values is left"


def test_images_that_differ_are_refused(aws):
    aws["docker"]["worker_image"] = "registry/other:1"
    with pytest.raises(UserError, match="the images differ"):
        compare_images(aws)


@pytest.mark.parametrize("image", ["registry:5000/a", "registry/a:latest", "a", "registry:5000/a:1.2"])
def test_image_that_is_not_named_by_its_digest_is_refused(aws, image):
    aws["docker"]["image"] = image
    with pytest.raises(UserError, match="is not named by its digest"):
        compare_images(aws)


@pytest.mark.parametrize("image", ["registry:5000/a:1.2@sha256:00", "registry/a@sha256:00"])
def test_image_that_is_named_by_its_digest_is_taken(aws, image):
    aws["docker"]["image"] = image
    assert compare_images(aws) == f"all nodes run {image}"


def test_node_type_with_another_image_is_refused(aws):
    aws["available_node_types"]["gpu-spot"]["docker"] = {"worker_image": "registry/other:1"}
    with pytest.raises(UserError, match="gpu-spot: registry/other:1"):
        compare_images(aws)


def test_head_that_takes_work_is_refused(aws):
    aws["available_node_types"]["head"]["resources"] = {}
    assert verdicts(file_of(aws))["head"] == (
        Verdict.FAILED,
        "head offers all that it has, so attempts would run beside the controller",
    )


def test_worker_without_a_label_is_refused(aws):
    del aws["available_node_types"]["gpu-spot"]["labels"]["ray.io/accelerator-type"]
    with pytest.raises(UserError, match=r"gpu-spot lacks the labels ray\.io/accelerator-type"):
        check_labels(aws)


@pytest.mark.parametrize("price", ["$24", "", "-1", "nan"])
def test_worker_whose_price_is_no_number_is_refused(aws, price):
    aws["available_node_types"]["gpu-spot"]["labels"]["price"] = price
    with pytest.raises(UserError, match=r"gpu-spot has the label price: .* is not a number from 0 up"):
        check_labels(aws)


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_worker_whose_label_lies_about_its_market_is_refused(path):
    config = yaml.safe_load(path.read_text())
    config["available_node_types"]["gpu-on-demand"]["labels"]["ray.io/market-type"] = "spot"
    with pytest.raises(UserError, match="gpu-on-demand is labelled spot, but is bought on demand"):
        check_labels(config)


def test_missing_files_are_named_the_token_with_how_to_make_it(aws, tmp_path):
    aws["file_mounts"] = {"~/.ray/auth_token": str(tmp_path / "auth_token")}
    found = verdicts(file_of(aws))["secrets"]
    assert found == (Verdict.FAILED, "there is no ~/.ray/auth_token")
    aws["file_mounts"] = {"~/data": str(tmp_path / "none")}
    assert "none" in verdicts(file_of(aws))["secrets"][1]


def test_cluster_without_a_token_is_a_concern(aws):
    aws["file_mounts"] = {}
    verdict, told = verdicts(file_of(aws))["secrets"]
    assert verdict is Verdict.WARNING
    assert "whoever reaches the head's port" in told


def test_cluster_file_that_is_none_is_told_what_would_be(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("version: 1\nname: x\n")
    with pytest.raises(UserError, match="is not the file of a cluster; expected a Ray launcher configuration"):
        read_cluster(path)
    with pytest.raises(NotFoundError, match="does not exist"):
        read_cluster(tmp_path / "absent.yaml")
    path.write_text("a: [1")
    with pytest.raises(UserError, match="is not YAML"):
        read_cluster(path)
    with pytest.raises(UserError, match=r"without kustomization\.yaml"):
        read_cluster(tmp_path)


def test_batch_script_is_a_slurm_cluster(tmp_path):
    path = tmp_path / "ray.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=2\n")
    assert read_cluster(path).kind is ClusterKind.SLURM


def test_growth_of_a_file_that_describes_no_nodes_is_refused(aws):
    with pytest.raises(Exception, match="describes no nodes"):
        node_groups([{"cluster_name": "x"}], "x.yaml")
    without_room = copy.deepcopy(aws)
    for one in without_room["available_node_types"].values():
        one["max_workers"] = 0
    assert node_groups([without_room], "x.yaml") == ()
