"""The page ``docs/handbook/papers.md``: method, paper, equation, file and preset, from the catalogue."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path

from hone.apps.explain.catalogue.methods import function_of, methods
from hone.apps.explain.catalogue.pages import table
from hone.apps.explain.catalogue.records import KINDS, Method

PACKAGE = Path(__file__).resolve().parents[3]
WITHOUT_FUNCTION = {"filter_groups": "hone/trainers/group_filter.py"}
"""Files of building blocks that no pure function computes."""

SYSTEMS = (
    ("HybridFlow", "2409.19256", "one driver, distributed roles", "hone/trainers/algorithm.py", "trainer.runtime"),
    ("PipelineRL", "2509.19128", "new weights during a response", "hone/trainers/rollouter.py", "trainer.async_training.partial_rollouts"),
    ("AReaL", "2505.24298", "bounded staleness", "hone/trainers/group_buffer.py", "trainer.async_training.max_staleness"),
    ("PagedAttention", "2309.06180", "KV cache in pages", "hone/generation/native/paged", "actor_rollout_ref.rollout.max_cache_tokens"),
    ("Speculative decoding", "2211.17192", "a draft proposes, the model checks", "hone/generation/native", "actor_rollout_ref.rollout.speculative.method"),
    ("LoRA", "2106.09685", "low-rank adapters", "hone/models", "actor_rollout_ref.model.lora_rank"),
    ("PyTorch FSDP", "2304.11277", "sharded weights and optimizer", "hone/training/backends/fsdp2", "actor_rollout_ref.actor.strategy"),
    ("DeepSpeed-Ulysses", "2309.14509", "tokens over ranks, heads in attention", "hone/training/backends/fsdp2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
    ("Ring Attention", "2310.01889", "keys and values around a ring", "hone/training/backends/fsdp2/ring.py", "actor_rollout_ref.actor.context_parallel_size"),
    ("Megatron-LM", "1909.08053", "tensor parallelism", "hone/training/backends/megatron", "actor_rollout_ref.actor.tensor_model_parallel_size"),
)  # fmt: skip
"""Papers of systems: name, arXiv number, idea, file or folder, key."""

_HEAD = """# Papers: method, equation, file, preset

<!-- Generated from the registries by scripts/make_docs. Do not edit. -->

After this page you can go from a paper to the lines that compute its method, and to the key that chooses it. The page is written from the
registries, so it lists what the code has. Each method's own page says when to use it and how it fails.

In the formulas `s` is the score of a response, `A` an advantage, `r` a ratio, `d` a log-ratio to the reference, `V` a value and `pi` the policy.
"""


def papers_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for kind, words in KINDS.items():
        of_kind = [method for method in methods() if method.kind == kind and kind != "correction"]
        if of_kind:
            title = words + ("es" if words.endswith("s") else "s")
            rows = [["Method", "Paper", "Equation", "File", "Preset, or key"]]
            rows += [_row(method) for method in of_kind]
            parts.append(f"## {title[0].upper()}{title[1:]}\n\n{table(rows)}\n")
    rows = [["System", "Paper", "Idea", "File", "Key"]]
    rows += [
        [name, f"[arXiv:{number}](https://arxiv.org/abs/{number})", idea, _link(file), f"`{key}`"]
        for name, number, idea, file, key in SYSTEMS
    ]
    parts.append(
        f"## Systems\n\nHow Hone differs from HybridFlow: [comparison](comparison.md#hybridflow).\n\n{table(rows)}\n"
    )
    return "\n".join(parts)


def file_of(method: Method) -> str:
    """Return the file that computes a method, relative to the repository."""
    if method.name in WITHOUT_FUNCTION:
        return WITHOUT_FUNCTION[method.name]
    function = function_of(method.entry)
    while isinstance(function, functools.partial):
        function = function.func
    path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").resolve()
    return path.relative_to(PACKAGE.parent).as_posix()


def _row(method: Method) -> list[str]:
    chosen = ", ".join(f"`{preset}`" for preset in method.presets[:3]) or f"`{method.select.partition(' (')[0]}`"
    name = f"[{method.name}](../algorithms/{method.page})"
    return [name, linked(method.paper), f"`{method.formula}`", _link(file_of(method)), chosen]


def _link(file: str) -> str:
    return f"[`{file}`](../../{file})"


def linked(paper: str) -> str:
    """Return a source with links for its arXiv numbers and addresses.

    >>> linked("Hu 2025, arXiv:2501.03262, eq. 1")
    'Hu 2025, [arXiv:2501.03262](https://arxiv.org/abs/2501.03262), eq. 1'
    """
    text = re.sub(r"(?<!\()https?://[^\s,)]+", lambda link: f"<{link[0]}>", paper)
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
