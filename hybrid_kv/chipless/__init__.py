"""Compile and cost kernels for named accelerators on a machine that has none.

`targets` names the chips and prepares the environment, `compile` runs the ahead-of-time compiler, `schedule`
reads the instruction schedule it writes, `tree` shows where the bundles are, `replay` executes the scalar half of
it with real operands (which `operands` gets from the public wrapper), `cases` and `measure` make a benchmark of
these. `hopper` compiles for an H100. docs/11-chipless.md says how far the figures can be trusted.

Nothing here needs the compiler library (`pip install 'hybrid-kv[aot]'`) until something is compiled.
"""
