"""Triton programs in Triton's interpreter against the references in float64; `scripts/kernels` runs these tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from hone.models.kernels.cuda import gates as _gates  # noqa: E402, F401  registers the operators
from hone.models.kernels.cuda import heads as _heads  # noqa: E402, F401
from hone.models.kernels.cuda import norms as _norms  # noqa: E402, F401
from hone.models.kernels.cuda import pages as _pages  # noqa: E402, F401
from hone.models.kernels.cuda import vocabulary as _vocabulary  # noqa: E402, F401
from hone.models.kernels.cuda.programs import gates, heads, norms, pages, vocabulary  # noqa: E402

operators: Any = torch.ops.hone
DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_like_float64(program: Any, reference: Any, arguments: list[Any]) -> None:
    """The program's results equal those of the reference in float64, up to rounding to their dtypes."""
    exact = [part.double() if isinstance(part, Tensor) and part.is_floating_point() else part for part in arguments]
    exact = [torch.float64 if part in DTYPES else part for part in exact]
    found, wanted = program(*arguments), reference(*exact)
    for one, other in zip(*(part if isinstance(part, tuple) else (part,) for part in (found, wanted)), strict=True):
        rounding = 1e-2 if one.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(one.double(), other.double(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("width", [64, 80])
def test_norms(width: int, with_delta: bool, dtype: torch.dtype) -> None:
    residual, weight, scale = numbers((7, width), (width,), (7,))
    delta, grad = numbers((7, width), (7, width), dtype=dtype)
    added = delta if with_delta else None
    assert_like_float64(norms.forward, operators.add_rms_norm, [residual, added, weight, 1e-5, dtype])
    backward = [residual + 1 if with_delta else None, grad, residual, weight, scale, dtype if with_delta else None]
    assert_like_float64(norms.backward, operators.add_rms_norm_backward, backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("counts", "width"), [((4, 2, 2), 16), ((7, 1, 1), 24), ((16, 8, 8), 8)])
def test_heads(counts: tuple[int, int, int], width: int, with_norm: bool, dtype: torch.dtype) -> None:
    tokens = 5
    joint, *grads = numbers((tokens, sum(counts), width), *((tokens, n, width) for n in counts), dtype=dtype)
    weights, cos, sin = numbers((2, width), (tokens, width // 2), (tokens, width // 2))
    norm = weights if with_norm else None
    assert_like_float64(heads.forward, operators.split_heads, [joint, norm, cos, sin, 1e-5, *counts[:2]])
    assert_like_float64(heads.backward, operators.split_heads_backward, [*grads, joint, norm, cos, sin, 1e-5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1030])
def test_gates(width: int, dtype: torch.dtype) -> None:
    joint, grad = numbers((3, 2 * width), (3, width), dtype=dtype)
    assert_like_float64(gates.forward, operators.swiglu, [joint])
    assert_like_float64(gates.backward, operators.swiglu_backward, [grad, joint])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 5.0)])
@pytest.mark.parametrize(("rows", "size", "width"), [(5, 37, 20), (33, 100, 32), (70, 33, 16)])
def test_vocabulary(rows: int, size: int, width: int, bias: bool, softcap: float | None, dtype: torch.dtype) -> None:
    hidden, weight = numbers((rows, width), (size, width), dtype=dtype)
    biases, grad_log_probs, grad_entropy = numbers((size,), (rows,), (rows,))
    added, targets = biases if bias else None, torch.arange(rows) * 7 % (size + 9) - 4  # some are of other ranks
    arguments = [hidden, weight, added, targets, 0.7, softcap]
    assert_like_float64(vocabulary.statistics, operators.vocabulary_statistics, arguments)
    log_sum, _, mean = operators.vocabulary_statistics(hidden.double(), weight.double(), *arguments[2:]).float()
    for entropy, grad in ((log_sum - mean, grad_entropy), (None, None)):
        given = [*arguments[:4], log_sum, entropy, grad_log_probs, grad, *arguments[4:]]
        assert_like_float64(vocabulary.gradient, operators.vocabulary_gradient, given)


def test_vocabulary_statistics_of_large_logits_stay_exact() -> None:
    hidden, weight = numbers((4, 16), (50, 16))
    targets = torch.arange(4)
    log_sum, _, mean = vocabulary.statistics(30 * hidden, weight, None, targets, 1.0, None)
    exact, _, exact_mean = operators.vocabulary_statistics(
        (30 * hidden).double(), weight.double(), None, targets, 1.0, None
    )
    torch.testing.assert_close((log_sum - mean).double(), exact - exact_mean, rtol=1e-4, atol=1e-4)


PAGE, TABLE = 32, 4
LENGTHS = [1, 32, 33, 77, 128, 0, 999]
"""Ends within a page, at its end, and of a full table; a row without tokens, and one that its table cannot hold."""


def paged_rows(heads: int, key_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, pages of keys and values, tables and lengths."""
    sizes = (TABLE * len(LENGTHS), PAGE, key_heads, width)
    states = numbers((len(LENGTHS), heads, width), sizes, sizes, dtype=dtype)
    tables = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(1)).view(-1, TABLE).int()
    return [*states, tables, torch.tensor(LENGTHS, dtype=torch.int32)]


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "window", "softcap", "sinks", "dtype"),
    [
        (4, 4, 16, None, None, False, torch.float32),
        (8, 2, 80, None, None, False, torch.float32),
        (7, 1, 96, 37, None, False, torch.float32),
        (4, 2, 64, 1, None, False, torch.float32),
        (4, 2, 20, None, 5.0, False, torch.float32),
        (4, 2, 16, 40, 5.0, True, torch.float32),
        (2, 1, 256, None, None, True, torch.float32),
        (34, 2, 16, None, None, False, torch.float32),
        (8, 2, 128, None, None, False, torch.bfloat16),
        (4, 2, 80, 37, 5.0, True, torch.bfloat16),
        (4, 4, 96, None, None, False, torch.float16),
    ],
)
def test_pages(
    heads: int,
    key_heads: int,
    width: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in float64, and bit for bit the same alone, with a wider table, and whichever program computes a page."""
    forward: Any = pages.forward
    rows = paged_rows(heads, key_heads, width, dtype)
    scores: list[Any] = [torch.linspace(-2, 2, heads) if sinks else None, width**-0.5, window, softcap]
    found = forward(*rows, *scores)
    exact = [part.double() if isinstance(part, Tensor) and part.is_floating_point() else part for part in rows]
    wanted = operators.attend_pages(*exact, None if scores[0] is None else scores[0].double(), *scores[1:])
    bound = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    assert found.dtype == dtype and (found.double() - wanted).norm() < bound * wanted.norm()
    assert not found[LENGTHS.index(0)].any(), "filler rows are not used, and are numbers"
    query, keys, values, tables, lengths = rows
    wider = torch.cat([tables, torch.full((len(tables), 5), -(2**30), dtype=torch.int32)], 1)  # not read
    for row in (2, 3):
        one = slice(row, row + 1)
        alone = forward(query[one], keys, values, wider[one], lengths[one], *scores)
        assert torch.equal(alone, found[one])
    monkeypatch.setattr(pages, "programs_of_a_row", lambda *_: 1)
    assert torch.equal(forward(*rows, *scores), found)


def test_pages_take_queries_and_keys_in_larger_tensors() -> None:
    """Queries beside keys in a projection, and keys of one layer of many."""
    query, keys, values, tables, lengths = paged_rows(4, 2, 16, torch.float32)
    joint = torch.cat([query, query + 1], 1)
    layers = torch.stack([keys + 1, values + 1, keys, values])
    scores: list[Any] = [None, 0.25, None, None]
    forward: Any = pages.forward
    found = forward(joint[:, :4], layers[2], layers[3], tables, lengths, *scores)
    assert torch.equal(found, forward(query, keys, values, tables, lengths, *scores))


@pytest.mark.parametrize(
    ("rows", "key_heads", "table", "window", "programs"),
    [(1, 8, 64, None, 64), (256, 8, 64, None, 2), (4096, 8, 64, None, 1), (8, 8, 64, 512, 3)],
)
def test_programs_fill_the_gpu_and_few_are_idle(
    rows: int, key_heads: int, table: int, window: int | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Processors:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Processors())
    assert pages.programs_of_a_row(torch.device("cuda", 0), rows * key_heads, table, 256, window) == programs
