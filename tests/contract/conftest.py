"""The real S3 server that the suite of object stores runs over."""

from tests.s3_server import s3_server

__all__ = ["s3_server"]
