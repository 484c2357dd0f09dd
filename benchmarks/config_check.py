"""Measure `hone config check` on a large dataset and a large model: `python benchmarks/config_check.py`.

The dataset has 100,000 rows of chat messages with a system message: word problems of 40 to 2,000 characters, in one parquet file.
The model directory has the shape and the files of a 7-billion-parameter model, with a byte-level BPE tokenizer of 152,000 tokens. Its
weight files have only headers: no weights exist, so none can be read. The bound is 10 s of wall time on two cores and 2 GB.

Processor time is that of the command with all processes that it started; memory is the peak of the largest one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from grpo_step import machine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone.data.tasks.arithmetic import NAMES, OBJECTS

VOCABULARY, LAYERS, HIDDEN, INNER, KEY_VALUE = 152064, 28, 3584, 18944, 512
SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Make the files, check them several times, print time and memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function, in one more run")
    options = parser.parse_args()
    print(machine(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "train.parquet", options.rows)
        make_model(folder / "model")
        command = check_command(folder)
        for number in range(options.repeats):
            wall, processor, memory = measured(["-m", "hone.cli.main", *command], folder)
            print(f"{number + 1}: {wall:.1f} s wall, {processor:.1f} s of processor time, {memory / 2**20:.0f} MiB")
        if options.profile:
            subprocess.run(
                [sys.executable, "-m", "cProfile", "-s", "cumtime", "-m", "hone.cli.main", *command], check=True
            )


def make_data(file: Path, rows: int) -> None:
    """Write word problems as chat messages, all of them different."""
    draw = random.Random(0)
    names, things = list(NAMES), list(OBJECTS)

    def question(number: int) -> str:
        sentences = max(1, min(40, round(draw.lognormvariate(1.8, 0.7))))
        facts = (f"{draw.choice(names)} has {draw.randrange(99)} {draw.choice(things)}." for _ in range(sentences))
        return f"Problem {number}. {' '.join(facts)} How many {draw.choice(things)} are there?"

    system = {"role": "system", "content": "You solve problems step by step. Write the answer after ####."}
    batches = range(0, rows, 10_000)
    with pq.ParquetWriter(file, SCHEMA) as writer:
        for first in batches:
            numbers = range(first, min(rows, first + 10_000))
            writer.write_table(
                pa.Table.from_pylist(
                    [
                        {
                            "data_source": "openai/gsm8k",
                            "prompt": [system, {"role": "user", "content": question(number)}],
                            "ability": "math",
                            "reward_model": {"style": "rule", "ground_truth": str(number)},
                            "extra_info": {"split": "train", "index": number},
                        }
                        for number in numbers
                    ],
                    SCHEMA,
                )
            )


SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64()}),
    }
)


def make_model(folder: Path) -> None:
    """Make a model directory without weights: config, tokenizer, and the headers of the weight files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCABULARY - 1]}))
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "lm_head.weight": [VOCABULARY, HIDDEN]}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for part, shape in {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), [HIDDEN, HIDDEN]),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), [KEY_VALUE, HIDDEN]),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), [INNER, HIDDEN]),
            "mlp.down_proj": [HIDDEN, INNER],
        }.items():
            shapes[f"{block}.{part}.weight"] = shape
    head = json.dumps(
        {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head.encode())
    make_tokenizer().save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make byte-level BPE whose merges give all pairs of letters, then longer strings, up to the size of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = dict.fromkeys(letters), []
    pairs = itertools.product(letters, letters)
    longer = ((f"{a}{b}", c) for a, b, c in itertools.product(letters[32:96], letters[32:96], letters[32:96]))
    for first, second in itertools.chain(pairs, longer):
        if len(tokens) == VOCABULARY - 3:
            break
        tokens[first + second] = None
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    whole.chat_template = TEMPLATE
    return whole


def check_command(folder: Path) -> list[str]:
    """Return the arguments of `hone`."""
    actor = "actor_rollout_ref.actor"
    return [
        *("config", "check", "--preset", "grpo"),
        *(f"data.train_files={folder}/train.parquet", "data.train_batch_size=256", "data.filter_overlong_prompts=true"),
        *(f"actor_rollout_ref.model.path={folder}/model", f"{actor}.ppo_mini_batch_size=256"),
        *(f"trainer.default_local_dir={folder}/run", "trainer.save_freq=50", "preflight.allow=[R06,R57]"),
    ]


def measured(words: list[str], folder: Path) -> tuple[float, float, int]:
    """Return wall seconds, processor seconds and peak bytes of a Python command that must succeed."""
    begun = time.perf_counter()
    with (folder / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, *words], stdout=said, stderr=said, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {(folder / 'said').read_text()}")
    return time.perf_counter() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


if __name__ == "__main__":
    main()
