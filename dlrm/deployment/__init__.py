"""Deployment: a Triton model repository of a trained model, its server and a client."""
