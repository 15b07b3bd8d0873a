"""Every operator equals its reference, whatever shape, dtype, kernels and threads."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from op_cases import CASES, FLOATS, check, results

NAMED = {case.name: case for case in CASES}


@pytest.fixture(params=NAMED)
def case(request):
    return NAMED[request.param]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_instruction_set_gives_outputs_and_gradients_of_the_reference(
    case, dtype, instruction_set
):
    for shape in case.shapes if dtype in case.dtypes else ():
        check(case, shape, dtype)


@settings(max_examples=30)
@given(data=st.data(), dtype=st.sampled_from(FLOATS))
@pytest.mark.parametrize("name", [case.name for case in CASES if case.drawn is not None])
def test_so_does_any_shape(name, data, dtype):
    check(NAMED[name], data.draw(NAMED[name].drawn), dtype)


def test_threads_do_not_change_a_bit(case, threads, native):
    for dtype in case.dtypes:
        tensors, found = case.make(case.shapes[-1], dtype), []
        for count in (1, 2, 3):
            threads(count)
            found.append(results(case.function, tensors))
        for others in found[1:]:
            assert all(map(torch.equal, others, found[0]))


@pytest.mark.unwatched
def test_opcheck(case, native):
    for op, arguments, options in case.calls():
        torch.library.opcheck(op, arguments, options)


@pytest.mark.unwatched
@pytest.mark.parametrize(
    "name",
    [name for name in NAMED if not any(word in name for word in ("network", "relu", "mean"))],
)
def test_it_compiles_as_one_graph(name):
    """Leaves out layers, which compile as a module, and another rounding of gradients."""
    case = NAMED[name]
    torch.compiler.reset()
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in case.shapes[1:3]:
        tensors = case.make(shape, torch.float32)
        found, expected = (results(f, tensors) for f in (compiled, case.function))
        torch.testing.assert_close(found, expected, **case.close)


def test_tensors_are_read_by_their_strides(case):
    tensors = case.make(case.shapes[1], torch.float32)
    spread = [
        torch.stack([one.detach(), one.detach()], -1)[..., 0].requires_grad_(one.requires_grad)
        for one in tensors
    ]
    found, expected = (results(case.function, given) for given in (spread, tensors))
    torch.testing.assert_close(found, expected, **case.close)
