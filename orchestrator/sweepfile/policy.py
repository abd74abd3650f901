"""`policy:`: its schema, resolved and compared with the resources. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.units import parse_duration
from orchestrator.sweepfile.fields import Count, Strict
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.resources import ResourceGroups, ResourcesSpec
from orchestrator.sweepfile.values import Policy, PriorityClass


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """The numbers that a field takes, in sweep files and in messages; never NaN, an infinity or a boolean."""

    least: int
    excludes_least: bool = False
    most: int | None = None
    is_whole: bool = False
    is_optional: bool = False
    """Whether it may be None, which is no bound."""

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.is_optional
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        is_above = value > self.least if self.excludes_least else value >= self.least
        return is_above and value <= (sys.float_info.max if self.most is None else self.most)

    @property
    def bounds(self) -> dict[str, Any]:
        """Arguments of a field of the schema."""
        least = {"gt" if self.excludes_least else "ge": self.least}
        return least if self.most is None else {**least, "le": self.most}

    def __str__(self) -> str:
        number = "a whole number" if self.is_whole else "a number"
        least = f"above {self.least}" if self.excludes_least else f"from {self.least} on"
        return f"{number} {least}" + (f", at most {self.most}" if self.most is not None else "")


POLICY_RANGES: Mapping[str, NumberRange] = {
    "priority": NumberRange(least=-1000, most=1000, is_whole=True),
    "weight": NumberRange(least=0, excludes_least=True, most=1000),
    "max_gpus": NumberRange(least=0, excludes_least=True, is_optional=True),
    "max_concurrent": NumberRange(least=1, is_whole=True, is_optional=True),
    "max_failures": NumberRange(least=1, is_whole=True),
    "max_preemptions": NumberRange(least=0, most=1000, is_whole=True),
    "breaker": NumberRange(least=0, most=100_000, is_whole=True),
    "gpu_hours": NumberRange(least=0, excludes_least=True, is_optional=True),
    "cost": NumberRange(least=0, excludes_least=True, is_optional=True),
    "gpu_hour_price": NumberRange(least=0),
    # Moments that have a date: the years 1 to 9999.
    "deadline_s": NumberRange(least=-62_135_596_800, most=253_402_300_799, is_optional=True),
    "time_limit_s": NumberRange(least=0, excludes_least=True, is_optional=True),
}
"""By field of ``Policy``. The schema takes its ranges from here, and so does the check of plans in messages."""
PriorityName = Literal["low", "normal", "high", "urgent"]
Priority = Annotated[int, Field(**POLICY_RANGES["priority"].bounds)]


def policy_problem(policy: Policy) -> str:
    """Which value of a policy no sweep file can have given it, and what it can be; empty if all are sound."""
    for name, numbers in POLICY_RANGES.items():
        if (value := getattr(policy, name)) not in numbers:
            return f"policy.{name} is {value!r:.80}, which is not {numbers}"
    flag: Any = policy.fails_on_expectations  # of a plan that was read, it may be anything
    return "" if isinstance(flag, bool) else f"policy.fails_on_expectations is {flag!r:.80}, which is no boolean"


def _deadline(text: str) -> str:
    moment = moment_s(text)
    if moment is not None and moment not in POLICY_RANGES["deadline_s"]:
        raise PydanticCustomError("refused", "{value} is outside of the years 1 to 9999 (UTC)", {"value": repr(text)})
    if not duration_s(text) and moment is None:
        message = (
            "{value} is neither a duration above zero ('90m', '36h', '3d', counted from submission) nor a moment with "
            "its time zone ('2026-12-01T18:00:00+01:00')"
        )
        raise PydanticCustomError("refused", message, {"value": repr(text)})
    return text


def duration_s(text: str) -> float | None:
    """Seconds of ``"90m"``, ``"36h"`` or ``"3d"``; none for any other text."""
    return parse_duration(text, "mhd")


def moment_s(text: str) -> float | None:
    """Unix seconds of an ISO 8601 moment with a time zone; none for any other text."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None


class BudgetSpec(Strict):
    """What the whole sweep may use; jobs that no longer fit are not started and the sweep ends with the reason."""

    gpu_hours: float | None = Field(
        None, **POLICY_RANGES["gpu_hours"].bounds, description="GPU-hours of all attempts, also of those that failed."
    )
    cost: float | None = Field(
        None,
        **POLICY_RANGES["cost"].bounds,
        description="Cost of all attempts, in any currency; needs gpu_hour_price.",
    )
    gpu_hour_price: float | None = Field(None, gt=0, description="Cost of one GPU-hour, in the currency of cost.")

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.cost is not None and self.gpu_hour_price is None:
            message = "cost needs gpu_hour_price, the price of one GPU for one hour, to be compared with"
            raise PydanticCustomError("no_price", message)
        if self.gpu_hours is None and self.cost is None:
            raise PydanticCustomError("no_budget", "a budget bounds something: add gpu_hours, or cost with its price")
        return self


class PolicySpec(Strict):
    """What the sweep may use, how it ranks among others, and what to do when jobs fail. It changes no result."""

    priority: PriorityName | Priority = Field(
        "normal",
        description=(
            "low (-10), normal (0), high (10), urgent (100) or a number in [-1000, 1000]. Sweeps of higher priority "
            "run first and preempt running jobs of lower priority, which write a checkpoint and resume later."
        ),
    )
    weight: float = Field(
        1,
        **POLICY_RANGES["weight"].bounds,
        description="Share of a busy cluster relative to other sweeps of the same priority.",
    )
    max_gpus: float | None = Field(
        None,
        **POLICY_RANGES["max_gpus"].bounds,
        description="GPUs that its running jobs hold at most; default: no bound.",
    )
    max_concurrent: Count | None = Field(None, description="Jobs that run at a time at most; default: no bound.")
    failures: Count = Field(
        3,
        description=(
            "Failed attempts before a job fails; preemptions, lost nodes and failures of storage do not count."
        ),
    )
    preemptions: int = Field(
        3,
        **POLICY_RANGES["max_preemptions"].bounds,
        description=(
            "A job whose attempts have ended as `preempted` so many times is no longer preempted for a sweep of higher "
            "priority; ends by spot notices, pauses, drains and growth count, too."
        ),
    )
    breaker: int = Field(
        5,
        **POLICY_RANGES["breaker"].bounds,
        description=(
            "The sweep stops when this many jobs of a kind have failed in the same way and none has succeeded; "
            "0 = never."
        ),
    )
    budget: BudgetSpec | None = Field(None, description="What all attempts together may use; default: no bound.")
    deadline: Annotated[str, AfterValidator(_deadline)] | None = Field(
        None,
        description=(
            "No job starts after this: a duration after submission (90m, 36h, 3d) or a time with its time zone "
            "(2026-12-01T18:00:00+01:00). Running jobs finish."
        ),
    )
    users: list[str] = Field(
        default_factory=list, description="Users who may pause, cancel or change the sweep, in addition to its owner."
    )
    expectations: Literal["report", "fail"] = Field(
        "report",
        description="fail: a submit ends with exit code 104 if an expectation of a simulation does not hold, is "
        "undefined or has too few seeds.",
    )

    @field_validator("deadline", mode="before")
    @classmethod
    def _has_a_unit(cls, value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise PydanticCustomError(
                "refused", "{value} has no unit; write {value}h, or m or d", {"value": f"{value:g}"}
            )
        return value

    @field_validator("priority", mode="before")
    @classmethod
    def _is_a_priority(cls, value: object) -> object:
        if value not in POLICY_RANGES["priority"] and value not in get_args(PriorityName):
            message = "{value} is not a priority; write low, normal, high, urgent or a whole number in [-1000, 1000]"
            raise PydanticCustomError("refused", message, {"value": repr(value)})
        return value


def resolve_policy(spec: PolicySpec, groups: ResourceGroups, complaints: Complaints) -> Policy:
    """The policy of a sweep; complains about jobs that its own bounds would keep from ever starting."""
    for name in type(groups).model_fields:
        smallest = _fewest_gpus(getattr(groups, name))
        if spec.max_gpus is not None and smallest > spec.max_gpus:
            message = (
                f"{spec.max_gpus:g} keeps jobs of resources.{name} from ever starting, which ask for {smallest:g} "
                "GPUs; raise max_gpus, or lower their gpus or min_gpus"
            )
            complaints.add(("policy", "max_gpus"), message)
    complaints.refuse_repeats(("policy", "users"), spec.users)
    priority = spec.priority if isinstance(spec.priority, int) else int(PriorityClass[spec.priority.upper()])
    budget, deadline = spec.budget, spec.deadline or ""
    return Policy(
        priority=priority,
        weight=spec.weight,
        max_gpus=spec.max_gpus,
        max_concurrent=spec.max_concurrent,
        max_failures=spec.failures,
        max_preemptions=spec.preemptions,
        breaker=spec.breaker,
        gpu_hours=budget.gpu_hours if budget else None,
        cost=budget.cost if budget else None,
        gpu_hour_price=(budget.gpu_hour_price if budget else None) or 0.0,
        deadline_s=moment_s(deadline),
        time_limit_s=duration_s(deadline),
        users=tuple(spec.users),
        fails_on_expectations=spec.expectations == "fail",
    )


def _fewest_gpus(spec: ResourcesSpec) -> float:
    return spec.min_gpus or spec.gpus
