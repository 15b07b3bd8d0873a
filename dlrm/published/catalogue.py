"""The former place of `CATALOG`, for one version."""

from dlrm.published.catalog import CATALOG as CATALOGUE, DOCUMENTS as DOCUMENTS, select as select

__all__ = ["CATALOGUE", "DOCUMENTS", "select"]
