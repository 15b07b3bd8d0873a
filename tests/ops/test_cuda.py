"""Properties of the CUDA kernels alone; each op's tests cover those shared with the CPU.

They run on a GPU if there is one, and on an emulated GPU (emulated_cuda.py), whose kind each test
may choose.
"""

import pytest
import test_dot_interaction as interactions
import test_joint_embedding as look_ups
import test_row_update as updates
import torch
from op_cases import CASES, UPDATES, check

from dlrm import ops
from dlrm.data.clicks.batch import Batch
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.ops.library import why_not_cuda_kernels
from dlrm.ops.row_update import ORDERED_COLUMNS
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SGD, ADAGRAD, ROW_WISE, ADAM = ops.ROW_RULES.values()
INTERACTIONS = [  # batch, tables, dim
    (1, 1, 1),
    (6, 26, 128),
    (5, 5, 19),
    (3, 12, 16),
    (3, 0, 5),
    (0, 26, 128),
    (2, 60, 40),  # one block per sample
    (2, 40, 100),
]


class Gpu:
    """A GPU, or an emulated GPU with tensors on the CPU."""

    def __init__(self, device, emulator=None):
        self.device, self._emulator = device, emulator

    def kind(self, **kind):
        """Changes the kind of an emulated GPU; skips the test on a real one."""
        if self._emulator is None:
            pytest.skip("a GPU is of the kind that it is")
        self._emulator.configure(**kind)

    def sectors_of_additions(self):
        """See `Emulator`; counts one or several launches after `kind`."""
        return self._emulator.sectors_of_additions()

    def switch(self, tf32=False, deterministic=False):
        if self._emulator is None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.use_deterministic_algorithms(deterministic)
        else:
            torch.ops.dlrm_emulated.cuda_switches(tf32 + 2 * deterministic)

    def raised(self):
        """Returns the message of the kernels' kept error, which is raised once."""
        with pytest.raises(RuntimeError) as error:
            ops.raise_device_errors(self.device)
        ops.raise_device_errors(self.device)
        return str(error.value)


@pytest.fixture(
    params=[
        pytest.param("emulated", marks=pytest.mark.emulated),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def gpu(request):
    """Yields the GPU of new tensors; its switches are off before and after the test."""
    if request.param == "emulated":
        emulator = request.getfixturevalue("emulator")
        with emulator.in_place_of_cpu():
            found = Gpu("cpu", emulator)
            yield found
            found.switch()
        return
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    problem = why_not_cuda_kernels()
    if problem is not None:
        pytest.skip(f"no CUDA kernels: {problem}")
    found = Gpu("cuda")
    found.switch()
    with torch.device("cuda"):
        yield found
    found.switch()


class Random:
    """Draws the same numbers on every device."""

    def __init__(self, seed):
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape):
        return self._moved(torch.randn(shape, generator=self._generator, device="cpu"))

    def uniform(self, *shape):
        return self._moved(torch.rand(shape, generator=self._generator, device="cpu"))

    def integers(self, end, *shape):
        return self._moved(torch.randint(end, shape, generator=self._generator, device="cpu"))

    def _moved(self, values):
        return values.to(torch.get_default_device())


def gradients(function, args):
    args = [arg.detach().requires_grad_() for arg in args]
    output = function(*args)
    grad = Random(0).normal(*output.shape).to(output.dtype)
    return [output, *torch.autograd.grad(output, args, grad)]


def interaction_inputs(shape, dtype):
    batch, tables, dim = shape
    random = Random(batch + tables + dim)
    return random.normal(batch, dim).to(dtype), random.normal(batch, tables, dim).to(dtype)


WITH_KERNELS = [case for case in CASES if case.name.startswith(("dot", "joint", "row"))]


@pytest.mark.first_half
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WITH_KERNELS, ids=lambda case: case.name)
def test_operators_give_outputs_and_gradients_of_their_references(case, dtype, gpu):
    for shape in case.shapes[:-1]:
        check(case, shape, dtype, gpu.device)


PROPERTIES = [  # of operators on any device
    interactions.test_known_answer,
    *(interactions.test_mismatched_sizes_are_named, interactions.test_other_dtypes_are_named),
    *(look_ups.test_known_answer, look_ups.test_tables_may_have_the_same_rows),
    *(look_ups.test_transposed_ids_are_read_by_their_strides,),
    look_ups.test_bags_of_one_are_the_look_up,
    *(updates.test_known_answer, updates.test_small_steps_are_not_lost_in_a_split_weight),
    updates.test_repeated_rows_are_summed_before_they_are_squared,
    updates.test_rows_of_small_tables_that_do_not_occur_are_left_alone,
]


@pytest.mark.parametrize("test", PROPERTIES, ids=lambda test: f"{test.__module__}-{test.__name__}")
def test_an_emulated_gpu_has_the_properties_of_others(test, emulator):
    with emulator.in_place_of_cpu():
        test("cpu")


@pytest.mark.parametrize("id_dtype", look_ups.ID_DTYPES, ids=str)
def test_an_emulated_gpu_takes_ids_of_any_integer_dtype(id_dtype, emulator):
    with emulator.in_place_of_cpu():
        look_ups.test_ids_and_lengths_may_be_of_any_integer_dtype(id_dtype, torch.int16)
        for form in ("one each", "lists"):
            look_ups.test_wrong_shapes_and_dtypes_are_named(form, "cpu")


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.name)
def test_an_emulated_gpu_updates_rows_of_tables(update, emulator):
    with emulator.in_place_of_cpu():
        for tables in updates.TABLES:
            updates.test_tables_of_any_size_match_reference(update, tables, torch.float32, "cpu")
            updates.test_tables_of_a_split_weight_match_reference(update, tables, "cpu")
        for dtype in DTYPES:
            tables = updates.TABLES[0]
            updates.test_tables_of_any_size_match_reference(update, tables, dtype, "cpu")
            updates.test_grad_scale_divides_the_gradient(update, dtype, "cpu")
        updates.test_a_split_weight_matches_reference(update, updates.SHAPES[0], "cpu")
        for sizes in (None, [3, 9, 200]):
            updates.test_found_inf_changes_nothing(update, sizes, "cpu")
        updates.test_found_inf_changes_nothing_of_a_split_weight(update, "cpu")
        updates.test_table_sizes_that_do_not_fit_are_named(update, "cpu", None)
        updates.test_a_weight_and_low_that_do_not_fit_are_named(update, "cpu", None)
        updates.test_wrong_shapes_and_dtypes_are_named(update, "cpu", None)


@pytest.mark.first_half
@pytest.mark.parametrize("shared", [9000, 64 * 1024])  # the first fits few samples
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", INTERACTIONS[1:5] + INTERACTIONS[6:])
def test_interaction_with_little_room_in_shared_memory(shape, dtype, shared, gpu):
    gpu.kind(shared=shared)
    check(CASES[0], shape, dtype, gpu.device)


@pytest.mark.first_half
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", INTERACTIONS)
def test_interaction_of_a_gpu_without_these_tensor_cores(shape, dtype, gpu):
    gpu.kind(capability=60)
    check(CASES[0], shape, dtype, gpu.device)


@pytest.mark.parametrize("shape", INTERACTIONS)
def test_tf32_multiplies_rounded_values_and_passes_the_dense_vector_whole(shape, gpu):
    dense, embeddings = interaction_inputs(shape, torch.float32)

    def rounded(x):  # to 10 bits of fraction, halfway cases away from zero
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    gpu.switch(tf32=True)
    output, *grads = gradients(ops.dot_interaction, (dense, embeddings))
    inputs = rounded(dense), rounded(embeddings)
    expected, *_ = gradients(ops.dot_interaction_reference, inputs)
    dim = shape[2]
    torch.testing.assert_close(output[:, dim:], expected[:, dim:], atol=1e-4, rtol=1e-5)
    assert torch.equal(output[:, :dim], dense)
    grad = Random(0).normal(*output.shape)
    own = grad[:, :dim].clone()
    leaves = [x.requires_grad_() for x in inputs]
    grad = torch.cat([torch.zeros_like(own), rounded(grad[:, dim:].contiguous())], dim=1)
    wanted = torch.autograd.grad(ops.dot_interaction_reference(*leaves), leaves, grad)
    torch.testing.assert_close(grads[0], wanted[0] + own, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(grads[1], wanted[1], atol=1e-4, rtol=1e-5)


def test_tf32_passes_infinities_and_nans(gpu):
    gpu.switch(tf32=True)
    dense = torch.tensor([[1.0], [1.0], [1.0]])
    embeddings = torch.tensor([[[float("inf")]], [[float("nan")]], [[float("-inf")]]])
    output = ops.dot_interaction(dense, embeddings)
    torch.testing.assert_close(output[:, 1:2], embeddings[:, 0], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_inputs_are_read_one_by_one(dtype, gpu):
    flat = torch.randn(1 + 7 * 16).to(dtype)
    embeddings = torch.randn(7, 3, 16).to(dtype)
    dense = flat[1:].view(7, 16)
    aligned = ops.dot_interaction(dense.clone(), embeddings)
    assert torch.equal(ops.dot_interaction(dense, embeddings), aligned)
    ids, offsets = torch.randint(7, (9, 1)), torch.tensor([0, 7])
    assert torch.equal(ops.joint_embedding(dense, ids, offsets)[:, 0], dense[ids[:, 0]])
    ones = torch.ones(9, 1, dtype=torch.int64)
    pooled = ops.joint_embedding(dense, ids[:, 0], offsets, ones)
    assert torch.equal(pooled[:, 0], dense[ids[:, 0]])
    grad, mask = flat[1:].view(7, 16), torch.randn(7, 16).to(dtype)
    for one, other in zip(
        torch.ops.dlrm.relu_bias_backward(grad, mask),
        torch.ops.dlrm.relu_bias_backward(grad.clone(), mask),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 24, 130])
def test_look_ups_are_cast_as_torch_does(dim, weight_dtype, output_dtype, gpu):
    weight = torch.randn(20, dim).to(weight_dtype)
    weight[3, 0] = float("nan")
    ids, offsets = torch.randint(10, (37, 2), dtype=torch.int16), torch.tensor([0, 10, 20])
    torch.testing.assert_close(
        ops.joint_embedding(weight, ids, offsets, dtype=output_dtype),
        ops.joint_embedding_reference(weight, ids, offsets, dtype=output_dtype),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def sgd(weight, state, *args, **more):
    ops.row_update_(SGD, weight, [], *args, **more)


def adagrad(weight, state, *args, **more):
    ops.row_update_(ADAGRAD, weight, [state], *args, **more)


def row_wise(weight, state, *args, **more):
    ops.row_update_(ROW_WISE, weight, [state[:, 0].contiguous()], *args, **more)


def adam(weight, state, *args, **more):
    states = [state, torch.ones_like(state)]
    ops.row_update_(ADAM, weight, states, *args, step=torch.tensor(3), **more)


def adagrad_reference(weight, state, *args, **more):
    ops.row_update_reference(ADAGRAD, weight, [state], *args, **more)


def updated(function, seed=3, total_rows=40, count=9000, dim=12, dtype=torch.float32, **more):
    random = Random(seed)
    weight = random.normal(total_rows, dim)
    # One row has most gradients, some rows occur often, and some do not occur.
    rows = random.integers(total_rows, count) // 2
    rows[random.uniform(count) < 0.6] = 7 % total_rows
    grad = random.normal(count, dim).to(dtype)
    state = torch.full_like(weight, 0.1)
    function(weight, state, rows, grad, torch.tensor(0.1), **more)
    return weight, state


@pytest.mark.first_half
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 12, 130])
@pytest.mark.parametrize(("total_rows", "count"), [(1, 3000), (40, 33), (40, 5000), (3000, 2000)])
def test_long_and_short_runs_of_a_row_match_the_reference(total_rows, count, dim, dtype, gpu):
    sizes = {"total_rows": total_rows, "count": count, "dim": dim, "dtype": dtype}
    torch.testing.assert_close(
        updated(adagrad, **sizes),
        updated(adagrad_reference, **sizes),
        rtol=1e-3,  # thousands of gradients in another order
        atol=1e-4,
    )


def test_runs_of_every_length_around_the_borders_of_chunks(gpu):
    for before in (0, 1, 31, 32, 33):
        for length in (1, 31, 32, 33, 64, 65, 500, 600):
            rows = torch.cat([torch.zeros(before), torch.ones(length), torch.full((5,), 2)]).long()
            grad = torch.randn(len(rows), 3)
            weight = torch.zeros(4, 3)
            state = torch.zeros(4)
            ops.row_update_(ROW_WISE, weight, [state], rows, grad, torch.tensor(1.0))
            sums = torch.zeros(4, 3).index_add_(0, rows, grad)
            torch.testing.assert_close(state, sums.square().mean(1), rtol=1e-4, atol=1e-5)


def table_inputs(sizes, batch, dim, seed=0):
    random = Random(seed)
    begins = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    ids = (random.uniform(batch, len(sizes)) * torch.tensor(sizes)).long()
    grad = random.normal(batch * len(sizes), dim)
    return random.normal(sum(sizes), dim), (ids + begins).flatten(), grad


def updated_tables(function, sizes, batch, dim, **more):
    weight, rows, grad = table_inputs(sizes, batch, dim)
    state = torch.full_like(weight, 0.1)
    function(weight, state, rows, grad, torch.tensor(0.1), table_sizes=sizes, **more)
    return weight, state


@pytest.mark.parametrize("function", [sgd, row_wise, adagrad, adam])
@pytest.mark.parametrize("dim", [1, 16, 19, 128])
def test_small_tables_repeat_their_bits_in_any_order_of_threads(dim, function, gpu):
    # There is no other table, so SGD adds in order without a switch.
    args = function, (3, 1, 16, 9), 1300, dim
    results = [updated_tables(*args) for _ in range(2)]
    if gpu.device == "cpu":
        for seed in (1, 2, 3):
            gpu.kind(seed=seed)
            results.append(updated_tables(*args))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("seed", range(16))
def test_tables_drawn_at_random_match_the_reference(seed, gpu):
    random = Random(seed)
    sizes = [1 + int(random.uniform() ** 3 * 90) for _ in range(int(random.integers(12)) + 1)]
    dim = int(random.integers(70)) * int(random.integers(5) + 1) + 1
    batch = int(random.integers(900))
    gpu.switch(deterministic=seed % 2 == 1)
    if gpu.device == "cpu":
        gpu.kind(seed=seed)
    weight, rows, grad = table_inputs(sizes, batch, dim, seed)
    actual, lr = weight.clone(), torch.tensor(0.1)
    ops.row_update_(SGD, actual, [], rows, grad, lr, table_sizes=sizes)
    exact = weight.double()
    ops.row_update_reference(SGD, exact, [], rows, grad.double(), lr)
    torch.testing.assert_close(actual, exact.float(), rtol=1e-5, atol=1e-5)


def test_a_batch_of_more_slices_than_one_block_adds_up(gpu):
    sizes, batch, dim = (3,), 140_300, 17  # 509 slices of 4 groups of 69 pairs
    weight, rows, _ = table_inputs(sizes, batch, dim)
    before, grad = weight.clone(), torch.ones(batch, dim)
    ops.row_update_(SGD, weight, [], rows, grad, torch.tensor(1.0), table_sizes=sizes)
    counts = rows.bincount(minlength=3).unsqueeze(1)
    torch.testing.assert_close(weight, before - counts, rtol=0, atol=0.02)  # half a rounding


def test_more_tables_than_a_kernel_can_be_told_of(gpu):
    for tables in (256, 257):
        sizes = [2] * tables
        weight, rows, grad = table_inputs(sizes, 3, 4)
        actual, exact, lr = weight.clone(), weight.double(), torch.tensor(0.1)
        ops.row_update_(SGD, actual, [], rows, grad, lr, table_sizes=sizes)
        ops.row_update_reference(SGD, exact, [], rows, grad.double(), lr)
        torch.testing.assert_close(actual, exact.float())


@pytest.mark.parametrize("begin", [0, 1, 4])
def test_weights_and_gradients_of_any_alignment(begin, gpu):
    for move_weight, move_grad in ((0, begin), (begin, 0), (begin, begin)):
        weight, rows, grad = table_inputs((3, 200), 70, 8)
        exact, lr = weight.double(), torch.tensor(0.1)
        ops.row_update_reference(SGD, exact, [], rows, grad.double(), lr)
        weight = torch.cat([torch.zeros(move_weight), weight.flatten()])[move_weight:].view(-1, 8)
        grad = torch.cat([torch.zeros(move_grad), grad.flatten()])[move_grad:].view(-1, 8)
        ops.row_update_(SGD, weight, [], rows, grad, lr, table_sizes=(3, 200))
        torch.testing.assert_close(weight, exact.float())


def test_sgd_repeats_its_bits_if_it_is_to(gpu):
    fast = updated(sgd)[0]
    gpu.switch(deterministic=True)
    results = [updated(sgd)[0] for _ in range(3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(fast, results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.first_half
def test_only_the_sgd_of_narrow_rows_depends_on_the_order_of_threads(gpu):
    def bits(**sizes):
        results = []
        for seed in (0, 1, 2):
            gpu.kind(seed=seed)
            results.append(updated(sgd, **sizes)[0])
        return [torch.equal(one, results[0]) for one in results[1:]]

    narrow = {"dim": ORDERED_COLUMNS - 4, "count": 900}
    assert bits(**narrow) == [False, False]
    assert bits(dim=ORDERED_COLUMNS, count=900) == [True, True]
    gpu.switch(deterministic=True)
    assert bits(**narrow) == [True, True]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dim", [64, 16])
def test_atomic_additions_reach_each_sector_once(dim, capability, gpu):
    gpu.kind(capability=capability)
    rows, grad = torch.arange(37).flip(0), torch.randn(37, dim)
    weight = torch.zeros(40, dim)
    ops.row_update_(SGD, weight, [], rows, grad, torch.tensor(1.0))
    torch.testing.assert_close(weight[rows], -grad, rtol=0, atol=0)
    assert gpu.sectors_of_additions() == grad.nbytes // 32


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_runs_and_the_order_of_threads_change_no_bit(seed, gpu):
    def everything():
        random = Random(5)
        weight, offsets = random.normal(40, 12), torch.tensor([0, 20, 40])
        lengths = random.integers(5, 50, 2)
        ids = random.integers(20, int(lengths.sum()))
        return [
            *gradients(ops.dot_interaction, interaction_inputs((9, 20, 40), torch.float16)),
            *gradients(ops.dot_interaction, interaction_inputs((1, 70, 60), torch.float32)),
            *updated(adagrad),
            *updated(row_wise),
            ops.joint_embedding(weight, ids, offsets, lengths),
            *torch.ops.dlrm.relu_bias_backward(random.normal(300, 70), random.normal(300, 70)),
        ]

    before = everything()
    if seed is not None:
        gpu.kind(seed=seed)
    assert all(map(torch.equal, before, everything()))


@pytest.mark.first_half
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_a_bad_id_is_kept_row_0_is_read_and_nothing_is_updated(bad, seed, gpu):
    weight, offsets = torch.randn(117, 8), torch.tensor([0, 10, 17, 117])
    ids = torch.zeros(500, 3, dtype=torch.int64)
    ids[42, 1] = bad
    ids[43:, 2] = 100  # only the first is reported
    if seed is not None:
        gpu.kind(seed=seed)
    output = ops.joint_embedding(weight, ids, offsets)
    assert torch.equal(output[42, 1], weight[0])
    assert torch.equal(output[42, 2], weight[17])
    ops.joint_embedding(weight, ids.flip(0), offsets)  # nor one of a later launch
    before = weight.clone()
    rows, grad, lr = torch.tensor([1]), torch.ones(1, 8), torch.tensor(1.0)
    ops.row_update_(SGD, weight, [], rows, grad, lr)
    ops.row_update_(ROW_WISE, weight, [torch.zeros(117)], rows, grad, lr)
    assert torch.equal(weight, before)
    message = f"id {bad} of table 1 in batch row 42: expected 0 <= id < 7"
    assert gpu.raised() == f"joint_embedding: {message}"
    ops.row_update_(SGD, weight, [], rows, grad, lr)
    assert not torch.equal(weight, before)


@pytest.mark.first_half
def test_a_look_up_in_no_rows_gives_zeros(gpu):
    output = ops.joint_embedding(torch.empty(0, 4), torch.tensor([[0]]), torch.tensor([0, 0]))
    assert output.tolist() == [[[0.0] * 4]]
    assert gpu.raised().endswith("id 0 of table 0 in batch row 0: expected 0 <= id < 0")


def test_offsets_beyond_the_weight_are_kept(gpu):
    weight, ids = torch.randn(13, 8), torch.ones(5, 2, dtype=torch.int64)
    for offsets, shown in (([0, 4, 14], (2, 14)), ([0, 5, 4], (2, 4)), ([-1, 4, 13], (0, -1))):
        ops.joint_embedding(weight, ids, torch.tensor(offsets))
        assert gpu.raised() == (
            f"joint_embedding: table_offsets[{shown[0]}] = {shown[1]}: expected offsets that do "
            "not fall, within the weight's 13 rows"
        )


def test_bad_bags_are_kept(gpu):
    weight, offsets = torch.randn(17, 8), torch.tensor([0, 10, 17])
    lengths, ids = torch.full((5, 2), 2), torch.zeros(20, dtype=torch.int32)

    def pool(ids, lengths):
        ops.joint_embedding(weight, ids, offsets, lengths)
        return gpu.raised()

    wrong = ids.clone()
    wrong[14] = 7
    assert pool(wrong, lengths) == (
        "joint_embedding: id 7 of table 1 in batch row 3: expected 0 <= id < 7"
    )
    assert pool(wrong[1:], lengths) == (
        "joint_embedding: lengths add up to 20: expected the number of ids, 19"
    )
    for bad in (-1, 21):
        wrong_lengths = lengths.clone()
        wrong_lengths[4, 1] = 50
        wrong_lengths[3, 1] = bad
        assert pool(wrong, wrong_lengths) == (
            f"joint_embedding: length {bad} of table 1 in batch row 3: "
            "expected 0 <= length <= 20, the number of ids"
        )


@pytest.mark.first_half
@pytest.mark.parametrize("bad", [-1, 50, 2**40, -(2**63)])
@pytest.mark.parametrize("rule", ops.ROW_RULES.values(), ids=lambda rule: rule.name)
def test_a_bad_row_is_kept_and_nothing_changes(rule, bad, gpu):
    weight, rows, grad = torch.randn(50, 8), torch.randint(50, (400,)), torch.randn(400, 8)
    rows[300:] = 77
    rows[21] = bad
    states = [torch.ones(state.shape(50, 8)) for state in rule.states]
    before = [tensor.clone() for tensor in (weight, *states)]
    one = torch.tensor(1) if rule.counts_steps else None
    ops.row_update_(rule, weight, states, rows, grad, torch.tensor(0.1), step=one)
    assert gpu.raised() == f"row_update_: row {bad} at position 21: expected 0 <= row < 50"
    assert all(map(torch.equal, before, (weight, *states)))


@pytest.mark.first_half
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("function", [sgd, row_wise, adagrad, adam])
@pytest.mark.parametrize(
    ("position", "bad", "expected"),
    [
        (61, 212, "0 <= row < 212"),
        (61, -1, "0 <= row < 212"),
        (61, 2, "a row of table 1, 3 <= row < 12"),
        (61, 12, "a row of table 1, 3 <= row < 12"),
        (60, 3, "a row of table 0, 0 <= row < 3"),
        (62, 11, "a row of table 2, 12 <= row < 212"),
        (63, 211, "a row of table 3, 212 <= row < 212"),
    ],
)
def test_a_row_of_another_table_is_kept(position, bad, expected, function, seed, gpu):
    sizes = (3, 9, 200, 0) if position == 63 else (3, 9, 200)
    if position == 63:  # every row of this table is bad
        position = 3
    weight, rows, grad = table_inputs((3, 9, 200), 40, 8)
    if len(sizes) == 4:
        grad = torch.ones(160, 8)
        rows = torch.cat([rows.view(40, 3), torch.full((40, 1), bad)], dim=1).flatten()
    rows[position] = bad
    rows[100:] = 300  # only the first is reported
    if gpu.device == "cpu":
        gpu.kind(seed=seed)
    before, state = weight.clone(), torch.full_like(weight, 0.1)
    function(weight, state, rows, grad, torch.tensor(0.1), table_sizes=sizes)
    message = f"row {bad} at position {position}: expected {expected}"
    assert gpu.raised().endswith(f"_: {message}")
    assert torch.equal(weight, before)
    assert torch.equal(state, torch.full_like(weight, 0.1))


@pytest.mark.captures
def test_an_error_is_kept_while_a_graph_is_replayed(gpu):
    weight, grad, lr = torch.randn(50, 8), torch.ones(40, 8), torch.tensor(0.1)
    rows = torch.arange(40)

    def replay():
        gpu.kind()
        ops.row_update_(SGD, weight, [], rows, grad, lr)

    if gpu.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.row_update_(SGD, weight, [], rows, grad, lr)
        replay = graph.replay
    before = weight.clone()
    for position in (21, 5, 30):
        rows.copy_(torch.arange(40))
        rows[position] = 50 + position
        replay()
    assert gpu.raised() == "row_update_: row 71 at position 21: expected 0 <= row < 50"
    assert torch.equal(weight, before)
    rows.copy_(torch.arange(40))
    replay()
    torch.testing.assert_close(weight[:40], before[:40] - 0.1)


def test_a_step_below_1_is_kept(gpu):
    weight, *states = tensors = [torch.ones(5, 2) for _ in range(3)]
    args = torch.tensor([1]), torch.ones(1, 2), torch.tensor(0.1)
    ops.row_update_(ADAM, weight, states, *args, step=torch.tensor(0.0))
    assert gpu.raised() == "row_update_: expected step >= 1, the number of this update, got 0"
    assert all(torch.equal(tensor, torch.ones(5, 2)) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_scalars_of_other_dtypes(dtype, gpu):
    weight, rows, grad = torch.zeros(3, 2), torch.tensor([1]), torch.ones(1, 2)
    one = torch.tensor(1).to(dtype)
    ops.row_update_(
        SGD, weight, [], rows, grad, one, grad_scale=one, found_inf=torch.tensor(0).to(dtype)
    )
    assert weight.tolist() == [[0, 0], [-1, -1], [0, 0]]
    ops.row_update_(SGD, weight, [], rows, grad, one, found_inf=one)
    assert weight.tolist() == [[0, 0], [-1, -1], [0, 0]]


def test_scalars_that_do_not_fit_are_named(gpu):
    weight, rows, grad = torch.zeros(3, 2), torch.tensor([1]), torch.ones(1, 2)
    with pytest.raises(
        RuntimeError, match=r"row_update_: expected lr to be one value .* got \[2\]"
    ):
        ops.row_update_(SGD, weight, [], rows, grad, torch.ones(2))
    with pytest.raises(RuntimeError, match="expected found_inf to be Float, .* got Half"):
        ops.row_update_(
            SGD, weight, [], rows, grad, torch.ones(()), found_inf=torch.ones(()).half()
        )


def test_nothing_is_raised_where_nothing_was_found():
    ops.raise_device_errors("cpu")
    ops.raise_device_errors("meta")


def test_training_ends_at_the_next_line_and_names_the_id(gpu):
    config = DLRMConfig((5, 7), 3, 4, (8, 4), (8, 1))
    world = World(device=gpu.device)
    task = Recommendation(config, world)
    ids = torch.tensor([[1, 6], [4, 0], [0, 7], [2, 2]])

    class Batches:
        num_samples, steps = 40, 0

        def __len__(self):
            return 10

        def batches(self, epoch=0, start=0):
            for step in range(start, 10):
                self.steps = step + 1
                rows = ids if step == 2 else ids % 5
                yield Batch(torch.ones(4, 3), rows, torch.ones(4))

    data = Batches()
    trainer = Trainer(
        task,
        optimizers=task.optimizers(OptimizerConfig(), one_look_up=True),
        schedule=lambda step: 0.1,
        config=TrainConfig(print_freq=4),
        world=world,
    )
    with pytest.raises(RuntimeError, match="id 7 of table 1 in batch row 2: expected 0 <= id < 7"):
        trainer.fit(data, data)
    assert data.steps == 5


@pytest.mark.captures
def test_a_graph_replays_look_ups_products_and_updates(gpu):
    if gpu.device != "cuda":
        pytest.skip("an emulated GPU captures no graphs")
    random = Random(3)
    start, dense = random.normal(60, 16), random.normal(9, 16)
    ids, offsets = random.integers(5, 9, 3), torch.tensor([0, 5, 25, 60])
    weight, state, lr = start.clone(), torch.ones(60, 16), torch.tensor(0.1)

    def step():
        vectors = ops.joint_embedding(weight, ids, offsets)
        output = ops.dot_interaction(dense, vectors)
        rows = (ids + offsets[:-1]).flatten()
        grad = vectors.reshape(-1, 16)
        ops.row_update_(ADAGRAD, weight, [state], rows, grad, lr, table_sizes=[5, 20, 35])
        return output

    expected = [step() for _ in range(3)]
    after = weight.clone()
    weight.copy_(start)
    state.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for wanted in expected:
        graph.replay()
        assert torch.equal(output, wanted)
    assert torch.equal(weight, after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (300, 37), (513, 256), (0, 8), (6, 0)])
def test_gradients_are_masked_and_summed(shape, dtype, gpu):
    random = Random(2)
    grad, output = random.normal(*shape).to(dtype), random.normal(*shape).to(dtype).relu()
    output[:1] *= -1  # a ReLU never gives -0; here it masks the gradient
    output[:, 5:9] = float("nan")  # NaN lets the gradient pass
    masked, bias = torch.ops.dlrm.relu_bias_backward(grad, output)
    expected, _ = ops.relu_bias_backward_reference(grad, output)
    assert torch.equal(masked, expected)
    assert (masked.dtype, bias.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(bias.double(), masked.double().sum(0), atol=1e-4, rtol=1e-5)
