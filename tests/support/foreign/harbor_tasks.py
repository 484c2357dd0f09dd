"""What the package harbor reads: `python harbor_tasks.py < JSON`, with folders of tasks and with files that a verifier wrote.

Input: ``{"tasks": [FOLDER...], "rewards": [{FILE: TEXT}...], "task": FOLDER}``. Output: ``{"templates": FOLDER, "fields": {SECTION: [NAME...]},
"tasks": [{...} or an error...], "rewards": [{NAME: NUMBER} or an error...]}``; the verifier is that of ``task``.
"""

import asyncio
import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import harbor
from harbor.models.task.config import AgentConfig, EnvironmentConfig, TaskConfig, TaskOS, VerifierConfig
from harbor.models.task.task import Task
from harbor.models.trial.paths import TrialPaths
from harbor.verifier.verifier import Verifier

warnings.simplefilter("ignore")
GIVEN = json.load(sys.stdin)


def read(folder):
    task = Task(folder)
    environment, verifier = task.config.environment, task.config.verifier
    return {
        "instruction": task.instruction,
        "agent_seconds": task.config.agent.timeout_sec,
        "verifier_seconds": verifier.timeout_sec,
        "build_seconds": environment.build_timeout_sec,
        "image": environment.docker_image,
        "network": environment.network_mode.value == "public",
        "workdir": environment.workdir,
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb,
        "storage_mb": environment.storage_mb,
        "env": environment.env,
        "verifier_env": verifier.env,
    }


def rewards_of(files):
    """The verifier's own reading, where its test has written these files."""
    with tempfile.TemporaryDirectory() as name:
        paths = TrialPaths(Path(name))
        paths.verifier_dir.mkdir(parents=True, exist_ok=True)

        async def execute(command, **_):
            if "test.sh" in command and "chmod" not in command:
                for file, text in files.items():
                    (paths.verifier_dir / file).write_text(text)
            return SimpleNamespace(return_code=0, stdout="", stderr="")

        async def upload(**_):
            pass

        environment = SimpleNamespace(os=TaskOS.LINUX, exec=execute, upload_dir=upload, is_path_mounted=lambda *_: True)
        verifier = Verifier(task=Task(GIVEN["task"]), trial_paths=paths, environment=environment)
        return asyncio.run(verifier.verify()).rewards


def tried(call, value):
    try:
        return call(value)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
        return f"{type(error).__name__}: {error}"


models = {"task.toml": TaskConfig, "environment": EnvironmentConfig, "verifier": VerifierConfig, "agent": AgentConfig}
answer = {
    "templates": str(Path(str(harbor.__file__)).parent),
    "fields": {name: list(model.model_fields) for name, model in models.items()},
    "tasks": [tried(read, folder) for folder in GIVEN["tasks"]],
    "rewards": [tried(rewards_of, files) for files in GIVEN["rewards"]],
}
sys.stdout.write(json.dumps(answer))
