"""Environments of the library verifiers, for tests: run with the Python in which it is installed."""

import sys

import verifiers as vf
from datasets import Dataset


class HigherLower(vf.MultiTurnEnv):
    """A number is to be found."""

    async def env_response(self, messages, state, **kwargs):
        said, number = messages[-1].content.strip(), int(state["answer"])
        if said == str(number):
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        if said == "crash":
            raise RuntimeError("the world came to its end")
        return [{"role": "user", "content": "higher" if said.isdigit() and int(said) < number else "lower"}]


def found(completion, answer, **kwargs) -> float:
    """1 where the number was said last."""
    return float(completion[-1].content == "right" or completion[-1].content.strip() == answer)


async def turns(state) -> float:
    """Turns of the model."""
    return float(len(state["trajectory"]))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def load_environment(kind: str = "game", count: int = 8) -> vf.Environment:
    """A game, or a sum with a tool."""
    sys.stdout.write("an environment may print what it likes\n")
    if kind == "sum":
        rows = Dataset.from_list([{"question": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(count)])
        return vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[found]), max_turns=3)
    rows = Dataset.from_list([{"question": f"Find number {n}.", "answer": str(n)} for n in range(count)])
    return HigherLower(dataset=rows, rubric=vf.Rubric(funcs=[found, turns], weights=[1.0, 0.0]), max_turns=4)
