"""The small-matrix products against torch's own."""

from __future__ import annotations

import pytest
import torch

from hone.generation.native.products import products


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_equal_the_batched_product_of_strided_views(threads, dtype):
    generator = torch.Generator().manual_seed(0)
    slab = torch.randn(64, 320, 64, generator=generator).to(dtype)
    queries = torch.randn(64, 2, 64, generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scores = products(queries, slab[:, :300].transpose(1, 2))
        mixed = products(scores, slab[:, :300])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(scores, torch.bmm(queries, slab[:, :300].transpose(1, 2)))
    torch.testing.assert_close(mixed, torch.bmm(scores, slab[:, :300]), rtol=1e-4, atol=1e-3)
