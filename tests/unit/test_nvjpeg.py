"""The decoder of GPUs, as far as a machine without one can tell: refusals, identity, and what surrounds nvJPEG itself.

On the CPU torchvision decodes by libjpeg-turbo, so that everything but the GPU's own arithmetic is compared.
"""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.core.errors import UserError
from tests.data_jobs import TREE, DataPlane
from tests.photographs import photograph
from workloads.data.decode import DecoderName, Interpolation, NvJpegDecoder, decoder_of
from workloads.data.pixels import PixelSpec
from workloads.data.reasons import BadSampleError, Reason
from workloads.data.source import SampleSource

PHOTO = photograph(0, width=120, height=90)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def encode(image: Image.Image, format_name: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format=format_name, **options)
    return buffer.getvalue()


@pytest.fixture
def decoder() -> NvJpegDecoder:
    return NvJpegDecoder(torch.device("cpu"))


@pytest.mark.parametrize(
    "encoded",
    [
        encode(PHOTO, "JPEG", quality=90),
        encode(PHOTO, "JPEG", progressive=True),
        encode(PHOTO.convert("L"), "JPEG"),
        encode(PHOTO.convert("CMYK"), "JPEG"),
        encode(PHOTO, "PNG"),
        encode(PHOTO, "WEBP"),
    ],
    ids=["jpeg", "progressive", "grey", "cmyk", "png", "webp"],
)
def test_nvjpeg_gives_the_pixels_of_pil(decoder: NvJpegDecoder, encoded: bytes) -> None:
    with Image.open(BytesIO(encoded)) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(decoder.decode(encoded).astype(int) - expected).max() <= 1


def test_nvjpeg_resizes_as_turbo(decoder: NvJpegDecoder) -> None:
    image = np.asarray(PHOTO)
    found, expected = (np.zeros((32, 32, 3), dtype=np.uint8) for _ in range(2))
    decoder.resize(image, found, Interpolation.BICUBIC)
    decoder_of(DecoderName.TURBO).resize(image, expected, Interpolation.BICUBIC)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", Reason.EMPTY),
        (b"\xff\xd8\xffnonsense", Reason.NOT_AN_IMAGE),
        (encode(PHOTO, "JPEG")[:900], Reason.TRUNCATED),
    ],
)
def test_nvjpeg_leaves_it_to_pillow_what_is_bad(decoder: NvJpegDecoder, encoded: bytes, reason: Reason) -> None:
    with pytest.raises(BadSampleError) as caught:
        decoder.decode(encoded)
    assert caught.value.reason is reason


@without_gpu
def test_nvjpeg_without_a_gpu_is_refused_before_the_first_sample(tmp_path: Path) -> None:
    plane = DataPlane(folder=tmp_path)
    index = plane.builtin(TREE)
    pixels = PixelSpec(image_size=16, decoder=DecoderName.NVJPEG)
    with pytest.raises(UserError, match=r"nvjpeg, but this process sees no CUDA device; give the job a GPU .*turbo"):
        SampleSource(plane.store, index, "train", cache_dir=plane.cache, pixels=pixels)


@without_gpu
def test_nvjpeg_that_cannot_decode_is_one_clear_message() -> None:
    with pytest.raises(UserError, match=r"torchvision cannot decode on cuda:0: .*; install .*or use decoder: turbo"):
        NvJpegDecoder(torch.device("cuda:0")).check()
