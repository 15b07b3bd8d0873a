"""The version of this package, without importing the package's public names."""

__version__ = "0.2.0"
