"""The notebook of the docs runs as it stands, and what it shows is a report.

``python -m tests.integration.test_notebook`` executes it and keeps its outputs in the docs.
"""

from __future__ import annotations

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
