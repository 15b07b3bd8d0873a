"""Reports the working and missing parts of this installation, their cost and their fixes.

    dlrm doctor          a report to read
    dlrm doctor --json   the same for programs
    dlrm doctor --tune   times matrix products; prints the flag of the faster

The exit code is 0 if training a small model works, and 1 otherwise.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dlrm.flags import ConfigFlags, UsageError, Values, run_command
from dlrm.scripts.doctor.checks import BROKEN, NOTE, OK, SLOW, Result, first_line, report
from dlrm.scripts.doctor.gpu import cuda
from dlrm.scripts.doctor.machine import memory_set_up, offered_instructions, room, threads
from dlrm.scripts.doctor.packages import preprocessing, rebuild, versions
from dlrm.scripts.doctor.tuning import LAYERS, tune
from dlrm.settings import setting


@dataclass(frozen=True)
class DoctorConfig:
    """The form of the report, or the products to time; field names are those of the flags."""

    json: bool = setting(False, "print one JSON object, for programs")
    tune: bool = setting(
        False,
        "time the matrix products of MLPs, and print the --mlp_products that is faster here",
    )
    layers: tuple[str, ...] = setting(
        (),
        "with --tune, the MLPs to time, instead of those of the reference models: inputs and "
        "outputs of the hidden layers, such as 368-256-128",
        words=True,
    )
    batch_size: int = setting(2048, "with --tune, the samples of a batch", least=1)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", DoctorConfig)]), _run, __doc__, arguments, usage=2)


def _run(values: Values) -> int:
    """Prints the report."""
    options = values.config(DoctorConfig)
    if options.tune:
        return tune(options.layers or LAYERS, options.batch_size)
    if options.layers:
        raise UsageError("--layers needs --tune")
    results = examine()
    works = all(result.state != BROKEN for result in results)
    if options.json:
        print(json.dumps({"works": works, "findings": [result.for_json() for result in results]}))
    else:
        print(report(results, works))
    return 0 if works else 1


def examine() -> list[Result]:
    """Runs all checks; an error of a check is a result too."""
    logging.getLogger("dlrm.ops.library").setLevel(logging.ERROR)  # reported below
    warnings.simplefilter("ignore")
    results: list[Result] = []
    for check in CHECKS:
        try:
            results += check()
        except Exception as error:  # any error is named, and the report continues
            state = BROKEN if check is training else NOTE
            name = check.__name__.replace("_", " ")
            results.append(Result(name, state, f"{type(error).__name__}: {first_line(error)}"))
    return results


def native_operators() -> Iterator[Result]:
    """The compiled CPU operators and their instruction set."""
    from dlrm import ops
    from dlrm.ops.library import why_not_native

    offered = offered_instructions()
    processor = f"; the processor offers {', '.join(offered) or 'none of AVX2 and AVX-512'}"
    if ops.native_available():
        yield Result("native operators", OK, f"{ops.instruction_set()} kernels{processor}")
        return
    yield Result(
        "native operators",
        SLOW,
        f"not loaded: {why_not_native()}{processor}",
        "plain-torch operators run instead: the same results, interaction and row update 3 to 7 "
        "times slower",
        rebuild(),
    )


def linear_layers() -> Iterator[Result]:
    """Reports the linear layers that the MLPs use on a CPU."""
    import torch

    from dlrm import ops

    names = ("float32", "bfloat16")
    fused = ops.fused_linear_dtypes()
    lacking = [name for name in names if getattr(torch, name) not in fused]
    native = [name for name in names if ops.choose_products(getattr(torch, name)) == "native"]
    value = f"the native operator's in {' and '.join(native)} (--mlp_products auto)"
    if len(native) == len(names):
        yield Result("linear layers", OK, value)
        return
    of_onednn = "oneDNN's, with the bias in the product"
    if not lacking:
        yield Result("linear layers", OK, f"{value}, else {of_onednn}" if native else of_onednn)
        return
    value = f"torch's own in {' and '.join(lacking)}" + ("; oneDNN's in float32" if fused else "")
    cost = "MLPs in float32 take about a ninth longer"
    if fused:
        cost = "--amp gains little: oneDNN has no bfloat16 products for this processor"
    yield Result("linear layers", NOTE if fused else SLOW, value, cost)


def training() -> Iterator[Result]:
    """Trains a small model and checks its loss."""
    import torch

    from dlrm.distributed import World
    from dlrm.model.config import DLRMConfig
    from dlrm.tasks.recommendation import Batch, Recommendation
    from dlrm.train.optim.base import set_learning_rate
    from dlrm.train.optim.config import OptimizerConfig

    config = DLRMConfig((50, 60), 4, 8, (16, 8), (16, 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (256, 2), generator=random)
    numerical = torch.rand(256, 4, generator=random)
    batch = Batch(numerical, ids, (ids[:, 0] < 25).float()).map(lambda t: t.to(device))
    task = Recommendation(config, World(device=device))
    optimizers = task.optimizers(OptimizerConfig("adam", "adam"))
    set_learning_rate(optimizers, 0.01)
    losses = []
    for _ in range(50):
        loss = task.loss(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    value = f"50 steps of a small model on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    learned = math.isfinite(losses[-1]) and losses[-1] < 0.7 * losses[0]
    if learned:
        yield Result("training", OK, value)
    else:
        yield Result("training", BROKEN, f"{value}: it does not learn", "", rebuild())


CHECKS: tuple[Callable[[], Iterator[Result]], ...] = (
    *(versions, native_operators, linear_layers, cuda, threads),
    *(memory_set_up, preprocessing, room, training),
)
