"""Launch scripts in the style of verl, and the words that some of them ask for."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "unit" / "config" / "launch_scripts"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
ARGUMENTS = {"sft_peft_torchrun": ("8", "out")}
"""Words that a script is called with."""
