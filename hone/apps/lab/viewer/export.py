"""One HTML file with the page and a part of a run, to send to a colleague (`hone view RUN --export FILE.html`)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hone.apps.lab.viewer.api import READS, Workspace
from hone.errors import HoneError
from hone.insight.run_files import write_atomically

PAGE = Path(__file__).parent / "page"
GROUPS = 100
"""Most groups in a file."""
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w/.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|const|let|class) (\w+)", re.MULTILINE)
_EXPORT_LIST = re.compile(r"export\s*\{([^}]*)\};?\s*$")


def export(workspace: Workspace, path: Path, query: str = "") -> dict[str, int]:
    """Write groups of the first run to a file; return the number of ``groups`` and ``bytes``.

    A query (:mod:`hone.apps.lab.viewer.queries`) chooses the groups, by default those of the newest step; at most :data:`GROUPS`.
    """
    run = next(iter(workspace.runs.values()))
    archived = run.archived("rollouts")
    archived.rows()
    archived.index.wait()
    steps = archived.index.archive.steps()
    query = query or (f"step={steps[-1]}" if steps else "")
    answers = _answers(workspace, run.name, query) if steps else {}
    groups = [key for key in answers if key.startswith("group?")]
    if steps and not groups:
        raise HoneError(f"no group matches '{query}'", fix="another --filter", code="E-view-export")
    answers |= _run_answers(workspace, run.name)
    data = {"about": f"{len(groups)} groups of '{query}'", "query": query, "answers": answers}
    text = page_with(data)
    write_atomically(path, text)
    return {"groups": len(groups), "bytes": len(text.encode())}


def _ask(workspace: Workspace, name: str, parameters: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the page's key of a question, and the answer."""
    used = {key: str(value) for key, value in parameters.items() if value not in (None, "")}
    key = name + ("?" if used else "") + "&".join(f"{key}={_quoted(used[key])}" for key in sorted(used))
    return key, READS[name](workspace, used)


def _quoted(value: str) -> str:
    return quote(value, safe="-_.!~*'()")  # as encodeURIComponent


def _run_answers(workspace: Workspace, run: str) -> dict[str, Any]:
    key, runs = _ask(workspace, "runs", {})
    runs["runs"] = [state for state in runs["runs"] if state["name"] == run]
    questions = [_ask(workspace, name, {"run": run}) for name in ("overview", "metrics", "alerts", "config", "labels")]
    return {key: runs, **dict(questions)}


def _answers(workspace: Workspace, run: str, query: str) -> dict[str, Any]:
    """Return the answers about the groups of a query: lists, groups, tokens and episodes."""
    page = {"run": run, "offset": 0, "limit": 100}
    key, listed = _ask(workspace, "groups", {**page, "q": query})
    listed["groups"] = listed["groups"][:GROUPS]
    listed["total"] = len(listed["groups"])
    _, flat = _ask(workspace, "answers", {**page, "q": query})
    flat["total"] = len(flat["answers"])
    answers: dict[str, Any] = {key: listed}
    for name, value in (("groups", listed), ("answers", flat)):  # the lists without a filter show the same
        answers[_key(name, page)] = value
    for group in listed["groups"]:
        at = {"run": run, "step": group["step"], "uid": group["uid"]}
        key, one = _ask(workspace, "group", at)
        answers[key] = one
        for answer in one["answers"]:
            place = at | {"index": answer["index"]}
            for name in ("tokens", "factors"):
                key, value = _ask(workspace, name, place | {"part": answer["part"]})
                answers[key] = value
            key, value = _ask(workspace, "episode", place)
            answers[key] = value
    return answers | _pictures(workspace, run, answers.values())


def _pictures(workspace: Workspace, run: str, answers: Iterable[Any]) -> dict[str, str]:
    """Return the images that the answers name, as ``data:`` URLs; those that are missing are marks in the text."""
    names = {name for answer in answers for name in _named(answer)}
    urls: dict[str, str] = {}
    for name in sorted(names):
        with contextlib.suppress(HoneError):
            key, shown = _ask(workspace, "image", {"run": run, "name": name})
            urls[key] = f"data:{shown.media_type};base64,{base64.b64encode(shown.content).decode()}"
    return urls


def _named(answer: Any) -> Iterator[str]:
    """Yield the names of the images in the answer about a group, tokens or an episode."""
    if not isinstance(answer, dict):
        return
    yield from answer.get("images", ())
    for field in ("pictures", "prompt_pictures"):
        yield from answer.get(field, {}).values()
    for lane in answer.get("lanes", ()):
        yield from (name for entry in lane["entries"] for name in entry["images"])


def _key(name: str, parameters: Mapping[str, Any]) -> str:
    return name + "?" + "&".join(f"{key}={_quoted(str(parameters[key]))}" for key in sorted(parameters))


# the file ------------------------------------------------------------------------------------------------------------


def page_with(data: Any) -> str:
    """Return the page as one HTML text that holds its data, its code and its style, and may load nothing."""
    styles = [(PAGE / name).read_text(encoding="utf-8") for name in ("vendor/uplot.css", "style.css")]
    scripts = [(PAGE / "vendor/uplot.js").read_text(encoding="utf-8"), bundle("app.js")]
    embedded = (
        json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    )
    policy = (
        f"default-src 'none'; img-src data:; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Hone</title>',
            *(f"<style>{style}</style>" for style in styles),
            '</head><body><div id="app"></div>',
            f'<script type="application/json" id="hone-data">{embedded}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(entry: str) -> str:
    """Return the modules of the page as one script: each becomes a function that returns what it exports."""
    order: list[str] = []
    _visit(entry, order, ())
    parts = ['"use strict";']
    for name in order:
        text = (PAGE / name).read_text(encoding="utf-8")
        text = _IMPORT.sub(lambda match, name=name: _taken(match, name), text)
        exports = [f"{match[2]}" for match in _EXPORT.finditer(text)]
        text = _EXPORT.sub(r"\1 \2", text)
        listed = _EXPORT_LIST.search(text)
        if listed:
            text = text[: listed.start()]
            pairs = [entry.split(" as ") for entry in listed[1].split(",")]
            exports += [f"{pair[-1].strip()}: {pair[0].strip()}" for pair in pairs]
        parts.append(f"const {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exports)} }};\n}})();")
    return "\n".join(parts).replace("</script", "<\\/script")


def _visit(name: str, order: list[str], path: tuple[str, ...]) -> None:
    if name in path:
        raise ValueError(f"modules of the page import each other: {' -> '.join((*path, name))}")
    if name in order:
        return
    for match in _IMPORT.finditer((PAGE / name).read_text(encoding="utf-8")):
        _visit(match[2], order, (*path, name))
    order.append(name)


def _taken(match: re.Match[str], name: str) -> str:
    names = [entry.strip().replace(" as ", ": ") for entry in match[1].split(",") if entry.strip()]
    return f"const {{ {', '.join(names)} }} = {_variable(match[2])};\n"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))
