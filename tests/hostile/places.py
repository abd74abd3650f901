"""Hostile URIs, URLs and names of objects."""
# ruff: noqa: E501 - tables of hostile texts

from __future__ import annotations

from tests.hostile.sweeps import NAMES

STORES = (
    "pipe:touch pwned", "pipe:cat /etc/passwd |", "file://../../etc", "file:///a/../../etc", "file:///a/%2e%2e/etc",
    "file:///a/..%2f..%2fetc", "file:///a/%00b", "file://host/share", "file:relative", "file://./relative", "s3://u:p@b/x",
    "s3://token@bucket/x", "s3://169.254.169.254/x", "s3://127.0.0.1/x", "s3://0.0.0.0/x", "s3://bucket/../x", "s3://b",
    "s3://bucket/a/../../b", "s3://bucket/%2e%2e/x", "s3://bucket/x?versionId=1", "s3://bucket/x#f", "s3://Bucket/x",
    "s3://buc_ket/x", "s3://[::1]/x", "s3://[/x", "s3:///x", "s3://", "s3:bucket/x", "http://169.254.169.254/latest",
    "https://example.org/x", "ftp://host/x", "gs://bucket/x", "hdfs://host/x", "gopher://127.0.0.1:6379/_SET", "data:,x",
    "javascript:alert(1)", "jar:file:///a!/b", "/etc/passwd", "etc/passwd", "", "://", "//host/x", "\\\\host\\share",
    "s3://bucket/$(touch pwned)", "s3://bucket/a b", "s3://bucket/a\nb", "s3://bucket//x", "s3://bucket/.hidden/x",
    "s3://user%40host:pass@bucket/x", "s3://bucket:9000/x", "FILE:///etc\0", "s3://bucket/" + "x" * 2000,
)  # fmt: skip
URLS = (
    "http://169.254.169.254/latest/meta-data/iam/", "http://169.254.170.2/v2/credentials", "http://2852039166/",
    "http://0xa9fea9fe/", "http://0xA9.0xFE.0xA9.0xFE/", "http://0251.0376.0251.0376/", "http://169.254.43518/",
    "http://[fe80::1]/", "http://[fe80::1%25eth0]/", "http://[::ffff:169.254.169.254]/", "http://[fd00:ec2::254]/",
    "http://[2002:a9fe:a9fe::]/", "http://[64:ff9b::169.254.169.254]/", "http://[64:ff9b::a9fe:aa02]/",
    "http://[64:ff9b:1:a9fe:a9:fe00::]/", "http://[64:ff9b:1:ffa9:fe:a9fe::]/", "http://[64:ff9b:1:fff:a9:fea9:fe00:0]/",
    "http://[64:ff9b:1::169.254.169.254]/", "http://[64:ff9b::6464:64c8]/", "http://[::a9fe:a9fe]/",
    "http://[2001:db8:64:64::169.254.169.254]/", "http://[2001:0:5601:5601:0:0:5601:5601]/", "http://metadata.google.internal/", "http://METADATA.google.internal./", "http://metadata/",
    "http://100.100.100.200/", "http://0.0.0.0:6379/", "http://[::]/", "http://224.0.0.1/", "http://u:p@example.org/",
    "http://token@example.org/", "http://example.org:80@169.254.169.254/", "http://169.254.169.254\\@example.org/",
    "http://example.org\t.evil/", "http://example.org/\r\nHost: evil", "file:///etc/passwd", "ftp://example.org/", "gopher://x/",
    "javascript:alert(1)", "data:text/html,x", "//example.org/", "example.org", "", "http://", "http:///x", "http://[",
    "http://example.org:99999/", "http://example.org:x/", "dict://127.0.0.1:11211/stat", "unix:///var/run/docker.sock",
)  # fmt: skip
OBJECT_NAMES = (
    *(name for name in NAMES if name not in {"--help", "-rf", "~root", "a" * 300}), "a//b", "/a", "a/", "a/./b", "a/../b", "..", "a\0b",
    "a/.b", "a\\b", "a:b", "a?b", "a%2fb", "\n", "a\n",
)  # fmt: skip
"""``-`` and ``~`` may begin a part of a name: no name is ever an argument of its own."""
