"""The memory of tensors of any layout and dtype, as dense tensors that a group can broadcast."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddpx import _C
from ddpx.comm.transforms import unwrapped
from ddpx.params.dtensors import local_part

# In these schemes of quantization, torch cannot change the scale of a tensor.
PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that make up ``tensor``. They share its memory.

    Ranks may broadcast the parts in place of the tensor, if it has the same layout on all ranks.

    Raises:
        TypeError: The layout hides its memory.
    """
    tensor = unwrapped(local_part(tensor))
    if _C.holds_plain_values(tensor):
        return [tensor]
    if tensor.is_meta:
        return []
    if hides_memory(tensor):
        raise TypeError(f"{type(tensor).__name__} is a class that hides its memory")
    held = list(_held_by(tensor))
    if held and held[0] is tensor:
        return _of_strided(tensor)
    return [part for each in held for part in parts_of(each)]


def in_shown_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``, or a copy of its values if its class hides its memory."""
    local = unwrapped(local_part(tensor))
    if not hides_memory(local):
        return tensor
    return torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local)


def hides_memory(tensor: torch.Tensor) -> bool:
    """Whether the class has operations in Python, and no method that names the tensors it holds.

    The method is ``__tensor_flatten__()``. Without the method, the tensor may have no memory at its
    own address.
    """
    written_in_python = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return written_in_python and not is_traceable_wrapper_subclass(tensor)


def _held_by(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the values of ``tensor``: itself if it is strided."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif layout in _COMPRESSED_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif layout in _COMPRESSED_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif layout is torch.jagged:
        yield from (tensor.values(), tensor.offsets())  # type: ignore[attr-defined]
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.is_quantized:
        yield _bytes_of_memory(tensor)
        if tensor.qscheme() not in PER_TENSOR:
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
    elif is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from (each for each in inner if isinstance(each, torch.Tensor))
    elif layout is torch.strided:
        yield tensor
    else:
        raise TypeError(f"a tensor of layout {layout} hides its memory")


def _of_strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor._is_zerotensor():
        return []  # zeros on all ranks
    # Of elements that expand() put at one address, one is enough.
    sizes = [
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    if sizes != list(tensor.shape):
        tensor = tensor.as_strided(sizes, tensor.stride())
    # A group may not know the dtype, and torch may refuse to write to an inference tensor.
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if is_dense and not (tensor.is_conj() or tensor.is_neg()):
        return [_bytes_of_memory(tensor)]
    return [tensor]


def _bytes_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    begin = tensor.storage_offset() * size
    return memory.set_(tensor.untyped_storage(), begin, (tensor.numel() * size,), (1,))
