"""The interpreter of Mosaic GPU kernels, which JAX does not export yet.

That of jax 0.10.2 knows part of the dialect. `gpu_interpreter` adds what the kernels here need beyond it: layouts of
registers (which change no value), loads that name one, accumulators that begin with a value, and products with a
transposed operand. A kernel of several
warpgroups is compiled once, not again for each of its programs.
"""

import functools
import threading

import jax
import numpy as np
import pytest


def gpu_interpreter():
    """Parameters for `interpret`: on the CPU, races are looked for, memory that nobody wrote to is NaN."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    _complete()
    return params.InterpretGPUParams(detect_races=True)


def assert_no_races(capsys) -> None:
    """Races are printed, not raised."""
    jax.effects_barrier()
    assert "RACE DETECTED" not in capsys.readouterr().out


@functools.cache
def _complete() -> None:
    from jax._src.pallas import primitives as pallas
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu import core, primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
    from jax._src.state import primitives as state
    from jax._src.state.discharge import run_state_p
    from jax._src.state.types import AbstractRef, TransposeTransform

    interpreter = jaxpr_interpret.JaxprInterpreter
    interpret, arithmetic = interpreter.interpret, interpreter._interpret_arithmetic_primitive
    run_scoped = interpreter._interpret_run_scoped_p

    def known(eqn):
        """A load that names a layout is a load; what begins with a value passes where the scoped are handled."""
        if eqn.primitive is run_state_p:
            return eqn.replace(primitive=pallas.run_scoped_p)
        if eqn.primitive is primitives.load_p:
            return eqn.replace(primitive=state.get_p, params={"tree": eqn.params["tree"]})
        return eqn

    def complete_interpret(self, jaxpr, token, *args):
        return interpret(self, jaxpr.replace(eqns=[known(eqn) for eqn in jaxpr.eqns]), token, *args)

    def complete_arithmetic(self, eqn, get_invals):
        return get_invals()[0] if eqn.primitive is core.layout_cast_p else arithmetic(self, eqn, get_invals)

    def complete_run_scoped(self, eqn, token, get_invals):
        if "is_initialized" not in eqn.params:
            return run_scoped(self, eqn, token, get_invals)
        at = {
            "device_id": jax.numpy.int32(self.device_info.device_id),
            "grid_point_coords": self.grid_point_coords,
            "thread_id": self.thread_id,
        }
        keys, own = [], {}
        for nth, (var, value) in enumerate(zip(eqn.invars, get_invals(), strict=True)):
            if isinstance(var.aval, AbstractRef):
                keys.append(value)
                continue
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                device_id=at["device_id"],
                memory_space_id=gpu_callbacks.get_memory_space_idx(core.MemorySpace.REGS),
                thread_id=jax.numpy.int32(self.thread_id),
                initial_ref_count=1,
            )
            token, key = gpu_callbacks.call_allocate_buffer(
                token=token, allocation_request_as_array=request, value=value, **at
            )
            keys.append(key)
            own[nth] = var.aval
        token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
        out = list(keys)
        for nth, aval in own.items():
            token, out[nth] = gpu_callbacks.call_get(
                token=token, result_shape_and_dtype=aval, allocation_key_as_array=keys[nth], transforms=(), **at
            )
            token = gpu_callbacks.call_deallocate_buffer(token=token, allocation_key_as_array=keys[nth], **at)
        return token, out

    def wgmma(
        *, token, device_id, grid_point_coords, thread_id, acc_allocation_key_as_array, acc_transforms, acc_dtype,
        a_allocation_key_as_array, a_transforms, b_allocation_key_as_array, b_transforms, source_info=None,
    ):  # fmt: skip
        memory = gpu_callbacks._get_shared_memory()
        thread = memory.get_global_thread_id(int(device_id), int(thread_id))
        info = gpu_callbacks.interpret_utils.GPULoggingInfo(
            device_id=int(device_id),
            grid_point_coords=tuple(int(at) for at in grid_point_coords),
            thread_id=int(thread_id),
            source_info=source_info,
        )

        def operand(key, transforms):
            transforms = gpu_callbacks._remove_noop_transforms(transforms)
            turns = [each for each in transforms if isinstance(each, TransposeTransform)]
            slices = jax.tree.map(int, tuple(each for each in transforms if each not in turns))
            key = gpu_callbacks.HostAllocationKey.from_array(key)
            at = gpu_callbacks.interpret_utils.to_range(slices)
            value = memory.get_buffer_content(key, at, thread, logging_info=info)[0]
            return key, at, (value.T if len(turns) % 2 else value)

        key, at, acc = operand(acc_allocation_key_as_array, acc_transforms)
        a, b = (
            operand(*each)[2].astype(acc_dtype)
            for each in ((a_allocation_key_as_array, a_transforms), (b_allocation_key_as_array, b_transforms))
        )
        memory.store_buffer_content(key, at, acc + np.matmul(a, b), thread, logging_info=info)
        return token

    compiled, one_at_a_time = {}, threading.Lock()

    def run_jaxpr(jaxpr, consts, *args):
        with one_at_a_time:
            if jaxpr not in compiled:
                compiled.clear()
                run = functools.partial(jax.core.eval_jaxpr, jaxpr)
                compiled[jaxpr] = jax.jit(lambda consts, *args: run(consts, *args)).lower(consts, *args).compile()
            program = compiled[jaxpr]
        program(consts, *args)

    thread_map._run_jaxpr = run_jaxpr
    interpreter.interpret = complete_interpret
    interpreter._interpret_run_scoped_p = complete_run_scoped
    interpreter._interpret_arithmetic_primitive = complete_arithmetic
    gpu_callbacks.wgmma = wgmma
