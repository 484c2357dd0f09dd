"""Rules of the whole package: cheap imports, a fast command line, optional packages at their places."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.patience import SOON

import hone

PACKAGE = Path(hone.__file__).parent
HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "hydra", "omegaconf", "numpy", "peft", "ray", "matplotlib")
ADAPTERS = {
    "ray": ("cluster/ray/",),
    "vllm": ("generation/server/",),
    "sglang": ("generation/server/",),
    "tensorrt_llm": ("generation/server/",),
    "tensorboard": ("insight/trackers/tensorboard.py",),
    "torch.utils.tensorboard": ("insight/trackers/tensorboard.py",),
    "wandb": ("insight/trackers/services.py",),
    "mlflow": ("insight/trackers/mlflow.py",),
    "opentelemetry": ("insight/trackers/otel.py",),
    "trackio": ("insight/trackers/services.py",),
    "swanlab": ("insight/trackers/services.py",),
    "math_verify": ("rewards/scorers/math_answer.py",),
    "reasoning_gym": ("rewards/scorers/gym.py", "data/tasks/reasoning_gym.py", "agents/environments/reasoning_gym.py"),
}
"""Optional packages, and the modules that may import them. A folder may do so right away, and is itself imported lazily."""


def loaded_by(code: str) -> set[str]:
    """Heavy packages in memory after running ``code`` in a fresh interpreter."""
    program = f"{code}\nimport sys\nprint(' '.join(name for name in {HEAVY} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=True)
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["hone", "hone.errors", "hone.registry", "hone.config", "hone.cli.main"])
def test_cheap_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") <= ({"omegaconf"} if module == "hone.config" else set())


def test_a_reward_worker_starts_without_torch() -> None:
    assert not loaded_by("import hone.rewards.worker, hone.rewards.scorers") & {"torch", "transformers", "pyarrow"}


def test_algorithms_load_neither_transformers_nor_configuration() -> None:
    loaded = loaded_by("import hone.algorithms")
    assert "torch" in loaded and not loaded & {"transformers", "omegaconf", "hydra", "peft", "ray"}


def test_help_loads_little() -> None:
    program = "import sys; sys.argv[1:] = ['--help']\nfrom hone.cli.main import main\ntry: main()\nfinally: print(len(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON)
    assert int(result.stdout.split()[-1]) < 450  # 326; torch alone is a thousand


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every imported module of a file, and whether it is imported at module level.

    Strings given to ``import_module`` and to the trackers' ``require`` count as imports inside a function.
    """
    nodes = [(tree, True)]
    while nodes:
        node, outside = nodes.pop()
        within = outside and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        nodes += [(child, within) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from ((alias.name, outside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", outside) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
            "import_module",
            "require",
        ):
            yield from ((a.value, False) for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def test_optional_packages_are_imported_in_their_adapters_only_and_lazily() -> None:
    seen = set()
    folders = [adapter for adapters in ADAPTERS.values() for adapter in adapters if adapter.endswith("/")]
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        for module, outside in imports(ast.parse(path.read_text(encoding="utf-8"))):
            for package, adapters in ADAPTERS.items():
                if module == package or module.startswith(f"{package}."):
                    inside = any(where.startswith(adapter) for adapter in adapters if adapter.endswith("/"))
                    assert inside or where in adapters, f"{where} imports {module}"
                    assert inside or not outside, f"{where} imports {module} when it is imported itself"
                    seen.add(package)
            for folder in folders:
                if f"{module}.".startswith(f"hone.{folder.replace('/', '.')}") and not where.startswith(folder):
                    assert not outside, f"{where} imports {module} when it is imported itself"
    assert {"ray", "tensorboard", "mlflow", "math_verify", "reasoning_gym"} <= seen, "the search finds nothing"
