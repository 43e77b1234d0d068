"""What every wrapper of a Triton kernel does before it launches."""

import torch


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count` (at least 1)."""
    return 1 << max(0, count - 1).bit_length()


def padded_group(group: int) -> int:
    """Query heads per KV head as the rows of a matrix product, which has at least 16."""
    return max(16, next_power_of_2(group))


def check(tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, like: torch.Tensor) -> None:
    """`tensor` has this shape, is contiguous, of one of `dtypes` and on the device of `like`."""
    assert tuple(tensor.shape) == shape, (tuple(tensor.shape), shape)
    assert tensor.dtype in dtypes, (tensor.dtype, dtypes)
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.device == like.device, (tensor.device, like.device)


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError where head_dim does not suit the kernels (those of torch and of the CPU take any)."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}: the Triton kernels take powers of two from 16 on")


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int16, torch.int32, torch.int64)
