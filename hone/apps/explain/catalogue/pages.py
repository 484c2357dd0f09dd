"""Pages ``docs/algorithms/*.md`` and ``docs/handbook/papers.md``: facts from the registries, and hand-written text around them.

A page has a generated part between two markers, which :func:`algorithm_pages` replaces, and hand-written text around it,
which it keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

from hone.apps.explain.catalogue.examples import Table, example
from hone.apps.explain.catalogue.methods import KINDS, Method, function_of, methods, preset_title, presets
from hone.text import replace_between

BEGIN = "<!-- Generated from the registries by scripts/make_docs: do not edit from here -->"
END = "<!-- to here. What follows is written by hand and kept. -->"
TO_WRITE = "(to be written)"
_NOTES = f"## When to use it and how it fails\n\n{TO_WRITE}\n"
_INDEX = "README.md"


def algorithm_pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by file name; hand-written text is read from the pages in ``folder``."""
    by_page: dict[str, list[Method]] = {}
    for method in methods():
        by_page.setdefault(method.page, []).append(method)
    pages = {name: _page(folder / name, page_methods) for name, page_methods in sorted(by_page.items())}
    return {_INDEX: splice(_read(folder / _INDEX), "# Algorithms\n", _index()), **pages}


def hand_written(text: str) -> str:
    """Return the text after the generated part of a page."""
    return text.partition(END)[2].strip()


def splice(existing: str, head: str, generated: str) -> str:
    """Put ``generated`` between the markers of ``existing``; a page without them becomes head, generated part, notes."""
    page = existing if BEGIN in existing and END in existing else f"{head}\n{BEGIN}{END}\n\n{_NOTES}"
    return replace_between(page, BEGIN, END, generated.strip())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _page(path: Path, methods_on_page: Sequence[Method]) -> str:
    up = f"[All methods]({_INDEX}) | `hone algorithms show {path.stem}`\n\n"
    if path.name == "rollout_correction.md":
        return splice(_read(path), "# Rollout correction\n", up + _corrections(methods_on_page))
    titles = len(methods_on_page) > 1
    sections = [
        (f"## As {_article(KINDS[method.kind])}\n\n" if titles else "") + _facts(method) for method in methods_on_page
    ]
    return splice(_read(path), f"# {methods_on_page[0].name}\n", up + "\n\n".join(sections))


# --------------------------------------------------------------------------------------------------------- one method


def _facts(method: Method) -> str:
    also = f" Also called {', '.join(f'`{name}`' for name in method.aliases)}." if method.aliases else ""
    needs = "; ".join(f"`{need.argument}`: {need.source}" for need in method.needs) or "nothing more"
    rows = [
        ["Paper", method.paper],
        ["Choose it", _choose(method)],
        ["Needs", needs],
        *([label, text] for label, text in method.remarks.items()),
        ["Costs", method.cost.sentence()],
        ["Presets", ", ".join(f"`{name}`" for name in method.presets) or "none"],
    ]
    parts = [
        f"{_capital(_article(KINDS[method.kind]))}.{also}",
        method.description,
        f"```text\n{method.formula}\n```",
        table([["", ""], *rows]),
    ]
    if method.knobs:
        heading = [["Knob", "Default", "Meaning"]]
        knobs = [[f"`{knob.key}`", f"`{knob.default}`", knob.meaning] for knob in method.knobs]
        parts.append(table(heading + knobs))
    numbers = example(method)
    if numbers:
        parts += [numbers[0], table(numbers[1])]
    return "\n\n".join(part for part in parts if part)


def _choose(method: Method) -> str:
    return method.select if "(" in method.select else f"`{method.select}`"


def table(rows: Table) -> str:
    """Return a Markdown table; the first row is the heading."""
    lines = [
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row).rstrip() + " |" for row in rows
    ]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


# ------------------------------------------------------------------------------------------------- pages over several


def _corrections(corrections: Sequence[Method]) -> str:
    """Return the function's facts, then every named preset."""
    (function,) = (method for method in corrections if method.kind == "block")
    rows = [["Preset", "Effect", "Sets"]]
    rows += [[f"`{m.name}`", m.formula, f"`{m.remarks['Sets']}`"] for m in corrections if m is not function]
    return f"{_facts(dataclasses.replace(function, remarks={}))}\n\n{table(rows)}"


def _index() -> str:
    parts = []
    for kind, words in KINDS.items():
        of_kind = [method for method in methods() if method.kind == kind]
        title = f"### {_capital(_plural(words))}"
        if kind == "correction":
            parts += [
                title,
                f"[{len(of_kind)} named presets]({of_kind[0].page}): {', '.join(f'`{m.name}`' for m in of_kind)}.",
            ]
        elif of_kind:
            rows = [["Method", "Formula", "Costs"]]
            rows += [[_link(method), f"`{method.formula}`", _short_cost(method)] for method in of_kind]
            parts += [title, table(rows)]
    parts.append("### Presets")
    for command, folder in (("train", "rl"), ("prefer", "prefer")):
        rows = [[f"`hone {command} --preset`", "Description"]]
        parts.append(table(rows + [[f"`{name}`", preset_title(name, folder)] for name in presets(folder)]))
    return "\n\n".join(parts)


def _plural(words: str) -> str:
    return f"{words}{'es' if words.endswith('s') else 's'}"


def _link(method: Method) -> str:
    also = f" ({', '.join(method.aliases)})" if method.aliases else ""
    return f"[{method.name}]({method.page}){also}"


def _short_cost(method: Method) -> str:
    models = [*method.cost.trained[1:], *method.cost.frozen]
    extra = f"{', '.join(models)} besides the policy" if models else "the policy alone"
    return f"{extra}; {method.cost.generation}" if "greedy" in method.cost.generation else extra


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
        [name, f"[arXiv:{number}](https://arxiv.org/abs/{number})", idea, _file_link(file), f"`{key}`"]
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
    return [name, linked(method.paper), f"`{method.formula}`", _file_link(file_of(method)), chosen]


def _file_link(file: str) -> str:
    return f"[`{file}`](../../{file})"


def linked(paper: str) -> str:
    """Return a source with links for its arXiv numbers and addresses.

    >>> linked("Hu 2025, arXiv:2501.03262, eq. 1")
    'Hu 2025, [arXiv:2501.03262](https://arxiv.org/abs/2501.03262), eq. 1'
    """
    text = re.sub(r"(?<!\()https?://[^\s,)]+", lambda link: f"<{link[0]}>", paper)
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
