"""All converters by name, and how a source is listed by JSON arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from orchestrator.core.errors import UserError
from workloads.data.convert import imagefolder, imagenet, inat, tabular
from workloads.data.convert.items import Conversion
from workloads.data.convert.request import ConvertRequest

CONVERTERS: Final[Mapping[str, Callable[[ConvertRequest], Conversion]]] = {
    "imagefolder": imagefolder.convert,
    "imagenet1k": imagenet.convert_1k,
    "imagenet21k": imagenet.convert_21k,
    "inat2021": inat.convert,
    "csv": tabular.convert_csv,
    "parquet": tabular.convert_parquet,
}


def list_source(arguments: Mapping[str, Any]) -> Conversion:
    """List a source.

    Args:
        arguments: ``format``, and the fields of `ConvertRequest` with paths as text; empty ones are left out.

    Raises:
        UserError: there is no such converter or source, or the source does not fit.
    """
    name = arguments["format"]
    if name not in CONVERTERS:
        raise UserError(f"there is no converter {name!r}; there are {', '.join(CONVERTERS)}")
    request = convert_request(arguments)
    if not request.source.exists():
        raise UserError(f"{request.source} does not exist; name the folder or file to convert")
    return CONVERTERS[name](request)


def convert_request(arguments: Mapping[str, Any]) -> ConvertRequest:
    """The request that arguments of `list_source` make."""
    wanted = {name: value for name, value in arguments.items() if name != "format"}
    for path in ("source", "labels", "root"):
        wanted[path] = Path(wanted[path]) if wanted.get(path) else None
    return ConvertRequest(**{**wanted, "level_columns": tuple(wanted.get("level_columns", ()))})
