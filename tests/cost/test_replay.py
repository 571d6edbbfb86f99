"""What replaying a graph saves, and when that is worth a recording."""

from __future__ import annotations

import pytest

from dynafuse.cost import device as devices
from dynafuse.cost.model import Prediction
from dynafuse.cost.replay import LEAST_SAVED_US, Copies, saving

H200 = devices.describe("h200")


def launches(number: int, busy_us: float = 1.0) -> Prediction:
    """What a graph costs that launches a number of kernels, each busy so long."""
    return Prediction(number * (busy_us + 2), number * 7.0, 0.0, number * (busy_us + H200.replay_us))


def test_a_graph_that_the_host_bounds_is_worth_a_recording() -> None:
    assert saving(launches(100), Copies(4, 1 << 16), H200).pays


def test_one_launch_is_not() -> None:
    assert not saving(launches(1), Copies(), H200).pays
    assert not saving(launches(2), Copies(2, 64), H200).pays


def test_a_graph_that_the_device_bounds_is_not() -> None:
    assert not saving(launches(100, busy_us=100.0), Copies(4, 1 << 16), H200).pays


def test_copies_take_the_device_a_read_and_a_write() -> None:
    without, copied = (saving(launches(100), Copies(1, count), H200) for count in (0, 1 << 30))
    assert copied.replayed.us - without.replayed.us == pytest.approx(2 * (1 << 30) / (H200.bandwidth_tbs * 1e6))
    assert without.pays and not copied.pays


def test_every_copied_tensor_takes_the_host_some_time() -> None:
    assert saving(launches(20), Copies(400, 0), H200).us < saving(launches(20), Copies(4, 0), H200).us


def test_little_is_not_worth_it_even_if_it_is_most_of_a_call() -> None:
    found = saving(Prediction(0.1, LEAST_SAVED_US + 5, 0.0, 0.1), Copies(), H200)
    assert found.us < LEAST_SAVED_US and not found.pays


def test_what_a_slow_host_would_make_worth_it_is_open() -> None:
    found = saving(launches(100, busy_us=6.0), Copies(4, 1 << 16), H200)
    assert not found.pays and found.is_open
    slower = Prediction(100 * 8.0, found.least_host_us, 0.0, 100 * (6.0 + H200.replay_us))
    assert saving(slower, Copies(4, 1 << 16), H200).pays
    assert not saving(launches(100, busy_us=100.0), Copies(4, 1 << 16), H200).is_open


def test_a_slow_host_is_slow_at_replays_as_well() -> None:
    """A product by itself takes the host about as long as a replay, on any host."""
    product = Prediction(2.2, 18.0, 0.0, 2.2)
    assert not saving(product, Copies(3, 5000), H200).is_open
    few = saving(Prediction(10.0, 40.0, 0.0, 8.0), Copies(3, 5000), H200)
    slow = few.least_host_us / few.host_us
    assert few.least_host_us - slow * few.replayed.host_us == pytest.approx(LEAST_SAVED_US)
