"""Entry points of SGLang's processes; each imports only what it needs, because SGLang's imports are slow."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from hone.generation.server.processes import die_with_parent


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler process with Hone's classes."""
    die_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process

    from hone.generation.server.sglang_worker import install

    install()
    run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """Run SGLang's detokenizer process, which ends with its parent."""
    die_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)
