"""The casebook of preflight: for every rule a configuration that it refuses, what it must say, and the repair."""

from support.preflight_cases.files import FILE_CASES
from support.preflight_cases.keys import KEY_CASES
from support.preflight_cases.machines import MACHINE_CASES
from support.preflight_cases.world import Case, World

__all__ = ["CASES", "Case", "World"]

CASES = [*KEY_CASES, *FILE_CASES, *MACHINE_CASES]
