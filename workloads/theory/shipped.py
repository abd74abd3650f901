"""The simulations that come with this package, by the name that a sweep gives as ``run``.

A new one is a function in a module beside this one and a line here. Simulations of other packages, or in a plain file,
need no line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SIMULATIONS: Final[Mapping[str, str]] = {
    "two-layer-granularity": "workloads.theory.granularity:simulate_granularity",
    "feature-learning": "workloads.theory.feature_learning:simulate_feature_learning",
    "hypercube-features": "workloads.theory.feature_learning:simulate_hypercube",
    "teacher-student": "workloads.theory.teacher_student:simulate_teacher_student",
    "sparse-coding": "workloads.theory.sparse_coding:simulate_sparse_coding",
    "modular-addition": "workloads.theory.modular_addition:simulate_modular_addition",
    "prompt-regression": "workloads.theory.in_context:simulate_prompt_regression",
    "prompt-parity": "workloads.theory.in_context:simulate_prompt_parity",
    "looped-transformer": "workloads.theory.in_context:simulate_looped_transformer",
    "nuclear-norm": "workloads.theory.nuclear_norm:simulate_nuclear_norm",
    "rank-bound": "workloads.theory.nuclear_norm:simulate_rank_bound",
    "diversity": "workloads.theory.shared_private:simulate_diversity",
    "label-efficiency": "workloads.theory.shared_private:simulate_label_efficiency",
    "mixture-msdr": "workloads.theory.mixture:simulate_mixture",
    "unhinged-clusters": "workloads.theory.unhinged:simulate_unhinged",
}
"""Name -> ``module:function``; see ``workloads.theory.context`` for what such a function is."""
