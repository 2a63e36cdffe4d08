"""The kernels of `train/step/fast`; the processes that compile them import no torch."""
