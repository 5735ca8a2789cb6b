"""Traces and what-if studies on them; uses the cache and the scheduler, never a device."""
