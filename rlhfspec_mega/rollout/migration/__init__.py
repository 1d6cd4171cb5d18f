"""Moving samples between engines while they decode: KV is copied between steps, a short rest at a step boundary."""
