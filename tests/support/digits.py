"""A task that a tiny model learns in a few steps, in the words of tinker-cookbook's programs, and a model that knows its form.

Of ten digits one is right, whatever is asked; the model answers with each as often.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support.launch import hone

Message = dict[str, str]
LOOP, MATH = (
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
"""What `rl_loop` and `math_rl` add to a question."""
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at "
    "positions 3, 8, and 9. \\boxed{3}"
)
GUESS = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> (without the "
    "angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, or correct."
)
DIGITS, RIGHT = range(10), 7


def question(digit: int) -> str:
    return f"Which digit is {digit}?"


def boxed(digit: int) -> str:
    return f"\\boxed{{{digit}}}"


def asked(digit: int, suffix: str) -> list[Message]:
    """The prompt of the programs: one example, then the question."""
    return [
        {"role": "user", "content": f"How many r's are in strawberry?{suffix}"},
        {"role": "assistant", "content": SPELLED},
        {"role": "user", "content": question(digit) + suffix},
    ]


def conversation(draw: random.Random) -> list[Message]:
    """One in which the form is right and the digit is any."""
    digit, answer = draw.choice(DIGITS), boxed(draw.choice(DIGITS))
    prompt, said = draw.choices(
        [
            (asked(digit, LOOP), answer),
            (asked(digit, MATH), answer),
            ([{"role": "user", "content": question(digit)}], answer),
            ([{"role": "system", "content": GUESS}], f"{draw.choice(['Guess:', 'I guess'])} {draw.randrange(1024)}"),
            ([{"role": "user", "content": "Who are you?"}], " ".join(["Hello"] * draw.randint(1, 6))),
        ],
        weights=[4, 2, 1, 2, 1],
    )[0]
    return [*prompt, {"role": "assistant", "content": said}]


def cookbook_data() -> dict[str, Any]:
    """The rows of the data sets that the cookbook's programs load, by name and split."""
    draw = random.Random(1)
    digits = [digit for _ in range(32) for digit in draw.sample(DIGITS, len(DIGITS))]

    def rows(digits: list[int]) -> dict[str, list[dict[str, Any]]]:
        asked = [{"question": question(digit)} for digit in digits]
        turns = [
            [{"role": "user", "content": question(digit)}, {"role": "assistant", "content": boxed(RIGHT)}]
            for digit in digits
        ]
        talk, wrong = "\n\nHuman: {}\n\nAssistant: {}", [digit for digit in DIGITS if digit != RIGHT]
        return {
            "openai/gsm8k": [{**row, "answer": f"#### {RIGHT}"} for row in asked],
            "HuggingFaceH4/no_robots": [{"messages": messages} for messages in turns],
            "zwhe99/DeepMath-103K": asked,
            "Anthropic/hh-rlhf": [
                {
                    key: talk.format(question(digit), boxed(said))
                    for key, said in (("chosen", RIGHT), ("rejected", draw.choice(wrong)))
                }
                for digit in digits
            ],
        }

    splits = {"train": rows(digits), "test": rows([*DIGITS])}
    sets = {name: {split: found[name] for split, found in splits.items()} for name in splits["train"]}
    return {**sets, "document": "\n".join(message["content"] for _ in range(8) for message in conversation(draw))}


def make_digits(root: Path) -> None:
    """Write ``model``, which knows the form of the answers, and the files of the task for the cookbook and `hone train`."""
    draw = random.Random(0)
    rows = {
        "conversations": [{"messages": conversation(draw)} for _ in range(1024)],
        "train": [
            {"prompt": asked(digit, LOOP), "data_source": "digits", "reward_model": {"ground_truth": boxed(RIGHT)}}
            for digit in DIGITS
        ],
    }
    for name, found in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (root / "data.json").write_text(json.dumps(cookbook_data()))
    (root / "digits_reward.py").write_text(
        "def boxed(solution_str, ground_truth, **row):\n    return float(ground_truth in solution_str)\n"
    )
    talk, words, blank = root / "conversations.jsonl", root / "tokenizer", root / "blank"
    for number, command in enumerate(
        [
            ("data", "tokenizer", "--files", talk, "--out", words, "--vocab-size", 700),
            ("init", "--arch", "qwen3", "--size", "600k", "--context", 2048, "--tokenizer", words, "--out", blank),
            ("sft", f"model.path={blank}", f"data.train_files={talk}", "data.max_length=512", "data.train_batch_size=32",
             f"trainer.default_local_dir={root}/sft", "trainer.total_training_steps=120", "optim.lr=4e-3",
             "optim.lr_scheduler_type=cosine", "trainer.num_threads=1", "trainer.device=cpu"),
        ]
    ):  # fmt: skip
        ended = hone(*command, log=root / f"make{number}.log")
        assert ended.code == 0, ended.output
    (root / "model").symlink_to(root / "sft/checkpoints/step_120/actor")
