"""Every tensor that can be sent is bytes, bit for bit and untouched; the rest is refused."""

from __future__ import annotations

import warnings
from typing import cast

import numpy as np
import pytest
import torch
from support.tensor_samples import (
    ALL_DTYPES,
    FORMS,
    QUANTISED_DTYPES,
    as_bytes,
    expected_bytes,
    sample,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from vllm_bucketsync.errors import SourceError
from vllm_bucketsync.tensors import SeenTensors, byte_view, check_unchanged, meta_of

COMPLEX_DTYPES = [torch.complex32, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_form_of_every_dtype_is_its_own_bytes(dtype: torch.dtype) -> None:
    for form, make in FORMS.items():
        tensor = make(sample(dtype))

        data = byte_view(tensor)

        assert as_bytes(data) == expected_bytes(tensor), form
        assert data.dtype is torch.uint8
        assert data.dim() == 1
        assert data.is_contiguous()
        assert data.numel() == meta_of("a", tensor).num_bytes


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_contiguous_tensor_is_viewed_and_another_one_is_copied_aside(dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    before = expected_bytes(tensor)

    assert byte_view(tensor).data_ptr() == tensor.data_ptr()
    assert byte_view(tensor[1:]).data_ptr() == tensor[1:].data_ptr()
    byte_view(tensor.t()).fill_(7)

    assert expected_bytes(tensor) == before


def test_every_dtype_of_this_torch_can_be_sent_or_is_quantised() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}

    assert set(ALL_DTYPES) | set(QUANTISED_DTYPES) == dtypes
    assert len(ALL_DTYPES) >= 40


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_dtype_s_name_is_an_attribute_of_torch(dtype: torch.dtype) -> None:
    assert getattr(torch, meta_of("a", sample(dtype)).dtype) is dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", COMPLEX_DTYPES, ids=str)
def test_a_lazily_conjugated_tensor_is_sent_as_the_values_that_it_shows(dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    size = dtype.itemsize // 2
    flipped = bytearray(expected_bytes(tensor))
    for sign in range(2 * size - 1, len(flipped), 2 * size):
        flipped[sign] ^= 0x80

    assert as_bytes(byte_view(tensor.conj())) == bytes(flipped)
    assert not tensor.is_conj()
    parts = [bytes(flipped[i : i + size]) for i in range(size, len(flipped), 2 * size)]
    assert as_bytes(byte_view(tensor.conj().imag)) == b"".join(parts)


def test_a_conjugated_and_transposed_tensor_is_sent_in_row_major_order() -> None:
    tensor = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]])

    data = byte_view(tensor.conj().t())

    expected = torch.tensor([1 - 2j, 5 - 6j, 3 - 4j, 7 - 8j])
    assert as_bytes(data) == expected_bytes(expected)


def test_gradients_and_inference_mode_are_no_obstacle_and_stay_as_they_are() -> None:
    leaf = nn.Parameter(torch.ones(2, 3))
    derived = leaf * 2
    with torch.inference_mode():
        inference = torch.ones(3, 2)

    for tensor in (leaf, derived, derived.t(), inference, inference.t()):
        data = byte_view(tensor)
        assert not data.requires_grad
        assert as_bytes(data) == expected_bytes(tensor)

    assert leaf.requires_grad
    assert leaf.grad is None
    assert leaf._version == 0


def test_a_view_of_a_large_storage_is_its_own_bytes_only() -> None:
    large = torch.zeros(1 << 20)

    assert byte_view(large[5:7]).numel() == 8
    assert meta_of("a", large[5:7]).num_bytes == 8
    assert meta_of("a", torch.zeros(1).expand(1000)).num_bytes == 4000


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(9)[::3][:1], torch.randn(4, 9)[1:2, ::3][:, 1:2], torch.randn(9)[::3][:0]],
    ids=["one", "one of a matrix", "none"],
)
def test_a_single_element_of_any_stride_is_its_own_bytes(tensor: torch.Tensor) -> None:
    assert tensor.stride()[-1] != 1

    assert expected_bytes(tensor) == as_bytes(byte_view(tensor))


def test_a_meta_says_name_dtype_shape_bytes_and_kind() -> None:
    meta = meta_of("a.count", torch.tensor(3), is_buffer=True)

    assert (meta.name, meta.dtype, meta.shape) == ("a.count", "int64", ())
    assert (meta.num_bytes, meta.is_buffer) == (8, True)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def freed() -> torch.Tensor:
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def shortened() -> torch.Tensor:
    tensor = torch.ones(4, 4).t()
    tensor.untyped_storage().resize_(60)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def two_tensors() -> torch.Tensor:
    return cast(torch.Tensor, TwoTensor(torch.ones(2), torch.ones(2)))


REFUSED = {
    "none": (lambda: None, "is a NoneType; expected a torch.Tensor; leave it out"),
    "number": (lambda: 0.5, r"is a float; expected a torch.Tensor; send torch.tensor"),
    "list": (lambda: [1.0], "is a list; expected a torch.Tensor"),
    "numpy": (lambda: np.ones(3), r"is a numpy.ndarray; .*; send torch.from_numpy"),
    "module": (lambda: nn.Linear(1, 1), r"is a torch.nn.modules.linear.Linear; expected"),
    "meta": (lambda: torch.ones(2, device="meta"), "on the meta device.*; materialise it first"),
    "lazy": (lambda: nn.LazyLinear(2).weight, "is an UninitializedParameter.*materialise it first"),
    "coo": (lambda: torch.eye(3).to_sparse(), "has the layout sparse_coo; expected strided"),
    "csr": (compressed, "has the layout sparse_csr; expected strided"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "has the layout _mkldnn; expected strided"),
    "nested": (lambda: nested(torch.strided), "nested; expected strided; send it as dense"),
    "jagged": (lambda: nested(torch.jagged), "nested; expected strided; send it as dense"),
    "quantised": (quantised, r"is quantised \(torch.qint8\): its scales .*dequantize\(\)"),
    "bare": (lambda: sample(torch.int8).view(torch.quint4x2), r"is quantised \(torch.quint4x2\)"),
    "fake": (fake, "is a FakeTensor, which stands for other tensors"),
    "wrapper": (two_tensors, "is a TwoTensor, which stands"),
    "freed": (freed, "has no memory for its 16 elements: its storage was freed; gather it first"),
    "short": (shortened, "has no memory for its 16 elements"),
    "dims": (lambda: torch.ones([1] * 65), "has 65 dimensions; at most 64 are allowed"),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_bytes_of_its_own_is_refused_by_name(make: object, text: str) -> None:
    with pytest.raises(SourceError, match=rf"^'layers\.0\.x' .*{text}") as caught:
        meta_of("layers.0.x", make())  # type: ignore[operator]

    assert caught.value.name == "layers.0.x"


def test_a_plain_subclass_with_memory_of_its_own_is_a_tensor() -> None:
    class Marked(torch.Tensor):
        pass

    tensor = torch.ones(2, 2).as_subclass(Marked)

    assert meta_of("a", tensor).shape == (2, 2)
    assert as_bytes(byte_view(tensor)) == expected_bytes(torch.ones(2, 2))


def test_a_tensor_that_is_no_longer_what_was_declared_is_refused_with_both() -> None:
    meta = meta_of("a", torch.ones(2, 3))

    was = r"was declared as float32 \[2, 3\] and is "

    assert check_unchanged(meta, torch.zeros(2, 3)) is not None
    with pytest.raises(SourceError, match=was + r"now float32 \[3, 2\]"):
        check_unchanged(meta, torch.ones(3, 2))
    with pytest.raises(SourceError, match=was + r"now int32 \[2, 3\]"):
        check_unchanged(meta, torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(SourceError, match=was + "gone"):
        check_unchanged(meta, None)
    with pytest.raises(SourceError, match="materialise"):
        check_unchanged(meta, torch.ones(2, 3, device="meta"))


def test_tensors_are_tied_only_where_they_show_the_same_bytes_alike() -> None:
    base = torch.zeros(4, 4)
    square = torch.zeros(2, dtype=torch.complex64)
    new = [
        base,
        base[:2],
        base.t(),
        base.view(16),
        base.view(torch.int32),
        base[1:],
        torch.zeros(4, 4),
        torch.zeros(0),
        torch.zeros(0),
        square,
        square.conj(),
    ]
    seen = SeenTensors()

    assert [seen.add(tensor) for tensor in new] == [None] * len(new)
    assert all(seen.add(tensor) is tensor for tensor in new)
    assert seen.add(base.view(4, 4)) is base
    assert seen.add(base.detach()) is base
