"""Cases of preflight: for every rule a configuration with a finding, what the message must name, and the repair."""

from support.preflight_cases.files import FILE_CASES
from support.preflight_cases.keys import KEY_CASES
from support.preflight_cases.machines import MACHINE_CASES
from support.preflight_cases.megatron import MEGATRON_CASES
from support.preflight_cases.world import Case, World

__all__ = ["CASES", "Case", "World"]

CASES = [*KEY_CASES, *FILE_CASES, *MACHINE_CASES, *MEGATRON_CASES]
