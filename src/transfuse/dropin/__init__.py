"""Other libraries' transports under their own names: PyTorch's on its own wire, torchft's on ours."""
