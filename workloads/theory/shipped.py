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

METRICS: Final[Mapping[str, str]] = {
    "two-layer-granularity": "sub_to_common common_response sub_response",
    "feature-learning": "train_accuracy test_accuracy cosine majority_rate clustered_share",
    "hypercube-features": "covered worst_covered covered_at_start test_accuracy bayes_accuracy",
    "teacher-student": "original_curve injected_curve baseline_curve original injected baseline speed_gap "
    "teacher_accuracy largest_class",
    "sparse-coding": "span_share covered_share mean_cosine accuracy error raw_accuracy raw_error",
    "modular-addition": "margin_ratio accuracy test_accuracy max_power frequency_share",
    "prompt-regression": "loss closed_form ratio excess excess_closed_form",
    "prompt-parity": "head_ratio small_hinge large_hinge small_rare_accuracy large_rare_accuracy small_accuracy "
    "large_accuracy",
    "looped-transformer": "deviation condition_number violations log_error",
    "nuclear-norm": "in_domain out_of_domain reliance",
    "rank-bound": "in_domain out_of_domain bound weight_ratio ratio_bound",
    "diversity": "shared target others spurious shared_closed_form target_closed_form target_ratio",
    "label-efficiency": "accuracy",
    "mixture-msdr": "train_accuracy msdr similar_msdr",
    "unhinged-clusters": "ratio_before ratio_after gain",
}
"""Name -> all metrics that it may yield, so that a misspelt one is found before the first job runs."""
