"""One episode of mini-swe-agent: the row's task in, the reward out.

The program runs with the Python in whose environment the harness is installed, and knows of Hone only the endpoint in its
environment variables. The harness runs its commands by bubblewrap in a folder of the episode, without network and without the
program's environment variables. The reward is 1 if the task's file has the right word at the end.
"""

# pyright: reportMissingImports=false
import json
import os
import sys

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
}

from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.extra.bubblewrap import (  # noqa: E402
    BubblewrapEnvironment,
    BubblewrapEnvironmentConfig,
)
from minisweagent.models.openrouter_model import OpenRouterAPIError, OpenRouterModel  # noqa: E402

CONFINED = ["--clearenv", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]


class Policy(OpenRouterModel):
    """The harness's client for chats over HTTP, at the endpoint of the run: it starts ten times as fast as the one on litellm."""

    def __init__(self) -> None:
        super().__init__(model_name=os.environ["OPENAI_MODEL"], model_kwargs={"usage": None})
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]


def main() -> None:
    """Read the row, run the harness, print the result."""
    row = json.loads(sys.stdin.readline())
    system, task = (message["content"] for message in row["messages"])
    world = BubblewrapEnvironment(wrapper_args=CONFINED + BubblewrapEnvironmentConfig().wrapper_args, timeout=10)
    agent = DefaultAgent(Policy(), world, system_template=system, instance_template="{{task}}", step_limit=3)
    try:
        status = agent.run(task)["exit_status"]
    except OpenRouterAPIError as error:
        if "context_length_exceeded" not in str(error):
            raise
        status = "LimitsExceeded"  # the episode's tokens are used up
    file = world.working_dir / row["extra_info"]["file"]
    right = file.is_file() and not file.is_symlink() and file.read_text().strip() == row["ground_truth"]
    facts = {"calls": agent.n_calls, "submitted": float(status == "Submitted")}
    print(json.dumps({"reward": float(right), "facts": facts}))


if __name__ == "__main__":
    main()
