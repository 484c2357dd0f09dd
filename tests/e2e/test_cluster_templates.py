"""The templates of `examples/cluster` do what they say: scripts run here, manifests are checked field by field, and the `hone`
command in each of them is taken out and checked by `hone` itself.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from support.forked_python import Forks
from support.launch import hone
from support.patience import LONG, SOON
from support.services import free_port

long = pytest.mark.long("hone/cluster/ray", "hone/cluster/torchrun", "examples/cluster")

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "examples" / "cluster"
BIN = Path(sys.executable).parent
SMALL = (
    *("data.train_batch_size=4", "data.max_prompt_length=96", "data.max_response_length=8", "data.val_max_samples=4"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.test_freq=0"),
    *("actor_rollout_ref.actor.dtype=float32", "actor_rollout_ref.rollout.dtype=float32"),
    *(
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=2",
    ),
)
"""What makes of a run on sixteen GPUs one that two cores can do."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.parquet, val.parquet and an untrained model in model/."""
    folder = tmp_path_factory.mktemp("task")
    for number, words in enumerate(
        (
            f"data make digit_sequence --out {folder} --size 16 --val-size 4",
            f"data tokenizer --files {folder}/train.parquet --out {folder}/words --vocab-size 300",
            f"init --arch qwen3 --size 200k --tokenizer {folder}/words --out {folder}/model",
        )
    ):
        ended = hone(*words.split(), log=folder / f"{number}.log")
        assert ended.code == 0, ended.output
    return folder


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def surroundings(task: Path, port: int, forks: Forks, tmp_path: Path) -> dict[str, str]:
    """The environment that the scripts want, small nodes, and a home of its own for Ray's token."""
    (tmp_path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "SKYPILOT_"))}
    return {
        **kept,
        "PATH": os.pathsep.join(map(str, (tmp_path / "bin", forks.bin, BIN, os.environ["PATH"]))),
        "HOME": str(tmp_path / "home"),
        "MODEL": str(task / "model"),
        "DATA": str(task),
        "RAY_PORT": str(port),
        "RAY_OPTIONS": "--num-cpus=1 --object-store-memory=100000000",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # workers of a machine that does other things besides would starve
        "RAY_enable_worker_prestart": "0",  # workers that nobody asked for
        "RAY_prestart_worker_first_driver": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "OMP_NUM_THREADS": "1",
        "NODE_PATIENCE": "300",
    }


@pytest.fixture
def start(surroundings: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    """Start processes from the repository's root; whatever is left of them ends with the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(*command: str, **environment: str) -> subprocess.Popen[str]:
        log = (tmp_path / f"process{len(begun)}.log").open("w")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**surroundings, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        process.log = log.name  # type: ignore[attr-defined]
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process in begun:
        try:
            process.wait(SOON)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(process: Any, timeout: float = LONG) -> tuple[int, str]:
    """Exit code and output."""
    code = process.wait(timeout)
    return code, Path(process.log).read_text(errors="replace")


# ---------------------------------------------------------------------------------------------------------- as they read


@pytest.mark.parametrize("script", [p.name for p in sorted(TEMPLATES.glob("*.s*")) if p.suffix in (".sh", ".sbatch")])
def test_scripts_are_clean(script: str) -> None:
    done = subprocess.run([BIN / "shellcheck", TEMPLATES / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_template_is_tested_and_listed() -> None:
    files = {path.name for path in TEMPLATES.iterdir()}
    assert files - {"__pycache__"} == {
        *("README.md", "grpo.yaml", "node.sh", "slurm.sbatch", "submit.sh", "kuberay.yaml", "skypilot.yaml"),
        *("launch_sagemaker.py", "sagemaker_entry.sh"),
    }
    readme = (TEMPLATES / "README.md").read_text()
    assert all(f"[`{name}`]({name})" in readme for name in files - {"README.md", "__pycache__"})


def known(content: dict[str, Any], fields: str, where: str) -> None:
    """No field of a manifest is one that its reader would refuse or, worse, pass over."""
    unknown = set(content) - set(fields.split())
    assert not unknown, f"{where}: {sorted(unknown)}"


def test_the_kuberay_manifest_has_only_fields_that_the_operator_reads() -> None:
    (job,) = yaml.safe_load_all((TEMPLATES / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and re.fullmatch(
        "[a-z0-9-]+", job["metadata"]["name"]
    )
    known(
        job["spec"],
        "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus entrypointNumGpus "
        "entrypointResources jobId managedBy metadata preRunningDeadlineSeconds rayClusterSpec runtimeEnvYAML "
        "shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend ttlSecondsAfterFinished",
        "spec",
    )
    cluster = job["spec"]["rayClusterSpec"]
    known(
        cluster,
        "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec "
        "headServiceAnnotations managedBy networkPolicy rayVersion suspend tlsOptions upgradeStrategy workerGroupSpecs",
        "rayClusterSpec",
    )
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    shared = "labels rayStartParams resources template"
    known(head, f"{shared} enableIngress headService serviceType", "headGroupSpec")
    known(
        workers,
        f"{shared} groupName idleTimeoutSeconds maxReplicas minReplicas numOfHosts replicas scaleStrategy suspend",
        "workerGroupSpecs",
    )
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "they become words"
        spec = group["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            known(container, "name image resources volumeMounts env", "container")
            assert container["resources"]["limits"] == container["resources"]["requests"]
    words = shlex.split(job["spec"]["entrypoint"])
    assert f"trainer.nnodes={workers['replicas']}" in words
    (container,) = workers["template"]["spec"]["containers"]
    assert f"trainer.n_gpus_per_node={container['resources']['limits']['nvidia.com/gpu']}" in words


def test_the_skypilot_task_has_only_fields_that_sky_reads() -> None:
    task = yaml.safe_load((TEMPLATES / "skypilot.yaml").read_text())
    known(
        task,
        "name workdir num_nodes resources envs secrets volumes file_mounts setup run config service pool inputs outputs",
        "task",
    )
    known(
        task["resources"],
        "accelerators accelerator_args any_of autostop cpus disk_size disk_tier image_id infra instance_type job_recovery "
        "labels memory network_tier ordered ports priority use_spot",
        "resources",
    )
    (bucket,) = task["file_mounts"].values()
    known(bucket, "name source store persistent mode config", "file_mounts")
    assert bucket["mode"] in ("MOUNT", "COPY", "MOUNT_CACHED")
    for part in ("setup", "run"):
        done = subprocess.run(
            [BIN / "shellcheck", "--shell=bash", "--exclude=SC1090", "-"],
            input=f"set -e\n{task[part]}",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


class _Recorded:
    """Stands in for a class of SageMaker's package: keeps what it was made with."""

    made: list[_Recorded] = []

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.trained = False
        self.made.append(self)

    def train(self) -> None:
        self.trained = True


def test_the_sagemaker_launcher_starts_the_entry_script(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CheckpointConfig", "Compute", "InputData", "OutputDataConfig", "SourceCode")
    configs = SimpleNamespace(**dict.fromkeys(names, _Recorded))
    modules = {"sagemaker": {}, "sagemaker.core": {}, "sagemaker.core.training": {"configs": configs}}
    for name, content in {**modules, "sagemaker.train": {"ModelTrainer": _Recorded}}.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    words = "--image i --role r --bucket s3://b/ --instances 3 trainer.seed=2 data.train_batch_size=64"
    monkeypatch.setattr(sys, "argv", ["launch_sagemaker.py", *words.split()])
    monkeypatch.setattr(_Recorded, "made", [])
    runpy.run_path(str(TEMPLATES / "launch_sagemaker.py"), run_name="__main__")
    (job,) = [one for one in _Recorded.made if one.trained]
    fields = job.fields
    source = fields["source_code"].fields
    assert (Path(source["source_dir"]) / source["entry_script"]).is_file()
    assert fields["compute"].fields["instance_count"] == 3
    assert [one.fields["channel_name"] for one in fields["input_data_config"]] == ["model", "data"]
    assert [one.fields["data_source"] for one in fields["input_data_config"]] == ["s3://b/model", "s3://b/data"]
    assert fields["hyperparameters"] == {"trainer.seed": "2", "data.train_batch_size": "64"}
    assert len(fields["environment"]["RAY_AUTH_TOKEN"]) == 64
    assert fields["checkpoint_config"].fields == {"s3_uri": "s3://b/runs/hone-grpo/checkpoints"}


# ------------------------------------------------------------------------------------------------- the commands in them


def command_of(template: str) -> str:
    """The `hone` command of a template, as its shell gets it."""
    text = (TEMPLATES / template).read_text()
    if template == "kuberay.yaml":
        return yaml.safe_load(text)["spec"]["entrypoint"]
    if template == "skypilot.yaml":
        text = yaml.safe_load(text)["run"]
    text = text.replace("\\\n", " ")
    return text[text.index("hone train ") :].splitlines()[0]


@long
@pytest.mark.alone
@pytest.mark.parametrize(
    "template", ["slurm.sbatch", "submit.sh", "kuberay.yaml", "skypilot.yaml", "sagemaker_entry.sh"]
)
def test_hone_takes_the_command(template: str, task: Path, tmp_path: Path) -> None:
    """All keys exist, and the run passes every check before it would begin."""
    values = {
        "MODEL": str(task / "model"),
        "DATA": str(task),
        "RUN": str(tmp_path / "run"),
        "@": "",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE:-8": "8",
        "SLURM_JOB_ID": "7",
        "SM_CHANNEL_MODEL": str(task / "model"),
        "SM_CHANNEL_DATA": str(task),
        "#hosts[@]": "2",
        "SM_NUM_GPUS": "8",
        "keys[@]": "",
        "run": str(tmp_path / "run"),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    written = command_of(template)
    for name, value in values.items():
        written = written.replace(f"${{{name}}}", value).replace(f"${name}", value)
    written = written.replace("/volume/models/my-model", values["MODEL"]).replace("/volume/data/my-task", str(task))
    written = written.replace("/volume/config", str(TEMPLATES)).replace("--config-path .", f"--config-path {TEMPLATES}")
    assert "$" not in written, f"not filled in: {written}"
    small = [word for word in SMALL if not word.startswith("data.train_batch_size")]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        words = [word for word in shlex.split(written)[1:] if word]
        changed = (f"ray.address=127.0.0.1:{server.getsockname()[1]}", "data.train_batch_size=16", *small)
        done = hone(
            *words,
            "--dry-run",
            *changed,
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            log=tmp_path / "log",
            cwd=ROOT,
        )
    assert done.code == 0, done.output
    assert "plan:" in done.output


# ----------------------------------------------------------------------------------------------------------- as they run

FAKE_SRUN = """#!/usr/bin/env bash
# What srun does for a script of one task a node, with all nodes on this machine.
set -u
while [[ "$1" == -* ]]; do shift; done
tasks=()
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
  tasks+=($!)
done
trap 'kill "${tasks[@]}" 2>/dev/null' TERM
worst=0
for task in "${tasks[@]}"; do wait "$task" || { code=$?; (( code > worst )) && worst=$code; }; done
exit "$worst"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] || exit 1
IFS=, read -ra names <<<"$3"
printf '%s\\n' "${names[@]}"
"""


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@long
@pytest.mark.alone
def test_the_slurm_script_trains_on_two_nodes(start: Any, forked_ray_workers, tmp_path: Path) -> None:
    """The whole script; only Slurm's own two commands are stand-ins, which run the tasks of both nodes here."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = start(
        *("bash", str(TEMPLATES / "slurm.sbatch"), *SMALL, f"trainer.default_local_dir={tmp_path / 'run'}"),
        SLURM_NNODES="2",
        SLURM_JOB_NODELIST="127.0.0.1,127.0.0.1",
        SLURM_GPUS_ON_NODE="1",
        SLURM_JOB_ID="7",
        **forked_ray_workers,
    )
    code, output = ended(job)
    assert code == 0, output
    rows = metrics(tmp_path / "run")
    assert [row["training/global_step"] for row in rows] == [1, 2]
    for row in rows:  # two data-parallel ranks: their shares are as even as those in order, or more
        assert 1 <= row["global_seqlen/balanced_imbalance"] <= row["global_seqlen/imbalance"]
        assert row["global_seqlen/balanced_max"] <= row["perf/total_num_tokens"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


@long
@pytest.mark.alone
def test_the_sagemaker_script_trains_on_two_instances_and_leaves_a_model(
    start: Any, forked_ray_workers, task: Path, tmp_path: Path
) -> None:
    """Both instances of a job here, with the variables that SageMaker's toolkit sets and the keys as hyperparameters."""
    keys = dict(key.split("=", 1) for key in SMALL)
    instances = [
        start(
            *("bash", str(TEMPLATES / "sagemaker_entry.sh")),
            SM_HOSTS='["127.0.0.1", "localhost"]',
            SM_CURRENT_HOST=host,
            SM_NUM_GPUS="1",
            SM_HPS=json.dumps(keys),
            SM_CHANNEL_MODEL=str(task / "model"),
            SM_CHANNEL_DATA=str(task),
            SM_MODEL_DIR=str(tmp_path / "model"),
            HONE_CHECKPOINTS=str(tmp_path),
            **forked_ray_workers,
        )
        for host in ("localhost", "127.0.0.1")
    ]
    for instance in reversed(instances):
        code, output = ended(instance)
        assert code == 0, output
    assert [row["training/global_step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert list((tmp_path / "model").glob("*.safetensors"))


@long
@pytest.mark.alone
def test_a_node_hands_on_how_the_command_ended(start: Any) -> None:
    script = "import ray, sys; ray.init(sys.argv[1].split('=')[1]); sys.exit(40 + sum(n['Alive'] for n in ray.nodes()))"
    other = start("bash", str(TEMPLATES / "node.sh"), "1", "2", "127.0.0.1", "false")
    head = start("bash", str(TEMPLATES / "node.sh"), "0", "2", "127.0.0.1", "python", "-c", script)
    code, output = ended(head)
    assert code == 42, output  # the command saw both nodes
    assert ended(other)[0] == 0, "the others leave without complaint when the head is done"


@long
@pytest.mark.alone
def test_a_node_does_not_wait_for_ever(start: Any) -> None:
    code, output = ended(start("bash", str(TEMPLATES / "node.sh"), "1", "2", "127.0.0.1", "false", NODE_PATIENCE="2"))
    assert code == 1 and "no head at 127.0.0.1:" in output
    code, output = ended(start("bash", str(TEMPLATES / "node.sh"), "0", "3", "127.0.0.1", "false", NODE_PATIENCE="2"))
    assert code == 1 and "1 of 3 nodes came within 2 s" in output


@long
@pytest.mark.alone
def test_a_job_is_handed_to_a_cluster(start: Any, port: int, tmp_path: Path) -> None:
    """A real job server; the job checks the configuration there, in the way a run begins."""
    server, agent = (
        free_port(),
        free_port(),
    )  # the agent's is fixed otherwise, and taken while another test has a cluster
    start(
        *("ray", "start", "--head", f"--port={port}", "--num-cpus=1", "--object-store-memory=100000000", "--block"),
        *("--include-dashboard=true", f"--dashboard-port={server}", f"--dashboard-agent-listen-port={agent}"),
        "--disable-usage-stats",
        RAY_AUTH_MODE="token",
    )
    answers = f"until (exec 3<>/dev/tcp/127.0.0.1/{server}) 2>/dev/null; do sleep 0.5; done"
    assert ended(start("timeout", "300", "bash", "-c", answers))[0] == 0

    def submitted() -> tuple[int, str]:
        return ended(
            start(
                *("bash", str(TEMPLATES / "submit.sh"), "--dry-run"),
                *("trainer.nnodes=1", "trainer.n_gpus_per_node=1", *SMALL),
                RAY_API_SERVER_ADDRESS=f"http://127.0.0.1:{server}",
                SUBMISSION_ID="grpo-7",
            )
        )

    code, output = submitted()
    tries = 1
    while code and "No available agent" in output and tries < 10:  # the server answers before its agent does
        time.sleep(3)
        code, output = submitted()
        tries += 1
    assert code == 0, output
    assert "plan: 4 prompts x 2 = 8 sequences" in output and "grpo-7" in output
