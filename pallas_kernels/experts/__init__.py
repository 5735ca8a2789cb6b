"""Routed experts: their weights in four bits."""
