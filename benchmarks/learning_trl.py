"""Run TRL's side of `learning.py`, in TRL's environment: one GRPO run; its curve and its model are written to a directory.

learning_trl.py '{"model": DIR, "rows": FILE, "out": DIR, "seed": 1, ...}'        settings as JSON
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from learning_reward import trl_reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Callback that collects the seconds of each step, in which TRL generates, and its mean reward."""

    def __init__(self) -> None:
        self.began, self.seconds, self.rewards = 0.0, [], []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "reward" in kwargs["logs"]:
            self.rewards.append(kwargs["logs"]["reward"])


def main() -> None:
    """Train one run."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    out = Path(settings["out"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, attn_implementation="sdpa")
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    clock, answers = Clock(), settings["prompts"] * settings["n"]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=trl_reward,
        args=trl.GRPOConfig(
            output_dir=str(out / "trainer"),
            seed=settings["seed"],
            per_device_train_batch_size=answers,
            num_generations=settings["n"],
            max_completion_length=settings["length"],
            num_iterations=1,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            epsilon=settings["clip"],
            loss_type="dapo",  # the mean over the tokens of the batch: Hone's token-mean
            scale_rewards="group",
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            warmup_steps=0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=settings["steps"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": row["prompt"], "task": row["data_source"], "entry": row["extra_info"]["entry"]} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model(str(out / "model"))
    tokenizer.save_pretrained(str(out / "model"))
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    result = {"rewards": clock.rewards, "seconds": clock.seconds, "versions": versions}
    (out / "curve.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
