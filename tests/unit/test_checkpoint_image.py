"""Tensors in host memory as a safetensors file that the library itself would write."""

import os
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from workloads.checkpoint.snapshot import _TYPES, Checkpoint, SafetensorsImage, Snapshot


def _tensors() -> dict[str, Tensor]:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 5), (0, 4), (7, 1, 3)]
    return {
        f"{dtype}.{shape}".replace("torch.", ""): torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for dtype in _TYPES
        for shape in shapes
    }


def _content(tensors: dict[str, Tensor]) -> bytes:
    image = SafetensorsImage()
    image.fit(tensors)
    for place, tensor in image.places(tensors):
        place.copy_(tensor)
    return image.file.view.tobytes()


def test_image_of_every_type_is_what_the_library_writes() -> None:
    tensors = _tensors()
    content = _content(tensors)
    found = safetensors.torch.load(content)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert len(content) == len(safetensors.torch.save(tensors))


def test_image_has_no_type_the_library_lacks() -> None:
    assert {safetensors.torch._TYPES[name]: name for name in _TYPES.values()} == _TYPES


def test_image_of_no_tensors_is_readable() -> None:
    assert safetensors.torch.load(_content({})) == {}


def test_image_of_tensors_not_in_order_holds_their_values() -> None:
    base = torch.arange(24.0).reshape(1, 2, 3, 4)
    tensors = {"channels_last": base.contiguous(memory_format=torch.channels_last), "turned": base[0, 0].T}
    found = safetensors.torch.load(_content(tensors))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_image_tied_tensors_come_back_as_two() -> None:
    weight = torch.rand(3)
    found = safetensors.torch.load(_content({"a": weight, "b": weight}))
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)


def test_image_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"odd.*complex64"):
        SafetensorsImage().fit({"odd": torch.ones(2, dtype=torch.complex64)})


def test_image_equal_layout_uses_the_same_memory() -> None:
    image = SafetensorsImage()
    image.fit({"a": torch.ones(3)})
    file = image.file
    image.fit({"a": torch.zeros(3)})
    assert image.file is file
    image.fit({"a": torch.zeros(4)})
    assert image.file is not file


def test_snapshot_takes_parameters_that_require_gradients() -> None:
    snapshot = Snapshot()
    parameter = torch.nn.Parameter(torch.ones(3))
    checkpoint = Checkpoint(step=1, model={"a": parameter}, optimizer={}, state={})
    snapshot.fit(checkpoint)
    snapshot.take(checkpoint)
    with torch.no_grad():
        parameter.fill_(2.0)
    found = safetensors.torch.load(snapshot.files["model.safetensors"].view.tobytes())
    assert torch.equal(found["a"], torch.ones(3))


def test_snapshot_closed_leaves_no_open_files() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    snapshot = Snapshot()
    state: dict[str, Any] = {}
    for size in (3, 4):
        snapshot.fit(Checkpoint(step=1, model={"a": torch.ones(size)}, optimizer={}, state=state))
    snapshot.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - see above


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_snapshot_of_a_device_holds_what_was_there_before_the_next_step() -> None:
    snapshot = Snapshot()
    weight = torch.ones(1 << 24, device="cuda")
    checkpoint = Checkpoint(step=1, model={"a": weight}, optimizer={"step": torch.tensor(1.0)}, state={})
    snapshot.fit(checkpoint)
    snapshot.take(checkpoint)
    weight.fill_(2.0)
    snapshot.wait()
    found = safetensors.torch.load(snapshot.files["model.safetensors"].view.tobytes())
    assert torch.equal(found["a"], torch.ones(1 << 24))
