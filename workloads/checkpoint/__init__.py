"""Checkpoints of a training job: safetensors and JSON, committed by their manifest."""
