"""Cases of rules that look at the machine, and at what is installed on it."""

from __future__ import annotations

import importlib
import importlib.util

from support.preflight import safetensors_head
from support.preflight_cases.keys import ACTOR, MODEL, RAY, ROLLOUT
from support.preflight_cases.world import Case, World

from hone.preflight.machine import GIB, Gpu, GpuUser

UNUSED_PORT = 1  # of a service of the eighties; connections are refused


def without(world: World, package: str) -> None:
    """Let one package be not installed."""
    find = importlib.util.find_spec
    world.monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest)
    )


def broken_peft(world: World) -> None:
    """Let peft be installed and not loadable."""
    load = importlib.import_module

    def loads(name: str, *rest):
        if name == "peft":
            raise OSError("libcudart.so.12: undefined symbol: cudaMalloc")
        return load(name, *rest)

    world.monkeypatch.setattr(importlib, "import_module", loads)


def disk(world: World, free: float) -> None:
    """Let so many bytes be free."""
    from hone.preflight import environment

    world.write("model/model.safetensors", "")
    (world.model / "model.safetensors").write_bytes(safetensors_head({"w": [1000, 1000, 1000]}))
    world.monkeypatch.setattr(environment, "free_disk", lambda path: (world.folder, free))


def logged_out(world: World) -> None:
    """Let wandb be installed, and nobody be logged in."""
    find = importlib.util.find_spec
    world.monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "wandb" else find(name, *rest)
    )
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        world.monkeypatch.delenv(name, raising=False)
    world.monkeypatch.setenv("NETRC", str(world.folder / "netrc"))


def engine(world: World) -> None:
    """Put the interpreter of an engine in its place."""
    python = world.folder / "engines/vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()


MACHINE_CASES = [
    Case(
        "R01 environment.packages_can_be_imported",
        given=f"{MODEL}.lora_rank=8 {ACTOR}.optim.lr=1e-4",
        spoil=broken_peft,
        says=("'peft' cannot be imported: libcudart.so.12",),
        advice="pip install --force-reinstall hone-rl",
        mend=lambda world: world.monkeypatch.undo(),
    ),
    Case(
        "R02 cluster.devices_present",
        "trainer.n_gpus_per_node=4",
        ("trainer.n_gpus_per_node=4 workers take 4 GPUs, this machine has 2",),
        fix="trainer.n_gpus_per_node=2",
        given=f"{RAY} trainer.device=auto",
        spoil=lambda world: world.gpus(2),
    ),
    Case(
        "R02 device.cuda_present",
        "trainer.device=cuda",
        ("trainer.device=cuda", "no CUDA GPU"),
        fix="trainer.device=cpu",
        spoil=lambda world: world.monkeypatch.setattr("torch.cuda.is_available", lambda: False),
    ),
    Case(
        "R03 environment.threads_fit_the_cores",
        "trainer.num_threads=9",
        ("9 threads", "may use 8 of 8 CPUs"),
        fix="trainer.num_threads=8",
        warns=True,
    ),
    Case(
        "R04 environment.limits_for_workers",
        given=RAY,
        spoil=lambda world: world.machine(open_files=1024),
        says=("may open 1024 files",),
        advice="ulimit -n 65535",
        mend=lambda world: world.machine(open_files=65535),
        warns=True,
    ),
    Case(
        "R05 environment.gpus_are_free",
        given="trainer.device=auto",
        spoil=lambda world: world.machine(
            gpus=(Gpu(0, "H100", 80, 41),), gpu_users=(GpuUser(0, 4711, "VLLM::EngineCore", 41),)
        ),
        says=("GPU 0: 41.0 of 80 GiB", "PID 4711 (VLLM::EngineCore)"),
        advice="kill 4711",
        mend=lambda world: world.machine(gpus=(Gpu(0, "H100", 80, 0),)),
        warns=True,
    ),
    Case(
        "R06 environment.host_memory_suffices",
        spoil=lambda world: world.machine(memory=4 * GIB // 5),
        says=("process 832 MiB", "memory of this machine 0.8 GiB"),
        advice=f"{ACTOR}.",
        mend=lambda world: world.machine(memory=2 * GIB),
        warns=True,
    ),
    Case(
        "R07 device.dtype_supported",
        f"{ACTOR}.dtype=bfloat16",
        ("Tesla P40 does not compute in bfloat16",),
        fix=f"{ACTOR}.dtype=float32",
        given="trainer.device=auto",
        spoil=lambda world: world.gpus(bfloat16=False),
    ),
    Case(
        "R07 device.bfloat16_is_no_slower",
        f"{ACTOR}.dtype=bfloat16",
        ("a product in bfloat16 takes 6.1 times as long as in float32",),
        fix=f"{ACTOR}.dtype=float32",
        spoil=lambda world: world.bfloat16(cost=6.1),
        warns=True,
    ),
    Case(
        "R31 environment.device_memory_suffices",
        given="trainer.device=auto",
        spoil=lambda world: world.machine(gpus=(Gpu(0, "tiny", 0.001, 0),)),
        says=("memory of the GPU 0.0 GiB",),
        advice="it also takes a smaller model or more devices",
        mend=lambda world: world.machine(gpus=(Gpu(0, "H100", 80, 0),)),
    ),
    Case(
        "R56 environment.trackers_are_logged_in",
        "trainer.logger=[wandb]",
        ("wandb is not logged in", "no WANDB_API_KEY"),
        advice="WANDB_MODE=offline",
        spoil=logged_out,
        mend=lambda world: world.monkeypatch.setenv("WANDB_MODE", "offline"),
    ),
    Case(
        "R57 environment.disk_suffices",
        "trainer.max_ckpt_to_keep=2",
        ("3 checkpoints of about 11.2 GiB need 34 GiB", "24 GiB free"),
        fix="trainer.max_ckpt_to_keep=1",
        given="trainer.save_freq=10",
        spoil=lambda world: disk(world, 24 * GIB),
        warns=True,
    ),
    Case(
        "R74 cluster.ray_answers",
        f"ray.address=127.0.0.1:{UNUSED_PORT}",
        (f"no Ray cluster answers at 127.0.0.1:{UNUSED_PORT}",),
        advice="ray start --head",
        then="ray.address=null",
        given=RAY,
    ),
    Case(
        "R75 checkpoints.storage_can_be_written",
        "trainer.checkpoint_dir=TMP/own.py/below",
        ("TMP/own.py/below cannot be written", "own.py is not a directory"),
        fix="trainer.checkpoint_dir=null",
        spoil=lambda world: world.write("own.py", ""),
    ),
    Case(
        "R76 engines.engine_is_installed",
        f"{ROLLOUT}.name=vllm",
        ("vllm",),
        advice="hone engines install vllm",
        spoil=lambda world: world.monkeypatch.setenv("HONE_ENGINES", str(world.folder / "engines")),
        mend=engine,
        warns=True,
    ),
]
