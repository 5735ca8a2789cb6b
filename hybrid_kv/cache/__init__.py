"""The functional cache state machine: state, index, pool, lookup, checkpoints, transitions, check."""
