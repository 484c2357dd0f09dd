"""Products of many small matrices, which is what attention of one token a sequence is made of.

A product is a few rows (the heads that share keys) by the length of a sequence: it costs what reading the keys costs. On
CPU in float32 the BLAS under numpy reads them about twice as fast as torch's batched product, which packs first.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

_WORTH_A_THREAD = 1 << 18
"""Numbers of ``b`` under which a second thread costs more than it saves."""


def products(a: Tensor, b: Tensor) -> Tensor:
    """``[B, M, K] @ [B, K, N]`` without gradients, for small ``M``."""
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return torch.bmm(a, b)
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2])
    left, right, result = a.numpy(), b.numpy(), out.numpy()
    threads = min(torch.get_num_threads(), max(1, b.numel() // _WORTH_A_THREAD))
    if threads == 1:
        np.matmul(left, right, out=result)
        return out
    edges = [len(left) * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in zip(edges, edges[1:], strict=False)]
    others = [_pool().submit(np.matmul, left[part], right[part], out=result[part]) for part in parts[1:]]
    np.matmul(left[parts[0]], right[parts[0]], out=result[parts[0]])
    for other in others:
        other.result()
    return out


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="hone-products")
