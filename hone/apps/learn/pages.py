"""Pages of ``docs/learn``, written from the texts and entries by ``scripts/make_docs``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.apps.learn.progress import ENTRIES, NEEDS
from hone.apps.learn.texts import ENGLISH, PARTS, boxes, find_box
from hone.text import replace_between

CHECK_BOXES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "first_run": (
        ("完成环境安装", "environment installed", "install"),
        ("下载模型和数据", "model and data present", "data_and_model"),
        ("完成第一次训练", "first training done", "first_training"),
        ("学会使用 TensorBoard", "curves read", "curves"),
        ("评估训练效果", "effect of training evaluated", "evaluate baseline"),
    ),
    "data": (
        ("理解 Parquet 格式", "parquet understood", "parquet"),
        ("准备单轮数据", "single-turn data prepared", "single_turn"),
        ("准备多轮数据", "multi-turn data prepared", "multi_turn"),
        ("实现数据检查", "data check implemented", "data_check"),
    ),
    "algorithms": (
        ("理解 GRPO 算法原理和实现", "GRPO: principle and implementation", "groups advantages"),
        ("理解 PPO 算法和 GAE", "PPO and GAE", "ppo clip"),
        ("对比不同算法的优缺点", "algorithms compared", "two_estimators preferences"),
        (
            "实现算法切换和参数调优",
            "algorithms switched, parameters tuned",
            "switch sweep_micro_batch sweep_kl sweep_rollout",
        ),
    ),
    "reward": (
        ("理解 Reward 函数基础和签名", "reward function and its signature", "signature"),
        ("掌握 RewardManager 调用流程", "way of a reward through the trainer", "flow"),
        ("实现 Rule-based Reward", "rule-based rewards", "five_rewards write_reward repair_reward"),
        ("了解 Model-based 和 Sandbox Reward", "model-based and sandbox rewards", "reward_model sandbox"),
        ("掌握 Reward Shaping 技巧", "reward shaping", "shaping"),
    ),
    "agents": (
        ("理解 Agent Loop", "agent loop", "agent_loop"),
        ("准备工具调用数据", "data with tool calls", "tool_data"),
        ("训练第一个 Agent", "first agent trained", "first_agent game"),
        ("实现自定义 Agent Loop", "a loop of one's own", "own_loop"),
    ),
}
"""Part to its check boxes: words of the notes, what they mean, and the boxes of the course."""
WEEKS = (
    ("1", "a baseline, frozen end to end", "first_training evaluate baseline"),
    (
        "2",
        "three sweeps: micro-batch, KL coefficient, budget of the rollout",
        "sweep_micro_batch sweep_kl sweep_rollout",
    ),
    ("3", "two estimators on the same ground", "ppo two_estimators"),
    ("4", "a tool task of two or three turns", "tool_data first_agent game"),
)
"""Weeks of the 30-day path: number, aim, and boxes."""


BEGIN = "<!-- Generated from hone/apps/learn by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"


@dataclass(frozen=True)
class Phrases:
    """Sentences of a page around its boxes, in one language."""

    titles: dict[str, str]  # headings of the parts that are written in this language
    opening: str  # line below the heading; takes the numbers ``part`` and ``parts``
    box: str  # word before the name of a box; takes ``name``
    needs: str  # sentence on the box whose results another one uses; takes ``name``


PHRASES = {
    ENGLISH: Phrases(
        PARTS,
        "Boxes of [the course](index.md), part {part} of {parts}. `hone learn next BOX` shows the same text, "
        "`hone learn hint BOX` helps, and `hone learn check BOX` checks your files and answers.",
        "Box `{name}`.",
        " It uses the results of the box `{name}`.",
    ),
    "zh": Phrases(
        {"first_run": "第一次运行", "data": "数据", "algorithms": "算法"},
        "[课程](index.md)的第 {part} 部分，共 {parts} 部分。`hone learn next BOX --language zh` 显示同样的文字，"
        "`hone learn hint BOX --language zh` 给出提示，`hone learn check BOX` 检查你的文件和答案。",
        "练习 `{name}`。",
        "它使用练习 `{name}` 的结果。",
    ),
    "vi": Phrases(
        {"first_run": "Lượt chạy đầu tiên", "data": "Dữ liệu", "algorithms": "Thuật toán"},
        "Các ô bài tập của [khóa học](index.md), phần {part} trên {parts}. `hone learn next BOX --language vi` hiện cùng nội dung,\n"
        "`hone learn hint BOX --language vi` gợi ý, và `hone learn check BOX` kiểm tra tệp và câu trả lời của bạn.",
        "Ô `{name}`.",
        " Nó dùng kết quả của ô `{name}`.",
    ),
}


def part_pages() -> dict[str, str]:
    """Return the pages of all parts in all languages that have them, by file name."""
    return {
        f"{part}.md" if language == ENGLISH else f"{part}.{language}.md": part_page(part, language)
        for language, phrases in PHRASES.items()
        for part in phrases.titles
    }


def part_page(part: str, language: str = ENGLISH) -> str:
    """Return the page of a part: the texts of its boxes, without their hints."""
    phrases = PHRASES[language]
    lines = [
        f"# {phrases.titles[part]}",
        "",
        "<!-- Generated from hone/apps/learn/boxes by scripts/make_docs. Do not edit. -->",
        "",
        phrases.opening.format(part=list(PARTS).index(part) + 1, parts=len(PARTS)),
    ]
    for box in boxes().values():
        if box.part == part:
            text = box.text(language)
            needs = phrases.needs.format(name=NEEDS[box.name]) if box.name in NEEDS else ""
            lines += ["", f"## {text.title}", "", phrases.box.format(name=box.name) + needs]
            for section, (heading, body) in text.sections.items():
                if section != "Hint":
                    lines += ["", f"### {heading}", "", body]
    return "\n".join(lines) + "\n"


def index_page(existing: str) -> str:
    """Return the index with new tables between the markers; the rest is unchanged."""
    names = list(ENTRIES)
    lines = ["### Boxes, by day of each entry", "", f"| Part | Box | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for box in boxes().values():
        days = [next((str(stop.day) for stop in ENTRIES[name].stops if stop.box == box.name), "") for name in names]
        lines.append(f"| {PARTS[box.part]} | {_link(box.name)} | {' | '.join(days)} |")
    lines += ["", "### Check boxes of the learning notes", "", "| Part | Check box | Boxes |", "|---|---|---|"]
    for part, entries in CHECK_BOXES.items():
        for words, meaning, names_of_boxes in entries:
            lines.append(f"| {PARTS[part]} | {words}: {meaning} | {', '.join(map(_link, names_of_boxes.split()))} |")
    lines += ["", "### Weeks of the 30-day path", "", "| Week | Aim | Boxes |", "|---|---|---|"]
    lines += [f"| {week} | {aim} | {', '.join(map(_link, names.split()))} |" for week, aim, names in WEEKS]
    return replace_between(existing, BEGIN, END, "\n".join(lines))


def _link(name: str) -> str:
    box = find_box(name)
    anchor = re.sub(r"[^\w\- ]", "", box.text().title.lower()).replace(" ", "-")
    return f"[{name}]({box.part}.md#{anchor})"
