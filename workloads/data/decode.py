"""Encoded images to RGB pixels, and pixels to other sizes: the `Decoder` seam.

How all decoders handle unusual images (like PIL's and torchvision's loaders):

- JPEG, PNG, WebP, BMP, PPM and GIF are read, by content and not by name; of an animation its first frame.
- EXIF orientation is ignored. Alpha is dropped, not blended. Grey, palette, CMYK and YCCK images become RGB.
- 16-bit grey keeps its upper 8 bits (PIL's own conversion would clip it to white).
- Pixels are counted in the header; above ``MAX_PIXELS`` nothing is decoded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from enum import StrEnum
from io import BytesIO
from typing import Any, Final, NoReturn, Protocol

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from PIL import Image

from orchestrator.core.hyper_parameters import PARAMETERS
from workloads.data.images import FORMATS, IMAGE_ERRORS, MAX_PIXELS, complaint_of
from workloads.data.reasons import BadSampleError, Reason

START_OF_JPEG: Final = b"\xff\xd8\xff"
_KEPT_BUFFER_BYTES: Final = 16 * 1024**2
_RGB: Final = 3


class DecoderName(StrEnum):
    """Who decodes and resizes; part of a recipe, because resized pixels differ: bilinearly by one level, bicubically by
    two on photographs and by more at hard edges, where Pillow clips overshoots between its two passes.
    """

    PILLOW = "pillow"
    """The reference: Pillow decodes, Pillow resizes."""
    TURBO = "turbo"
    """JPEG by libjpeg-turbo straight into an array (the same pixels), resized by torch's vectorised filter (Pillow's
    weights); other formats are decoded by Pillow. Measured at 0.6 of the reference's CPU time (docs/data.md)."""

    @classmethod
    def _missing_(cls, value: object) -> DecoderName | None:
        """A removed decoder, which plans of former releases name: their jobs end with the one that resizes alike."""
        return cls.TURBO if value in PARAMETERS["decoder"].removed else None


class Interpolation(StrEnum):
    """Filter of a change of size; both are antialiased: their support grows with the reduction."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


class Decoder(Protocol):
    """Has no state but buffers of its threads, so that all threads of a process may share one."""

    def decode(self, encoded: bytes) -> NDArray[np.uint8]:
        """RGB pixels [H, W, 3], valid until this thread's next call.

        Raises:
            BadSampleError: the bytes are empty, no image, cut off, broken, or hold more than ``MAX_PIXELS``.
        """

    def resize(
        self, image_HWC: NDArray[np.uint8], resized_HWC: NDArray[np.uint8], interpolation: Interpolation
    ) -> None:
        """Write the whole image at the size of ``resized_HWC`` into it; contiguous, another memory than the image's."""


def decoder_of(name: DecoderName | str) -> Decoder:
    """The decoder of a name; all calls get the same one.

    Raises:
        ValueError: an unknown name.
    """
    return _DECODERS[DecoderName(name)]


class PillowDecoder:
    """See ``DecoderName.PILLOW``."""

    def decode(self, encoded: bytes) -> NDArray[np.uint8]:
        """See ``Decoder``."""
        image = _open(encoded)
        try:
            with image:
                return np.asarray(_to_rgb(image))
        except IMAGE_ERRORS as error:
            reason = Reason.TRUNCATED if "truncated" in str(error) else Reason.UNDECODABLE
            raise BadSampleError(reason, f"cannot be decoded: {complaint_of(error)}") from error

    def resize(
        self, image_HWC: NDArray[np.uint8], resized_HWC: NDArray[np.uint8], interpolation: Interpolation
    ) -> None:
        """See ``Decoder``."""
        if image_HWC.shape == resized_HWC.shape:
            resized_HWC[...] = image_HWC
            return
        height, width, _ = resized_HWC.shape
        image = Image.fromarray(np.ascontiguousarray(image_HWC))
        resized_HWC[...] = np.asarray(image.resize((width, height), Image.Resampling[interpolation.name]))


class TurboDecoder:
    """See ``DecoderName.TURBO``."""

    def __init__(self) -> None:
        self._others = PillowDecoder()
        self._buffers = threading.local()

    def decode(self, encoded: bytes) -> NDArray[np.uint8]:
        """See ``Decoder``."""
        if not encoded.startswith(START_OF_JPEG):
            return self._others.decode(encoded)
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded)
            if colorspace in {"CMYK", "YCCK"} or height * width > MAX_PIXELS:
                return self._others.decode(encoded)  # which knows Adobe's inverted inks, and how to refuse
            buffer = self._buffer(height * width * _RGB)
            pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(encoded, buffer=buffer)
        except ValueError:
            # Strict here means that libjpeg had a warning, which PIL only minds where data are missing: PIL decides.
            return self._others.decode(encoded)
        return pixels

    def resize(
        self, image_HWC: NDArray[np.uint8], resized_HWC: NDArray[np.uint8], interpolation: Interpolation
    ) -> None:
        """See ``Decoder``."""
        if image_HWC.shape == resized_HWC.shape:
            resized_HWC[...] = image_HWC
            return
        # torch would copy a part of an image too, but with all the threads it has: wakened for 0.1 ms, in each worker.
        # Pillow's arrays may not be written to, of which torch warns.
        is_ready = image_HWC.flags.c_contiguous and image_HWC.flags.writeable
        image_HWC = image_HWC if is_ready else image_HWC.copy(order="C")
        # What torch.nn.functional.interpolate(antialias=True) calls. That one chooses the layout of its result by
        # itself, planes for a part of an image, and putting these together again costs as much as the resizing.
        _RESIZE[interpolation](_planes(image_HWC), resized_HWC.shape[:2], align_corners=False, out=_planes(resized_HWC))

    def _buffer(self, size_bytes: int) -> NDArray[np.uint8]:
        """A buffer of this thread: fresh pages for every image would cost a tenth of its decoding."""
        buffer: NDArray[np.uint8] | None = getattr(self._buffers, "pixels", None)
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = np.empty(size_bytes, dtype=np.uint8)
            if size_bytes <= _KEPT_BUFFER_BYTES:  # one giant image must not occupy every worker for good
                self._buffers.pixels = buffer
        return buffer


_DECODERS: Final[Mapping[DecoderName, Decoder]] = {
    DecoderName.PILLOW: PillowDecoder(),
    DecoderName.TURBO: TurboDecoder(),
}


_RESIZE: Final = {
    Interpolation.BILINEAR: torch.ops.aten._upsample_bilinear2d_aa.out,  # noqa: SLF001 - see TurboDecoder.resize
    Interpolation.BICUBIC: torch.ops.aten._upsample_bicubic2d_aa.out,  # noqa: SLF001
}


def _planes(image_HWC: NDArray[np.uint8]) -> torch.Tensor:
    """A view [1, 3, H, W] of the same memory."""
    return torch.from_numpy(image_HWC).permute(2, 0, 1).unsqueeze(0)


def _open(encoded: bytes) -> Image.Image:
    """The image with its header read and its pixels counted, nothing decoded."""
    if not encoded:
        raise BadSampleError(Reason.EMPTY, "cannot be decoded: its image has zero bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS decides
            image = Image.open(BytesIO(encoded), formats=FORMATS)
    except IMAGE_ERRORS as error:
        _refuse(error)
    width, height = image.size
    if width * height > MAX_PIXELS:
        _refuse(Image.DecompressionBombError(f"{width} x {height} pixels; at most {MAX_PIXELS} are decoded"))
    return image


def _refuse(error: Exception) -> NoReturn:
    is_bomb = isinstance(error, Image.DecompressionBombError)
    reason = Reason.TOO_MANY_PIXELS if is_bomb else Reason.NOT_AN_IMAGE
    raise BadSampleError(reason, f"cannot be decoded: {complaint_of(error)}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        values: NDArray[Any] = np.asarray(image)
        image = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")
