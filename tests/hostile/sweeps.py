"""Hostile sweep.yaml files: (name, content) pairs."""
# ruff: noqa: E501 - tables of hostile texts

from __future__ import annotations

from collections.abc import Iterator

HEAD = "version: 1\nname: hostile\n"
SOUND = """
version: 1
name: {name}
{store}
datasets:
  {dataset}: {{builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 64, num_val: 32}}
labels:
  {space}: {{dataset: {dataset}, hierarchy: [depth1]}}
pretrain:
  model: {{name: {model}, image_size: 16}}
  labels: ["{space}/*"]
  recipe: {{epochs: 1, batch_size: 16, lr: 0.1}}
{rest}
"""
"""A small sweep with places for something hostile; sound as it stands in ``FIELDS``. A model with arguments would be built."""
FIELDS = {"name": "sound", "store": "", "dataset": "tree", "space": "levels", "model": "test_vit", "rest": ""}

NAMES = (
    "$(touch pwned)", "`touch pwned`", "; touch pwned", "| touch pwned", "a && b", "../../escape", "/etc/passwd", "..",
    "a/../b", "-rf", "--help", "a b", "a*", "~root", "${IFS}", "%00", "a%2e%2e", "<script>alert(1)</script>", "[red]x[/red]",
    "a'b", 'a\\"b', "CON\\n", "\\x1b[31mred", "\\u202eevil", "a" * 300, "", ".", ".hidden", "名前",
)  # fmt: skip
URIS = (
    "pipe:touch pwned", "pipe:cat /etc/passwd|", "file://../../etc", "file:///a/../../etc/passwd", "file://host/share",
    "file:///a/%2e%2e/%2e%2e/etc", "s3://user:password@bucket/x", "s3://key@bucket/x", "s3://169.254.169.254/latest",
    "s3://127.0.0.1/x", "s3://bucket/../other", "s3://bucket/x?versionId=1", "s3://bucket/x#y", "s3://Bucket/x", "s3://b",
    "http://169.254.169.254/latest/meta-data/", "https://example.org/x", "gopher://127.0.0.1:6379/_SET", "ftp://host/x",
    "data:text/plain,x", "javascript:alert(1)", "jar:file:///a!/b", "\\\\\\\\host\\\\share", "etc/passwd", "/etc/passwd",
    "file:///x\\0y", "s3:///x", "s3://", "file://", "://", "s3://[::1]/x", "s3://[/x", "gs://bucket/x", "hdfs://x/y",
)  # fmt: skip


def documents() -> Iterator[tuple[str, bytes]]:
    """Files that are no sweep, or only look like one."""
    yield from _bombs()
    yield from _tags()
    yield from _encodings()
    yield from _structures()


def filled(**fields: str) -> bytes:
    """The small sweep with something hostile in one place."""
    return SOUND.format(**{**FIELDS, **fields}).encode()


def sweeps() -> Iterator[tuple[str, bytes]]:
    """Sweeps with hostile names, URIs and values."""
    for number, name in enumerate(NAMES):
        yield f"name-{number}", filled(name=f'"{name}"')
    for number, name in enumerate(NAMES[:12]):
        yield f"dataset-{number}", filled(dataset=f'"{name}"')
        yield f"space-{number}", filled(space=f'"{name}"')
    for number, uri in enumerate(URIS):
        yield f"store-{number}", filled(store=f'store: "{uri}"')
    external = '\n  other: {{shards: {{train: "{0}"}}, num_train: 10, num_classes: 2}}'
    for number, uri in enumerate(URIS):
        yield (
            f"shards-{number}",
            filled(dataset="tree").replace(b"\nlabels:", external.format(uri).encode() + b"\nlabels:"),
        )
    for number, model in enumerate(("hf-hub:evil/model", "local-dir:/tmp/evil", "os.system", "../x", "__class__")):
        yield f"model-{number}", filled(model=f'"{model}"')
    for number, uri in enumerate(
        ("http://169.254.169.254/", "http://a:b@host/", "http://[fe80::1]/", "http://2852039166/")
    ):
        yield f"tracking-{number}", filled(rest=f'tracking: {{uri: "{uri}"}}')
    for number, value in enumerate(("1e400", "-1e400", ".nan", ".inf", "9" * 400, "-1", "1e-400", "true", "[1]", "{}")):
        yield f"number-{number}", filled().replace(b"epochs: 1,", f"epochs: {value},".encode())


def _bombs() -> Iterator[tuple[str, bytes]]:
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    yield "laughs-merges", (HEAD + merges).encode()
    variables = "vars:\n  v0: [x, x]\n" + "".join(
        f"  v{n}: [{', '.join([f'${{vars.v{n - 1}}}'] * 9)}]\n" for n in range(1, 12)
    )
    yield "laughs-variables", (HEAD + variables + "pretrain: ${vars.v11}\n").encode()
    texts = "vars:\n  v0: xxxxxxxxxx\n" + "".join(f'  v{n}: "{f"${{vars.v{n - 1}}}" * 10}"\n' for n in range(1, 12))
    yield "laughs-texts", (HEAD + texts + 'store: "file:///${vars.v11}"\n').encode()
    yield "self-alias", (HEAD + "a: &a [*a]\n").encode()
    yield "deep-lists", (HEAD + "a: " + "[" * 3_000).encode()
    yield "deep-maps", (HEAD + "a: " + "{a: " * 3_000).encode()
    yield "deep-blocks", (HEAD + "".join(f"{' ' * n}a:\n" for n in range(1000))).encode()
    yield "deep-sequences", (HEAD + "a:\n" + "- " * 3_000 + "x\n").encode()
    yield "many-keys", (HEAD + "".join(f"k{n}: 1\n" for n in range(3_000))).encode()
    yield "too-large", (HEAD + "#" + "x" * 2_000_000).encode()
    yield "many-anchors", (HEAD + "a: [" + ", ".join(f"&x{n} y" for n in range(2_000)) + "]\n").encode()
    yield (
        "braces",
        filled().replace(
            b"\nlabels:",
            b'\n  o: {shards: {train: "s3://b/{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}"}, num_train: 1, num_classes: 2}\nlabels:',
        ),
    )
    yield (
        "braces-huge",
        filled().replace(
            b"\nlabels:",
            b'\n  o: {shards: {train: "s3://b/{0..99999999999999}"}, num_train: 1, num_classes: 2}\nlabels:',
        ),
    )
    yield "schemes", (HEAD + "# " + "a." * 100_000 + "\n").encode()
    yield "web-tokens", (HEAD + "# " + "eyJ-" * 50_000 + "\n").encode()
    yield "quotes", (HEAD + 'a: "' + "\\" * 400_000).encode()


def _tags() -> Iterator[tuple[str, bytes]]:
    for number, value in enumerate((
        '!!python/object/apply:os.system ["touch pwned"]',
        '!!python/object/new:os.system ["touch pwned"]',
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object:tests.hostile.payloads.Command {command: x}",
        '!!python/object/apply:subprocess.Popen [["touch", "pwned"]]',
        "!!python/tuple [1, 2]",
        "!!python/bytes aGk=",
        "!!binary aGk=",
        "!!set {a, b}",
        "!!omap [a: 1]",
        "!!timestamp 2020-01-01",
        "!include /etc/passwd",
        "!ENV ${HOME}",
        "!<tag:yaml.org,2002:python/name:os.system> x",
        "!!js/function 'x'",
        "!ruby/object:Gem::Installer {i: x}",
    )):  # fmt: skip
        yield f"tag-{number}", f"{HEAD}store: {value}\n".encode()
    yield "tag-key", (HEAD + '? !!python/object/apply:os.system ["touch pwned"]\n: 1\n').encode()
    yield "tag-root", b'!!python/object/apply:os.system ["touch pwned"]\n'


def _encodings() -> Iterator[tuple[str, bytes]]:
    yield "utf-16", HEAD.encode("utf-16")
    yield "utf-32", HEAD.encode("utf-32")
    yield "latin-1", (HEAD + "store: é\n").encode("latin-1")
    yield "nul", HEAD.encode() + b"store: a\0b\n"
    yield "controls", HEAD.encode() + b"store: a\x1b]0;pwned\x07b\n"
    yield "surrogate", HEAD.encode() + b"store: \xed\xa0\x80\n"
    yield "overlong", HEAD.encode() + b"store: \xc0\xae\xc0\xae/\n"
    yield "zeros", b"\0" * 100_000
    yield "gzip", b"\x1f\x8b" + b"\0" * 1000
    yield "elf", b"\x7fELF" + b"\0" * 1000
    yield "escape", (HEAD + 'store: "\\ud800"\n').encode()


def _structures() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "list", b"- a\n- b\n"
    yield "scalar", b"touch pwned\n"
    yield "twice", (HEAD + "name: other\n").encode()
    yield "documents", (HEAD + "---\n" + HEAD).encode()
    yield "list-key", (HEAD + "? [a, b]\n: 1\n").encode()
    yield "null-key", (HEAD + "~: 1\n").encode()
    yield "unknown", (HEAD + "__class__: {__init__: {__globals__: 1}}\n").encode()
    yield "include-self", (HEAD + "include: sweep.yaml\n").encode()
    yield "include-device", (HEAD + "include: /dev/zero\n").encode()
    yield "include-pipe", (HEAD + "include: pipe\n").encode()
    yield "include-folder", (HEAD + "include: .\n").encode()
    yield "include-passwords", (HEAD + "include: ../../../../../../../etc/passwd\n").encode()
    yield "include-many", (HEAD + f"include: [{', '.join(['nothing.yaml'] * 500)}]\n").encode()
    yield "env-secret", (HEAD + "store: file:///${env:HOSTILE_SECRET}\n").encode()
    yield "env-result", filled(name='"${env:HOME}"')
    yield "var-circle", (HEAD + "vars: {a: '${vars.b}', b: '${vars.a}'}\nstore: '${vars.a}'\n").encode()
    yield "secret", (HEAD + "# password: AKIAABCDEFGHIJKLMNOP\n").encode()
