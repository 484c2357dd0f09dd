"""Names of vision towers in modules of transformers; importable without torch."""

TOWERS = ("visual", "vision_model")
"""Names of the module, in Qwen-VL and in Idefics3."""
