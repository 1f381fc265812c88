"""Checkpoints of other tools: the weights of Hugging Face's, and PyTorch's distributed checkpoints (DCP)."""
