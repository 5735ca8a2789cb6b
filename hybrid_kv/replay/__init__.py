"""Replays a trace through an engine in a closed loop, reports the hits, and proves the answers right."""
