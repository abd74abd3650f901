"""What we write to S3 is read by a program that is not ours: the command line of AWS, where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from orchestrator.stack.description import BUCKET
from orchestrator.storage.layout import checkpoints_folder
from tests.checkpoint_cases import save_at_once
from tests.s3_server import s3_server, s3_store
from workloads.checkpoint.store import Checkpoint, CheckpointFolder

__all__ = ["s3_server"]

KEY = "pretrain-x-0123456789abcdef"
_NUM_WEIGHTS = 4_000_000
"""16 MB: several parts of an upload."""


def aws(*arguments: str) -> str:
    """Run it without any configuration but the environment's; skips where it is missing or does not start."""
    program = shutil.which(os.environ.get("AWS_CLI", "aws"))
    if program is None or subprocess.run([program, "--version"], check=False, capture_output=True).returncode:
        pytest.skip("needs the aws command: pipx install awscli, or name it by AWS_CLI")
    done = subprocess.run([program, *arguments], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_aws_command_lists_and_downloads_a_checkpoint_as_its_manifest_says(s3_server: object, tmp_path: Path) -> None:
    store = s3_store(tmp_path)
    weights = torch.arange(_NUM_WEIGHTS, dtype=torch.float32)
    checkpoint = Checkpoint(step=7, model={"weight": weights}, optimizer={"momentum/weight": weights * 0.5}, state={})
    save_at_once(CheckpointFolder(store, KEY), checkpoint)
    prefix = f"{store.uri.removeprefix(f's3://{BUCKET}/')}/{checkpoints_folder(KEY)}/"
    listed = json.loads(aws("s3api", "list-objects-v2", "--bucket", BUCKET, "--prefix", prefix, "--output", "json"))
    sizes = {Path(found["Key"]).name: found["Size"] for found in listed["Contents"]}
    aws("s3", "cp", "--recursive", "--only-show-errors", f"s3://{BUCKET}/{prefix}", str(tmp_path / "copy"))
    (folder,) = (tmp_path / "copy").iterdir()
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["objects"].keys() | {"manifest.json"} == sizes.keys()
    for part, entry in manifest["objects"].items():
        content = (folder / part).read_bytes()
        assert (sizes[part], sha256(content).hexdigest()) == (entry["size_bytes"], entry["sha256"])
