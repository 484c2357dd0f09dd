"""The quickstart and an agent example in a form that trains within seconds: small data, an untrained model, two steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.launch import hone

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAKE = {
    "quickstart": ("arithmetic", "max_number=10"),
    "guess_the_number": ("environment:guess_the_number", "max_number=8", "guesses=3", "random_demonstrations=50"),
}
NAMES = sorted(MAKE)
SHORT = (
    *("data.train_batch_size=4", "data.val_max_samples=4", "data.max_response_length=24", "trainer.test_freq=-1"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"),
    *("actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2", "trainer.num_threads=1", "trainer.device=cpu"),
    *("trainer.save_freq=0", "trainer.rollout_dump_freq=1", "trainer.logger=[]", "trainer.watchdog_seconds=0"),
)


@dataclass(frozen=True)
class SmallExample:
    """A small form of an example: its folder, its file, and what its commands need in addition."""

    root: Path
    file: Path
    words: tuple[str, ...]


def small_example(name: str, root: Path) -> SmallExample:
    """Make data, tokenizer and model of the example ``name`` below ``root``."""
    for number, words in enumerate(
        [
            ("data", "make", *MAKE[name], "--out", root / "data", "--size", 24, "--val-size", 8),
            ("data", "tokenizer", "--files", root / "data/train.parquet", "--out", root / "tokenizer", "--vocab-size", 300,
             "--template", "chatml_tools"),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", root / "tokenizer", "--out", root / "model"),
        ]
    ):  # fmt: skip
        ended = hone(*words, log=root / f"make{number}.log")
        assert ended.code == 0, ended.output
    data = (f"data.train_files={root}/data/train.parquet", f"data.val_files={root}/data/val.parquet")
    words = (*SHORT, *data, f"actor_rollout_ref.model.path={root}/model")
    return SmallExample(root, EXAMPLES / name / "grpo.yaml", words)
