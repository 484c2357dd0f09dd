"""The table of chat templates in docs/models.md."""

from __future__ import annotations

from support.templates import SHAPES, tokenizer

from hone.apps.lab.data.verdict import TemplateReport, examine
from hone.text import replace_between

BEGIN = "<!-- Generated from the templates in tests/support/templates by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"
TITLES = {
    "qwen2_5": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "qwen3_coder": "Qwen 3 Coder",
    "llama3_1": "Llama 3.1",
    "llama3_2_pythonic": "Llama 3.2, pythonic calls",
    "gemma3": "Gemma 2, 3",
    "function_gemma": "FunctionGemma",
    "gemma4": "Gemma 4",
    "harmony": "GPT-OSS (harmony)",
    "deepseek_v3": "DeepSeek V3",
    "deepseek_v3_1": "DeepSeek V3.1",
    "kimi_k2": "Kimi K2",
}


def report(name: str) -> TemplateReport:
    """Return what is found about a template of the list."""
    made = tokenizer(name)
    return examine(made, [made.eos_token_id])


def models_page(existing: str) -> str:
    """Return the page with its table written anew between the markers; the rest stays."""
    lines = [
        "| Shape of the template | Renderer | Calls | Ends of turns | Results of one turn | Verdict |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(name) for name in SHAPES]
    return replace_between(existing, BEGIN, END, "\n".join(lines))


def _line(name: str) -> str:
    found = report(name)
    said = {check.name: check for check in found.checks}
    ends = ", ".join(f"`{end.split(' (')[0]}`" for end in said["end of turn"].detail.split(", "))
    results = "one by one" if "one by one" in said["tool results"].detail else "together"
    cells = [TITLES[name], found.renderer, found.parser, ends.replace("|", "\\|"), results, found.verdict]
    return "| " + " | ".join(cells) + " |"
