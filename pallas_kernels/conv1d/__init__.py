"""Short depthwise causal convolution with its history kept by slot."""

from pallas_kernels.conv1d.api import causal_conv1d

__all__ = ["causal_conv1d"]
