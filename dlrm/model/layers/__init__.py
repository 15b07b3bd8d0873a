"""Layers of the DLRM: MLPs, interactions, and vectors of numerical fields."""
