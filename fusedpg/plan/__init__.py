"""Plans for training on many devices: how to find them, and what they cost.

``python -m fusedpg.plan`` is the command line; docs/guides/plan.md describes it.
"""

from fusedpg.plan.config import Plan, PlanError, Prediction

__all__ = ["Plan", "PlanError", "Prediction"]
