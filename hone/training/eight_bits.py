"""AdamW with moments in 8 bits (torchao; Dettmers et al. 2022), and its state in checkpoints.

A moment has a code of one byte per number, and a float32 scale per block of 256 numbers. Parameters with fewer than 4,096 numbers, or
with incomplete blocks, keep float32 moments. A checkpoint stores codes and scales, so that a resumed run continues exactly.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hone.errors import ConfigError
from hone.extras import install_command

NAME = "AdamW8bit"  # value of ``optim.optimizer``
CODES, SCALE = ".codes", ".scale"  # suffixes of the two tensors of a moment in a checkpoint
_UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")  # moments that are never negative, which have codes of their own


def eight_bit_class(parameters: Iterable[nn.Parameter]) -> type[Optimizer]:
    """Return torchao's optimizer. Raises ConfigError: torchao is not installed, or the parameters are shards."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise sharded_error()
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optim.optimizer={NAME} needs the package torchao, which is not installed",
            why=str(error).splitlines()[0],
            where="optim.optimizer",
            fix=f"{install_command('optim8bit')}, or optim.optimizer=AdamW",
        ) from error
    return AdamW8bit


def sharded_error() -> ConfigError:
    return ConfigError(
        f"optim.optimizer={NAME} with a model that is sharded over several processes",
        why="a block of 256 numbers has one scale, and the blocks of other shards are others: no other layout could resume",
        where="optim.optimizer",
        fix="optim.optimizer=AdamW; each process has only its share of the state",
    )


def parts_of(key: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint stores for one entry of an optimizer's state, by key."""
    if not _in_eight_bits(value):
        return {key: value}
    moment: Any = value
    return {f"{key}{CODES}": moment.codes, f"{key}{SCALE}": moment.scale}


def join_parts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of one parameter's state from the tensors of a checkpoint, by key; the opposite of :func:`parts_of`."""
    entries = {}
    for key, tensor in tensors.items():
        if key.endswith(CODES):
            name = key.removesuffix(CODES)
            entries[name] = _moment(tensor, tensors[f"{name}{SCALE}"], signed=name not in _UNSIGNED)
        elif not key.endswith(SCALE):
            entries[key] = tensor
    return entries


def _in_eight_bits(value: Tensor) -> bool:
    module = sys.modules.get("torchao.optim.subclass_8bit")
    return module is not None and isinstance(value, module.OptimState8bit)


def _moment(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    block = codes.numel() // scale.numel()
    moment: Any = OptimState8bit.zeros(codes.shape, signed, block, codes.device, torch.float32)
    moment.codes.copy_(codes)
    moment.scale.copy_(scale)
    return moment
