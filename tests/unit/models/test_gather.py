"""A gather with repeated indices, against indexing and its transpose."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.models.gather import Gather


@given(st.lists(st.integers(0, 7), min_size=1, max_size=30), st.sampled_from([(), (3,), (2, 3)]))
def test_values_and_gradients_are_those_of_indexing(source: list[int], shape: tuple[int, ...]) -> None:
    index = torch.tensor(source)
    gather = Gather.from_source(index, 8, torch.device("cpu"))
    values = torch.randn(8, *shape, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather(values), values[index])
    incoming = torch.randn(len(source), *shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad(gather(values), values, incoming)
    torch.testing.assert_close(grad, torch.zeros_like(values).index_add(0, index, incoming))
