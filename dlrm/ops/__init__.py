"""The operators that DLRM needs and torch lacks, or runs slower.

Each operator runs compiled if `dlrm/_ops_cpu.so` (on a GPU `dlrm/_ops_cuda.so`) was built and can
be loaded. Otherwise its plain-torch reference runs, with the same values.
"""

from dlrm.ops.attended_bag import (
    ActivationUnits,
    attended_bag,
    attended_bag_reference,
    item_weights,
)
from dlrm.ops.dense_adam import dense_adam_
from dlrm.ops.device_errors import raise_device_errors
from dlrm.ops.dot_interaction import (
    dot_interaction,
    dot_interaction_reference,
    interaction_width,
)
from dlrm.ops.joint_embedding import (
    POOLINGS,
    bags_of_ids,
    check_ids,
    joint_embedding,
    joint_embedding_gradient,
    joint_embedding_reference,
    table_ranges,
)
from dlrm.ops.layers import dropout, fused_linear_dtypes, linear
from dlrm.ops.library import PRODUCTS, choose_products, instruction_set, native_available
from dlrm.ops.linear_relu import (
    linear_relu,
    linear_relu_reference,
    relu_bias_backward,
    relu_bias_backward_reference,
)
from dlrm.ops.logistic_loss import logistic_loss, logistic_loss_reference
from dlrm.ops.network import (
    NetworkParameters,
    Rows,
    network,
    network_gradients,
    network_gradients_reference,
    network_reference,
)
from dlrm.ops.piecewise_linear import (
    piecewise_linear,
    piecewise_linear_reference,
    piecewise_tables,
)
from dlrm.ops.row_rules import ROW_RULES, RowRule
from dlrm.ops.row_update import (
    row_decay_,
    row_decay_reference,
    row_update_,
    row_update_reference,
)
from dlrm.ops.split_float32 import join_float32, split_float32

__all__ = [
    "ActivationUnits",
    "NetworkParameters",
    "Rows",
    "POOLINGS",
    "PRODUCTS",
    "ROW_RULES",
    "RowRule",
    "attended_bag",
    "attended_bag_reference",
    "bags_of_ids",
    "check_ids",
    "choose_products",
    "dense_adam_",
    "dot_interaction",
    "dot_interaction_reference",
    "dropout",
    "fused_linear_dtypes",
    "instruction_set",
    "item_weights",
    "interaction_width",
    "join_float32",
    "joint_embedding",
    "joint_embedding_gradient",
    "joint_embedding_reference",
    "linear",
    "linear_relu",
    "linear_relu_reference",
    "logistic_loss",
    "logistic_loss_reference",
    "native_available",
    "network",
    "network_gradients",
    "network_gradients_reference",
    "network_reference",
    "piecewise_linear",
    "piecewise_linear_reference",
    "piecewise_tables",
    "raise_device_errors",
    "relu_bias_backward",
    "relu_bias_backward_reference",
    "row_decay_",
    "row_decay_reference",
    "row_update_",
    "row_update_reference",
    "split_float32",
    "table_ranges",
]
