"""Restricts the files of the stack's MLflow server to one folder.

All requests for files, of runs, models or traces, use MLflow's registry of artifact stores. So the restriction is
there: no other scheme, no other folder, and no link that leads out of it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracing.utils.artifact_utils import TRACE_DATA_FILE_NAME

OWN_LOCATION: Final = "mlflow-artifacts:/"
"""MLflow's name for the folder of the server itself."""
_INDIRECT: Final = {"mlflow-artifacts", "runs", "models"}
"""Schemes that refer to a place of another scheme, which is checked in turn."""


def confine_artifacts(root: Path) -> None:
    """Make MLflow of this process read, list, write and delete no files but those below ``root``."""
    known = get_registered_artifact_repositories()
    for scheme in known.keys() - _INDIRECT:
        del known[scheme]
    known[""] = known["file"] = cast("ArtifactRepository", partial(ConfinedRepository, root.resolve()))


def refuse_locations() -> None:
    """Make MLflow of this process refuse experiments that name a place for their files, other than its own."""
    create = SqlAlchemyStore.create_experiment

    def create_inside(store: SqlAlchemyStore, name: str, artifact_location: str | None = None, tags: Any = None) -> str:  # noqa: ANN401 - MLflow's
        place = artifact_location or OWN_LOCATION
        if not place.startswith(OWN_LOCATION) or place.startswith(f"{OWN_LOCATION}/"):
            raise _refusal(f"artifact_location is {place!r}, but this server keeps files itself; leave it out")
        return str(create(store, name, artifact_location, tags))  # type: ignore[no-untyped-call]

    SqlAlchemyStore.create_experiment = create_inside  # type: ignore[method-assign]


class ConfinedRepository(LocalArtifactRepository):
    """MLflow's folder of artifacts, with a check of each path before it is used.

    Only the user may write below ``root``, so that a path cannot change between the check and its use.
    """

    def __init__(self, root: Path, artifact_uri: str, tracking_uri: str = "", registry_uri: str = "") -> None:
        super().__init__(artifact_uri, tracking_uri or None, registry_uri or None)
        self._root = root
        self._confine()
        self._confine(TRACE_DATA_FILE_NAME)  # which MLflow opens without asking for its path

    def get_local_path(self, artifact_path: str) -> str:
        """Of a file or folder that is there."""
        self._confine(artifact_path)
        return str(super().get_local_path(artifact_path))

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy a folder."""
        for path in Path(local_dir).rglob("*"):
            self._confine(artifact_path, str(path.relative_to(local_dir)))
        super().log_artifacts(local_dir, artifact_path)  # type: ignore[no-untyped-call]

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """Files and folders, without links that lead out."""
        self._confine(path)
        found: list[FileInfo] = super().list_artifacts(path)  # type: ignore[no-untyped-call]
        return [info for info in found if self._is_inside(info.path)]

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Delete a file, or a folder with all that is in it."""
        self._confine(artifact_path)
        super().delete_artifacts(artifact_path)  # type: ignore[no-untyped-call]

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        self._confine(remote_file_path)
        super()._download_file(remote_file_path, local_path)  # type: ignore[no-untyped-call]

    def _get_or_create_artifact_dir(self, artifact_path: str | None = None) -> str:
        # All writes of single files come here; they replace a link, and never write through it.
        self._confine(artifact_path)
        return str(super()._get_or_create_artifact_dir(artifact_path))

    def _confine(self, *parts: str | None) -> None:
        if not self._is_inside(*parts):
            raise _refusal("the path is not in this server's folder of artifacts, or a link leads out of it")

    def _is_inside(self, *parts: str | None) -> bool:
        place = Path(self.artifact_dir, *(part for part in parts if part))
        return place.resolve().is_relative_to(self._root)


def _refusal(message: str) -> MlflowException:
    return MlflowException(message, error_code=INVALID_PARAMETER_VALUE)
