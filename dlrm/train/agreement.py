"""Errors of kernels; `dlrm.train.progress` has the function."""

from dlrm.train.progress import raise_device_errors as raise_device_errors
