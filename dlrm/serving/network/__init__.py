"""The network as it is served: exported, quantized, recalibrated, on every platform."""
