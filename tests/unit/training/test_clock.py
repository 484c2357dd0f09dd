"""The device's clock: the host's on a CPU, events on CUDA, for which only the end waits."""

from __future__ import annotations

import time

import pytest
import torch

from hone.training.engine import DeviceClock


def test_blocks_add_up_and_are_taken_once() -> None:
    clock = DeviceClock(torch.device("cpu"))
    for _ in range(2):
        with clock.running():
            time.sleep(0.01)
    time.sleep(0.05)
    taken = clock.take()
    assert taken >= 0.02 and clock.take() == 0.0


class Event:
    """An event of a device that reaches each one a second after the one before."""

    reached = 0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.moment = -1

    def record(self) -> None:
        Event.reached += 1
        self.moment = Event.reached

    def synchronize(self) -> None:
        Event.waits += 1
        assert self.moment == Event.reached, "the last event of all"

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.moment - self.moment)


def test_on_cuda_the_device_is_timed_and_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(3):
        with clock.running():
            assert Event.waits == 0
    assert clock.take() == 3.0 and Event.waits == 1
    assert clock.take() == 0.0 and Event.waits == 1, "nothing was computed"
