"""The notebook of the docs runs as it stands, and what it shows is a report.

``python -m tests.integration.test_notebook`` executes it and keeps its outputs in the docs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "quickstart.ipynb"
_TIMEOUT_S = 600


def execute(folder: Path) -> Any:
    """The notebook with its outputs, run in a folder of its own, where it also keeps its results."""
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=_TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def _shown(notebook: Any) -> list[str]:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S)
def test_the_notebook_runs_and_shows_plan_status_and_report(tmp_path: Path) -> None:
    plan, status, report, *_ = _shown(execute(tmp_path))
    assert "Plan of sweep quickstart" in plan
    assert "succeeded" in status
    assert "value='1.0000'" in status
    assert "label space" in report
    assert "newPlot" in report


SMALL = """version: 1
name: live
datasets: {digits: {builtin: digits}}
labels: {digit: {dataset: digits, hierarchy: [digit]}, parity: {dataset: digits, modulo: 2}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: [digit/digit, parity]
  recipe: {epochs: 1, batch_size: 64, lr: 0.05}
report: {baseline: parity}
"""


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S)
def test_a_kernel_shows_the_progress_of_a_submitted_sweep_and_then_its_status_once(tmp_path: Path) -> None:
    """A real kernel, cluster and controller: what a person sees who submits from a notebook and waits."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    shown: list[tuple[str, dict[str, str]]] = []

    class Recording(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in {"display_data", "update_display_data", "execute_result"}:
                shown.append((msg["msg_type"], msg["content"]["data"]))
            return super().process_message(msg, cell, cell_index)

    (tmp_path / "live.yaml").write_text(SMALL)
    line = "from orchestrator import Sweep\nSweep.from_yaml('live.yaml').submit(wait=True)"
    notebook: Any = new_notebook(cells=[new_code_cell(line)])
    try:
        Recording(notebook, timeout=_TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        down = [sys.executable, "-m", "orchestrator.cli", "down"]
        environment = {**os.environ, "PYTHONPATH": str(NOTEBOOK.parents[2])}
        subprocess.run(down, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    kinds = [kind for kind, _ in shown]
    assert kinds[0] == "display_data"
    assert kinds[-1] == "execute_result"
    assert set(kinds[1:-1]) == {"update_display_data"}
    pages = [data["text/html"] for kind, data in shown[:-1] if "text/html" in data]
    assert len(pages) > 2
    assert all("<progress" in page and "Sweep live: running" in page for page in pages[1:])
    assert shown[-2][1] == {"text/plain": shown[-1][1]["text/plain"].strip("<>")}
    assert "Sweep live: succeeded (6 succeeded)" in shown[-1][1]["text/html"]
    outputs = notebook.cells[0]["outputs"]
    assert [one["output_type"] for one in outputs if one["output_type"] != "stream"] == [
        "display_data",
        "execute_result",
    ]
    said = "".join(one["text"] for one in outputs if one["output_type"] == "stream")
    assert "Traceback" not in said


def test_the_notebook_of_the_docs_holds_its_outputs() -> None:
    import json

    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code), "run: python -m tests.integration.test_notebook"


def main() -> None:
    """Keep the outputs in the docs."""
    import tempfile

    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(Path(folder))
        for cell in notebook.cells:  # what libraries warn of names places of this machine
            cell["outputs"] = [one for one in cell.get("outputs", ()) if one.get("name") != "stderr"]
            if cell.cell_type != "code":
                del cell["outputs"]
        text = nbformat.writes(notebook).replace(folder, "/project")
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
