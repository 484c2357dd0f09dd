"""Pages ``docs/algorithms/*.md`` and ``docs/handbook/papers.md``: facts from the registries, and hand-written text around them.

A page has a generated part between two markers, which :func:`algorithm_pages` replaces, and hand-written text around it,
which it keeps.

Numbers on the pages are of the same small cases for every method. Estimators get the batch of four: one prompt, four answers, the first one
right. Policy losses get twelve tokens: six ratios, each with an advantage of +1 and of -1. KL estimators get a few log-ratios,
aggregations two responses.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    ("AReaL", "2505.24298", "bounded staleness", "hone/trainers/rollouter.py", "trainer.async_training.max_staleness"),
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
    text = re.sub(r"(?<!\()https?://[^\s,;)]+", lambda link: f"<{link[0]}>", paper)
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


Table = list[list[str]]
"""Rows of cells; the first row is the heading."""

SCORES = (1.0, 0.0, 0.0, 0.0)
LENGTHS = (2, 4, 3, 3)
RATIOS = (0.5, 0.9, 1.0, 1.1, 1.5, 4.0)
OLD_PROBABILITY = 0.2
LOG_RATIOS = (-2.0, -0.5, 0.0, 0.5, 2.0)
MARGINS = (-10.0, -2.0, 0.0, 2.0, 10.0)


def batch_of_four() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return rewards and mask ``[4, 4]`` of four answers to one prompt, and every input that an estimator may need.

    The first answer is right. Its reward of 1 is on its last token; the answers have 2, 4, 3 and 3 tokens. The critic
    expects 0.25 at first, and 0.5 at the second token of the right answer; process rewards are a fifth of that.
    """
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(4) < lengths[:, None]).float()
    rewards = torch.zeros(4, 4)
    rewards[torch.arange(4), lengths - 1] = torch.tensor(SCORES)
    values = torch.full((4, 4), 0.25) * mask
    values[0, 1] = 0.5
    inputs: dict[str, Any] = {
        "group_ids": ["prompt"] * 4,
        "values": values,
        "process_rewards": values / 5,
        "reward_baselines": torch.zeros(4),
        "old_log_probs": torch.full((4, 4), math.log(0.5)),
        "sum_pi_squared": torch.full((4, 4), 0.5),
        "reward_components": {"right": torch.tensor(SCORES), "format": torch.tensor([1.0, 1.0, 0.0, 1.0])},
        "turn_ids": (torch.arange(4) >= 2).long().expand(4, 4),
        "turn_group_ids": [["first", "first", "second", "second"] for _ in range(4)],
        "turn_values": [{}, {1: 0.5}, {1: 0.0}, {}],
        "turn_roles": [["first", "second"]] * 4,
        "turn_baselines": [[("first", 0.25), ("second", -0.25)] for _ in range(4)],
    }
    return rewards, mask, inputs


def example(method: Method) -> tuple[str, Table] | None:
    """Return a caption and a table of numbers for ``method``; None if it has no example."""
    tables = {
        "estimator": _estimator,
        "loss": _policy_loss,
        "kl": _kl,
        "aggregation": _aggregation,
        "preference": _preference,
    }
    return tables[method.kind](method) if method.kind in tables else None


def _estimator(method: Method) -> tuple[str, Table]:
    rewards, mask, inputs = batch_of_four()
    advantages, _ = method.entry(rewards, mask, **inputs)
    rows = [["answer", "score", "advantages of its tokens"]]
    for number, (score, row, length) in enumerate(zip(SCORES, advantages, LENGTHS, strict=True), 1):
        rows.append([str(number), f"{score:g}", ", ".join(number_text(value) for value in row[:length])])
    return "Four answers to one prompt, of 2, 4, 3 and 3 tokens; the first one is right:", rows


def _policy_loss(method: Method) -> tuple[str, Table]:
    push = token_push(method.entry, RATIOS * 2, [1.0] * len(RATIOS) + [-1.0] * len(RATIOS))
    rows = [["ratio to the old policy", "push, A = +1", "push, A = -1"]]
    for i, ratio in enumerate(RATIOS):
        rows.append([f"{ratio:g}", number_text(push[i]), number_text(push[i + len(RATIOS)])])
    caption = (
        f"Twelve responses of one token, each sampled with probability {OLD_PROBABILITY:g}. The push is the effect of a gradient "
        "step on the log-probability of the token: minus the derivative of the loss of its response. A push of 1 at "
        "ratio 1 is the plain policy gradient; 0 means that the token has no gradient:"
    )
    return caption, rows


def token_push(loss: Any, ratios: Sequence[float], advantages: Sequence[float]) -> Tensor:
    """Return minus the derivative of the loss, with its defaults, in the log-prob of each of B responses of one token, ``[B]``.

    The old policy has probability 0.2 everywhere; ``ratios`` are the policy's over it.
    """
    old = torch.full((len(ratios), 1), math.log(OLD_PROBABILITY), dtype=torch.float64)
    new = (old + torch.tensor(ratios, dtype=torch.float64).log()[:, None]).requires_grad_()
    advantage, mask = torch.tensor(advantages, dtype=torch.float64)[:, None], torch.ones(len(ratios), 1)
    torch.manual_seed(0)
    total, _ = loss(old, new, advantage, mask, loss_agg_mode="seq-mean-token-mean", **_loss_options(loss))
    (gradient,) = torch.autograd.grad(total, new)
    return -len(ratios) * gradient[:, 0]


def _loss_options(loss: Any) -> dict[str, float]:
    return {"dro_beta": 0.5} if "dro_beta" in loss.options else {}


def _kl(method: Method) -> tuple[str, Table]:
    gap = torch.tensor(LOG_RATIOS, dtype=torch.float64, requires_grad=True)
    value = method.entry(gap, torch.zeros_like(gap))
    (gradient,) = torch.autograd.grad(value.sum(), gap)
    straight = method.entry.func(gap, torch.zeros_like(gap), f"{method.name}+")
    (plus,) = torch.autograd.grad(straight.sum(), gap)
    rows = [["log p - log p_ref", "value", "derivative", "derivative with +"]]
    columns = zip(LOG_RATIOS, value, gradient, plus, strict=True)
    rows += [[f"{d:g}", number_text(v), number_text(g), number_text(p)] for d, v, g, p in columns]
    return "At five log-ratios of a sampled token:", rows


def _aggregation(method: Method) -> tuple[str, Table]:
    lengths = torch.tensor([1, 3])
    mask = (torch.arange(3) < lengths[:, None]).double()
    loss = torch.tensor([[4.0, 0, 0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    options = {"loss_scale_factor": 3.0} if method.name == "seq-mean-token-sum-norm" else {}
    total = method.entry(loss, mask, **options)
    (weight,) = torch.autograd.grad(total, loss)
    rows = [["response", "loss of its tokens", "weight of each token"]]
    rows += [["1", "4", number_text(weight[0, 0])], ["2", "1, 1, 1", number_text(weight[1, 0])]]
    scale = ", with loss_scale_factor=3" if options else ""
    return f"Two responses, of one and of three tokens{scale}; together {number_text(total)}:", rows


def _preference(method: Method) -> tuple[str, Table]:
    rows = [["margin h", "loss", "push on the chosen one", "push on the rejected one"]]
    for margin in MARGINS:
        reference = torch.full((2, 10), -2.0, dtype=torch.float64)
        shift = torch.tensor([[margin / 20], [-margin / 20]], dtype=torch.float64)
        log_probs = (reference + shift).requires_grad_()
        mask, labels = torch.ones(2, 10), torch.tensor([True, False])
        loss, _ = method.entry(log_probs, mask, labels, ref_log_probs=reference, kl=0.0)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        push = -gradient[:, 0] * method.entry.counts(mask, labels)["units"]
        rows.append([f"{margin:g}", *(number_text(value) for value in (loss, push[0], push[1]))])
    caption = (
        "Two responses of ten tokens, each with log-prob -2 per token under the reference; the policy gives the chosen one h/2 "
        "nats more and the rejected one h/2 nats less. The push is minus the derivative in the log-prob of a response:"
    )
    return caption, rows


def number_text(value: Any) -> str:
    """Format with at most three decimals and without a minus zero."""
    text = f"{float(value.detach() if isinstance(value, Tensor) else value):.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
