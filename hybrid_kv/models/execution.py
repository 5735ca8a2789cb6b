"""How a model runs: which kernels, and in which form. Static; what it computes does not depend on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """Choices of a compiled step.

    Attributes:
      kernels: "tpu" or "gpu" names the kernels that run, whose pools lie in their form (`planning.forms`); None takes
        those of the platform for what they fit.
      workspace: rows of the context expanded at a time where the expanded form of latent attention pays; None attends
        in absorbed form alone, whose bits do not depend on how a prompt is cut into steps.
      exchange: collectives of decode context parallelism, "reduce_scatter" or "all_to_all".
    """

    kernels: str | None = None
    workspace: int | None = None
    exchange: str = "reduce_scatter"


PLAIN = Execution()
