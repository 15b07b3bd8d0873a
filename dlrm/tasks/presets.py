"""Presets of DLRM: the settings of published runs, as values of flags."""

from typing import Any

# Habana's medium configuration for Gaudi, DLRM of the Model-References: 10,000 batches of random
# samples, each of them fresh, and Meta's rule for initial weights.
_GAUDI_MEDIUM: dict[str, Any] = {
    "dataset_type": "synthetic_random",
    "num_numerical_features": 1024,
    "synthetic_dataset_table_sizes": (3_000_000,),
    "synthetic_dataset_hotness": (38,),
    "synthetic_dataset_num_entries": 5_120_000,
    "batch_size": 512,
    "test_batch_size": 512,
    "embedding_dim": 64,
    "pooling": "sum",
    "bottom_mlp_sizes": (1024, 1024, 64),
    "interaction_op": "cat",
    "top_mlp_sizes": (4096, 4096, 4096, 4096, 4096, 4096, 4096, 1),
    "output_init": "normal",
    "embedding_optimizer": "adagrad",
    "mlp_optimizer": "adagrad",
    "lr": 1e-5,
    "warmup_steps": 0,
    "decay_steps": 0,
    "max_steps": 10_000,
    "print_freq": 50,
}

# DLRM-DCNv2 of MLPerf Training since v3.0 (mlcommons/training, recommendation_v2/torchrec_dlrm):
# low-rank cross layers over Criteo's day files of 24 days, each field with several ids, which are
# drawn here; --dataset names the real ones.
_MLPERF_DCNV2: dict[str, Any] = {
    "dataset_type": "synthetic_gpu",
    "num_numerical_features": 13,
    "synthetic_dataset": "mlperf",
    "batch_size": 65536,
    "test_batch_size": 65536,
    "embedding_dim": 128,
    "pooling": "sum",
    "bottom_mlp_sizes": (512, 256, 128),
    "interaction_op": "dcn",
    "cross_layers": 3,
    "cross_rank": 512,
    "top_mlp_sizes": (1024, 1024, 512, 256, 1),
    "output_init": "normal",
    "embedding_optimizer": "adagrad",
    "mlp_optimizer": "adagrad",
    "lr": 0.004,
    "warmup_steps": 0,
    "decay_steps": 0,
    "epochs": 1,
}

DLRM_PRESETS: dict[str, dict[str, Any]] = {
    "gaudi_medium": _GAUDI_MEDIUM,
    "mlperf_dcnv2": _MLPERF_DCNV2,
}
