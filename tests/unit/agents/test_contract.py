"""The agent contract: equal for equal programs, and a change names its part."""

from __future__ import annotations

import logging

import pytest
from support.agents import setting

from hone.agents.tools.calculator import Calculator
from hone.agents.tools.lookup import Lookup
from hone.trainers.inputs import VERSION, agent_contract, contract_changes, report_contract


def test_a_contract_has_a_version_and_a_hash_of_every_part() -> None:
    contract = agent_contract(setting([Calculator()]))
    assert contract == agent_contract(setting([Calculator()]))
    assert contract["version"] == str(VERSION) and len({*contract.values()}) == len(contract) == 4
    assert agent_contract(setting([Calculator()], enable=False)) == {}


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        (setting([Calculator(), Lookup()]), ["the tools"]),
        (setting([Calculator()], tool_timeout=5.0), ["what a call gives"]),
        (setting([Calculator()], max_assistant_turns=3), []),
    ],
)
def test_a_change_names_its_part(changed, parts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    earlier, now = agent_contract(setting([Calculator()])), agent_contract(changed)
    assert contract_changes(earlier, now) == parts
    with caplog.at_level(logging.WARNING):
        report_contract(earlier, now, "the run resumes")
    assert bool(caplog.records) == bool(parts)
    other = setting([Calculator()])
    other.template_kwargs = {"enable_thinking": False}
    assert contract_changes(earlier, agent_contract(other)) == ["the chat format"]
    assert contract_changes({}, now) == contract_changes(now, {}) == []
