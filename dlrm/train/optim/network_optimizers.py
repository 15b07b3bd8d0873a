"""Former place of `network_optimizer`."""

from dlrm.train.optim.config import NetworkOptimizerConfig as NetworkOptimizerConfig
from dlrm.train.optim.dense import network_optimizer as network_optimizer
