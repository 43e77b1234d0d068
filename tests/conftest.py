"""What every test starts from: few threads, and the same random numbers each time."""

import os
import random

# Before torch is loaded: several ranks share few cores, and results must not depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before triton is loaded: its kernels run in its interpreter, on the CPU (`make gpu-check` is for hardware).
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture(autouse=True)
def _seeds() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
