"""Replacements for other libraries' transports, under the same names: PyTorch's on its own wire, torchft's on ours."""
