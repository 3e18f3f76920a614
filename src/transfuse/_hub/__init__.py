"""A running job as a Hugging Face Hub: a state as safetensors files over HTTP."""
