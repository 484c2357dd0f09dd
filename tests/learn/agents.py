"""How the boxes of the part Agents are played."""

from __future__ import annotations

from playing import Play

PLAYS: dict[str, Play] = {}
