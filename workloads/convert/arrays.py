"""``cifar10``, ``cifar100``, ``mnist``, ``svhn``: data sets that are published as arrays of pixels in a few files.

An image is a row of such a file. It is packed as a PPM or PGM file, its pixels behind a header, so that the same source
gives the same shards with any release of any library. What is published as the test set becomes ``val``. Pickles
are read without executing what they name: nothing but numbers and text is taken from them.
"""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.core.units import GIB
from orchestrator.storage.dataset_files import ClassRows
from orchestrator.storage.files import open_regular, read_regular
from workloads.convert.imagefolder import with_val
from workloads.convert.items import Conversion, ConvertRequest, ItemTable, LinkRule, image_bytes, offset_of_row
from workloads.convert.matlab import read_matlab

_CIFAR_SHAPE: Final = (3, 32, 32)
_CIFAR_BYTES: Final = 3 * 32 * 32
_CIFAR_BATCHES: Final = tuple(f"data_batch_{number}" for number in range(1, 6))
"""Files of CIFAR-10's training set, beside the ending of their form."""
_MAX_BYTES: Final = 2 * GIB
"""Of one file, unpacked; the largest that is published (SVHN's ``extra``) has 1.6 GB."""
_NUM_KEPT: Final = 8
"""Files whose pixels stay in memory: shuffled samples come from all of them in turn."""
_IDX: Final = re.compile(r".*(train|t10k|test)-(images|labels)[-.]idx([13])-ubyte(?:\.gz)?")
_MALFORMED: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, EOFError, MemoryError, RecursionError),
    *(pickle.UnpicklingError, struct.error, zlib.error),
)
"""What readers raise for bytes that are not of their form."""
_HASHED: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "ADDITEMS"})
_MAX_HASHED: Final = 16
"""The hash of tuples of one another takes time that doubles with each; a pickled array has six."""
_SVHN_FILES: Final = {"train": "train_32x32.mat", "val": "test_32x32.mat"}


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """One file of a source."""

    pixels: NDArray[np.uint8]
    """[N, H, W, 3], or [N, H, W] of grey images."""
    labels: Mapping[str, NDArray[np.int64]]
    """[N] each, by level; ``class`` is the leaf class. Empty where they stand in a file of their own."""


# ------------------------------------------------------------------------------------------------------------ sources


def convert_cifar10(request: ConvertRequest) -> Conversion:
    """List CIFAR-10 in its form for Python or in its binary form (https://www.cs.toronto.edu/~kriz/cifar.html).

    Raises:
        UserError: files are missing, or not of this form.
    """
    files = _one_form(request.source, {"train": "data_batch_*", "val": "test_batch*"}, "data_batch_1 and test_batch")
    batches = {path.stem for path in files["train"]}
    if missing := [name for name in _CIFAR_BATCHES if name not in batches]:
        raise UserError(f"{request.source} lacks {', '.join(missing)} of CIFAR-10; unpack the whole archive")
    names = _names(request, ("batches.meta", b"label_names"), "batches.meta.txt")
    return _conversion("cifar10", files, request, lambda _: {"class": names})


def convert_cifar100(request: ConvertRequest) -> Conversion:
    """List CIFAR-100 in either form; its 20 superclasses become the level ``superclass``.

    Raises:
        UserError: files are missing or not of this form, or images of one class are of two superclasses.
    """
    files = _one_form(request.source, {"train": "train*", "val": "test*"}, "train and test, or train.bin and test.bin")
    fine = _names(request, ("meta", b"fine_label_names"), "fine_label_names.txt")
    coarse = _names(request, ("meta", b"coarse_label_names"), "coarse_label_names.txt")
    return _conversion("cifar100", files, request, lambda found: _levels(found, fine, coarse))


def convert_mnist(request: ConvertRequest) -> Conversion:
    """List MNIST, or a data set in its form (IDX: Fashion-MNIST, KMNIST, EMNIST), packed by gzip or not.

    Raises:
        UserError: files are missing, or not of this form.
    """
    found: dict[str, Path] = {}
    for path in sorted(request.source.glob("*-ubyte*")):
        match = _IDX.fullmatch(path.name)
        if match:
            split = "train" if match[1] == "train" else "val"
            if found.setdefault(f"{split} {match[2]}", path) != path:
                message = f"{request.source} has {found[f'{split} {match[2]}'].name} and {path.name}; keep one data set"
                raise UserError(message + " in the folder")
    if not {"train images", "train labels"} <= found.keys():
        message = (
            f"{request.source} has no train-images-idx3-ubyte with train-labels-idx1-ubyte; name the folder of both"
        )
        raise UserError(message)
    files = {split: (found[f"{split} images"],) for split in ("train", "val") if f"{split} images" in found}
    return _conversion("mnist", files, request, _digits)


def convert_svhn(request: ConvertRequest) -> Conversion:
    """List SVHN's cropped digits (``train_32x32.mat``, ``test_32x32.mat``; http://ufldl.stanford.edu/housenumbers).

    Raises:
        UserError: files are missing, or not of this form.
    """
    wanted = dict(request.splits) or _SVHN_FILES
    files = {split: (request.source / name,) for split, name in wanted.items() if (request.source / name).exists()}
    if missing := [request.source / name for split, name in request.splits.items() if split not in files]:
        raise UserError(f"{missing[0]}: no such file; --split names files in {request.source}")
    if "train" not in files:
        raise UserError(
            f"{request.source} has no {wanted.get('train', 'file of train')}; name the folder that holds it"
        )
    return _conversion("svhn", files, request, _digits)


_NameLevels = Callable[[Mapping[str, NDArray[np.int64]]], Mapping[str, Sequence[str]]]
"""From the labels of all images to the names of the leaf classes (``class``) and of each class's group, by level."""


def _conversion(
    converter: str, files: Mapping[str, Sequence[Path]], request: ConvertRequest, name_levels: _NameLevels
) -> Conversion:
    rule = LinkRule.within(request.source, follow_links=request.follow_links)
    for path in (path for paths in files.values() for path in paths):
        image_bytes(path, rule)  # a plain file of the source
    labels = {split: [_labels(path, rule) for path in paths] for split, paths in files.items()}
    levels = [of_file for of_split in labels.values() for of_file in of_split]
    every = {level: np.concatenate([of_file[level] for of_file in levels]) for level in levels[0]}
    names = name_levels(every)
    if (low := int(every["class"].min())) < 0 or int(every["class"].max()) >= len(names["class"]):
        found = f"classes {low} to {every['class'].max()}"
        raise UserError(f"{request.source} has {found}, and {len(names['class'])} names of classes; download it again")
    splits: dict[str, ItemTable] = {}
    for split, paths in files.items():
        splits[split] = table = ItemTable()
        for path, of_file in zip(paths, labels[split], strict=True):
            _add(table, path, of_file["class"])
    rows: ClassRows = [
        {"class": leaf, "name": name, **{level: some[leaf] for level, some in names.items() if level != "class"}}
        for leaf, name in enumerate(names["class"])
    ]
    forget()
    return Conversion(converter=converter, classes=rows, splits=with_val(splits, request))


def _add(table: ItemTable, path: Path, classes: NDArray[np.int64]) -> None:
    pixels = load(path).pixels
    if len(pixels) != len(classes):
        raise UserError(f"{path} has {len(pixels)} images and {len(classes)} labels; download it again")
    container = table.container(path, sha256_of_array=sha256(np.ascontiguousarray(pixels).data).hexdigest())
    length = len(encoded(pixels[0])) if len(pixels) else 0
    stem, extension = path.name.removesuffix(".gz").partition(".")[0], "pgm" if pixels.ndim == 3 else "ppm"
    for row, leaf in enumerate(classes.tolist()):
        name = f"{stem}/{row:06d}.{extension}"
        table.add(name, container=container, leaves=(leaf,), length_bytes=length, offset_bytes=offset_of_row(row))


def _one_form(source: Path, patterns: Mapping[str, str], needed: str) -> dict[str, tuple[Path, ...]]:
    """Files by split, binary ones or pickles, whichever are there."""
    found = {split: sorted(source.glob(pattern)) for split, pattern in patterns.items()}
    for is_wanted in (lambda path: path.suffix == ".bin", lambda path: not path.suffix):
        of_form = {split: tuple(path for path in paths if is_wanted(path)) for split, paths in found.items()}
        if of_form["train"]:
            return {split: paths for split, paths in of_form.items() if paths}
    raise UserError(f"{source} has no {needed}; name the unpacked folder that holds them")


def _names(request: ConvertRequest, pickled: tuple[str, bytes], text: str) -> Sequence[str]:
    """Names of classes, from a pickle or from a text of lines."""
    source, (file, field) = request.source, pickled
    rule = LinkRule.within(source, follow_links=request.follow_links)
    if (source / file).is_file():
        image_bytes(source / file, rule)
        names = _unpickled(source / file).get(field, [])
        if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
            raise UserError(f"{source / file} has no list of names in {field.decode()}; download it again")
        return [name.decode(errors="replace") if isinstance(name, bytes) else name for name in names]
    if (source / text).is_file():
        image_bytes(source / text, rule)
        return read_regular(source / text).decode(errors="replace").split()
    raise UserError(f"{source} has neither {file} nor {text}, which names the classes; unpack the whole archive")


def _levels(
    labels: Mapping[str, NDArray[np.int64]], fine: Sequence[str], coarse: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    pairs = np.unique(np.stack([labels["class"], labels["superclass"]], axis=1), axis=0)
    groups = dict(pairs.tolist())
    if len(groups) != len(pairs) or max(groups.values(), default=0) >= len(coarse):
        raise UserError(
            "images of one class are of two superclasses, or of one without a name; download CIFAR-100 again"
        )
    return {"superclass": [coarse[groups[leaf]] if leaf in groups else "" for leaf in range(len(fine))], "class": fine}


def _digits(labels: Mapping[str, NDArray[np.int64]]) -> Mapping[str, Sequence[str]]:
    return {"class": [str(leaf) for leaf in range(int(labels["class"].max()) + 1)]}


# -------------------------------------------------------------------------------------------------------------- files


def read_row(path: Path, row: int) -> bytes:
    """An image of a file as it is packed. Raises ``UserError``: the file is not of a form above, or has no such row."""
    pixels = load(path).pixels
    if row >= len(pixels):
        raise UserError(f"{path} has {len(pixels)} images, it was listed with more: the source changed; run again")
    return encoded(pixels[row])


def encoded(image: NDArray[np.uint8]) -> bytes:
    """An image uint8 [H, W, 3] as PPM, [H, W] as PGM (binary Netpbm)."""
    height, width = image.shape[:2]
    magic = "P6" if image.ndim == 3 else "P5"
    return f"{magic}\n{width} {height}\n255\n".encode() + np.ascontiguousarray(image).tobytes()


def _labels(path: Path, rule: LinkRule) -> Mapping[str, NDArray[np.int64]]:
    """By level; where the file holds pixels alone, those of the IDX file of labels beside it."""
    if labels := load(path).labels:
        return labels
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    if beside.exists():
        image_bytes(beside, rule)
    return load(beside).labels


def load(path: Path) -> ArrayFile:
    """Pixels and labels of a file, of which the last few stay in memory until `forget`.

    Raises:
        UserError: it cannot be read, or is not of a form above.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; repair the source and run again") from error
    return _load(path, (found.st_ino, found.st_size, found.st_mtime_ns))


def forget() -> None:
    """Files that are in memory leave it."""
    _load.cache_clear()


@lru_cache(maxsize=_NUM_KEPT)
def _load(path: Path, _: tuple[int, ...]) -> ArrayFile:
    try:
        if path.suffix == ".mat":
            return _svhn(path)
        if _IDX.fullmatch(path.name):
            return _idx(path)
        return _cifar_binary(path) if path.suffix == ".bin" else _cifar_pickle(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; repair the source and run again") from error
    except _MALFORMED as error:
        message = f"{path} is not of the form that its name promises ({str(error) or type(error).__name__})"
        raise UserError(message + "; download it again") from error


def _cifar_binary(path: Path) -> ArrayFile:
    content = np.frombuffer(_unpacked(path), dtype=np.uint8)
    # CIFAR-100 has two labels before the pixels: the superclass and the class.
    num_labels = 1 if path.name.startswith(("data_batch", "test_batch")) else 2
    records = content.reshape(-1, num_labels + _CIFAR_BYTES)
    labels = {"class": records[:, num_labels - 1].astype(np.int64)}
    if num_labels == 2:
        labels["superclass"] = records[:, 0].astype(np.int64)
    return ArrayFile(_from_planes(records[:, num_labels:]), labels)


def _cifar_pickle(path: Path) -> ArrayFile:
    found = _unpickled(path)
    fine = b"fine_labels" if b"fine_labels" in found else b"labels"
    labels = {"class": _integers(found[fine])}
    if b"coarse_labels" in found:
        labels["superclass"] = _integers(found[b"coarse_labels"])
    return ArrayFile(_from_planes(found[b"data"].array(np.uint8)), labels)


def _integers(value: object) -> NDArray[np.int64]:
    """A flat list as [N]. A list of lists of one another would become an array of any size."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("its labels are not a list of numbers")
    return np.array(value, dtype=np.int64)


def _from_planes(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows [N, 3072] of red, green and blue planes as images [N, 32, 32, 3]."""
    return np.ascontiguousarray(rows.reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1))


def _idx(path: Path) -> ArrayFile:
    """IDX: two zero bytes, 8 = uint8, the number of dimensions, each as big-endian int32, and the numbers."""
    content = _unpacked(path)
    if content[:3] != b"\0\0\x08" or content[3] not in {1, 3}:
        raise ValueError("no IDX file of unsigned bytes with 1 or 3 dimensions")
    shape = np.frombuffer(content, dtype=">u4", count=content[3], offset=4)
    numbers = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * content[3]).reshape(shape.tolist())
    if content[3] == 1:
        return ArrayFile(np.empty((0, 0, 0), np.uint8), {"class": numbers.astype(np.int64)})
    return ArrayFile(numbers, {})


def _unpacked(path: Path) -> bytes:
    """The content of a file, unpacked if it is packed by gzip."""
    with open_regular(path)[0] as file:
        opened = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        content = opened.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return content


def _svhn(path: Path) -> ArrayFile:
    found = read_matlab(_unpacked(path), max_bytes=_MAX_BYTES)
    pixels, labels = found["X"], found["y"].reshape(-1).astype(np.int64)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[2] != 3:
        raise ValueError(f"X is {pixels.dtype} {list(pixels.shape)} in place of uint8 [H, W, 3, N]")
    return ArrayFile(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), {"class": labels % 10})  # 10 is the digit 0


# ------------------------------------------------------------------------------------------------------------ pickles


class _Array:
    """Stands for an array of numpy in a pickle."""

    shape: tuple[int, ...] = ()
    content: bytes = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, _, _, self.content = state

    def array(self, dtype: type[np.uint8]) -> NDArray[np.uint8]:
        """Its numbers. Raises ``ValueError``: it has others, or another size."""
        return np.frombuffer(self.content, dtype=dtype).reshape(self.shape)


class _Type:
    """Stands for a type of numpy in a pickle."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _latin1(text: str, _: str = "latin1") -> bytes:
    return text.encode("latin1")


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 - the one in C allots 16 bytes times any index that a file writes
    """Makes nothing but the stand-ins above, whatever a file names."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as the base class
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return lambda *_: _Array()
        stand_ins = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Type, ("_codecs", "encode"): _latin1}
        if (module, name) not in stand_ins:
            raise ValueError(f"it names {module}.{name}, which is not executed")
        return stand_ins[module, name]


def _unpickled(path: Path) -> dict[bytes, Any]:
    """A pickled dictionary with its keys as bytes. Raises ``UserError``: it holds something else."""
    try:
        content = _unpacked(path)
        if sum(opcode.name in _HASHED for opcode, _, _ in pickletools.genops(content)) > _MAX_HASHED:
            raise ValueError("it is made of more tuples or sets than an array needs")
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except _MALFORMED as error:
        message = (
            f"{path} is not the pickle that CIFAR publishes ({str(error) or type(error).__name__}); use its binary form"
        )
        raise UserError(message) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not the pickle that CIFAR publishes (it holds no dictionary); use its binary form")
    return {key if isinstance(key, bytes) else str(key).encode(): value for key, value in found.items()}
