"""What SGLang's own processes begin with; each imports only what it needs, as SGLang takes its time."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from hone.generation.server.processes import die_with_parent

SAMPLED_FROM = "hone_sampling_log_probs"
"""Name under which the log-probs of the distribution really sampled from come with an answer."""


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """SGLang's scheduler process with Hone's parts in it."""
    die_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process

    from hone.generation.server.sglang_worker import install

    install()
    run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """SGLang's detokenizer process, which ends with its parent."""
    die_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)
