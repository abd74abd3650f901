"""The command line answers at once: its import must not pull in a framework."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules_of_cli() -> set[str]:
    """Top-level names in sys.modules after `import orchestrator.cli` in a fresh interpreter."""
    code = "import sys, orchestrator.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("heavy", ["torch", "torchvision", "timm", "webdataset", "ray", "mlflow", "workloads"])
def test_import_cli_leaves_heavy_package_out(modules_of_cli: set[str], heavy: str) -> None:
    assert "orchestrator" in modules_of_cli
    assert heavy not in modules_of_cli
