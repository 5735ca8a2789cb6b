"""How a model runs: which kernels, and in which form. Static; what it computes does not depend on it."""

import dataclasses
from dataclasses import dataclass

import jax

from hybrid_kv.errors import UserError
from hybrid_kv.models.stream import BySequence, Replicated

EXCHANGES = ("reduce_scatter", "all_to_all")
RESIDUALS = ("replicated", "sequence")


@dataclass(frozen=True)
class Execution:
    """Choices of a compiled step.

    Attributes:
      kernels: "tpu" or "gpu" names the kernels that run, whose pools lie in their form (`planning.forms`); None takes
        those of the platform for what they fit.
      workspace: rows of the context expanded at a time where the expanded form of latent attention pays; None attends
        in absorbed form alone, whose bits do not depend on how a prompt is cut into steps.
      exchange: collectives of decode context parallelism and of a stream split by tokens, "reduce_scatter" or
        "all_to_all".
      residual: the residual stream is "replicated" over the tensor group, or split by tokens ("sequence").

    Raises:
      UserError: another exchange or residual.
    """

    kernels: str | None = None
    workspace: int | None = None
    exchange: str = "reduce_scatter"
    residual: str = "replicated"

    def __post_init__(self) -> None:
        for field, choices in (("exchange", EXCHANGES), ("residual", RESIDUALS)):
            if getattr(self, field) not in choices:
                raise UserError(field, getattr(self, field), f"use one of {', '.join(choices)}")

    @property
    def on_tpu(self) -> bool:
        """Whether the step runs on a TPU, or is compiled for one that is not here."""
        return "tpu" in (self.kernels, jax.default_backend())

    @property
    def stream(self) -> Replicated:
        """How the residual stream lies on the tensor group."""
        return BySequence(self.exchange) if self.residual == "sequence" else Replicated()

    def token_multiple(self, ranks: int) -> int:
        """Of what the tokens of a step have to be a multiple on a tensor group of `ranks`."""
        return ranks if self.residual == "sequence" else 1

    def suited(self, tokens: int, ranks: int) -> "Execution":
        """For a step of so many tokens on a tensor group of `ranks`: where they do not divide, the stream is whole."""
        return dataclasses.replace(self, residual="replicated") if tokens % self.token_multiple(ranks) else self


PLAIN = Execution()
