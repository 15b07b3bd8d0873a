"""Bad values that kernels on a GPU found; the host asks for them when it waits anyway.

The kernels' side is in csrc/cuda/errors.h.
"""

import torch

from dlrm.ops.library import native_available

# Both in the order of the enums of csrc/cuda/errors.h.
_OPS = ("joint_embedding", "row_update_")
_MESSAGES = (
    "{op}: id {value} of table {table} in batch row {batch_row}: expected 0 <= id < {limit}",
    "{op}: length {value} of table {table} in batch row {batch_row}: "
    "expected 0 <= length <= {limit}, the number of ids",
    "{op}: lengths add up to {value}: expected the number of ids, {limit}",
    "{op}: row {value} at position {position}: expected 0 <= row < {limit}",
    "{op}: table_offsets[{table}] = {value}: expected offsets that do not fall, within the "
    "weight's {limit} rows",
    "{op}: expected step >= 1, the number of this update, got {value}",
    "{op}: row {value} at position {position}: expected a row of table {table}, "
    "{first} <= row < {limit}",
)


def raise_device_errors(device: torch.device | str) -> None:
    """Waits for a GPU, and raises the first error that its kernels found since the last call.

    A kernel cannot raise on a bad id, since the host is far ahead. It reads row 0 instead, and row
    updates change nothing until the error has been raised here. On the CPU, where each call raises
    its own errors, and without the CUDA kernels, this function does nothing.

    Raises:
        RuntimeError: an id, a length or a row was outside its range; the message is as on the CPU.
    """
    kind = torch.device(device).type.upper()
    if kind not in ("CUDA", "CPU") or not native_available():  # tests emulate a GPU on the CPU
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key("dlrm::take_cuda_error", kind):
        return
    taken = torch.ops.dlrm.take_cuda_error(torch.empty(0, device=device))
    op, problem, position, table, batch_row, value, limit, first = taken.tolist()
    if op < 0:
        return
    raise RuntimeError(
        _MESSAGES[problem].format(
            op=_OPS[op],
            position=position,
            table=table,
            batch_row=batch_row,
            value=value,
            limit=limit,
            first=first,
        )
    )
