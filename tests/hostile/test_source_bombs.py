"""What `data shard` makes of sources that expand, claim sizes or run in circles: one error, little memory and time."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.archives import member, tar

ROOT = Path(__file__).parents[2]
GIB = 1024**3
SYNSET = "n01440764"
MEMORY_BYTES, SECONDS = 3 * GIB, 60
"""Address space of the command, which takes a third of it for itself; the bombs want more than all of it."""


def _base256(number: int) -> bytes:
    """A number in a header's field of 12 bytes, as GNU tar writes those that octal digits cannot."""
    return (b"\xff" if number < 0 else b"\x80") + number.to_bytes(11, "big", signed=True)


def _with_size(header: bytes, number: int) -> bytes:
    """The header claims another size; its sum is made right."""
    changed = header[:124] + _base256(number) + header[136:148] + b" " * 8 + header[156:512]
    return changed[:148] + b"%06o\0 " % sum(changed) + changed[156:] + header[512:]


def _negative(folder: Path) -> None:
    (folder / f"{SYNSET}.tar").write_bytes(_with_size(member("a.jpg", b""), -512) + bytes(1024))


def _negative_name(folder: Path) -> None:
    name = member("././@LongLink", b"a.jpg", type=tarfile.GNUTYPE_LONGNAME)
    (folder / f"{SYNSET}.tar").write_bytes(_with_size(name, -1024) + member("a.jpg", b"x") + bytes(1024))


def _huge_header(folder: Path) -> None:
    """A file of holes: some bytes on disk, and a header of 8 GiB in it."""
    with (folder / f"{SYNSET}.tar").open("wb") as file:
        file.write(_with_size(member("pax", b"", type=tarfile.XHDTYPE), 8 * GIB))
        file.truncate(8 * GIB + 4096)


def _compressed(folder: Path) -> None:
    (folder / f"{SYNSET}.tar").write_bytes(gzip.compress(bytes(50_000_000)))


def _inside_a_tar(folder: Path) -> None:
    inner = _with_size(member("a.jpg", b""), -512) + bytes(1024)
    (folder / "winter21_whole.tar").write_bytes(tar(member(f"{SYNSET}.tar", inner)))


def _kit(folder: Path, *members: bytes) -> None:
    """ImageNet-1k with a development kit of our own."""
    (folder / "train" / SYNSET).mkdir(parents=True)
    (folder / "train" / SYNSET / "a.jpg").write_bytes(b"x")
    (folder / "val").mkdir()
    (folder / "val" / "b.jpg").write_bytes(b"x")
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar(*members), 9))


def _kit_of_zeros(folder: Path) -> None:
    """3 MB that are 3 GiB."""
    _kit(folder)
    bomb = zlib.compressobj(9, wbits=31)
    with (folder / "ILSVRC2012_devkit_t12.tar.gz").open("wb") as file:
        file.write(bomb.compress(_with_size(member("meta.mat", b""), 3 * GIB)))
        block = bytes(1 << 24)
        for _ in range(3 * GIB // len(block)):
            file.write(bomb.compress(block))
        file.write(bomb.flush())


def _kit_with_a_matrix(folder: Path) -> None:
    """``meta.mat`` is a zip bomb by its own format."""
    bomb = zlib.compressobj(9)
    block = bytes(1 << 24)
    content = b"".join(bomb.compress(block) for _ in range(3 * GIB // len(block))) + bomb.flush()
    element = (15).to_bytes(4, "little") + len(content).to_bytes(4, "little") + content
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    truth = member("ILSVRC2012_validation_ground_truth.txt", b"1\n")
    _kit(folder, member("meta.mat", head + element), truth)


def _digits_of_zeros(folder: Path) -> None:
    """3 MB that are 3 GiB."""
    bomb, block = zlib.compressobj(9, wbits=31), bytes(1 << 24)
    with (folder / "train-images-idx3-ubyte.gz").open("wb") as file:
        for _ in range(3 * GIB // len(block)):
            file.write(bomb.compress(block))
        file.write(bomb.flush())
    (folder / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + bytes(4))


def _numbered_pickle(folder: Path) -> None:
    """Its object gets the largest number that a pickle can give: unpicklers in C make room for all below it."""
    for name in ("train", "meta"):
        (folder / name).write_bytes(b"\x80\x02]r\xff\xff\xff\xff.")


def _table(folder: Path) -> None:
    """A Parquet file of two paths that are 400 MiB long, and compress to some kilobytes."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetWriter  # type: ignore[import-untyped]

    text = "a" * 400 * 1024**2
    schema = pa.schema([("path", pa.string()), ("label", pa.string())])
    with ParquetWriter(folder / "train.parquet", schema, compression="zstd", use_dictionary=False) as writer:
        rows = pa.table({"path": [f"{text}{number}.jpg" for number in range(2)], "label": ["0", "1"]}, schema)
        writer.write_table(rows, row_group_size=2)


def _no_table(folder: Path) -> None:
    (folder / "train.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")


def _long_field(folder: Path) -> None:
    (folder / "train.csv").write_text("path,label\n" + "a" * 1_000_000 + ".jpg,0\n")


def _no_text(folder: Path) -> None:
    (folder / "train.csv").write_bytes(b"path,label\n\xff\xfe.jpg,0\n")


BOMBS: tuple[tuple[str, Callable[[Path], None]], ...] = (
    ("imagenet21k", _negative), ("imagenet21k", _negative_name), ("imagenet21k", _huge_header),
    ("imagenet21k", _compressed), ("imagenet21k", _inside_a_tar), ("imagenet1k", _kit_of_zeros),
    ("imagenet1k", _kit_with_a_matrix), ("parquet", _table), ("parquet", _no_table), ("csv", _long_field),
    ("csv", _no_text), ("mnist", _digits_of_zeros), ("cifar100", _numbered_pickle),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("converter", "make"), BOMBS, ids=lambda one: getattr(one, "__name__", one))
def test_data_shard_of_a_bomb_ends_with_one_error(converter: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make(source)
    command = [sys.executable, "-m", "orchestrator.cli", "data", "shard", converter, str(source), str(tmp_path / "to")]
    done = subprocess.run(
        [*command, "-j", "1"], capture_output=True, text=True, check=False, timeout=SECONDS, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )  # fmt: skip
    assert done.returncode in {1, 2}, done.stderr[-2000:]
    assert done.stderr.startswith("error: "), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "MemoryError" not in done.stderr
    assert not list(tmp_path.glob("to/*.tar"))
