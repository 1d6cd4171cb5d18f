"""Conversion between Hugging Face directories and Megatron's distributed checkpoints, tensor by tensor."""
