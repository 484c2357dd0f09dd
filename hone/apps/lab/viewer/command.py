"""Start of the viewer (`hone view`)."""

from __future__ import annotations

import logging
import secrets
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.apps.lab.compare import find_run, run_names
from hone.errors import ConfigError, HoneError
from hone.extras import install_command

log = logging.getLogger("hone.view")


@dataclass(frozen=True)
class ViewRequest:
    """Request of `hone view`; the attributes are its options."""

    runs: Sequence[str] = ()
    root: Path = Path("runs")
    host: str = "127.0.0.1"
    port: int = 8750
    token: str | None = None
    open_browser: bool = True
    export: Path | None = None
    query: str = ""
    rewards: Sequence[str] = ()


def chosen_runs(names: Sequence[str], root: Path) -> dict[str, Path]:
    """Return the run directories by name; without names all below the root, the newest first. A folder with an archive alone counts."""
    if not names:
        below = run_names(root) if root.is_dir() else {}
        if not below:
            raise HoneError(f"no runs under '{root}'", fix="hone view RUN, or --root DIR with the runs", code="E-runs")
        return dict(reversed(below.items()))
    chosen: dict[str, Path] = {}
    for name in names:
        path = Path(name)
        if not (path.is_dir() and (any(path.glob("step_*.parquet")) or (path / "rollouts").is_dir())):
            path = find_run(name, root).path
        label = path.resolve().name if path.resolve().name not in chosen else str(path)
        chosen[label] = path
    return chosen


def view(request: ViewRequest) -> None:
    """Serve the page in the foreground, until a signal; with ``export`` write one file instead."""
    if request.export is not None:
        from hone.apps.lab.viewer.api import Workspace
        from hone.apps.lab.viewer.export import export

        written = export(Workspace(chosen_runs(request.runs, request.root)), request.export, request.query)
        log.info("wrote %s: %d groups, %.1f MB", request.export, written["groups"], written["bytes"] / 1e6)
        return
    try:
        from hone.agents.serving.server import HttpServer
        from hone.apps.lab.viewer.server import Viewer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the viewer needs the package '{error.name}', which is not installed", fix=install_command("serve")
        ) from error
    from hone.apps.lab.viewer.api import Workspace

    workspace = Workspace(chosen_runs(request.runs, request.root), request.rewards)
    token = request.token or secrets.token_urlsafe(24)
    server = HttpServer(Viewer(workspace, token).app, host=request.host, port=request.port)
    address = f"{server.url}/?token={token}"
    log.info("%s", address)
    if request.open_browser:
        webbrowser.open(address)
    server.run()
