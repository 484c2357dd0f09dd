"""Implementation of `hone engines serve`."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import typer
from omegaconf import OmegaConf

from hone.errors import ConfigError, ProcessError
from hone.generation.remote import EngineProcess, LaunchPlan
from hone.generation.remote.engine import TOKEN_VARIABLE


def run_server(plan: LaunchPlan, options: Sequence[str]) -> None:
    """Start an engine, print its address, and wait for a signal."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not _loopback(plan.host):
        raise ConfigError(
            f"the engine would listen on {plan.host} without a token",
            why="anyone who can reach the port could use it and replace its weights",
            fix=f"export {TOKEN_VARIABLE}=SECRET here and for the run, or --host 127.0.0.1",
        )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    process = EngineProcess(dataclasses.replace(plan, options=_parsed(options)), token)
    try:
        typer.echo(f"{plan.engine} serves {plan.model}: rollout.engine_url=tcp://{plan.host}:{process.port}")
        while not stop.wait(1.0):
            if not process.alive():
                raise ProcessError(process.exit_reason(), fix="run the same command again; the log has the reason")
    finally:
        process.kill()


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    for option in options:
        if "=" not in option:
            raise ConfigError(f"--option {option} is not NAME=VALUE", fix="--option enforce_eager=true")
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist(list(options)))
    assert isinstance(parsed, dict)
    return {str(name): value for name, value in parsed.items()}
