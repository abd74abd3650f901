"""Images of every kind become the pixels that PIL and torchvision make of them, or one reason why not."""

import struct
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from orchestrator.core.errors import UserError
from tests.photographs import jpeg, photograph, png
from workloads.data.decode import DecoderName, Interpolation, decoder_of
from workloads.data.pixels import PixelSpec
from workloads.data.reasons import BadSampleError, Reason

ROOT = Path(__file__).parents[2]
DECODERS = [DecoderName.PILLOW, DecoderName.TURBO]  # which need no GPU
PHOTO = photograph(0, width=200, height=150)


def encode(image: Image.Image, format_name: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format=format_name, **options)
    return buffer.getvalue()


def reference(encoded: bytes) -> NDArray[np.uint8]:
    with Image.open(BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def centre_square(encoded: bytes, spec: PixelSpec) -> NDArray[np.uint8]:
    square = np.zeros((spec.image_size, spec.image_size, 3), dtype=np.uint8)
    spec.render(encoded, spec.center, square)
    return square


def reason_of(encoded: bytes, decoder: DecoderName) -> Reason:
    with pytest.raises(BadSampleError) as caught:
        decoder_of(decoder).decode(encoded)
    return caught.value.reason


KINDS = {
    "jpeg-420": encode(PHOTO, "JPEG", quality=90),
    "jpeg-444": encode(PHOTO, "JPEG", quality=95, subsampling=0),
    "jpeg-progressive": encode(PHOTO, "JPEG", progressive=True),
    "jpeg-grey": encode(PHOTO.convert("L"), "JPEG"),
    "jpeg-cmyk": encode(PHOTO.convert("CMYK"), "JPEG"),
    "jpeg-one-pixel": encode(PHOTO.resize((1, 1)), "JPEG"),
    "png": encode(PHOTO, "PNG"),
    "png-palette": encode(PHOTO.quantize(16), "PNG"),
    "png-transparent-palette": encode(PHOTO.quantize(16), "PNG", transparency=3),
    "png-bits": encode(PHOTO.convert("1"), "PNG"),
    "png-alpha": encode(PHOTO.convert("RGBA"), "PNG"),
    "png-grey-alpha": encode(PHOTO.convert("LA"), "PNG"),
    "webp": encode(PHOTO, "WEBP"),
    "webp-alpha": encode(PHOTO.convert("RGBA"), "WEBP", lossless=True),
    "bmp": encode(PHOTO, "BMP"),
    "ppm": encode(PHOTO, "PPM"),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_any_kind_gives_the_pixels_of_pil(kind: str, decoder: DecoderName) -> None:
    decoded = decoder_of(decoder).decode(KINDS[kind])
    assert np.array_equal(decoded, reference(KINDS[kind]))


@pytest.mark.parametrize("decoder", DECODERS)
def test_decode_transparent_image_keeps_its_colours(decoder: DecoderName) -> None:
    """Alpha is dropped: an invisible red pixel is red, neither black nor white."""
    red = encode(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG")
    assert np.array_equal(decoder_of(decoder).decode(red), np.full((4, 4, 3), (255, 0, 0)))


@pytest.mark.parametrize("decoder", DECODERS)
def test_decode_sixteen_bit_png_keeps_the_upper_bits(decoder: DecoderName) -> None:
    values = np.arange(0, 2**16, 256, dtype=np.uint16).reshape(16, 16) + 255
    decoded = decoder_of(decoder).decode(encode(Image.fromarray(values), "PNG"))
    assert np.array_equal(decoded, np.repeat((values >> 8)[..., None], 3, axis=2))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("format_name", ["JPEG", "PNG"])
def test_decode_exif_orientation_is_ignored(format_name: str, decoder: DecoderName) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees
    turned = encode(PHOTO, format_name, exif=exif)
    assert decoder_of(decoder).decode(turned).shape == (150, 200, 3)
    assert np.array_equal(decoder_of(decoder).decode(turned), decoder_of(decoder).decode(encode(PHOTO, format_name)))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("format_name", ["GIF", "WEBP", "PNG"])
def test_decode_animation_gives_its_first_frame(format_name: str, decoder: DecoderName) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    options = {"lossless": True} if format_name == "WEBP" else {}
    animation = encode(frames[0], format_name, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(decoder_of(decoder).decode(animation), np.full((8, 8, 3), (255, 0, 0)))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", Reason.EMPTY),
        (b"\xff", Reason.NOT_AN_IMAGE),
        (b"this is a text", Reason.NOT_AN_IMAGE),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", Reason.NOT_AN_IMAGE),
        (KINDS["jpeg-420"][:100], Reason.NOT_AN_IMAGE),
        (KINDS["jpeg-420"][: len(KINDS["jpeg-420"]) // 2], Reason.TRUNCATED),
        (KINDS["jpeg-progressive"][: len(KINDS["jpeg-progressive"]) // 2], Reason.TRUNCATED),
        (KINDS["jpeg-cmyk"][: len(KINDS["jpeg-cmyk"]) // 2], Reason.TRUNCATED),
        (KINDS["png"][: len(KINDS["png"]) // 2], Reason.TRUNCATED),
        (KINDS["png"][:1000] + b"\0" * 200 + KINDS["png"][1200:], Reason.UNDECODABLE),
        (png(20_000, 20_000), Reason.TOO_MANY_PIXELS),
        (png(12_000, 12_000), Reason.TOO_MANY_PIXELS),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else f"{len(value)}-bytes",
)
def test_decode_bad_bytes_have_one_reason(encoded: bytes, reason: Reason, decoder: DecoderName) -> None:
    assert reason_of(encoded, decoder) is reason


@pytest.mark.parametrize("decoder", DECODERS)
def test_decode_jpeg_bomb_is_refused_by_its_header(decoder: DecoderName, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may claim what the rest of the file does not hold: nothing of that size may be allocated."""
    claimed = bytearray(KINDS["jpeg-420"])
    frame = claimed.index(b"\xff\xc0")
    claimed[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    allocated = []
    monkeypatch.setattr(np, "empty", lambda shape, **_: allocated.append(shape))
    assert reason_of(bytes(claimed), decoder) is Reason.TOO_MANY_PIXELS
    assert not allocated


@pytest.mark.parametrize("decoder", DECODERS)
def test_decode_jpeg_with_harmless_garbage_is_accepted_as_pil_does(decoder: DecoderName) -> None:
    encoded = KINDS["jpeg-420"]
    garbled = encoded[:-2] + b"\x12\x34\x56" + encoded[-2:]  # libjpeg: extraneous bytes before marker 0xd9
    assert np.array_equal(decoder_of(decoder).decode(garbled), reference(garbled))


@pytest.mark.parametrize("interpolation", list(Interpolation))
@pytest.mark.parametrize("resize", [32, 96, 256], ids=lambda size: f"to{size}")
def test_decode_centre_view_equals_torchvision(resize: int, interpolation: Interpolation) -> None:
    """The reference exactly; the fast decoder within two levels, on average within 0.05."""
    for width, height in ((200, 150), (151, 200), (97, 98)):
        encoded = jpeg(photograph(width, width=width, height=height))
        transform = v2.Compose(
            [v2.Resize(resize, interpolation=InterpolationMode(interpolation.value)), v2.CenterCrop(resize - 8)]
        )
        wanted = np.asarray(transform(Image.open(BytesIO(encoded)).convert("RGB"))).astype(np.int64)
        specs = [
            PixelSpec(image_size=resize - 8, resize=resize, interpolation=interpolation, decoder=name)
            for name in DECODERS
        ]
        slow, fast = (centre_square(encoded, spec) for spec in specs)
        assert np.array_equal(slow, wanted)
        assert np.abs(fast - wanted).mean() < 0.05
        assert np.abs(fast - wanted).max() <= (1 if interpolation is Interpolation.BILINEAR else 2)


@pytest.mark.parametrize(("interpolation", "least", "most"), [("bilinear", 1, 1), ("bicubic", 3, 40)])
def test_decode_turbo_differs_from_pillow_by_so_many_levels_at_hard_edges(
    interpolation: str, least: int, most: int
) -> None:
    """What the docs say of the decoders; photographs are above."""
    generator = np.random.default_rng(0)
    image_HWC = (generator.integers(0, 2, (255, 61, 3)) * 255).astype(np.uint8)
    worst = 0
    for size in (48, 173, 231):
        resized = np.empty((len(DECODERS), size, size, 3), np.uint8)
        for square_HWC, name in zip(resized, DECODERS, strict=True):
            decoder_of(name).resize(image_HWC, square_HWC, Interpolation(interpolation))
        worst = max(worst, int(np.abs(np.diff(resized.astype(np.int64), axis=0)).max()))
    assert least <= worst <= most


@pytest.mark.parametrize("decoder", DECODERS)
def test_decode_failure_leaves_the_square_alone(decoder: DecoderName) -> None:
    spec = PixelSpec(image_size=16, decoder=decoder)
    square = np.full((16, 16, 3), 7, dtype=np.uint8)
    with pytest.raises(BadSampleError):
        spec.render(KINDS["jpeg-420"][:3000], spec.center, square)
    assert (square == 7).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_decode_long_thin_image_is_refused_before_it_is_made_huge(decoder: DecoderName) -> None:
    """1 x 40,000 pixels at a shorter side of 224 would be 2 billion."""
    spec = PixelSpec(image_size=224, decoder=decoder)
    with pytest.raises(BadSampleError, match="40000 x 1 pixels would become 8960000 x 224") as caught:
        centre_square(encode(Image.new("RGB", (40_000, 1)), "JPEG"), spec)
    assert caught.value.reason is Reason.TOO_MANY_PIXELS


def test_decode_small_image_after_a_large_one_has_its_own_pixels() -> None:
    """The fast decoder reuses its buffer."""
    decoder = decoder_of(DecoderName.TURBO)
    small = encode(PHOTO.resize((20, 10)), "JPEG")
    decoder.decode(KINDS["jpeg-444"])
    assert np.array_equal(decoder.decode(small), reference(small))


def test_decode_resize_below_the_image_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"resize is 100, below the model's image_size 224"):
        PixelSpec(image_size=224, resize=100)


def test_decode_square_of_the_asked_size_is_left_alone() -> None:
    """What today's small data sets rely on: without a change of size all decoders give the stored pixels."""
    stored = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    encoded = encode(Image.fromarray(stored), "PNG")
    assert all(
        np.array_equal(centre_square(encoded, PixelSpec(image_size=16, decoder=name)), stored) for name in DECODERS
    )


def test_decode_worker_thread_wakes_no_pool_of_torch() -> None:
    """With W workers and T torch threads there would be W x T threads, which fight for the cores."""
    script = (
        "import os, sys, threading; sys.path.insert(0, os.getcwd())\n"
        "import torch, numpy as np\n"
        "from tests.photographs import jpeg, photograph\n"
        "from workloads.data.augment import Augment, Augmenter\n"
        "from workloads.data.pixels import PixelSpec\n"
        "from workloads.data.decode import DecoderName\n"
        "from workloads.data.pixels import Placement\n"
        "from workloads.runtime.streams import Stage\n"
        "torch.set_num_threads(4)\n"
        "photo = jpeg(photograph(0, width=400, height=300))\n"
        "squares = np.zeros((8, 224, 224, 3), dtype=np.uint8)\n"
        "spec = PixelSpec(image_size=224, resize=256, decoder=DecoderName.TURBO)\n"
        "def work():\n"
        "    spec.render(photo, spec.center, squares[0])\n"
        "    place = Placement(top=9, left=9, height=280, width=380, resized_height=224, resized_width=224)\n"
        "    spec.render(photo, lambda *_: place, squares[1])\n"
        "    Augmenter(Augment.FLIP, seed=0, stage=Stage.PRETRAIN).finish(squares, 0)\n"
        "    print(len(os.listdir('/proc/self/task')) - before - 1)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_decode_fast_enlargement_equals_pil() -> None:
    """Upscaling too: a support below one pixel is one pixel, as in PIL."""
    small = np.asarray(PHOTO.resize((20, 15)))
    fast, wanted = np.zeros((2, 60, 80, 3), dtype=np.uint8)
    decoder_of(DecoderName.TURBO).resize(small, fast, Interpolation.BILINEAR)
    decoder_of(DecoderName.PILLOW).resize(small, wanted, Interpolation.BILINEAR)
    assert wanted.any()
    assert np.abs(fast.astype(np.int64) - wanted).max() <= 1


def test_decoder_that_was_removed_decodes_for_plans_that_name_it() -> None:
    assert DecoderName("nvjpeg") is DecoderName.TURBO
    with pytest.raises(ValueError, match="magick"):
        DecoderName("magick")
