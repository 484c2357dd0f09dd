"""Store the verdicts of verl and math-verify on the constructed answers of the tests.

Run by a Python that has math-verify, with a folder of verl's source first on PYTHONPATH:

    PYTHONPATH=VERL:tests/support PYTHON scripts/answer_verdicts.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any

from answer_corpus import VERDICTS, Case, corpus, digest  # pyright: ignore[reportMissingImports]

LINE = 100


def _verl(name: str) -> Any:
    """Return a module of verl's scorers, without importing verl."""
    folder = next(Path(place) for place in sys.path if (Path(place) / "verl/utils/reward_score").is_dir())
    spec = importlib.util.spec_from_file_location(name, folder / f"verl/utils/reward_score/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Write the verdicts of all cases."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    modules = {"gsm8k": _verl("gsm8k"), "math_dapo": _verl("math_dapo"), "math": _verl("math_reward")}

    def by_verl(case: Case) -> str:
        result = modules[case.scorer].compute_score(case.text, case.truth)
        score = result["score"] if isinstance(result, dict) else result
        return "1" if score > 0 else "0"

    def by_math_verify(case: Case) -> str:
        if case.scorer != "math":
            return "-"
        truth = parse(f"\\boxed{{{case.truth}}}", parsing_timeout=0)
        return str(int(verify(truth, parse(case.text, parsing_timeout=0), timeout_seconds=0)))

    cases = list(corpus())
    verdicts = {"verl": "".join(map(by_verl, cases)), "math-verify": "".join(map(by_math_verify, cases))}
    stored = {
        "corpus": digest(),
        "versions": {"verl": "0.9.1", "math-verify": importlib.metadata.version("math-verify")},
        "verdicts": {name: [text[i : i + LINE] for i in range(0, len(text), LINE)] for name, text in verdicts.items()},
    }
    VERDICTS.write_text(json.dumps(stored, indent=1) + "\n")
    print(len(cases), {name: text.count("1") for name, text in verdicts.items()})


if __name__ == "__main__":
    main()
