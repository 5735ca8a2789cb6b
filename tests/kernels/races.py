"""What the interpreter of TPU kernels found out about races; it has no public name for it."""

import jax


def races_found() -> bool:
    """Whether a race was seen in the last interpreted kernel that looked for them."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    jax.effects_barrier()
    races = interpret_pallas_call.races
    assert races is not None
    return bool(races.races_found)
