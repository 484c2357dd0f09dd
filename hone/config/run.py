"""The block ``trainer``: the life cycle of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.config.asynchronous import AsyncConfig
from hone.config.fields import block, choice, frequency, number


@dataclass
class RunConfig:
    """The life cycle of a run, shared by all trainers."""

    project_name: str = "hone"
    """Groups runs in trackers and in the default directory."""
    experiment_name: str = "default"
    """Names the run."""
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    """Run directory: config, metrics, rollouts, checkpoints."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Trackers: console, tensorboard, wandb, mlflow, trackio, swanlab, otel (a trace per episode by OpenTelemetry; no metrics).
    metrics.jsonl is always written."""
    total_epochs: int = number(1, low=1)
    """Passes over the training data, when total_training_steps is null."""
    total_training_steps: int | None = number(None, low=1)
    """Steps of training; null means total_epochs over the data."""
    seed: int = number(1, low=0)
    """Seed of everything random in the run."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    """Device; auto uses a CUDA GPU when there is one."""
    num_threads: int | None = number(None, low=1)
    """CPU threads of torch; null means OMP_NUM_THREADS, or all cores that this process may use."""
    save_freq: int | str = frequency(-1)
    """Steps between checkpoints; one is also saved at the end. -1 saves only at the end, 0 never, after_each_epoch after each pass
    over the data."""
    max_ckpt_to_keep: int | None = number(3, low=1)
    """Keep the newest k checkpoints (and the best, see best_ckpt_metric); null keeps all."""
    best_ckpt_metric: str | None = None
    """Metric that selects the best checkpoint, for example val-core/gsm8k/acc/mean@1. The best one is also kept, and named in
    checkpoints/best.json. Only checkpoints of steps with this metric count. null keeps only the newest."""
    best_ckpt_mode: str = choice("max", "max", "min")
    """Whether the highest or the lowest value of best_ckpt_metric is best."""
    checkpoint_dir: str | None = None
    """Directory of checkpoints: a path, or a URL of an object store (s3://bucket/run, gs://...; extra [remote]); null means
    <default_local_dir>/checkpoints."""
    async_save: bool = True
    """Write checkpoints while training continues, from a copy in host memory (as large as the weights and the optimizer's state
    of a process); false waits until they are written."""
    test_freq: int | str = frequency(-1)
    """Steps between validations; one also runs at the end. -1 validates only at the end, 0 never, after_each_epoch after each pass
    over the data."""
    val_before_train: bool = True
    """Validate before the first step."""
    resume_mode: str = choice("auto", "auto", "disable", "resume_path")
    """auto continues from the newest checkpoint of the run directory; disable refuses a directory that has one;
    resume_path uses resume_from_path."""
    resume_from_path: str | None = None
    """Checkpoint (.../checkpoints/step_N or .../checkpoints/best, a path or a URL), with resume_mode=resume_path."""
    watchdog_seconds: float = number(600.0, low=0)
    """Seconds without progress in any process after which the run counts as hung. Stacks and a report of which process waits for
    which are written to hangs/ in the run directory, and the run ends with exit code 3, or restarts its workers. 0 switches it
    off. Keep it below the timeout of collectives."""
    timeline: bool = True
    """Record what each process did and waited for, and when, in timeline/ of the run directory (at most 16 MB per process), for
    `hone profile RUN --trace FILE`."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps whose updates torch.profiler records in every training process: a trace, the slowest operators, and on CUDA a snapshot
    of memory, in profile/ of the run directory. Such a step takes longer and computes the same numbers. With
    async_training.stream: the first part of the update."""
    runtime: str = choice("local", "local", "ray", "torchrun")
    """Processes of the roles: local is this process; ray is worker processes, on this machine or a cluster (see the block ray);
    torchrun is the ranks that torchrun, or a scheduler with its variables, has started. All give the same numbers."""
    nnodes: int = number(1, low=1)
    """Nodes of the pool of the trained model and of every role without a separate pool."""
    n_gpus_per_node: int = number(1, low=1)
    """Workers per node, one per GPU; on CPU: processes."""
    balance_batch: bool = True
    """Distribute the rows of each mini-batch over data-parallel ranks by their work; false distributes them in order."""
    max_restarts: int = number(0, low=0)
    """With runtime=ray: how often the run may restart lost or hung workers and resume from its last checkpoint (or its start)
    before it ends with exit code 3."""
    deterministic: bool = False
    """Compute gradients on a GPU so that a second run has the same bits: attention's backward pass adds in a fixed order, which
    takes longer. An operation that has no such way ends the run with its name. CPUs repeat bit for bit anyway."""


@dataclass
class TrainerConfig(RunConfig):
    """The life cycle of an RL run."""

    runtime: str = choice("local", "local", "ray")
    """Processes of the roles: local is this process; ray is worker processes, on this machine or a cluster (see the block ray).
    Both give the same numbers."""

    async_training: AsyncConfig = block(AsyncConfig)
    """Asynchronous training. On the command line also trainer.async."""
    critic_warmup: int = number(0, low=0)
    """Steps that train the critic alone before the policy moves."""
    rollout_dump_freq: int = number(10, low=0)
    """Steps between dumps of all samples to rollouts/ (see archive.md); the first step is also dumped. 0 dumps no step for this key."""
    rollout_dump_steps: list[int] = field(default_factory=list)
    """More steps whose samples are all dumped."""
    rollout_dump_share: float = number(0.05, low=0, high=1)
    """Share of the prompts whose samples are dumped at every step, so that a prompt can be followed through training. A hash of the
    row chooses them, at least one of the first 1000 rows; runs on the same data follow the same prompts. 0 follows none."""
    save_steps_for_replay: list[int] = field(default_factory=list)
    """Steps that `hone replay` and `hone what-if` can compute again: all their samples are dumped, and the checkpoint before each is kept."""
    save_microbatch_steps: list[int] = field(default_factory=list)
    """Steps whose first micro-batch is saved to microbatches/, for `hone oracle`: weights (4 bytes per parameter), tokens, and
    what the update computed from them. Needs one process per model."""
    log_rollout_samples: int | None = number(8, low=0)
    """Sequences of an archived step (see rollout_dump_freq), and of a validation, that trackers show as a table or traces. null shows all that the
    archive has, 0 none."""
    log_val_generations: int = number(8, low=0)
    """Samples written to validation/ per validation."""
