"""Identities of physical GPUs, which processes number differently."""

from __future__ import annotations

import torch


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU of this process, which has initialised CUDA."""
    return _plain(str(torch.cuda.get_device_properties(device).uuid))


def visible_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, in its order; none where the driver's library (NVML) does not say.

    CUDA is not initialised, since a fork could not use it then.
    """
    try:
        uuids = torch.cuda._raw_device_uuid_nvml()
        count = torch.cuda._device_count_nvml()
        numbers = [torch.cuda._get_nvml_device_index(number) for number in range(count)]
    except (OSError, RuntimeError, AttributeError):
        return []
    return [_plain(uuids[number]) for number in numbers] if uuids is not None and count > 0 else []


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-")
