"""Training runs that `hone twins` and `hone sweep` would start, as folders with chosen scores."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from hone.cli.trials import Trial
from hone.config import RLConfig, load_config, to_yaml
from hone.insight.run_directory import RunDirectory

PROMPTS = 32


class FakeTrials:
    """Stands in for ``run_trial``: writes a run whose validation scores are a function of configuration and prompt.

    Args:
        score: function of the configuration and a random generator; the score of a prompt without its own noise.

    Attributes:
        started: run directories in the order in which they were started.
    """

    def __init__(self, score: Callable[[RLConfig, random.Random], float]) -> None:
        self.score, self.started = score, []

    def __call__(self, trial: Trial) -> None:
        words = list(trial.words)
        assert words.pop(0) == "train"
        options = {}
        while words and words[0].startswith("--"):
            name = words.pop(0)[2:].replace("-", "_")
            options[name] = words.pop(0)
        config = load_config(RLConfig, words, **options)
        assert Path(config.trainer.default_local_dir) == trial.directory
        self.started.append(trial.directory)
        seed = config.trainer.seed
        run = RunDirectory(trial.directory)
        run.start(seed=seed, config_yaml=to_yaml(config), command=["hone", *trial.words])
        score = self.score(config, random.Random(f"{seed} {trial.directory.name}"))
        common = random.Random(seed)
        rest = {"index": 0, "part": 0, "error": None, "data_source": "sums", "extra": {}, "terms": {}, "text": ""}
        records = [rest | {"uid": f"val:{n}", "score": score + common.uniform(-0.3, 0.3)} for n in range(PROMPTS)]
        run.log_metrics(1, {"critic/rewards/mean": score / 2})
        run.log_metrics(2, {"critic/rewards/mean": score, "val-core/sums/reward/mean@1": score})
        run.write_validation(2, records)
        run.update_status("finished", "all 2 steps done", last_step=2)
        run.close()
