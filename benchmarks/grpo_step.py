"""Compare a whole GRPO step of Hone with TRL's `GRPOTrainer`, on one machine in one run: `python benchmarks/grpo_step.py`.

Both generate, score and learn from 64 sequences (8 prompts of 64 tokens, n=8) with a Qwen3 of 5 million random parameters. There is no
KL term, one update a step, no gradient checkpointing, and AdamW in float32. "bfloat16" means bfloat16 autocast over float32 parameters
on both sides. Two workloads:

    uniform        every response has 128 tokens
    long-tailed    responses have a median of 32 tokens, 256 at most, as if 11 of the 512 equally likely tokens ended one

The lengths are given: drawn once for each step, and the same for every contestant, response by response. Hone's requests have that
number of tokens. TRL's `generate` may draw the end only where a response is to end.

    TRL               transformers `generate` and TRL's loss; it takes no separate old log-probs when there is one update
                      a batch. It runs with each requested micro-batch size; the ratio is against the faster one.
    Hone              default settings: nothing before the one update needs old log-probs, so its forward pass gives them, and
                      engine is measured against trainer.
    Hone, recomputed  actor_rollout_ref.actor.recompute_old_log_probs=true: old log-probs have a separate forward pass, as when a
                      batch gives several updates.
    floor             time of the matmuls with weight matrices alone, if all ran as fast as the fastest of them does here
                      (matmul_floor.py); attention, norms and sampling come on top.

TRL is installed in `.venv-trl` on the first call, and takes a step on request. The contestants take turns step by step, so that other
load on the machine affects all of them. Ratios are of medians of wall time. The ratio of processor time (of the training process) is
printed too, because it hardly depends on other load, above all with --threads 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from matmul_floor import floor
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from hone.config import RLConfig, load_config
from hone.generation.protocol import Completion, Engine, GenerationRequest
from hone.trainers.rl import RLTrainer

HERE = Path(__file__).resolve().parent
TRL_ENV = HERE.parent / ".venv-trl"
WORDS, PROMPT_LENGTH = 512, 64


class Workload(NamedTuple):
    """Shape of a step. Responses have ``longest`` tokens, or less where each token ends one with some chance.

    Attributes:
        end: chance of a token to end its response.
        end_token: the last token of TRL's responses; None if none of its tokens ends one.
        n: responses per prompt.
    """

    name: str
    longest: int
    end: float = 0.0
    end_token: int | None = None
    prompts: int = 8
    prompt_length: int = PROMPT_LENGTH
    n: int = 8

    @property
    def sequences(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts * self.n

    def lengths(self, step: int) -> list[int]:
        """Return the number of tokens of each response of a step."""
        if not self.end:
            return [self.longest] * self.sequences
        draw = random.Random(f"lengths of step {step}")
        drawn = [1 + int(math.log(1 - draw.random()) / math.log(1 - self.end)) for _ in range(self.sequences)]
        return [min(length, self.longest) for length in drawn]


WORKLOADS = (Workload("uniform", 128), Workload("long-tailed", 256, 11 / WORDS, end_token=0))


class Seconds(NamedTuple):
    """Cost of one step."""

    wall: float
    cpu: float


class Contestant(Protocol):
    """Trainer that takes one step at a time."""

    name: str

    async def step(self, lengths: list[int]) -> Seconds:
        """Take one step, with responses of these numbers of tokens."""
        ...

    def close(self) -> None:
        """Release the processes."""
        ...


def make_files(directory: Path, hidden: int = 256, layers: int = 6) -> None:
    """Write `model/` (random weights; one word per token, and an end that the model cannot sample) and `prompts.jsonl`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    model.save_pretrained(directory / "model")
    words = Tokenizer(models.WordLevel({**{str(i): i for i in range(WORDS)}, "<end>": WORDS}, "0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token=str(WORDS - 1))
    tokenizer.save_pretrained(directory / "model")
    draw = random.Random(1)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(64):
            prompt = " ".join(str(draw.randrange(WORDS - 1)) for _ in range(PROMPT_LENGTH))
            file.write(
                json.dumps({"prompt": prompt, "data_source": "even", "reward_model": {"ground_truth": ""}}) + "\n"
            )


class Hone:
    """The real `RLTrainer`, stepped one at a time."""

    def __init__(self, name: str, files: Path, workload: Workload, dtype: str, threads: int, *overrides: str) -> None:
        self.name, self.workload = name, workload
        self.phases: dict[str, list[float]] = {}
        config = load_config(
            RLConfig,
            [
                f"data.train_files={files}/prompts.jsonl",
                f"data.max_prompt_length={workload.prompt_length}",
                f"data.max_response_length={workload.longest}",
                f"data.train_batch_size={workload.prompts}",
                f"actor_rollout_ref.model.path={files}/model",
                f"actor_rollout_ref.rollout.n={workload.n}",
                "actor_rollout_ref.rollout.ignore_eos=true",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={workload.prompts}",
                f"actor_rollout_ref.actor.dtype={dtype}",
                "algorithm.adv_estimator=grpo",
                f"reward.custom_reward_function.path={HERE}/even_reward.py",
                f"trainer.default_local_dir={files}/run-{name.replace(' ', '').replace(',', '-')}-{workload.name}-{dtype}",
                f"trainer.num_threads={threads}",
                "trainer.device=cpu",
                "trainer.total_training_steps=100000",
                "trainer.test_freq=0",
                "trainer.rollout_dump_freq=0",
                *overrides,
            ],
        )
        self.trainer = RLTrainer(config)
        self._lengths: Iterator[int] = iter(())
        rollout: Any = self.trainer.runtime.group("rollout")
        engine: Engine = rollout.role.engine
        generate = engine.generate

        def as_given(requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
            return generate([self._as_given(request) for request in requests])

        engine.generate = as_given
        actor: Any = self.trainer.runtime.group("actor")
        optimizer, self._optimizer_seconds = actor.role.engine.optimizer, 0.0
        take_step = optimizer.step

        def timed_step(step: int, grad_norm: float) -> bool:
            began = time.perf_counter()
            applied = take_step(step, grad_norm)
            self._optimizer_seconds += time.perf_counter() - began
            return applied

        optimizer.step = timed_step

    async def step(self, lengths: list[int]) -> Seconds:
        """Take one step and note its phases."""
        self.trainer.step += 1
        self._lengths = iter(lengths)
        wall, cpu = time.perf_counter(), time.process_time()
        metrics = await self.trainer.train_step()
        seconds = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
        if round(metrics["response_length/mean"] * len(lengths)) != sum(lengths):
            raise RuntimeError(
                f"responses have {metrics['response_length/mean']} tokens, not {sum(lengths) / len(lengths)}"
            )
        for name, value in self._parts(metrics, seconds.wall).items():
            self.phases.setdefault(name, []).append(value)
        return seconds

    def close(self) -> None:
        """End the reward workers."""
        self.trainer.close()

    def _parts(self, metrics: dict[str, float], wall: float) -> dict[str, float]:
        """Return the seconds of the stages, with the optimizer's apart, and of what lies between them."""
        optimizer, self._optimizer_seconds = self._optimizer_seconds, 0.0
        timed = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if "timing_s/" in name}
        stages = {name: value for name, value in timed.items() if name != "step" and "update_weights_" not in name}
        rest = wall - sum(stages.values())
        return stages | {"update_actor": stages["update_actor"] - optimizer, "optimizer": optimizer, "rest": rest}

    def _as_given(self, request: GenerationRequest) -> GenerationRequest:
        # an engine in a separate process gets a few requests more, which check that it has the trainer's weights
        length = next(self._lengths, request.sampling.max_tokens)
        sampling = dataclasses.replace(request.sampling, max_tokens=length)
        return dataclasses.replace(request, sampling=sampling)


class Trl:
    """Process in TRL's environment that steps on request."""

    def __init__(self, files: Path, workload: Workload, dtype: str, threads: int, micro_batch: int) -> None:
        self.name = f"TRL, micro-batch {micro_batch}"
        settings = {
            "model": str(files / "model"),
            "prompts": str(files / "prompts.jsonl"),
            "out": str(files / "trl"),
            "dtype": dtype,
            "threads": threads,
            "sequences": workload.sequences,
            "n": workload.n,
            "micro_batch": micro_batch,
            "response_length": workload.longest,
            "end": workload.end_token,
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  open while the process runs
        self._process = subprocess.Popen(
            [TRL_ENV / "bin/python", HERE / "trl_step.py", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        self.versions = self._answer()

    async def step(self, lengths: list[int]) -> Seconds:
        """Take one step, timed in the process itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(lengths) + "\n")
        self._process.stdin.flush()
        return Seconds(**self._answer())

    def close(self) -> None:
        """End the process by the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._errors.close()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"TRL ended:\n{self._errors.read().decode()[-3000:]}")
        return json.loads(line)


def ensure_trl() -> None:
    """Make `.venv-trl`: first this torch, so that pip downloads no other build, then the latest TRL and what `learning.py` needs."""
    packages = ["trl", "reasoning-gym", f"transformers=={transformers.__version__}"]
    complete = TRL_ENV / "complete"
    if complete.exists() and complete.read_text() == " ".join(packages):
        return
    print(f"installing TRL into {TRL_ENV} (once; a few minutes) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", TRL_ENV], check=True)
    pip = [TRL_ENV / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}"], check=True)
    subprocess.run([*pip, *packages], check=True)
    complete.write_text(" ".join(packages))


async def measure(
    contestants: list[Contestant], workload: Workload, warm_up: int, repeats: int
) -> dict[str, list[Seconds]]:
    """Return the seconds of each step of each contestant, taken in turns."""
    seconds: dict[str, list[Seconds]] = {contestant.name: [] for contestant in contestants}
    for repeat in range(warm_up + repeats):
        for contestant in contestants if repeat % 2 else reversed(contestants):
            taken = await contestant.step(workload.lengths(repeat))
            if repeat >= warm_up:
                seconds[contestant.name].append(taken)
            print(
                f"  {contestant.name:22} {taken.wall:7.3f} s, {taken.cpu:7.3f} s of processor{'' if repeat >= warm_up else '   (warm-up)'}",
                file=sys.stderr,
            )
    return seconds


def machine(threads: int) -> str:
    """Return the machine and the versions on Hone's side."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {threads} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


async def compare(files: Path, workload: Workload, dtype: str, arguments: argparse.Namespace) -> None:
    """Measure and print the rows of one dtype."""
    threads, warm_up = arguments.threads, arguments.warm_up
    label = f"{workload.name:11} {dtype:8}"
    kinds = {"Hone": (), "Hone, recomputed": ("actor_rollout_ref.actor.recompute_old_log_probs=true",)}
    ours = [
        Hone(name, files, workload, dtype, threads, *kinds[name], *arguments.overrides)
        for name in list(kinds)[: 1 if arguments.no_recomputed else 2]
    ]
    theirs = [
        Trl(files, workload, dtype, threads, micro)
        for micro in arguments.trl_micro_batch or (workload.sequences, workload.sequences // 4)
    ]
    print(
        f"TRL {theirs[0].versions['trl']} (torch {theirs[0].versions['torch']}, transformers {theirs[0].versions['transformers']})"
    )
    try:
        seconds = await measure([*ours, *theirs], workload, warm_up, arguments.repeats)
    finally:
        for contestant in (*ours, *theirs):
            contestant.close()
    medians = {name: Seconds(*map(statistics.median, zip(*taken, strict=True))) for name, taken in seconds.items()}
    best = min(medians[their.name].wall for their in theirs), min(medians[their.name].cpu for their in theirs)
    for name, (wall, cpu) in medians.items():
        line = f"{label} {name:22} {wall:7.3f} s/step, {cpu:7.3f} s of processor"
        if name.startswith("Hone"):
            line += f"   {best[0] / wall:.2f}x as fast as TRL, {best[1] / cpu:.2f}x by processor time"
        print(line)
    responses = statistics.median(sum(workload.lengths(warm_up + repeat)) for repeat in range(arguments.repeats))
    least = floor(
        files / "model", workload.prompts * workload.prompt_length, round(responses), workload.sequences, dtype
    )
    print(
        f"{label} {'floor':22} {least.seconds:7.3f} s/step: {least.gigaflops:.0f} billion operations in matmuls at "
        f"{least.rate:.0f} a second; {best[0] / least.seconds:.2f}x as fast as TRL"
    )
    for hone in ours:
        walls = [taken.wall for taken in seconds[hone.name]]
        middle = walls.index(statistics.median_high(walls))  # the parts of one step add up, medians of them do not
        phases = {name: taken[warm_up + middle] for name, taken in hone.phases.items()}
        print(
            f"{dtype:9} {hone.name + ' spends':22} "
            + ", ".join(f"{k} {v:.3f} ({v / walls[middle]:.0%})" for k, v in phases.items() if v > 0.0005)
        )
    print(flush=True)


def options(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return the parser of the options that every comparison has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="timed steps of each")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--no-recomputed", action="store_true", help="leave the further pass for old log-probs out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append", help="default: both")
    parser.add_argument("--workload", choices=["uniform", "long-tailed"], action="append", help="default: both")
    parser.add_argument(
        "--trl-micro-batch", type=int, action="append", help="TRL's sequences a pass; default: all, and a quarter"
    )
    parser.add_argument("overrides", nargs="*", help="key=value for Hone's side")
    return parser


def compare_all(files: Path, workloads: Sequence[Workload], arguments: argparse.Namespace) -> None:
    """Measure and print every workload and dtype that the options choose."""
    disable_progress_bar()
    ensure_trl()
    print(machine(arguments.threads), flush=True)
    for dtype in arguments.dtype or ("float32", "bfloat16"):
        for workload in workloads:
            if workload.name in (arguments.workload or ("uniform", "long-tailed")):
                asyncio.run(compare(files, workload, dtype, arguments))


def main() -> None:
    """Parse options, make the files, compare."""
    arguments = options(__doc__, repeats=7).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_files(Path(directory))
        compare_all(Path(directory), WORKLOADS, arguments)


if __name__ == "__main__":
    main()
