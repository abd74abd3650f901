"""Training: recipe, schedule, optimiser, the loop, evaluation, metrics and the ``pretrain`` job."""
