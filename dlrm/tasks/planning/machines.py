"""Constants of machines, from which times and memory are predicted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Compute and network performance of a rank.

    Attributes:
        name: name of the machine.
        source: source of the constants.
        row_seconds: time to find a row of any width, for a look-up or an update.
        row_bandwidth: bytes of rows read or written per second.
        flops: floating-point operations of matrix products per second, in float32.
        half_flops: the same in half precision.
        link_bandwidth: bytes that a rank sends, and receives, per second.
        link_seconds: time of an exchange of any size.
        step_seconds: further time of a step, for launching and the like.
        runtime_bytes: memory of a rank before it makes a model.
    """

    name: str
    source: str
    row_seconds: float
    row_bandwidth: float
    flops: float
    half_flops: float
    link_bandwidth: float
    link_seconds: float
    step_seconds: float
    runtime_bytes: int

    @property
    def has_store(self) -> bool:
        """Returns whether rows of tables may be in a store, which reads them on the host."""
        return self.name == "cpu"


_SHEET = "data sheets, with shares of the peak as reported for DLRM; not measured by this package"
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "cpu",
            "benchmarks/tables.py constants, on two idle cores of an AMD EPYC with AVX-512",
            row_seconds=2.5e-9,
            row_bandwidth=32e9,
            flops=100e9,
            half_flops=450e9,
            link_bandwidth=2.5e9,
            link_seconds=2.5e-3,
            step_seconds=1e-3,
            runtime_bytes=363 << 20,
        ),
        Machine(
            "a100",
            _SHEET,
            row_seconds=0.0,
            row_bandwidth=0.6 * 2.0e12,
            flops=0.4 * 156e12,  # TF32
            half_flops=0.4 * 312e12,
            link_bandwidth=0.7 * 300e9,
            link_seconds=30e-6,
            step_seconds=300e-6,
            runtime_bytes=600 << 20,
        ),
        Machine(
            "h100",
            "data sheets, with shares of the peak as reported for DLRM; on one H100 the Terabyte "
            "model took 0.90 (fp16) and 0.96 (TF32) of the predicted time; links are not measured",
            row_seconds=0.0,
            row_bandwidth=0.6 * 3.35e12,
            flops=0.4 * 495e12,  # TF32
            half_flops=0.4 * 990e12,
            link_bandwidth=0.7 * 450e9,
            link_seconds=30e-6,
            step_seconds=300e-6,
            runtime_bytes=600 << 20,
        ),
    )
}


def machine_of(device: str) -> Machine:
    """Returns the machine whose constants are used for a device of torch."""
    return MACHINES["cpu" if device == "cpu" else "h100"]
