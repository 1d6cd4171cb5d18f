"""Live migration of samples between engines: most KV is copied during decoding, the rest at a step boundary."""
