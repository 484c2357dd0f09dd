"""Compare many episodes with slow tools and the same with tools that take no time: `python benchmarks/agents.py`.

512 episodes of 4 turns, 32 tokens a turn and 16 tokens of tool result between turns, on the native engine with a Qwen3 of one
million random parameters. While one episode waits 200 ms for its tool, the engine samples for the others, so tools should cost
little wall time. The script also compares the prompt tokens that the engine computed with those of computing every turn's prompt
again: the engine keeps an episode's earlier turns. Wall times mean something on a machine that does nothing else (a minute or two
there). Processor time and the rows of a decode step say the same on a busy one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from hone.agents.base import AGENT_LOOPS, AgentLoop, EpisodeContext
from hone.agents.episode import Episode
from hone.agents.player import Player
from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.data.types import Sample
from hone.generation import ENGINES
from hone.generation.protocol import SamplingParams
from hone.models.routing import use_hone_attention

VOCABULARY, PROMPT, TURN, RESULT, TURNS = 512, 64, 32, 16, 4


class Words:
    """Tokenizer of meaningless tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The numbers."""
        return " ".join(map(str, ids))


class Rounds(AgentLoop):
    """Agent loop of turns of a fixed length, with a tool between them that takes ``seconds``."""

    seconds = 0.0

    async def play(self, episode: Episode) -> None:
        """Play all turns."""
        for turn in range(TURNS):
            await episode.generate(max_tokens=TURN, ignore_eos=True)
            if turn < TURNS - 1:
                if self.seconds:
                    await episode.outside(asyncio.sleep(self.seconds))
                episode.append([(7 * turn + place) % VOCABULARY for place in range(RESULT)])


def make_engine(episodes: int, concurrent: int) -> object:
    """Return the native engine over random weights; its cache holds all episodes, also those that wait for their tools."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    use_hone_attention(model)
    return ENGINES.get("native")(
        model=model,
        tokenizer=Words(),
        device=torch.device("cpu"),
        dtype="float32",
        max_num_seqs=concurrent,
        max_cache_tokens=episodes * (PROMPT + TURNS * (TURN + RESULT)),
        max_model_len=PROMPT + TURNS * (TURN + RESULT),
    )


@dataclass(frozen=True)
class Seen:
    """Cost of one run.

    Attributes:
        wall: in seconds.
        processor: seconds of processor time.
        stats: the engine's counters.
    """

    wall: float
    processor: float
    stats: dict[str, int]

    def row(self) -> str:
        """Return the printed line."""
        rows = self.stats["decode_tokens"] / self.stats["steps"]
        return (
            f"{self.wall:7.2f} s, processor {self.processor:7.2f} s, {self.stats['steps']:,} steps of {rows:.0f} rows"
        )


def play(episodes: int, concurrent: int, seconds: float) -> Seen:
    """Play all episodes."""
    Rounds.seconds = seconds
    engine = make_engine(episodes, concurrent)
    setting = EpisodeContext(Words(), MultiTurnConfig(enable=True), AgentConfig(default_agent_loop="rounds"))  # type: ignore[arg-type]
    samples = [
        Sample(str(n), [(n + place * 3) % VOCABULARY for place in range(PROMPT)], None, "bench")
        for n in range(episodes)
    ]
    sampling = SamplingParams(max_tokens=TURNS * (TURN + RESULT))
    started, busy = time.perf_counter(), time.process_time()
    player = Player(engine, setting)  # type: ignore[arg-type]
    played = asyncio.run(player.play(samples, sampling, n=1, seed_of=lambda uid, index: int(uid)))
    wall, processor = time.perf_counter() - started, time.process_time() - busy
    assert all(sum(t.response_mask) == TURNS * TURN for t in played)
    return Seen(wall, processor, dict(engine.describe().stats))  # type: ignore[attr-defined]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--concurrent", type=int, default=256, help="sequences decoded at once")
    parser.add_argument("--seconds", type=float, default=0.2, help="time of a tool call")
    parser.add_argument("--repetitions", type=int, default=2)
    arguments = parser.parse_args()
    AGENT_LOOPS.register("rounds")(Rounds)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{arguments.episodes} episodes, {TURNS} turns of {TURN} tokens, {RESULT} tokens of result")
    runs: dict[float, list[Seen]] = {0.0: [], arguments.seconds: []}
    for _ in range(arguments.repetitions):
        for seconds, seen in runs.items():
            seen.append(play(arguments.episodes, arguments.concurrent, seconds))
    without, with_tools = (min(seen, key=lambda one: one.wall) for seen in runs.values())
    uncached = arguments.episodes * sum(PROMPT + turn * (TURN + RESULT) for turn in range(TURNS))
    print(f"tools take no time    {without.row()}")
    print(f"tools take {arguments.seconds * 1000:4.0f} ms    {with_tools.row()}")
    print(f"wall {with_tools.wall / without.wall:.2f} x, processor {with_tools.processor / without.processor:.2f} x")
    print(
        f"prompt tokens computed {with_tools.stats['prefill_tokens']:,}; computing every turn's prompt again would take {uncached:,}"
    )


if __name__ == "__main__":
    main()
