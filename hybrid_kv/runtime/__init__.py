"""From plans to devices: layout, metadata, model step, sampler, engine."""
