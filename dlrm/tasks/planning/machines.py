"""Constants of machines, from which times and memory are predicted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a rank computes and sends with.

    Attributes:
        name: of the machine.
        source: where the constants are from.
        row_seconds: that a row takes to be found, whatever its width, looked up or updated.
        row_bandwidth: bytes of rows that are read or written a second.
        flops: floating-point operations of matrix products a second, in float32.
        half_flops: the same in half precision.
        link_bandwidth: bytes that a rank sends, and receives, a second.
        link_seconds: that an exchange takes, however small.
        step_seconds: that a step takes beside, for launching and the like.
        runtime_bytes: that a rank has before it makes a model.
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
        """Whether rows of tables may be in a store, which the memory of the host alone reads."""
        return self.name == "cpu"


_SHEET = "data sheets, with shares of the peak as reported for DLRM; not measured by this package"
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "cpu",
            "benchmarks/tables.py constants, on a busy machine; the link of gloo is assumed",
            row_seconds=110e-9,
            row_bandwidth=3.6e9,
            flops=57e9,
            half_flops=540e9,
            link_bandwidth=0.5e9,
            link_seconds=2e-4,
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
            _SHEET,
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
