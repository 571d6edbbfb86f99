"""How a fusion runs: what is compiled when, and which tensors come back."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from dynafuse.lowering.nvfuser.kernel import FusionKernel
from dynafuse.lowering.nvfuser.recipe import Input, Output, Recipe, Var

GIVEN = Input((4,), (True,), (0,), torch.float32)


class Definition:
    """A stand-in for a FusionDefinition: ``results`` makes what a call returns."""

    def __init__(self, results: Any) -> None:
        self.results = results
        self.calls: list[tuple[str, Any]] = []
        self.fec = self

    def execute(self, inputs: list[Any], *, device: Any) -> Any:
        self.calls.append((str(device), len(inputs)))
        return self.results(inputs)


def kernel(results: Any, *outputs: Output, scalars: tuple[tuple[Var, int], ...] = ()) -> tuple[FusionKernel, list[Definition]]:
    made: list[Definition] = []

    def define(recipe: Recipe) -> Definition:
        time.sleep(0.01)
        made.append(Definition(results))
        return made[-1]

    return FusionKernel("key", Recipe((GIVEN, GIVEN), scalars, (), outputs), define), made


def test_the_first_call_compiles_and_the_others_go_to_the_executor_cache() -> None:
    fusion, made = kernel(lambda inputs: [inputs[0] + 1], Output(Var(2)))
    assert made == []
    x, y = torch.zeros(4), torch.ones(4)
    for device in (0, 0, 1):
        found, = fusion.run([x, y], device)
        assert torch.equal(found, x + 1)
    definition, = made
    assert definition.calls == [("cuda:0", 2), ("0", 2), ("1", 2)]


def test_preparing_records_once_and_runs_nothing() -> None:
    fusion, made = kernel(lambda inputs: [inputs[0]], Output(Var(2)))
    assert fusion.prepare().prepare() is fusion
    definition, = made
    assert definition.calls == []
    fusion.run([torch.zeros(4), torch.zeros(4)], 0)
    assert made == [definition] and len(definition.calls) == 1


def test_threads_share_a_definition() -> None:
    fusion, made = kernel(lambda inputs: [inputs[0]], Output(Var(2)))
    threads = [threading.Thread(target=fusion.run, args=([torch.zeros(4), torch.zeros(4)], 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(made[0].calls) == 8


def test_overwritten_inputs_are_returned_in_the_order_of_the_stores() -> None:
    """Whether the library lists what it wrote into inputs or not."""
    x, y, new = torch.zeros(4), torch.ones(4), torch.full((4,), 3.0)
    outputs = (Output(Var(2), into=1), Output(Var(3)))
    for results in ([new], [y, new]):
        fusion, _ = kernel(lambda inputs, results=results: results, *outputs)
        found = fusion.run([x, y], 0)
        assert found[0] is y and found[1] is new


def test_copies_get_memory_of_their_own() -> None:
    x, y = torch.zeros(4), torch.ones(4)
    fusion, _ = kernel(lambda inputs: [inputs[0].view(2, 2), inputs[1] + 1], Output(Var(2), copies=True), Output(Var(3)))
    first, second = fusion.run([x, y], 0)
    assert torch.equal(first, x.view(2, 2)) and first.data_ptr() != x.data_ptr()
    assert torch.equal(second, y + 1)


def test_a_value_stored_twice_is_two_tensors() -> None:
    x = torch.zeros(4)
    shared = x + 2
    fusion, _ = kernel(lambda inputs: [shared, shared], Output(Var(2)), Output(Var(3), copies=True))
    first, second = fusion.run([x, x], 0)
    assert first is shared and torch.equal(second, shared) and second.data_ptr() != shared.data_ptr()


def test_outputs_that_turn_out_to_share_memory_are_told_apart() -> None:
    """nvFuser finds by itself that two outputs compute the same, or that one is an input in other sizes."""
    def results(inputs: list[Any]) -> list[torch.Tensor]:
        total = inputs[0] + 2
        return [total, total.view(2, 2), inputs[1].view(2, 2), inputs[0] * 2]

    fusion, _ = kernel(results, *(Output(Var(2 + i)) for i in range(4)))
    x, y = torch.zeros(4), torch.ones(4)
    for _ in range(2):
        found = fusion.run([x, y], 0)
        places = {tensor.untyped_storage().data_ptr() for tensor in (x, y, *found)}
        assert len(places) == 6
        for tensor, expected in zip(found, results([x, y]), strict=True):
            assert torch.equal(tensor, expected)


def test_an_output_does_not_share_the_memory_of_an_overwritten_input() -> None:
    x, y = torch.zeros(4), torch.ones(4)
    fusion, _ = kernel(lambda inputs: [inputs[1].add_(1).view(2, 2)], Output(Var(2), into=1), Output(Var(3)))
    for times in (1, 2):
        first, second = fusion.run([x, y], 0)
        assert first is y and torch.equal(second, torch.full((2, 2), 1.0 + times))
        assert second.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()


def test_nothing_is_looked_at_where_nothing_was_shared() -> None:
    made = [torch.full((4,), 3.0)]
    fusion, _ = kernel(lambda inputs: made, Output(Var(2)))
    fusion.run([torch.zeros(4), torch.zeros(4)], 0)
    assert fusion.run([torch.zeros(4), torch.zeros(4)], 0) is made


def test_scalars_name_the_size_symbols_that_are_passed() -> None:
    fusion, _ = kernel(lambda inputs: [inputs[0]], Output(Var(4)), scalars=((Var(3), 1),))
    assert fusion.scalars == (1,)
    assert "t3 = size(s1)" in fusion.source
