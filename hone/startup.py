"""Start of a process: fewer garbage collections while modules are imported, and what an interrupt does."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys

_USUAL = gc.get_threshold()[0]
_RARELY = 50_000
"""Allocations between collections. Imports create a million permanent objects; scanning them took a sixth of the start time."""


def collect_rarely() -> None:
    """Collect garbage rarely until :func:`collect_as_usual`."""
    gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Restore Python's usual collection frequency, because training creates garbage such as tensors in reference cycles.

    Without an earlier :func:`collect_rarely` it changes nothing.
    """
    if gc.get_threshold()[0] == _RARELY:
        gc.set_threshold(_USUAL)


_NOISE = {
    "torchao": "Failed to load",
    "torchao.kernel.intmm": "Detected no triton",
    "bitsandbytes.backends.cpu.ops": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass",
}
"""Messages about kernels that nothing here uses: transformers and PEFT import these packages wherever they are installed."""


@functools.cache
def quiet_imports() -> None:
    """Leave these messages out in this process, before the packages are imported."""
    for name, text in _NOISE.items():
        logging.getLogger(name).addFilter(lambda record, text=text: text not in record.getMessage())


def interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt, a handler of signals; the tasks that it ends are not reported one by one."""
    if asyncio := sys.modules.get("asyncio"):  # a process that has not imported it has no tasks
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    raise KeyboardInterrupt
