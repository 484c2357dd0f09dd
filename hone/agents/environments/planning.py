"""Planning task with a checker: carry things between places, one step per line.

    Places: shop, home, park. You are at shop. box: shop. key: park.
    Goal: box at home, key at home.
    Steps: go PLACE, take THING, drop THING. Write a plan, one step a line.

The plan is executed step by step. A failed plan is answered with its first impossible step, or with the missed
part of the goal. The next plan starts from the initial state.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message

PLACES = ("shop", "home", "park", "dock", "farm", "mill")
THINGS = ("box", "key", "cup", "pen", "map", "hat")
HOME = "home"
_STEP = re.compile(r"^\W*(go|take|drop)\s+(?:to\s+)?(\w+)\W*$", re.IGNORECASE)


@dataclass
class World:
    """State of the task: the position of the carrier and of each thing."""

    at: str  # place of the carrier
    things: dict[str, str | None] = field(default_factory=dict)  # place of each thing; None while it is carried

    def carry_out(self, verb: str, name: str, places: tuple[str, ...]) -> str | None:
        """Execute one step; return why it is impossible, or None."""
        if verb == "go":
            if name not in places:
                return f"there is no place {name}"
            self.at = name
            return None
        if name not in self.things:
            return f"there is no {name}"
        if verb == "take":
            if self.things[name] != self.at:
                return f"the {name} is not at {self.at}"
            self.things[name] = None
        else:
            if self.things[name] is not None:
                return f"you do not carry the {name}"
            self.things[name] = self.at
        return None


class Planning(Environment):
    """Task of bringing ``things`` things from ``places`` places home within ``tries`` plans.

    A plan that reaches the goal earns 1, minus ``cost`` for every earlier try. Facts: ``solved``, ``tries``, ``plan_valid`` (every
    step of the last plan was possible), ``goals`` (share of the things that it brought home), ``plan_length``.
    """

    def __init__(self, *, places: int = 3, things: int = 1, tries: int = 3, cost: float = 0.0) -> None:
        if not 2 <= places <= len(PLACES) or not 1 <= things <= len(THINGS) or tries < 1 or not 0 <= cost * tries <= 1:
            raise ValueError(f"places={places}, things={things}, tries={tries}, cost={cost}")
        self.count, self.things, self.tries, self.cost = places, things, tries, cost
        self.places: tuple[str, ...] = ()
        self.begin, self.tries_made = World(""), 0

    async def reset(self, seed: int) -> list[Message]:
        draw, self.tries_made = random.Random(seed), 0
        others = draw.sample([place for place in PLACES if place != HOME], self.count - 1)
        self.places = tuple(draw.sample([HOME, *others], self.count))
        things = draw.sample(THINGS, self.things)
        self.begin = World(draw.choice(self.places), {thing: draw.choice(others) for thing in things})
        where = " ".join(f"{thing}: {place}." for thing, place in self.begin.things.items())
        text = (
            f"Places: {', '.join(self.places)}. You are at {self.begin.at}. {where}\n"
            f"Goal: {', '.join(f'{thing} at {HOME}' for thing in things)}.\n"
            "Steps: go PLACE, take THING, drop THING. Write a plan, one step a line."
        )
        return [{"role": "user", "content": text}]

    async def step(self, turn: AssistantTurn) -> Step:
        """Execute a plan from the initial state."""
        self.tries_made += 1
        world, steps, wrong = World(self.begin.at, dict(self.begin.things)), 0, None
        for line in filter(None, map(str.strip, turn.content.splitlines())):
            steps += 1
            step = _STEP.match(line)
            words = (step[1].lower(), step[2].lower()) if step else None
            wrong = world.carry_out(*words, self.places) if words else "it is not a step"
            if wrong is not None:
                wrong = f"step {steps} ({line[:40]}): {wrong}"
                break
        home = [thing for thing, place in world.things.items() if place == HOME]
        solved = wrong is None and len(home) == len(world.things)
        facts = {
            "solved": float(solved),
            "tries": float(self.tries_made),
            "plan_valid": float(wrong is None and steps > 0),
            "goals": len(home) / len(world.things),
            "plan_length": float(steps),
        }
        if solved:
            return Step(reward=1.0 - self.cost * (self.tries_made - 1), done=True, facts=facts)
        if self.tries_made == self.tries:
            return Step(done=True, facts=facts)
        missing = next((thing for thing in world.things if thing not in home), "")
        return Step.says(wrong or f"the {missing} is not at {HOME}", facts=facts)

    def solution(self) -> str:
        """Return a correct plan, for demonstrations."""
        world, lines = World(self.begin.at, dict(self.begin.things)), []
        for thing, place in self.begin.things.items():
            if world.at != place:
                lines.append(f"go {place}")
            lines += [f"take {thing}", f"go {HOME}", f"drop {thing}"]
            world.at = HOME
        return "\n".join(lines)
