"""Commands: flags in, calls to the package, results out."""
