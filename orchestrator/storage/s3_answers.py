"""Whether an answer comes from S3, and answers what was asked.

Whoever stands between us and the server may answer in its place: the login page of a network, a web server at the wrong
port, a redirect to https. Botocore makes of such an answer what it can, often an empty one, and an empty listing would
be believed by garbage collection. So an answer is taken only if it has the status and the fields that S3 gives it, and
a listing names the bucket and the folder that were asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from orchestrator.core.errors import PreconditionFailedError

Response = dict[str, Any]

_OK: Final = (HTTPStatus.OK,)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_REGION_HEADER: Final = "x-amz-bucket-region"
_MAX_QUOTED: Final = 80


class StrangeAnswerError(Exception):
    """An answer that no S3 server gives to this request; the text says what is strange about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What every answer to an operation has."""

    statuses: Sequence[int] = _OK
    fields: Sequence[str] = ()
    root: str = ""
    """Name of the XML document; empty: the answer has no document, or (of an object) anything."""
    names_itself_by: str = ""
    """Field of a listing that has the bucket's name."""


_OBJECT: Final = ("ETag", "LastModified", "ContentLength")
_FORMS: Final[Mapping[str, _Form]] = {
    "put_object": _Form(fields=("ETag",)),
    "get_object": _Form(fields=_OBJECT, statuses=(HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT)),
    "head_object": _Form(fields=_OBJECT),
    "delete_object": _Form(statuses=(HTTPStatus.NO_CONTENT,)),
    "list_objects_v2": _Form(root="ListBucketResult", names_itself_by="Name"),
    "create_multipart_upload": _Form(root="InitiateMultipartUploadResult", fields=("UploadId",)),
    "upload_part": _Form(fields=("ETag",)),
    "complete_multipart_upload": _Form(root="CompleteMultipartUploadResult", fields=("ETag",)),
    "abort_multipart_upload": _Form(statuses=(HTTPStatus.NO_CONTENT,)),
    "list_multipart_uploads": _Form(root="ListMultipartUploadsResult", names_itself_by="Bucket"),
    "list_parts": _Form(root="ListPartsResult", fields=("UploadId",)),
}
_ROOTS: Final = {"".join(part.capitalize() for part in name.split("_")): form.root for name, form in _FORMS.items()}
"""By the operation's name in S3's API."""
_OBJECT_IN_BODY: Final = "GetObject"
_ERROR: Final = "Error"
"""S3 may say 200 before it knows that it fails; botocore sees to it."""
_ROOT_ELEMENT: Final = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?<([A-Za-z][\w:.-]{0,60})[\s/>]")
_ENTRIES: Final = {
    "Contents": ("Key", "Size", "ETag", "LastModified"),
    "CommonPrefixes": ("Prefix",),
    "Uploads": ("Key", "UploadId", "Initiated"),
}
_NEXT_PAGE: Final = {
    "list_objects_v2": ("NextContinuationToken",),
    "list_multipart_uploads": ("NextKeyMarker", "NextUploadIdMarker"),
}


def check_raw_answer(operation_model: Any, response_dict: Response, **_: object) -> None:  # noqa: ANN401 - botocore's
    """Look at an answer before botocore reads it; a handler of its events ``before-parse``.

    Raises:
        StrangeAnswerError: it is a redirect to another address, which botocore would follow in a circle, or a document
            of another kind.
    """
    status, headers = response_dict["status_code"], response_dict["headers"]
    if status in _REDIRECTS and _REGION_HEADER not in headers:
        raise StrangeAnswerError(f"redirects to {_place(headers.get('location', ''))}")
    if status == HTTPStatus.OK and operation_model.name != _OBJECT_IN_BODY and operation_model.name in _ROOTS:
        _check_document(response_dict["body"], _ROOTS[operation_model.name])


def _check_document(body: bytes, wanted: str) -> None:
    match = _ROOT_ELEMENT.match(body)
    found = match[1].decode() if match else ""
    if found != _ERROR and (found != wanted or (not match and body.strip())):
        told = f"<{found}>" if found else f"{len(body)} bytes of something else"
        raise StrangeAnswerError(f"is {told}, S3's is {f'<{wanted}>' if wanted else 'empty'}")


def check_answer(operation: str, asked: Mapping[str, Any], response: Response) -> None:
    """Compare what botocore read from an answer with the request.

    Args:
        operation: as boto3 names its method; others than this product's are not checked.
        asked: the request's parameters.
        response: as boto3 returns it.

    Raises:
        StrangeAnswerError: it is not S3's, or not to this request.
        PreconditionFailedError: the object is not the version that was asked for; the server ignored the condition.
    """
    form = _FORMS.get(operation)
    if form is None:
        return
    status = response["ResponseMetadata"]["HTTPStatusCode"]
    if status not in form.statuses:
        raise StrangeAnswerError(
            f"has HTTP status {status}, S3's has {' or '.join(str(int(s)) for s in form.statuses)}"
        )
    _require(form.fields, response, f"HTTP {status}")
    if operation == "get_object":
        _check_object(asked, response, status)
    if form.names_itself_by:
        _check_listing(operation, form.names_itself_by, asked, response)


def _check_object(asked: Mapping[str, Any], response: Response, status: int) -> None:
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", str(asked.get("Range", "")))
    if wanted is not None:
        found = re.match(r"bytes (\d+)-(\d+)/", str(response.get("ContentRange", "")))
        is_range = status == HTTPStatus.PARTIAL_CONTENT and found is not None
        if not is_range or not _is_inside(found, wanted, response["ContentLength"]):  # type: ignore[arg-type]
            told = f"HTTP {status}, Content-Range {response.get('ContentRange', 'missing')!r}"
            raise StrangeAnswerError(f"holds other bytes than {asked['Range']!r}: {told}; the server ignores ranges")
    version = asked.get("IfMatch")
    if version is not None and response["ETag"].strip('"') != version:
        raise PreconditionFailedError(
            f"{asked['Key']} has etag {response['ETag']}, expected {version}: it was replaced"
        )


def _is_inside(found: re.Match[str], wanted: re.Match[str], length: int) -> bool:
    start, end = int(found[1]), int(found[2])
    return start == int(wanted[1]) and start <= end <= int(wanted[2]) and length == end - start + 1


def _check_listing(operation: str, name_field: str, asked: Mapping[str, Any], response: Response) -> None:
    for field, wanted in ((name_field, asked["Bucket"]), ("Prefix", asked.get("Prefix", ""))):
        found = response.get(field, "")
        if found != wanted:
            message = f"is a listing of {field} {_quoted(found)}, and {wanted!r} was asked for"
            raise StrangeAnswerError(message if found else f"is a listing that does not say of which {field} it is")
    for kind, fields in _ENTRIES.items():
        for entry in response.get(kind, ()):
            _require(fields, entry, "a line of a listing")
            if not entry[fields[0]].startswith(asked.get("Prefix", "")):
                message = f"lists {_quoted(entry[fields[0]])}, which is not below {asked['Prefix']!r}"
                raise StrangeAnswerError(message)
    if response.get("IsTruncated"):
        tokens = _NEXT_PAGE[operation]
        # More uploads of one key than a page holds: the next one begins at the same key.
        if not response.get(tokens[0]) or all(response.get(one) == asked.get(one[4:]) for one in tokens):
            raise StrangeAnswerError("says that its listing goes on, and not where")


def _require(fields: Sequence[str], response: Mapping[str, Any], what: str) -> None:
    missing = [field for field in fields if field not in response]
    if missing:
        raise StrangeAnswerError(f"({what}) has no {', '.join(missing)}, which S3's always has")


def _place(location: str) -> str:
    """Scheme, host and port of an address; the rest may hold anything."""
    parts = urlsplit(location)
    return _quoted(f"{parts.scheme}://{parts.netloc}") if parts.netloc else "no address"


def _quoted(text: object) -> str:
    return repr(str(text)[:_MAX_QUOTED])
