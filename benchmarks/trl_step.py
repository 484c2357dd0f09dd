"""Run TRL's side of `grpo_step.py`, in TRL's environment: GRPOTrainer takes one step on each request.

trl_step.py '{"model": DIR, "prompts": FILE, ...}'        settings as JSON
stdin   one line a step: the tokens of each of its responses, as JSON
stdout  one JSON object a line: first the versions, then {"wall": ..., "cpu": ...}, seconds of each step
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from even_reward import even_share
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback


def say(**values: Any) -> None:
    """Write one JSON line for the benchmark."""
    sys.__stdout__.write(json.dumps(values) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


class Lengths(LogitsProcessor):
    """Logits processor with which each response draws the end as its last token, and nowhere else.

    Args:
        end: the token that ends a response.
    """

    def __init__(self, end: int) -> None:
        self.end, self.lengths, self.prompt = end, torch.empty(0), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores ``[B, V]`` of the next token in place and return them."""
        last = self.lengths == input_ids.shape[1] - self.prompt + 1
        scores[:, self.end] = float("-inf")
        scores[last] = float("-inf")
        scores[last, self.end] = 0.0
        return scores

    def given_to(self, generate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a model's ``generate`` with these lengths."""

        def with_lengths(**arguments: Any) -> torch.Tensor:
            self.prompt = arguments["input_ids"].shape[1]
            ids = generate(**arguments, logits_processor=LogitsProcessorList([self]))
            drawn = (ids[:, self.prompt :] == self.end).int().argmax(1) + 1
            if not torch.equal(drawn, self.lengths):
                raise RuntimeError(f"responses have {drawn.tolist()} tokens, not {self.lengths.tolist()}")
            return ids

        return with_lengths


class Paced(TrainerCallback):
    """Callback that begins a step for each line, ends training at the end of input, and reports seconds.

    Args:
        lengths: takes the lengths of each step.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths, self.began = lengths, (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock before generation: TRL generates inside the step."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        self.lengths.lengths = torch.tensor(json.loads(line))
        self.began = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the seconds after the optimizer's step."""
        say(wall=time.perf_counter() - self.began[0], cpu=time.process_time() - self.began[1])


def main() -> None:
    """Build the trainer and train until stdin ends."""
    settings = json.loads(sys.argv[1])
    sys.stdout = sys.stderr
    torch.set_num_threads(settings["threads"])
    sequences, micro, length = settings["sequences"], settings["micro_batch"], settings["response_length"]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    lengths = Lengths(settings["end"])
    if settings["end"] is not None:
        model.generation_config.eos_token_id = settings["end"]
        model.generate = lengths.given_to(model.generate)
    prompts = [json.loads(line)["prompt"] for line in Path(settings["prompts"]).read_text().splitlines()]
    arguments = trl.GRPOConfig(
        output_dir=settings["out"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=sequences // micro,
        num_generations=settings["n"],
        max_completion_length=length,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=100_000,
        bf16=settings["dtype"] == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        disable_dropout=True,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=even_share,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Paced(lengths)],
    )
    say(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__)
    trainer.train()


if __name__ == "__main__":
    main()
