"""JPEG decoded by a GPU (nvJPEG, through torchvision), behind the `Decoder` seam.

What the GPU takes over is the decoding, three quarters of the processor's work per image; pixels come back to the host,
where the wanted part is resized as by ``turbo``. Other formats, CMYK, and whatever the GPU refuses go to Pillow, which
decides whether a sample is bad.
"""

from __future__ import annotations

import warnings
from typing import Final, Self

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.decode import START_OF_JPEG, Interpolation, PillowDecoder, TurboDecoder
from workloads.data.images import MAX_PIXELS

_REMEDY: Final = "give the job a GPU (resources.<group>.gpus: 1), or use decoder: turbo, which needs none"


class NvJpegDecoder:
    """See ``DecoderName.NVJPEG``.

    Args:
        device: where images are decoded. The decoder of ``torch.device("cpu")`` is libjpeg-turbo, for tests.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # It will move to another package one day; once, because filters of warnings are global to all threads.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torchvision\.io")
        self._others, self._turbo = PillowDecoder(), TurboDecoder()

    @classmethod
    def of_this_process(cls) -> Self:
        """On the GPU that this process was given. Raises ``UserError``: there is none, or torchvision lacks nvJPEG."""
        if not torch.cuda.is_available():
            raise UserError(f"recipe.decoder is nvjpeg, but this process sees no CUDA device; {_REMEDY}")
        # With its number: decoding threads would otherwise take GPU 0, whichever this process was given.
        found = cls(torch.device("cuda", torch.cuda.current_device()))
        found.check()
        return found

    def check(self) -> None:
        """Decode a small image. Raises ``UserError``: that is not possible here."""
        tiny: bytes = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), dtype=np.uint8))
        try:
            self._decode(tiny)
        except (ImportError, AttributeError, RuntimeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            message = f"recipe.decoder is nvjpeg, but this torchvision cannot decode on {self._device}: {reason}"
            raise UserError(f"{message}; install one that is built with nvJPEG, or use decoder: turbo") from error

    def decode(self, encoded: bytes) -> NDArray[np.uint8]:
        """See ``Decoder``."""
        if not encoded.startswith(START_OF_JPEG):
            return self._others.decode(encoded)
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded)
            if colorspace in {"CMYK", "YCCK"} or height * width > MAX_PIXELS:
                return self._others.decode(encoded)
            return self._decode(encoded)
        except torch.cuda.OutOfMemoryError:
            raise  # the job's own business, and no sample's fault
        except (ValueError, RuntimeError):
            return self._others.decode(encoded)

    def resize(
        self, image_HWC: NDArray[np.uint8], resized_HWC: NDArray[np.uint8], interpolation: Interpolation
    ) -> None:
        """See ``Decoder``."""
        self._turbo.resize(image_HWC, resized_HWC, interpolation)

    def _decode(self, encoded: bytes) -> NDArray[np.uint8]:
        from torchvision.io import ImageReadMode, decode_jpeg

        content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        pixels_CHW: torch.Tensor = decode_jpeg(content, mode=ImageReadMode.RGB, device=self._device)
        # Put in order where it was decoded: the copy to the host is one of consecutive bytes.
        pixels: NDArray[np.uint8] = pixels_CHW.permute(1, 2, 0).contiguous().cpu().numpy()
        return pixels
