"""Cases of rules about the machine and the packages installed on it."""

from __future__ import annotations

import importlib
import importlib.util

from support.preflight import safetensors_head
from support.preflight_cases.keys import ACTOR, JUDGE, MODEL, RAY, ROLLOUT
from support.preflight_cases.world import Case, World

from hone.preflight.machine import GIB, Gpu, GpuUser

UNUSED_PORT = 1  # connections are refused


def without(world: World, package: str) -> None:
    """Simulate a package that is not installed."""
    find = importlib.util.find_spec
    world.monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest)
    )


def broken_peft(world: World) -> None:
    """Simulate an installed peft that cannot be imported."""
    load = importlib.import_module

    def loads(name: str, *rest):
        if name == "peft":
            raise OSError("libcudart.so.12: undefined symbol: cudaMalloc")
        return load(name, *rest)

    world.monkeypatch.setattr(importlib, "import_module", loads)


def disk(world: World, free: float) -> None:
    """Simulate a number of free bytes on the disk."""
    from hone.preflight import environment

    world.write("model/model.safetensors", "")
    (world.model / "model.safetensors").write_bytes(safetensors_head({"w": [1000, 1000, 1000]}))
    world.monkeypatch.setattr(environment, "free_disk", lambda path: (world.folder, free))


def logged_out(world: World) -> None:
    """Simulate wandb without a login."""
    find = importlib.util.find_spec
    world.monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "wandb" else find(name, *rest)
    )
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        world.monkeypatch.delenv(name, raising=False)
    world.monkeypatch.setenv("NETRC", str(world.folder / "netrc"))


def engine(world: World) -> None:
    """Create the interpreter of an engine."""
    python = world.folder / "engines/vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()


MACHINE_CASES = [
    Case(
        "R01 environment.packages_can_be_imported",
        given=f"{MODEL}.lora_rank=8 {ACTOR}.optim.lr=1e-4",
        breaks=broken_peft,
        says=("'peft'", "libcudart.so.12"),
        advice="pip install --force-reinstall",
        repairs=lambda world: world.monkeypatch.undo(),
    ),
    Case(
        "R02 layouts.devices_present",
        "trainer.n_gpus_per_node=4",
        ("trainer.n_gpus_per_node=4 workers", "4 GPUs", "2"),
        fix="trainer.n_gpus_per_node=2",
        given=f"{RAY} trainer.device=auto",
        breaks=lambda world: world.gpus(2),
    ),
    Case(
        "R02 layouts.ranks_have_their_own_gpu",
        "ray.device_fraction=0.5",
        ("ray.device_fraction=0.5", "2 workers", "main"),
        fix="ray.device_fraction=1",
        given=f"{RAY} trainer.n_gpus_per_node=2 trainer.device=auto",
        breaks=lambda world: world.gpus(2),
    ),
    Case(
        "R02 layouts.broadcast_between_separate_gpus",
        f"{ROLLOUT}.checkpoint_engine.between_workers=broadcast",
        ("ray.device_fraction=0.5", "between_workers=broadcast", "2 workers"),
        fix=f"{ROLLOUT}.checkpoint_engine.between_workers=auto",
        given=f"{RAY} {ROLLOUT}.enable_resource_pool=true ray.device_fraction=0.5 trainer.device=auto",
        breaks=lambda world: world.gpus(2),
    ),
    Case(
        "R02 environment.cuda_present",
        "trainer.device=cuda",
        ("trainer.device=cuda",),
        fix="trainer.device=cpu",
        breaks=lambda world: world.monkeypatch.setattr("torch.cuda.is_available", lambda: False),
    ),
    Case(
        "R03 environment.threads_fit_the_cores",
        "trainer.num_threads=9",
        ("9 threads", "8 of 8 CPUs"),
        fix="trainer.num_threads=8",
        warns=True,
    ),
    Case(
        "R04 environment.limits_for_workers",
        given=RAY,
        breaks=lambda world: world.machine(open_files=1024),
        says=("1024 files",),
        advice="ulimit -n 65535",
        repairs=lambda world: world.machine(open_files=65535),
        warns=True,
    ),
    Case(
        "R05 environment.gpus_are_free",
        given="trainer.device=auto",
        breaks=lambda world: world.machine(
            gpus=(Gpu(0, "H100", 80, 41),), gpu_users=(GpuUser(0, 4711, "VLLM::EngineCore", 41),)
        ),
        says=("GPU 0: 41.0 of 80 GiB", "PID 4711 (VLLM::EngineCore)"),
        advice="kill 4711",
        repairs=lambda world: world.machine(gpus=(Gpu(0, "H100", 80, 0),)),
        warns=True,
    ),
    Case(
        "R06 environment.host_memory_suffices",
        breaks=lambda world: world.machine(memory=4 * GIB // 5),
        says=("process 832 MiB", "0.8 GiB"),
        advice=f"{ACTOR}.",
        repairs=lambda world: world.machine(memory=2 * GIB),
        warns=True,
    ),
    Case(
        "R07 environment.dtype_supported",
        f"{ACTOR}.dtype=bfloat16",
        ("Tesla P40", "bfloat16"),
        fix=f"{ACTOR}.dtype=float32",
        given="trainer.device=auto",
        breaks=lambda world: world.gpus(bfloat16=False),
    ),
    Case(
        "R07 environment.bfloat16_is_fast_here",
        f"{ACTOR}.dtype=bfloat16",
        ("6.1 times",),
        fix=f"{ACTOR}.dtype=float32",
        breaks=lambda world: world.bfloat16(cost=6.1),
        warns=True,
    ),
    Case(
        "R31 environment.device_memory_suffices",
        given="trainer.device=auto",
        breaks=lambda world: world.machine(gpus=(Gpu(0, "tiny", 0.001, 0),)),
        says=("0.0 GiB",),
        advice="smaller model",
        repairs=lambda world: world.machine(gpus=(Gpu(0, "H100", 80, 0),)),
    ),
    Case(
        "R56 environment.trackers_are_logged_in",
        "trainer.logger=[wandb]",
        ("wandb", "WANDB_API_KEY"),
        advice="WANDB_MODE=offline",
        breaks=logged_out,
        repairs=lambda world: world.monkeypatch.setenv("WANDB_MODE", "offline"),
    ),
    Case(
        "R57 environment.disk_suffices",
        "trainer.max_ckpt_to_keep=2",
        ("3 checkpoints", "11.2 GiB", "34 GiB", "24 GiB"),
        fix="trainer.max_ckpt_to_keep=1",
        given="trainer.save_freq=10",
        breaks=lambda world: disk(world, 24 * GIB),
        warns=True,
    ),
    Case(
        "R74 layouts.ray_answers",
        f"ray.address=127.0.0.1:{UNUSED_PORT}",
        (f"127.0.0.1:{UNUSED_PORT}",),
        advice="ray start --head",
        then="ray.address=null",
        given=RAY,
    ),
    Case(
        "R75 lifecycle.storage_can_be_written",
        "trainer.checkpoint_dir=TMP/own.py/below",
        ("TMP/own.py/below",),
        fix="trainer.checkpoint_dir=null",
        breaks=lambda world: world.write("own.py", ""),
    ),
    Case(
        "R76 engines.engine_is_installed",
        f"{ROLLOUT}.name=vllm",
        ("vllm",),
        advice="hone engines install vllm",
        breaks=lambda world: world.monkeypatch.setenv("HONE_ENGINES", str(world.folder / "engines")),
        repairs=engine,
        warns=True,
    ),
    Case(
        "R76 engines.engine_of_the_reward_model_is_installed",
        f"{JUDGE}.rollout.name=vllm",
        ("vllm",),
        advice="hone engines install vllm",
        given=f"{JUDGE}.enable=true {JUDGE}.kind=generative {JUDGE}.path=TMP/model",
        breaks=lambda world: world.monkeypatch.setenv("HONE_ENGINES", str(world.folder / "engines")),
        repairs=engine,
        warns=True,
    ),
]
