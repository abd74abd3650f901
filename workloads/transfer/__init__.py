"""Transfer of a pretrained backbone: the ``finetune`` and ``probe`` jobs."""
